"""A loaded model on this machine and its rows of tokens: the checks and measurements around every pass, whichever
runtime runs it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, Self

from engine.errors import ModelError
from engine.ipc.messages import ModelFacts
from engine.models.formats.byte_map import FileMapping
from engine.models.formats.model_files import Repacked
from engine.moe.kernels.file_guard import FileGuard
from engine.moe.timing import Phase, Recorder
from engine.pictures.places import PicturePlace
from engine.pictures.shown import PicturePass, ShownPictures, joined
from engine.runtimes.protocol import LoadedModel, Logits, RowArray, TokenRows


class LocalModel(LoadedModel):
    """A model whose weights are on this machine. One thread at a time.

    ``files``: all mappings that a pass reads. They are watched until the model is closed.
    """

    def __init__(
        self, facts: ModelFacts, recorder: Recorder, files: Sequence[FileMapping] = (), repacked: Repacked | None = None
    ) -> None:
        self._facts = facts
        self._recorder = recorder
        self._mapped = tuple(files)
        self._repacked = repacked or Repacked()
        self._guard = FileGuard(self._mapped)
        self._closed = False

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @facts.setter
    def facts(self, facts: ModelFacts) -> None:
        self._facts = facts

    @property
    def recorder(self) -> Recorder:
        return self._recorder

    @property
    def mapped_files(self) -> tuple[FileMapping, ...]:
        return self._mapped

    @property
    def repacked(self) -> Repacked:
        return self._repacked

    def close(self) -> None:
        """Drop the mappings of the files, and in subclasses the weights. The model cannot run afterwards."""
        self._recorder.enabled = False
        self._guard.close()
        self._mapped = ()
        self._closed = True

    def check_files(self) -> None:
        """Raises ModelError if the model is closed, or a file of it was changed since it was mapped, or could not be
        read."""
        if self._closed:
            raise ModelError(f"The model {self._facts.name} is closed; load it again.", kind="internal")
        for mapped in self._mapped:
            mapped.check_unchanged()
        self._guard.check()

    @contextmanager
    def one_pass(self, phase: Phase, tokens: Sequence[Sequence[int]]) -> Iterator[bool]:
        """A context for one forward pass over ``tokens`` [rows][positions]. It is whether the pass is measured.

        Raises ModelError if the model is closed, a token id is outside the vocabulary, or the model's files were
        changed. Results that were computed from changed files must be discarded.
        """
        if self._closed or phase == "prefill":
            self.check_files()
        vocabulary = self._facts.vocabulary
        # Tokens of pictures are prompts' only, and were looked up before.
        shown = self.pictures is not None and phase == "prefill"
        for row in tokens:
            if (min(row) < 0 and not shown) or max(row) >= vocabulary:
                wrong = next(token for token in row if not 0 <= token < vocabulary)
                raise ModelError(
                    f"Token id {wrong} is outside the model's vocabulary of {vocabulary}.", kind="bad-input"
                )
        measured = self._recorder.enabled
        if measured:
            self._recorder.begin_step(phase, len(tokens) * len(tokens[0]) if phase == "prefill" else 1)
        try:
            yield measured
        finally:
            if measured:
                self._recorder.end_step()
        self.check_files()


class WithFacts(Protocol):
    """The part of a model that is asked for in a refusal."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def pictures(self) -> ShownPictures | None: ...


