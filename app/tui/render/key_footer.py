"""The line of keys at the bottom of a screen: the currently useful keys, as many as fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.binding import ActiveBinding
from textual.widgets import Footer
from textual.widgets._footer import FooterKey

from app.tui.keymap import keys_of

_HELP = "app.help"
"""Action of the help's key, on every screen."""
_GAP = 1
"""Columns between two keys."""


@dataclass(frozen=True)
class _ShownKey:
    """A key as shown."""

    key: str
    display: str
    description: str
    action: str
    enabled: bool
    tooltip: str

    @property
    def width(self) -> int:
        """Columns that it takes."""
        return cell_len(self.display) + (1 + cell_len(self.description) if self.description else 0)

    @property
    def always_shown(self) -> bool:
        """Whether it is the way out or the help."""
        return self.action == _HELP or self.key == "escape"


class KeyFooter(Footer):
    """The keys that can be pressed now, of which none is cut: those that do not fit are left out.

    The way out and the help are always there. The others come in the order in which their bindings are declared, those
    of the focused widget first, so a screen declares the keys that matter most first.

    Textual's own footer mounts all its keys whenever the focus moves or a screen is shown, and styles each key twice.
    That was a quarter of the time of opening a screen, so this one mounts them only when they change.
    """

    def __init__(self) -> None:
        super().__init__(compact=True, show_command_palette=False)
        self._mounted: list[_ShownKey] = []

    def compose(self) -> ComposeResult:
        self._mounted = self._keys() if self._bindings_ready else []
        for key in self._mounted:
            # With the class the binding to `compact` changes nothing, and the key is styled once.
            yield FooterKey(
                key.key, key.display, key.description, key.action, not key.enabled, key.tooltip, classes="-compact"
            ).data_bind(compact=Footer.compact)

    async def recompose(self) -> None:
        # A screen that is being removed no longer has all the widgets that its bindings ask.
        if self._pruning:
            return
        if not self.is_attached or self._mounted != self._keys():
            await super().recompose()

    def on_resize(self, event: events.Resize) -> None:
        if self._bindings_ready:
            self.call_after_refresh(self.recompose)

    def _keys(self) -> list[_ShownKey]:
        """The keys that fit, in order."""
        shown: dict[str, _ShownKey] = {}
        for active in sorted(self.screen.active_bindings.values(), key=self._place):
            binding = active.binding
            if binding.show:
                display, tooltip = self.app.get_key_display(binding), active.tooltip or binding.description
                key = _ShownKey(binding.key, display, binding.description, binding.action, active.enabled, tooltip)
                shown.setdefault(binding.action, key)
        # A footer that has just been made has no size yet.
        return _fitting(list(shown.values()), self.size.width or self.app.size.width)

    def _place(self, active: ActiveBinding) -> tuple[int, int, int]:
        """Sort key of a binding: the distance of its widget from the focused one, its index in that widget, and the
        key's index.

        The order of active bindings differs: there, a screen's key precedes the same key of a field.
        """
        chain = (self.screen.focused or self.screen).ancestors_with_self
        declared = [binding.id for kind in type(active.node).__mro__ for binding in vars(kind).get("BINDINGS", ())]
        given = keys_of(active.binding.id or "", ())
        return (
            chain.index(active.node) if active.node in chain else 0,
            declared.index(active.binding.id) if active.binding.id in declared else len(declared),
            given.index(active.binding.key) if active.binding.key in given else 0,
        )


def _fitting(keys: Sequence[_ShownKey], room: int) -> list[_ShownKey]:
    """The members of ``keys``, in the same order, that fit in ``room`` columns."""
    shown: set[int] = set()
    for place, key in sorted(enumerate(keys), key=lambda entry: (not entry[1].always_shown, entry[0])):
        width = key.width + (_GAP if shown else 0)
        if width <= room:
            room -= width
            shown.add(place)
        elif not key.always_shown:
            break
    return [key for place, key in enumerate(keys) if place in shown]
