"""Why a part of a prompt was read again: the first difference from what was kept, or what kept it from use. Pure.

Only what every client may know of its own prompt is found here. The text of a difference is shown to its own client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.ipc.messages import ReadAgain, ReadingCause

FEW_TOKENS = 16
"""Tokens that were kept and are run again without a word: the marks of a message, or the last token of a prompt."""

AROUND_TOKENS = 24
"""Tokens before and after a difference of which the text is compared."""
BEFORE_CHARACTERS, AFTER_CHARACTERS = 12, 24
"""Maximum characters that are told before a difference, and from there on."""


@dataclass(frozen=True)
class Closest:
    """What was kept of the conversation that shares most with a prompt: its first ``shared`` tokens, of ``length``.

    ``around``: its tokens from :data:`AROUND_TOKENS` before the first difference to as many after it. ``client``: see
    :attr:`engine.session.kept_rows.CachedRow.client`. ``given_up``: it was dropped, because memory was wanted.
    ``cuts``: its keys and values could be cut back to what is shared.
    """

    shared: int
    length: int
    around: Sequence[int] = ()
    client: object = None
    given_up: bool = False
    cuts: bool = True

    @staticmethod
    def of(
        tokens: Sequence[int], shared: int, client: object, *, given_up: bool = False, shortest_cut: int = 0
    ) -> Closest:
        around = list(tokens[max(0, shared - AROUND_TOKENS) : shared + AROUND_TOKENS])
        return Closest(shared, len(tokens), around, client, given_up, shortest_cut <= shared)


def cause_of(
    closest: Closest | None, asked: int, reused: int, *, own: bool, last_message: bool, first: bool, answers: bool
) -> ReadingCause | None:
    """Why more than a new question was read of a prompt of ``asked`` tokens, ``reused`` of which were kept; None if
    there is nothing to tell.

    ``own``: what was kept is of the same client and conversation. Another conversation is no earlier version of this
    one, and a few tokens in common with it mean nothing.
    ``last_message``: the first difference from what was kept is in the last message. ``first``: no prompt was read
    since the model was loaded. ``answers``: the prompt holds answers of the model.
    """
    if closest is None or closest.shared <= (0 if own else FEW_TOKENS):
        return "restarted" if first and answers and not reused else None
    differs = closest.shared < min(asked, closest.length)
    if differs and not own:
        return None
    lost = closest.shared - reused > FEW_TOKENS
    if lost and closest.given_up:
        return "memory"
    if lost and not closest.cuts:
        return "state"
    if differs:
        return None if last_message else "changed"
    return "written" if lost else None


def message_at(position: int, ends: Sequence[int]) -> int:
    """The index of the message in which ``position`` is, or whose end it is; the last one if it is behind all.

    ``ends``: the position behind each message.
    """
    return next((index for index, end in enumerate(ends) if position <= end), len(ends) - 1)


def message_ends(rendered: str, contents: Sequence[str]) -> list[int]:
    """The position in the ``rendered`` conversation behind each of its messages' ``contents``.

    A message that the template has not written as it is ends where the one before it does.
    """
    ends, at = list[int](), 0
    for content in contents:
        found = rendered.find(content.strip(), at)
        at = found + len(content.strip()) if found >= 0 else at
        ends.append(at)
    return ends


def difference(old: str, new: str) -> tuple[str, str] | None:
    """A few characters of both texts around their first difference; None if one begins with the other."""
    at = next((place for place, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), None)
    if at is None:
        return None
    first, last = max(0, at - BEFORE_CHARACTERS), at + AFTER_CHARACTERS
    return old[first:last], new[first:last]


def told(
    cause: ReadingCause, closest: Closest | None, message: int | None, role: str, texts: tuple[str, str] | None
) -> ReadAgain:
    """The message about ``cause``. A difference that is none of the text is one of how it is split into tokens."""
    shared = 0 if closest is None else closest.shared
    if texts is not None and cause == "changed" and difference(*texts) is None:
        cause = "tokens"
    old, new = (difference(*texts) if texts is not None else None) or ("", "")
    return ReadAgain(cause=cause, shared_tokens=shared, message=message, role=role, before=old, now=new)
