"""The footer: the keys that count at the moment."""

from __future__ import annotations

from collections.abc import Iterator

from textual.app import ComposeResult
from textual.widgets import Footer


class KeyFooter(Footer):
    """Textual's footer, mounted anew only when its keys change.

    Textual's own mounts all its keys whenever the focus moves or a screen is shown, and styles each key twice. That was
    a quarter of the time of opening a screen.
    """

    def __init__(self) -> None:
        super().__init__(compact=True, show_command_palette=False)
        self._mounted: list[tuple[object, ...]] = []

    def _keys(self) -> Iterator[tuple[object, ...]]:
        """What is shown of each key, in order."""
        for _, binding, enabled, tooltip in self.screen.active_bindings.values():
            if binding.show:
                yield binding, self.app.get_key_display(binding), enabled, tooltip

    def compose(self) -> ComposeResult:
        self._mounted = list(self._keys()) if self._bindings_ready else []
        for key in super().compose():
            key.add_class("-compact", update=False)  # else the binding to `compact` adds it, and styles the key again
            yield key

    async def recompose(self) -> None:
        if not self.is_attached or self._mounted != list(self._keys()):
            await super().recompose()
