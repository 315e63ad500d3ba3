"""Attached files as the screen shows them: below a question, and above the prompt before it is sent. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from app.attachments.attachment import Attachment, estimated_tokens
from app.attachments.figures import figures, tokens_of, unseen
from app.attachments.references import Resolved
from app.chat.words import size
from app.text_safety import one_line, sanitize
from engine.ipc.messages import ModelFacts

_MUTED = "$foreground-muted"
SHOWN_LINES, SHOWN_CHARACTERS = 200, 20_000
"""Maximum lines and characters of an open file that are shown. What is drawn is laid out as one text."""
_NAMED = 3
"""Maximum number of files that are named above the prompt."""


def attached(attachments: Sequence[Attachment], is_open: bool) -> list[Content]:
    """A line for each file, followed by its text if ``is_open``."""
    parts: list[Content] = []
    for attachment in attachments:
        mark = "▪" if attachment.picture is not None else "▾" if is_open else "▸"
        tokens = None if attachment.picture is not None else estimated_tokens(len(attachment.text))
        line = " · ".join([f"{mark} {one_line(attachment.name)}", *figures(attachment, tokens, "~")])
        parts.append(Content.styled(line, f"italic {_MUTED}"))
        if is_open and attachment.text:
            parts.append(Content.styled(_beginning(attachment.text), _MUTED))
    return parts


def to_be_attached(
    resolved: Resolved, room: int | None, counts: Sequence[int] | None = None, facts: ModelFacts | None = None
) -> Content:
    """What will be attached to the question, what cannot be, and the room that remains for it.

    ``room``: tokens of context that are left for the next question; None: it is not known. ``counts``: the tokens of
    each text; None: they are estimated. ``facts``: of the model that will see the pictures; None: it is not known.
    """
    lines: list[Content] = []
    files = resolved.attachments
    if files:
        about = "~" if counts is None else ""
        known = list(tokens_of(files, facts, counts))
        tokens = sum(count for count in known if count is not None)
        if len(files) <= _NAMED:
            shown = zip(files, known, strict=True)
            what = "   ".join(" ".join([one_line(file.name), *figures(file, count, about)]) for file, count in shown)
        else:
            what = f"{len(files)} files {size(sum(file.size for file in files))} {about}{tokens:,} tokens"
        too_much = room is not None and tokens > room
        left = "" if room is None else f"   {'only ' if too_much else ''}{max(0, room):,} tokens of context are free"
        lines.append(Content.assemble(("+ ", "bold $text-accent"), what, (left, "$text-error" if too_much else _MUTED)))
    for problem in [*filter(None, [unseen(files, facts)]), *resolved.problems, *resolved.left_out][:_NAMED]:
        lines.append(Content.assemble(("! ", "bold $text-warning"), (one_line(problem), "$text-warning")))
    return Content("\n").join(lines)


def _beginning(text: str) -> str:
    lines = sanitize(text[: SHOWN_CHARACTERS + 1]).expandtabs(4).splitlines()
    shown = "\n".join(lines[:SHOWN_LINES])[:SHOWN_CHARACTERS]
    if len(lines) <= SHOWN_LINES and len(text) <= SHOWN_CHARACTERS:
        return shown
    return f"{shown}\n… {size(max(0, len(text) - len(shown)))} more"
