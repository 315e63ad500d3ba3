"""The panels beside the chat: what they have in common, and where the open one is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Static

from app.chat.state import Update
from app.tui.keymap import bound, key
from app.tui.render.key_footer import KeyFooter

WIDE = 104
"""Columns of a terminal from which on a panel fits beside the conversation."""


class Panel(VerticalScroll):
    """A part of the chat screen that is opened and closed by a key."""

    PANEL: ClassVar[str] = ""
    """Name of the panel, which is also that of the function whose keys open it."""
    TITLE: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__(classes="panel")
        self.covers = False
        """Whether the panel fills the screen, so that there is no prompt."""
        self.on_typed: Callable[[str], None] = lambda text: None
        """Called with a character that is not a key of the panel, because the person is typing a question."""
        self._typing = False
        """Whether such a character came. The keys of one burst all arrive here, and belong to the question."""

    def on_focus(self) -> None:
        self._typing = False

    def on_descendant_focus(self) -> None:
        self._typing = False

    def on_key(self, event: events.Key) -> None:
        if event.is_printable and event.character and (self._typing or event.key not in self.screen.active_bindings):
            event.stop()
            self._typing = True
            self.on_typed(event.character)

    def handle_update(self, update: Update) -> None:
        """The controller changed something."""

    def focus_first(self) -> None:
        self.focus()

    def opened(self) -> None:
        """The panel is on the screen."""

    def closed(self) -> None:
        """The panel is gone."""


class PanelScreen(Screen[None]):
    """A panel that fills the screen, where it would not fit beside the conversation.

    ``on_text`` is called with what is typed or pasted when the panel has been closed for it. ``toggle`` closes the
    panel of a name, or opens it in place of this one.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close_panel", "Close", show=False, id="panel.back"),
        Binding(bound("beams"), "toggle_panel('beams')", show=False, id="panel.beams"),
        Binding(bound("timing"), "toggle_panel('timing')", show=False, id="panel.timing"),
        Binding(bound("help"), "app.help", "Help", id="panel.help"),
    ]

    def __init__(self, panel: Panel, on_text: Callable[[str], None], toggle: Callable[[str], None]) -> None:
        super().__init__()
        self._panel = panel
        self._on_text = on_text
        self._toggle = toggle
        panel.covers = True
        panel.on_typed = self._leave_with

    def compose(self) -> ComposeResult:
        yield Static(self._panel.TITLE, classes="screen-title", markup=False)
        yield self._panel
        yield KeyFooter()

    def on_mount(self) -> None:
        self._panel.focus_first()
        self._panel.opened()

    def on_paste(self, event: events.Paste) -> None:
        event.stop()
        self._leave_with(event.text)

    def _leave_with(self, text: str) -> None:
        if self.is_current:
            self.action_close_panel()
        self._on_text(text)

    def action_close_panel(self) -> None:
        self._panel.closed()
        self.dismiss(None)

    def action_toggle_panel(self, kind: str) -> None:
        self._toggle(kind)


class PanelSlot:
    """The place of the open panel: the side of a wide terminal, a screen of its own on a narrow one.

    ``make`` builds the panel of a name. ``on_left`` is called when no panel is open any more, ``on_text`` with what is
    typed in the panel, or pasted where it fills the screen.
    """

    def __init__(
        self,
        screen: Screen[Any],
        make: Callable[[str], Panel],
        on_left: Callable[[], None],
        on_text: Callable[[str], None],
    ) -> None:
        self.panel: Panel | None = None
        self.on_moved: Callable[[], None] = lambda: None
        """Called when a panel was opened or closed beside the conversation."""
        self._screen = screen
        self._make = make
        self._on_left = on_left
        self._on_text = on_text
        self._cover: PanelScreen | None = None

    @property
    def covers(self) -> bool:
        """Whether the panel fills the screen."""
        return self._cover is not None

    @property
    def beside(self) -> bool:
        """Whether a panel is open beside the conversation."""
        return self.panel is not None and not self.covers

    def toggle(self, kind: str) -> None:
        """Open the panel. An open one gets the focus; with the focus it is closed."""
        panel = self.panel
        if panel is not None:
            focused = self._screen.focused
            has_focus = focused is not None and panel in focused.ancestors_with_self
            if kind == panel.PANEL and not has_focus and not self.covers:
                panel.focus_first()
                return
            self.close()
            if kind == panel.PANEL:
                return
        self._place(self._make(kind), self._screen.app.size.width)

    def close(self) -> None:
        panel, self.panel = self.panel, None
        if panel is None:
            return
        if self._cover is not None:
            self._cover.action_close_panel()
            return
        panel.closed()
        side = self._screen.query_one("#side")
        side.remove_children()
        side.display = False
        self.on_moved()
        self._on_left()

    def draw_again(self) -> None:
        """Repaint the open panel without a layout."""
        if self.panel is not None and self.panel.is_mounted:
            for widget in self.panel.children:
                widget.refresh()

    def fit(self, columns: int) -> None:
        """Move an open panel to where it fits, now that the terminal is ``columns`` wide."""
        panel = self.panel
        if panel is None or (columns >= WIDE) != self.covers:
            return
        kind = panel.PANEL
        self.close()
        self.panel = self._cover = None
        self._screen.call_after_refresh(lambda: self._place(self._make(kind), columns))

    def _place(self, panel: Panel, columns: int) -> None:
        self.panel = panel
        panel.on_typed = self._on_text
        if columns >= WIDE:
            side = self._screen.query_one("#side")
            side.display = True
            opener = key(panel.PANEL)
            hint = f"{opener} focuses the panel, {opener} again closes it"
            side.mount(panel, Static(hint, classes="panel-hint", markup=False))
            self.on_moved()
            self._screen.call_after_refresh(self._opened, panel)
            return
        cover = self._cover = PanelScreen(panel, self._on_text, self.toggle)
        self._screen.app.push_screen(cover, lambda _: self._left(cover))

    def _opened(self, panel: Panel) -> None:
        if panel is self.panel:
            panel.opened()
            if panel.PANEL == "beams":
                panel.focus_first()

    def _left(self, cover: PanelScreen) -> None:
        if self._cover is cover:
            self.panel = self._cover = None
            self._on_left()
