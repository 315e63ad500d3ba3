"""Widgets whose content is made anew for each width."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from textual.content import Content, Span
from textual.geometry import Size
from textual.selection import Selection
from textual.widget import Widget

from app.tui.render.highlighting import Highlighter
from app.tui.render.markdown import EDGE, copy_marks, render_markdown


class Rendered(Widget):
    """A widget whose content is made by :meth:`make`, once for each width in cells."""

    def __init__(self, *, id: str | None = None, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._made: tuple[int, Content] | None = None
        self._laid_out: tuple[int, int] | None = None
        """Width and height in cells that the last layout was given."""

    @abstractmethod
    def make(self, width: int) -> Content:
        """The content for ``width`` cells."""

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

    def text_at(self, width: int) -> str:
        """The text that is drawn ``width`` cells wide."""
        return self._content(width).plain

    def _content(self, width: int) -> Content:
        if self._made is None or self._made[0] != width:
            self._made = width, self.make(width)
        return self._made[1]


class Written(Rendered):
    """A widget with a model's Markdown. Its code is drawn again when ``highlighter`` has found the colours."""

    def __init__(self, highlighter: Highlighter, *, classes: str = "") -> None:
        super().__init__(classes=classes)
        self._highlighter = highlighter

    def make(self, width: int) -> Content:
        self._highlighter.begin(self)
        return self.written(width)

    @abstractmethod
    def written(self, width: int) -> Content:
        """The content for ``width`` cells."""

    def markdown(self, source: str, width: int, *, marked: bool = False) -> Content:
        def colours(code: str, language: str) -> Sequence[Span]:
            return self._highlighter.spans(code, language, self)

        return render_markdown(source, width, colours, marked=marked)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        content = self.render()
        drawn = list(content.plain.replace(EDGE, " "))
        for place in copy_marks(content):
            drawn[place] = " "
        return selection.extract("".join(drawn)), "\n"

    def on_unmount(self) -> None:
        self._highlighter.begin(self)
