"""A widget whose content depends on its width."""

from __future__ import annotations

from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget


class Rendered(Widget):
    """Its content is made once for each width, by :meth:`make`."""

    def __init__(self, *, id: str | None = None, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._made: tuple[int, Content] | None = None

    def make(self, width: int) -> Content:
        """The content for ``width`` cells."""
        raise NotImplementedError

    def remake(self) -> None:
        """What :meth:`make` gives has changed. The screen is laid out again only if the height is another."""
        before, self._made = self._made, None
        same_width = before is not None and 0 < before[0] == self.size.width
        if before is None or not same_width or not self.is_mounted:
            self.refresh(layout=True)
            return
        width = before[0]
        after = self._content(width)
        self.refresh(layout=self.height_of(after, width) != self.height_of(before[1], width))

    def height_of(self, content: Content, width: int) -> int:
        """The lines that ``content`` is given."""
        return content.get_height({}, width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self.height_of(self._content(width), width) if width else 0

    def render(self) -> Content:
        return self._content(self.size.width)

    def _content(self, width: int) -> Content:
        if self._made is None or self._made[0] != width:
            self._made = width, self.make(width)
        return self._made[1]
