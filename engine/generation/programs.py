"""Programs: whatever generates is a generator that yields the passes that it needs, and is sent what they gave.

A program knows its own rows of tokens and nothing of a clock, a thread or another answer. The passes of several are run
by :mod:`engine.session.scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from engine.generation.drafts import TokenDraft
from engine.generation.sampling import Sampler
from engine.runtimes.protocol import Logits, TokenRows


@dataclass(frozen=True)
class Reading:
    """A pass over ``tokens`` of a prompt, of which ``rows`` hold the only row.

    ``as_steps``: they were decoded before, and get the same bits again. ``check`` is called before each layer where the
    runtime can stop there, and may raise Interrupted. The outcome is logits [vocabulary], or None without
    ``want_logits``.
    """

    rows: TokenRows
    tokens: Sequence[int]
    want_logits: bool
    as_steps: bool = False
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Decoding:
    """A step of one token for each of ``rows``.

    The outcome is logits [rows, vocabulary]. With ``sampler`` it may also be the next token of the only row, which was
    chosen by that sampler where the logits are. ``draft`` guesses a given number of tokens, or fewer, that may follow
    the only one. The scheduler may run some of them in the same pass; then the outcome is logits [1 + those,
    vocabulary], and the rows hold all of them.
    """

    rows: TokenRows
    tokens: Sequence[int]
    sampler: Sampler | None = None
    draft: Callable[[int], TokenDraft | None] | None = None


@dataclass(frozen=True)
class MemoryWanted:
    """``nbytes`` of memory for keys and values, before they are taken.

    The program goes on when they fit beside those of others, or when no other is left. ``cancelled``: whether it goes
    on at once, because it will end. ``waits`` is called once if it has to wait.
    """

    nbytes: int
    cancelled: Callable[[], bool]
    waits: Callable[[], None]


@dataclass(frozen=True)
class Together:
    """``programs`` that run at the same time. The outcome is a list of what they return. If one fails, the others are
    closed, and what it raised is raised."""

    programs: Sequence[Program[Any]]


Work: TypeAlias = Reading | Decoding | MemoryWanted | Together
Outcome: TypeAlias = Logits | int | list[Any] | None
_T = TypeVar("_T")
Program: TypeAlias = Generator[Work, Outcome, _T]
"""A program that returns a ``_T``. What a pass raises is raised in it where it yielded the pass."""


def read(work: Reading) -> Program[Logits | None]:
    """Run ``work``. Returns the logits [vocabulary] after the last token, or None if they were not wanted."""
    found = yield work
    assert not isinstance(found, int | list)
    return found


def decode(rows: TokenRows, tokens: Sequence[int]) -> Program[Logits]:
    """Run a step of ``tokens``, one for each of ``rows``. Returns logits [rows, vocabulary]."""
    found = yield Decoding(rows, tokens)
    assert found is not None and not isinstance(found, int | list)
    return found


def decode_choosing(
    rows: TokenRows, token: int, sampler: Sampler | None, draft: Callable[[int], TokenDraft | None] | None = None
) -> Program[Logits | int]:
    """Run a step of ``token`` in the only row. Returns the next token if ``sampler`` chose it where the logits are, of
    which it is still to be told; otherwise logits [1, vocabulary], or with those after tokens of ``draft``."""
    found = yield Decoding(rows, [token], sampler, draft)
    assert found is not None and not isinstance(found, list)
    return found


def together(programs: Sequence[Program[_T]]) -> Program[list[_T]]:
    """Run ``programs`` at the same time. Returns what they return, and raises what the first one that fails raises."""
    found = yield Together(programs)
    assert isinstance(found, list)
    return found
