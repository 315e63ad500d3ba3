"""The panels of the chat: timing and beams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.screen import Screen

from app.chat.controller import ChatController
from app.text_safety import one_line
from app.tui.panels.panel import Panel, PanelSlot


class ChatPanels(PanelSlot):
    """Makes the chat's panels where there is room for them. ``on_left`` and ``on_text`` are those of the slot."""

    def __init__(
        self,
        screen: Screen[Any],
        controller: ChatController,
        on_left: Callable[[], None],
        on_text: Callable[[str], None],
    ) -> None:
        super().__init__(screen, self._made, on_left, on_text)
        self._controller = controller
        self._focus_prompt = on_left

    def _made(self, kind: str) -> Panel:
        if kind == "timing":
            from app.tui.panels.timing_panel import TimingPanel

            return TimingPanel(self._controller)
        from app.tui.panels.beam_panel import BeamPanel

        return BeamPanel(self._controller, self._apply_beams)

    def beams(self, width: str = "") -> None:
        """Use beams of the ``width`` that was typed; without one, open or close the panel."""
        if not width:
            self.toggle("beams")
            return
        number = int(width) if width.isdecimal() else 0
        if 1 <= number <= 16:
            self._apply_beams(number)
        else:
            self._controller.notify(f"The beam width must be a number from 1 to 16, not {one_line(width)}.", "warning")

    def _apply_beams(self, width: int) -> None:
        """Use beams of this ``width`` in the shown chat and go back to typing."""
        self._controller.setup.change({"beams": width})
        if self.covers:
            self.close()
        else:
            self._focus_prompt()
        self._controller.notify(
            f"This chat's next question uses {width} beam{'' if width == 1 else 's'}.", "information"
        )
