"""Tensors of a GGUF file written as bfloat16 safetensors, for the starter model, which is made of a dense file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import Cancelled
from engine.models.architectures.gguf_architectures import architecture_of, config_of
from engine.models.architectures.gguf_tensors import entries_of, named_tensors
from engine.models.formats.gguf_file import GgufFile
from engine.system.durable_files import flush

if TYPE_CHECKING:
    from engine.ipc.progress import ProgressCallback

StopCheck = Callable[[], bool] | None
Order = NDArray[np.int64]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write: its source in the GGUF, and the order of its rows and columns.

    ``values`` (float32) replace a tensor that the GGUF does not contain.
    """

    name: str
    shape: tuple[int, ...]
    source: str = ""
    row_order: Order | None = None
    column_order: Order | None = None
    values: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes as bfloat16."""
        return 2 * int(np.prod(self.shape))


def dense_plan(gguf: GgufFile) -> list[PlannedTensor]:
    """The tensors of a dense model under their Hugging Face names, in transformers' order of rows.

    Raises ModelError naming a tensor that is missing, has the wrong shape, or is not known.
    """
    architecture, config = architecture_of(gguf), config_of(gguf)
    entries_of(gguf, architecture, config)
    changes = architecture.changes(config)
    return [
        PlannedTensor(
            tensor.name, tensor.shape, tensor.source, changes[tensor.name].rows if tensor.name in changes else None
        )
        for tensor in named_tensors(gguf, architecture, config)
    ]


# --- writing ------------------------------------------------------------------------------------------------------


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to bfloat16 (nearest, ties to even) as raw words of the same shape."""
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (words + (0x7FFF + ((words >> 16) & 1))) >> 16
    # Rounding would carry a NaN with a full mantissa into infinity.
    return np.where(np.isnan(values), (words >> 16) | 0x40, rounded).astype(np.uint16)


def write_tensors(
    path: Path, gguf: GgufFile, plan: Sequence[PlannedTensor], progress: ProgressCallback, should_stop: StopCheck
) -> None:
    """Write the planned tensors as bfloat16 safetensors, in order, block by block; synced to the disk at the end."""
    total = sum(tensor.nbytes for tensor in plan)
    done = 0
    with path.open("wb") as file:
        file.write(_safetensors_header(plan))
        for tensor in plan:
            for block in _blocks(gguf, tensor):
                if should_stop is not None and should_stop():
                    raise Cancelled("Stopped; what was written so far is deleted.")
                words = to_bfloat16(block)
                file.write(words.tobytes())
                done += words.nbytes
                progress("writing weights", done, total, "bytes")
        flush(file)


def _blocks(gguf: GgufFile, tensor: PlannedTensor) -> Iterable[NDArray[np.float32]]:
    if tensor.values is not None:
        yield tensor.values
        return
    for block in gguf.rows(tensor.source, tensor.row_order):
        yield block if tensor.column_order is None else block[:, tensor.column_order]


def _safetensors_header(plan: Sequence[PlannedTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in plan:
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    body = json.dumps(header, separators=(",", ":")).encode()
    body += b" " * (-(8 + len(body)) % 64)
    return struct.pack("<Q", len(body)) + body
