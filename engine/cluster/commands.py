"""The head's commands to the other nodes of a decentralised ring: every operation on keys and values, in order.

A command is one frame of msgpack. Commands that run tokens carry the hash of the rows' previous content. A node whose
cache differs refuses instead of answering from stale keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from discovery.names import plain_text
from engine.cluster.contributions import REASON_BYTES, NodeFailed
from engine.cluster.parts import Observer, nobody_observes
from engine.cluster.transport.exchange import Link, RingProtocolError
from engine.errors import ModelError
from engine.generation.sampling import NotNumbersError, SamplerState
from engine.ipc.messages import PhaseTimes
from engine.ipc.messages.ring import LinkFacts
from engine.runtimes.protocol import Interrupted, Logits

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


class StepTogether(RowsCommand, frozen=True, tag="step_together"):
    """Run ``steps``, each of other rows, in one pass; see :meth:`LoadedModel.step_together`."""

    steps: list[Step]


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


AnyCommand = (
    StartRows | Extend | Replay | Step | StepTogether | Choose | Truncate | FanOut | Reorder | Drop | Measure | AskTimes
)


class Times(msgspec.Struct, frozen=True):
    """A node's measurements."""

    prefill: PhaseTimes
    decode: PhaseTimes


_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(AnyCommand | MoveLinks)
_times = msgspec.msgpack.Decoder(Times)


def command_limit(context_limit: int) -> int:
    """Maximum bytes of a command to a node whose context has ``context_limit`` tokens."""
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
        prefix = self
        while prefix.length > length and prefix.shorter is not None:
            prefix = prefix.shorter
        if prefix.length != length:
            raise ValueError(f"{length} is not a length between 0 and {self.length}")
        return prefix


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


# --- answers of a machine that runs the whole model ------------------------------------------------------------------


DONE, GAVE_UP, FAILED, NOT_NUMBERS = b"\x00", b"\x01", b"\x02", b"\x03"
"""First byte: logits, a token or nothing follow; the head gave up the pass; a reason in UTF-8 follows; or such a reason
why no token could be chosen."""
FLOAT = np.dtype("<f4")
TOKEN = np.dtype("<i4")


class Answers:
    """The machine's side, in place of a :class:`engine.moe.expert_parallel.LayerExchange`: it notifies the head of each
    pass.

    :meth:`stop` from any thread, everything else from the one that runs the passes.
    """

    def __init__(self, link: Link, observe: Observer = nobody_observes) -> None:
        self._link = link
        self._observe = observe
        self._number = 0
        self._answered = True
        self._stop = 0

    def begin_pass(self) -> None:
        self._number += 1
        self._answered = False

    def stop(self, number: int) -> None:
        """The head gives up pass ``number``, counted from one. It may not have begun here."""
        self._stop = number

    def check(self) -> None:
        """Called between two layers. Raises Interrupted if the head gave up the pass."""
        self._observe("checked", self)
        if self.stopped:
            raise Interrupted

    @property
    def stopped(self) -> bool:
        """Whether the head gave up the pass that runs now."""
        return self._stop == self._number

    def done(self, found: Logits | int | None) -> None:
        """``found``: logits [vocabulary] or [rows, vocabulary], or the chosen token, as far as they are wanted."""
        dtype = TOKEN if isinstance(found, int) else FLOAT
        self._answer(DONE, b"" if found is None else np.ascontiguousarray(found, dtype).tobytes())

    def not_numbers(self, reason: str) -> None:
        self._answer(NOT_NUMBERS, reason.encode()[:REASON_BYTES])

    def gave_up(self) -> None:
        self._answer(GAVE_UP, b"")

    def give_up(self, reason: str = "") -> bool:
        """Report that this machine cannot go on. Returns False if the head has its answer already."""
        if self._answered:
            return False
        self._answer(FAILED, reason.encode()[:REASON_BYTES])
        return True

    def _answer(self, kind: bytes, rest: bytes) -> None:
        self._answered = True
        self._link.send(kind, rest)


def answer_limit(nbytes: int) -> int:
    """Maximum bytes of an answer of ``nbytes``."""
    return 1 + max(REASON_BYTES, nbytes)


def read_answer(frame: memoryview, nbytes: int, rank: int) -> memoryview:
    """The ``nbytes`` in the answer of node ``rank``.

    Raises Interrupted if the pass was given up, NodeFailed if the node cannot go on, NotNumbersError if it could choose
    no token, RingProtocolError for anything else.
    """
    kind, rest = bytes(frame[:1]), frame[1:]
    if kind == GAVE_UP and not len(rest):
        raise Interrupted
    if kind in (FAILED, NOT_NUMBERS):
        said = plain_text(bytes(rest[:REASON_BYTES]).decode("utf-8", "replace"), REASON_BYTES)
        if kind == NOT_NUMBERS:
            raise NotNumbersError(said)
        raise NodeFailed(said or "it gave no reason", [rank])
    if kind != DONE or len(rest) != nbytes:
        raise RingProtocolError(
            f"The machine that computes sent {len(frame)} bytes where an answer of {1 + nbytes} was expected; ask "
            "once more, or leave the ring."
        )
    return rest


def read_logits(data: memoryview, rows: int, vocabulary: int) -> Logits:
    """The logits [rows, vocabulary] in ``data``."""
    return np.frombuffer(data, FLOAT).astype(np.float32).reshape(rows, vocabulary)


def read_token(data: memoryview, vocabulary: int) -> int:
    """The token in ``data``. Raises RingProtocolError if it is not one of the ``vocabulary``."""
    token = int(np.frombuffer(data, TOKEN)[0])
    if not 0 <= token < vocabulary:
        raise RingProtocolError(
            f"The machine that computes chose token {token} of a vocabulary of {vocabulary}; ask once more, or leave "
            "the ring."
        )
    return token
