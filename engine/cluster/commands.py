"""The head's commands to the other nodes of a decentralised ring: every operation on keys and values, in order.

A command is one frame of msgpack. Commands that run tokens carry the hash of the rows' previous content. A node whose
cache differs refuses instead of answering from stale keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.errors import ModelError
from engine.generation.sampling import SamplerState
from engine.ipc.messages import PhaseTimes
from engine.ipc.messages.ring import LinkFacts

_COMMAND_BYTES = 64 * 1024
"""Maximum bytes of a command beside a conversation's tokens: dropped rows, parents, biases."""
_TOKEN_BYTES = 15
"""Maximum bytes of a token of the conversation: in a prompt, or where a sampler counts it."""
REPLY_LIMIT = 4 * 1024 * 1024

_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1


class RowsCommand(msgspec.Struct, frozen=True, tag_field="type"):
    """Base of all commands. ``rows`` names rows of tokens (:class:`engine.runtimes.protocol.TokenRows`)."""


class StartRows(RowsCommand, frozen=True, tag="start"):
    """Make ``rows`` a new, empty row."""

    rows: int


class Extend(RowsCommand, frozen=True, tag="extend"):
    """Prefill ``tokens``; see :meth:`TokenRows.extend`."""

    rows: int
    before: int
    tokens: list[int]
    want_logits: bool


class Replay(RowsCommand, frozen=True, tag="replay"):
    """Run decoded ``tokens`` again in one pass; see :meth:`TokenRows.replay`."""

    rows: int
    before: int
    tokens: list[int]
    want_logits: bool


class Step(RowsCommand, frozen=True, tag="step"):
    rows: int
    before: int
    tokens: list[int]


class Choose(RowsCommand, frozen=True, tag="choose"):
    """Decode ``token`` and answer with the next one; see :meth:`TokenRows.step_choosing`.

    ``sampler``: from where the sampler goes on that chooses from now on; None: the last one of these rows does.
    """

    rows: int
    before: int
    token: int
    sampler: SamplerState | None


class Truncate(RowsCommand, frozen=True, tag="truncate"):
    rows: int
    length: int


class FanOut(RowsCommand, frozen=True, tag="fan_out"):
    """Make ``into``: ``count`` rows with the content of ``rows``."""

    rows: int
    into: int
    count: int


class Reorder(RowsCommand, frozen=True, tag="reorder"):
    rows: int
    parents: list[int]


class Drop(RowsCommand, frozen=True, tag="drop"):
    """Drop ``rows``, which nobody uses any more."""

    rows: list[int]


class Measure(RowsCommand, frozen=True, tag="measure"):
    """Start or stop measuring passes. ``forget``: drop the former measurements."""

    enabled: bool
    forget: bool


class AskTimes(RowsCommand, frozen=True, tag="ask_times"):
    """Answer with :class:`Times`."""


class MoveLinks(RowsCommand, frozen=True, tag="move_links"):
    """Make all links anew, as the head does now, and go on over them.

    ``addresses``: where the node that gets this reaches the link listeners of others, by rank. ``link``: the head's
    measurement of its link to that node; None: as before.
    """

    addresses: dict[int, str]
    link: LinkFacts | None = None


AnyCommand = StartRows | Extend | Replay | Step | Choose | Truncate | FanOut | Reorder | Drop | Measure | AskTimes


class Times(msgspec.Struct, frozen=True):
    """A node's measurements."""

    prefill: PhaseTimes
    decode: PhaseTimes


_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(AnyCommand | MoveLinks)
_times = msgspec.msgpack.Decoder(Times)


def command_limit(context_limit: int) -> int:
    """Maximum bytes of a command to a node whose model reads so many tokens."""
    return _COMMAND_BYTES + _TOKEN_BYTES * context_limit


def encode(message: RowsCommand | Times) -> bytes:
    return _encoder.encode(message)


def decode_command(frame: bytes | memoryview) -> AnyCommand | MoveLinks:
    """The command in ``frame``. Raises ModelError for anything else."""
    try:
        command: AnyCommand | MoveLinks = _commands.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"The head sent something that is no command of this version: {error}.") from error
    return command


def decode_times(frame: bytes | memoryview) -> Times:
    """The measurements in ``frame``. Raises ModelError for anything else."""
    try:
        return _times.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"A node sent something that is no measurement of this version: {error}.") from error


# --- what the rows hold -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prefix:
    """The tokens of one row as a rolling 64-bit hash. ``shorter``: the prefix without the last token."""

    hash: int = 0xCBF29CE484222325
    length: int = 0
    shorter: Prefix | None = None

    def longer(self, tokens: Sequence[int]) -> Prefix:
        found = self
        for token in tokens:
            found = Prefix(((found.hash ^ (token + 1)) * _PRIME) & _MASK, found.length + 1, found)
        return found

    def cut(self, length: int) -> Prefix:
        """The first ``length`` tokens. Raises ValueError if there are fewer."""
        found = self
        while found.length > length and found.shorter is not None:
            found = found.shorter
        if found.length != length:
            raise ValueError(f"{length} is not a length between 0 and {self.length}")
        return found


class Prefixes:
    """The prefixes of rows. Every operation on rows of tokens has its counterpart here."""

    def __init__(self, rows: Sequence[Prefix] = (Prefix(),)) -> None:
        self._rows = tuple(rows)

    @property
    def state(self) -> int:
        """One number for all rows."""
        found = len(self._rows)
        for row in self._rows:
            found = ((found ^ row.hash) * _PRIME) & _MASK
        return found

    def extended(self, tokens: Sequence[int]) -> Prefixes:
        return Prefixes([self._rows[0].longer(tokens)])

    def stepped(self, tokens: Sequence[int]) -> Prefixes:
        return Prefixes([row.longer([token]) for row, token in zip(self._rows, tokens, strict=True)])

    def truncated(self, length: int) -> Prefixes:
        return Prefixes([self._rows[0].cut(length)])

    def fanned_out(self, count: int) -> Prefixes:
        return Prefixes([self._rows[0]] * count)

    def reordered(self, parents: Sequence[int]) -> Prefixes:
        return Prefixes([self._rows[parent] for parent in parents])
