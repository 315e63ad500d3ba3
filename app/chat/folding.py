"""Large pastes folded in the prompt: a short label stands for each, and the whole text is sent. No Textual."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

LINES = 10
"""Maximum lines of a paste that is shown as it is. No more of them fit in the prompt."""
CHARACTERS = 2000
"""Maximum characters of a paste that is shown as it is."""


class Folds:
    """The folded pastes of a draft, by their labels (``[Pasted 214 lines]``), which stand in its text.

    Labels are not forgotten when they are deleted, so that an undone deletion brings the paste back.
    """

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        self._texts: dict[str, str] = {}
        self._pattern = re.compile("(?!)")
        self._know(texts or {})

    def fold(self, pasted: str, draft: str = "") -> str:
        """A new label for ``pasted``, or ``pasted`` itself if it is short. The label is not part of ``draft`` yet."""
        lines = pasted.count("\n") + (not pasted.endswith("\n"))
        if lines <= LINES and len(pasted) <= CHARACTERS:
            return pasted
        what = f"{lines:,} lines" if lines > LINES else f"{len(pasted):,} characters"
        label, number = f"[Pasted {what}]", 1
        while self._texts.get(label, pasted) != pasted or (label not in self._texts and label in draft):
            number += 1
            label = f"[Pasted {what}, {number}]"
        self._know({label: pasted})
        return label

    def expand(self, draft: str) -> str:
        """``draft`` with every label replaced by its paste."""
        return self._pattern.sub(lambda found: self._texts[found.group()], draft)

    def used(self, draft: str) -> dict[str, str]:
        """The pastes whose labels stand in ``draft``, by their labels."""
        return {label: self._texts[label] for label in self._pattern.findall(draft)}

    def restore(self, texts: Mapping[str, str]) -> None:
        """Know the pastes of a draft that was kept, besides those known already."""
        self._know(texts)

    def spans(self, line: str) -> Iterator[tuple[int, int]]:
        """Start and end of each label in ``line``."""
        return (found.span() for found in self._pattern.finditer(line))

    def around(self, line: str, column: int, *, touching: bool = False) -> tuple[int, int] | None:
        """Start and end of the label that ``column`` is inside of, or ``touching``; None if there is none."""
        reach = 1 if touching else 0
        spans = self.spans(line)
        return next(((start, end) for start, end in spans if start - reach < column < end + reach), None)

    def _know(self, texts: Mapping[str, str]) -> None:
        if not texts:
            return
        self._texts.update(texts)
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._texts, key=len, reverse=True))))