class LocalRows(TokenRows):
    """Rows of tokens in this machine's memory.

    The public methods check their arguments and discard a step that was begun ahead. Subclasses do the work.
    """

    def __init__(self, model: WithFacts) -> None:
        self._model = model
        self._pictures: tuple[PicturePlace, ...] = ()
        """The pictures in the rows, which are the same in all of them."""

    @abstractmethod
    def _pass(
        self,
        phase: Phase,
        tokens: list[list[int]],
        want_logits: bool,
        as_steps: bool = False,
        pictures: PicturePass | None = None,
    ) -> Logits | None:
        """Run one forward pass over ``tokens`` [rows][positions] after the contents of the rows.

        ``as_steps``: with the bits of one pass per position. ``pictures``: what pictures change. Returns the
        logits after the last position, float32 [rows, vocabulary] ([rows, 0] at a place in a ring that does not need
        them), or None. A pass that raises leaves the rows unchanged.
        """

    @abstractmethod
    def _cut(self, length: int) -> None:
        """Keep the first ``length`` tokens of the only row, which can be cut so far."""

    @abstractmethod
    def _copied(self, rows: int) -> Self:
        """A new object with ``rows`` copies of the only row."""

    @abstractmethod
    def _move(self, parents: Sequence[int], changed: Sequence[int]) -> int:
        """Make row i a copy of row ``parents[i]``; ``changed``: the rows with another parent than themselves. Returns
        the bytes moved."""

    @abstractmethod
    def _contents(self, checkpoint: TokenRows | None) -> Sequence[RowArray]:
        """The contents of the only row and its ``checkpoint``."""

    def extend(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        return self._prefill(tokens, want_logits, as_steps=False)

    def replay(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        if len(tokens) > self.steps_together:
            raise ValueError(f"{len(tokens)} tokens in one pass; at most {self.steps_together} equal as many steps")
        return self._prefill(tokens, want_logits, as_steps=True)

    def _prefill(self, tokens: Sequence[int], want_logits: bool, as_steps: bool) -> Logits | None:
        self._expect_one_row("a prompt is run")
        if not tokens:
            raise ValueError("a pass needs at least one token")
        self.settle()
        start, shown = self.length, self._model.pictures
        logits = self._pass("prefill", [list(tokens)], want_logits, as_steps, self._seen(tokens))
        if shown is not None:
            self._pictures = tuple(joined(self._pictures, shown.places(tokens, start)))
        return None if logits is None else logits[0]

    def _seen(self, tokens: Sequence[int]) -> PicturePass | None:
        """What pictures change in a pass over ``tokens`` of one row, or over tokens of all of them."""
        shown = self._model.pictures
        return None if shown is None else shown.pass_over(self._pictures, tokens, self.length)

    def step(self, tokens: Sequence[int]) -> Logits:
        if len(tokens) != self.rows:
            raise ValueError(f"{len(tokens)} tokens for {self.rows} rows")
        self.settle()
        pictures = self._seen([0]) if self._pictures else None
        logits = self._pass("decode", [[token] for token in tokens], want_logits=True, pictures=pictures)
        assert logits is not None
        return logits

    def truncate(self, length: int) -> None:
        self._expect_one_row("truncate works")
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} of {self.length} tokens")
        if length < self.length and not self.can_truncate:
            raise ModelError(f"The {self._model.facts.family} family keeps a state that cannot be cut back.")
        if length < self.shortest_cut:
            raise ValueError(f"cannot keep {length} tokens: what they see was forgotten")
        self.settle()
        self._cut(length)
        self._pictures = tuple(place for place in self._pictures if place.start < length)

    def fan_out(self, rows: int) -> Self:
        self._expect_one_row("fan_out works")
        if rows < 1:
            raise ValueError(f"{rows} rows cannot be made")
        self.settle()
        copied = self._copied(rows)
        copied._pictures = self._pictures
        return copied

    def reorder(self, parents: Sequence[int]) -> int:
        if len(parents) != self.rows or not all(0 <= parent < self.rows for parent in parents):
            raise ValueError(f"{list(parents)} does not name a parent among {self.rows} rows for each of them")
        self.settle()
        changed = [row for row, parent in enumerate(parents) if row != parent]
        return self._move(parents, changed) if changed else 0

    def contents(self, checkpoint: TokenRows | None = None) -> Sequence[RowArray] | None:
        """The contents of the only row, which has at least one token."""
        self._expect_one_row("contents are given")
        self.settle()
        return self._contents(checkpoint)

    def _expect_one_row(self, what: str) -> None:
        if self.rows != 1:
            raise ValueError(f"{what} on one row, not on {self.rows}")
