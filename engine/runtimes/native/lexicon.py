"""Embeddings of n-grams of a pass: rows of tables that stay in their files, and the tokens that a row of text keeps."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import damaged
from engine.models.architectures.ngrams import NgramHash
from engine.models.formats.lookup_table import LookupTable, lookup_tables, misplaced, misshapen
from engine.models.formats.model_files import ModelFiles
from engine.runtimes.native.shape import Shape
from engine.runtimes.native.weights import to_float32

TABLE = "model.layers.{}.ple.ple_embedding.ngram_embedding"
"""Name of a layer's table in checkpoints."""


@dataclass(frozen=True)
class LexicalInputs:
    """What a pass reads of the tables, and what its rows keep for the next one."""

    embeddings: NDArray[np.float32]
    """[layers with tables, rows * tokens, width]."""
    context: NDArray[np.float32]
    """[rows, tokens of the longest n-gram but one], the latest last."""


class Lexicon:
    """The tables of a model. The last tokens of a row are the last numbers of its states."""

    def __init__(self, shape: Shape, files: ModelFiles) -> None:
        """Raises ModelError if a table is missing, unexpected, or of another shape than the settings ask for."""
        assert shape.lexical is not None
        lexical = self._lexical = shape.lexical
        self._place = 4 * (shape.state_numbers - lexical.context)
        tables = lookup_tables(files)
        self._tables: list[tuple[NgramHash, LookupTable]] = []
        for layer, own in zip(lexical.layers, lexical.hashes, strict=True):
            name = TABLE.format(layer)
            if name not in tables:
                raise damaged(f"Tensor {name}.weight is missing from the model's files")
            table = tables.pop(name)
            columns = lexical.width // len(own.sizes)
            if table.shape[1] != columns or table.shape[0] < own.rows:
                raise misshapen(name, table.shape, (own.rows, columns))
            self._tables.append((own, table))
        if tables:
            raise misplaced(min(tables))

    def read(self, ids: NDArray[np.int32], states: Any) -> LexicalInputs:
        """The inputs of the tokens ``ids`` [rows, tokens]. ``states``: addresses of the rows' states before them; None
        in it for a row without tokens."""
        rows, count = ids.shape
        context = self._lexical.context
        before = np.full((rows, context), self._lexical.hashes[0].end, np.int64)
        for row in range(rows):
            if states[row]:
                before[row] = self._kept(states[row])
        tokens = ids.astype(np.int64)
        embeddings = np.empty((len(self._tables), rows * count, self._lexical.width), np.float32)
        for place, (own, table) in enumerate(self._tables):
            found = table.rows_of(own.rows_of(before, tokens).reshape(-1))
            embeddings[place] = to_float32(found).reshape(rows * count, -1)
        kept = np.concatenate([before, tokens], axis=1)[:, count:]
        return LexicalInputs(embeddings, kept.astype(np.float32))

    def keep(self, read: LexicalInputs, states: Any) -> None:
        """Write the last tokens into the rows' states after them, which begin at ``states``."""
        for row, context in enumerate(read.context):
            self._kept(states[row])[:] = context

    def _kept(self, address: int) -> NDArray[np.float32]:
        """The tokens in the states at ``address``, in place. Whole numbers of their size are exact in float32."""
        words = (ctypes.c_float * self._lexical.context).from_address(address + self._place)
        return np.frombuffer(memoryview(words), np.float32)
