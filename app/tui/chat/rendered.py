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
        self._laid_out: tuple[int, int] | None = None
        """Width and height that the last layout was told."""

    def make(self, width: int) -> Content:
        """The content for ``width`` cells."""
        raise NotImplementedError

    def remake(self) -> None:
        """What :meth:`make` gives has changed. The screen is laid out again only if the height is another."""
        self._made = None
        width = self.size.width
        if not self.is_mounted or width <= 0:
            self.refresh(layout=True)
            return
        # What was laid out counts, not what was drawn before: a subclass may change its mind about heights as well.
        self.refresh(layout=self._laid_out != (width, self.height_of(self._content(width), width)))

    def height_of(self, content: Content, width: int) -> int:
        """The lines that ``content`` is given."""
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
