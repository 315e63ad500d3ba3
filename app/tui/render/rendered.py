"""Widgets whose content is made anew for each width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from textual.content import Content, Span
from textual.geometry import Size
from textual.widget import Widget

from app.tui.render.markdown import render_markdown

if TYPE_CHECKING:
    from app.tui.application import ChatApp


class Rendered(Widget):
    """A widget whose content is made by :meth:`make`, once for each width in cells."""

    def __init__(self, *, id: str | None = None, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._made: tuple[int, Content] | None = None
        self._laid_out: tuple[int, int] | None = None
        """Width and height in cells that the last layout was given."""

    def make(self, width: int) -> Content:
        """The content for ``width`` cells."""
        raise NotImplementedError

    def remake(self) -> None:
        """Make the content again. The screen is laid out again only if the height changed."""
        self._made = None
        width = self.size.width
        if not self.is_mounted or width <= 0:
            self.refresh(layout=True)
            return
        # Compared is the height that was laid out, not that of the old content: a subclass may round heights.
        self.refresh(layout=self._laid_out != (width, self.height_of(self._content(width), width)))

    def height_of(self, content: Content, width: int) -> int:
        """The height in lines that ``content`` is laid out with."""
        return content.get_height({}, width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if not width:
            return 0
        self._laid_out = width, self.height_of(self._content(width), width)
        return self._laid_out[1]

    def render(self) -> Content:
        return self._content(self.size.width)

    def _content(self, width: int) -> Content:
        if self._made is None or self._made[0] != width:
            self._made = width, self.make(width)
        return self._made[1]


class Written(Rendered):
    """A widget with a model's Markdown. Its code is drawn again when the colours arrive."""

    def make(self, width: int) -> Content:
        cast("ChatApp", self.app).highlighter.begin(self)
        return self.written(width)

    def written(self, width: int) -> Content:
        """The content for ``width`` cells."""
        raise NotImplementedError

    def markdown(self, source: str, width: int) -> Content:
        return render_markdown(source, width, self._colours)

    def on_unmount(self) -> None:
        cast("ChatApp", self.app).highlighter.begin(self)

    def _colours(self, code: str, language: str) -> Sequence[Span]:
        return cast("ChatApp", self.app).highlighter.spans(code, language, self)
