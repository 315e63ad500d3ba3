"""What the screens need of the application they are shown in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from app.machine import Machine
from app.settings.schema import Settings
from app.tui.render.highlighting import Highlighter


class ChatHost(Protocol):
    """The application, as its screens know it; see :class:`app.tui.application.ChatApp`."""

    machine: Machine | None
    highlighter: Highlighter

    @property
    def settings(self) -> Settings: ...

    def change_setting(self, key: str, value: object) -> str: ...

    def change_settings(self, changes: Mapping[str, object]) -> str: ...

    def keep_options(self, options: Settings) -> None: ...

    def copy_out(self, text: str, what: str) -> None: ...

    def action_help(self) -> None: ...

    async def action_quit_chat(self) -> None: ...
