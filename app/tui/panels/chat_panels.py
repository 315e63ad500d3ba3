"""The panels of the chat: timing and beams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.screen import Screen

from app.chat.controller import ChatController
from app.tui.panels.panel import Panel, PanelSlot


class ChatPanels(PanelSlot):
    """Makes the chat's panels if there is room for them.

    ``on_left`` and ``on_text`` are passed to the slot. ``use_beams`` sets the shown chat's beam width.
    """

    def __init__(
        self,
        screen: Screen[Any],
        controller: ChatController,
        on_left: Callable[[], None],
        on_text: Callable[[str], None],
        use_beams: Callable[[int], None],
    ) -> None:
        super().__init__(screen, self._made, on_left, on_text)
        self._controller = controller
        self._focus_prompt = on_left
        self._use_beams = use_beams

    def _made(self, kind: str) -> Panel:
        if kind == "timing":
            from app.tui.panels.timing_panel import TimingPanel

            return TimingPanel(self._controller)
        from app.tui.panels.beam_panel import BeamPanel

        return BeamPanel(self._controller, self._apply_beams)

    def _apply_beams(self, width: int) -> None:
        """Use beams of this ``width`` in the shown chat and go back to typing."""
        self._use_beams(width)
        if self.covers:
            self.close()
        else:
            self._focus_prompt()
