"""A loaded model whose logits are noted down, for tests that demand the same ones again, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from engine.ipc.messages import ModelFacts
from engine.moe.timing import Recorder
from engine.runtimes.protocol import LoadedModel, Logits, TokenRows


class WatchedModel(LoadedModel):
    """``seen``: a digest of the logits of each pass that gave some;
    ``passes``: the tokens of every pass, below zero those that were decoded."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.seen: list[str] = []
        self.passes: list[int] = []

    @property
    def facts(self) -> ModelFacts:
        return self.model.facts

    @property
    def recorder(self) -> Recorder:
        return self.model.recorder

    @property
    def between_layers(self) -> Callable[[], None] | None:
        return self.model.between_layers

    @between_layers.setter
    def between_layers(self, check: Callable[[], None] | None) -> None:
        self.model.between_layers = check

    def start(self) -> TokenRows:
        return WatchedRows(self, self.model.start())

    def close(self) -> None:
        self.model.close()

    def note(self, logits: Logits | None) -> None:
        if logits is not None:
            self.seen.append(hashlib.sha256(logits.tobytes()).hexdigest())


class WatchedRows(TokenRows):
    """Rows of a watched model; tokens are always chosen on the host."""

    def __init__(self, model: WatchedModel, rows: TokenRows) -> None:
        self._model = model
        self._rows = rows

    @property
    def rows(self) -> int:
        return self._rows.rows

    @property
    def length(self) -> int:
        return self._rows.length

    @property
    def can_truncate(self) -> bool:
        return self._rows.can_truncate

    def extend(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        logits = self._rows.extend(tokens, want_logits)
        self._model.passes.append(len(tokens))
        self._model.note(logits)
        return logits

    @property
    def steps_together(self) -> int:
        return self._rows.steps_together

    def replay(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        logits = self._rows.replay(tokens, want_logits)
        self._model.passes.append(-len(tokens))
        self._model.note(logits)
        return logits

    def step(self, tokens: Sequence[int]) -> Logits:
        logits = self._rows.step(tokens)
        self._model.passes.append(-len(tokens))
        self._model.note(logits)
        return logits

    def checkpoint(self) -> TokenRows | None:
        found = self._rows.checkpoint()
        return None if found is None else WatchedRows(self._model, found)

    @property
    def checkpoint_bytes(self) -> int:
        return self._rows.checkpoint_bytes

    @property
    def shortest_cut(self) -> int:
        return self._rows.shortest_cut

    def forget_unseen(self, length: int) -> None:
        self._rows.forget_unseen(length)

    def truncate(self, length: int) -> None:
        self._rows.truncate(length)

    def fan_out(self, rows: int) -> TokenRows:
        return WatchedRows(self._model, self._rows.fan_out(rows))

    def reorder(self, parents: Sequence[int]) -> int:
        return self._rows.reorder(parents)
