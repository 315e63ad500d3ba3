"""What the chat screen opens: panels at its side, and other screens over it. They are imported when first opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from textual.screen import Screen
from textual.widgets import Static

from app.conversations.records import StoreError
from app.text_safety import one_line
from app.tui.chat.controller import ChatController
from app.tui.chat.hosting import ChatHost
from app.tui.chat.state import Severity
from app.tui.panels.panel import Panel

if TYPE_CHECKING:
    from app.tui.screens.machines import MachinesScreen
    from app.tui.screens.panel import PanelScreen

WIDE = 104
"""Columns from which on a panel fits beside the conversation."""


class OpensScreens(Screen[None]):
    """The part of the chat screen that opens other things."""

    controller: ChatController
    _panel: Panel | None = None
    _panel_screen: PanelScreen | None = None
    _machines: MachinesScreen | None = None

    @property
    def chat_app(self) -> ChatHost:
        return cast(ChatHost, self.app)

    def say(self, text: str, severity: Severity = "information") -> None:
        raise NotImplementedError

    def focus_prompt(self) -> None:
        raise NotImplementedError

    # --- panels ---------------------------------------------------------------------------------------------------

    def action_timing(self) -> None:
        self._open_panel("timing")

    def action_beams(self, width: str = "") -> None:
        if not width:
            self._open_panel("beams")
            return
        number = int(width) if width.isdecimal() else 0
        if not 1 <= number <= 16:
            self.say(f"The beam width is a number from 1 to 16, not {one_line(width)}.", "warning")
            return
        problem = self._apply_beams(number)
        if problem:
            self.say(problem, "error")

    def _open_panel(self, kind: str) -> None:
        """Open the panel; an open one is gone to, and closed when one is there already."""
        panel = self._panel
        if panel is not None:
            has_focus = self.focused is not None and panel in self.focused.ancestors_with_self
            if kind == panel.PANEL and not has_focus and self._panel_screen is None:
                panel.focus_first()
                return
            self.action_close_panel()
            if kind == panel.PANEL:
                return
        self._place(self._make_panel(kind), self.app.size.width)

    def _make_panel(self, kind: str) -> Panel:
        if kind == "timing":
            from app.tui.panels.timing_panel import TimingPanel

            return TimingPanel(self.controller)
        from app.tui.panels.beam_panel import BeamPanel

        return BeamPanel(self.controller, self._apply_beams)

    def _apply_beams(self, width: int) -> str:
        """Use ``width`` and go on typing; what went wrong, or an empty text."""
        problem = self.chat_app.change_setting("beams", width)
        if self._panel_screen is not None:
            self.action_close_panel()
        else:
            self.focus_prompt()
        if not problem:
            self.say(f"{width} beam{'' if width == 1 else 's'} from the next question on.")
        return problem

    def _place(self, panel: Panel, columns: int) -> None:
        self._panel = panel
        if columns >= WIDE:
            side = self.query_one("#side")
            side.display = True
            side.mount(panel, Static(panel.HINT, classes="panel-hint", markup=False))
            self.call_after_refresh(self._opened, panel)
            return
        from app.tui.screens.panel import PanelScreen

        self._panel_screen = PanelScreen(panel)
        self.app.push_screen(self._panel_screen, self._panel_left)

    def _opened(self, panel: Panel) -> None:
        if panel is self._panel:
            panel.opened()
            if panel.PANEL == "beams":
                panel.focus_first()

    def action_close_panel(self) -> None:
        panel, self._panel = self._panel, None
        if panel is None:
            return
        if self._panel_screen is not None:
            self._panel_screen.action_close_panel()
            return
        panel.closed()
        side = self.query_one("#side")
        side.remove_children()
        side.display = False
        self.focus_prompt()

    def _panel_left(self, result: None) -> None:
        self._panel = self._panel_screen = None
        self.focus_prompt()

    def place_panel(self, columns: int) -> None:
        """The terminal is ``columns`` wide now: an open panel goes where it fits."""
        panel = self._panel
        if panel is None or (columns >= WIDE) == (self._panel_screen is None):
            return
        kind = panel.PANEL
        self.action_close_panel()
        self._panel = self._panel_screen = None
        self.call_after_refresh(lambda: self._place(self._make_panel(kind), columns))

    # --- screens --------------------------------------------------------------------------------------------------

    def action_chats(self) -> None:
        from app.tui.screens.conversations import ConversationsScreen, Opened

        def chosen(result: Opened | None) -> None:
            if result is not None:
                self.controller.open_conversation(result.conversation, result.message)
            self.focus_prompt()

        self.app.push_screen(ConversationsScreen(self.controller), chosen)

    def action_model(self, name: str = "") -> None:
        def chosen(model: str | None) -> None:
            if model is not None:
                self._use_model(model)
            self.focus_prompt()

        if name:
            chosen(name)
            return
        from app.tui.screens.models import ModelsScreen

        self.app.push_screen(ModelsScreen(self.controller), chosen)

    def _use_model(self, model: str) -> None:
        if model == self.controller.options.model:
            self.controller.load_again()
            return
        problem = self.chat_app.change_setting("model", model)
        if problem:
            self.say(problem, "error")

    def action_settings(self) -> None:
        from app.tui.screens.settings import SettingsScreen

        def left(problem: str | None) -> None:
            if problem:
                self.say(problem, "error")
            self.focus_prompt()

        self.app.push_screen(SettingsScreen(self.controller), left)

    def action_machines(self) -> None:
        from app.tui.screens.machines import MachinesScreen

        def left(result: None) -> None:
            self._machines = None
            self.focus_prompt()

        self._machines = MachinesScreen(self.controller)
        self.app.push_screen(self._machines, left)

    def _network_changed(self) -> None:
        if self._machines is not None and self._machines.is_mounted:
            self._machines.network_changed()

    def action_help(self) -> None:
        self.chat_app.action_help()

    def action_rename(self, title: str = "") -> None:
        if title:
            self.controller.rename(title)
            return
        from app.tui.screens.asking import AskText

        self.app.push_screen(
            AskText("Title of the chat", self.controller.thread.title),
            lambda text: self.controller.rename(text) if text else None,
        )

    def action_export(self, path: str = "") -> None:
        if self.controller.thread.conversation is None and not self.controller.thread.path:
            self.say("There is nothing to export yet.", "warning")
            return
        if path:
            self._export(path)
            return
        from app.tui.chat.exporting import suggested_path
        from app.tui.screens.asking import AskText

        self.app.push_screen(
            AskText("Export to (.md or .json)", str(suggested_path(self.controller.thread.title))),
            lambda text: self._export(text) if text else None,
        )

    def _export(self, path: str) -> None:
        from app.tui.chat.exporting import export_thread, why_not_exported

        try:
            written = export_thread(self.controller.store, self.controller.thread, Path(path).expanduser())
        except (OSError, StoreError) as error:
            self.say(why_not_exported(Path(path), error), "error")
        else:
            self.say(f"Exported to {written}.")
