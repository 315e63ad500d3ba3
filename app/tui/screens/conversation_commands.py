"""The commands for conversations as a whole: rename, pin, archive, delete, export, import."""

from __future__ import annotations

from pathlib import Path

from app.chat.saving import toggle
from app.conversations.store import StoreError
from app.tui.screens.command_host import CommandHost


class ConversationCommands:
    """What ``/rename``, ``/pin``, ``/archive``, ``/delete``, ``/export`` and ``/import`` do on the chat screen."""

    def __init__(self, screen: CommandHost) -> None:
        self._screen = screen
        self._controller = screen.controller

    def rename(self, title: str = "") -> None:
        """Give the shown chat a title; without one, ask for it."""
        if title:
            self._controller.rename(title)
            return
        from app.tui.screens.dialogues import AskText

        self._screen.app.push_screen(
            AskText("Title of the chat", self._controller.thread.title),
            lambda text: self._controller.rename(text) if text else None,
        )

    def pin(self) -> None:
        """Keep the shown chat at the top of the list, or no longer."""
        self._controller.run_in_background(toggle(self._controller, "pinned"))

    def archive(self) -> None:
        """Put the shown chat away from the list, or back."""
        self._controller.run_in_background(toggle(self._controller, "archived"))

    def delete(self, what: str = "") -> None:
        """Delete the last message, or with ``chat`` the chat; it can be brought back."""
        self._controller.deletions.named(what)

    def export(self, argument: str = "") -> None:
        """``[--thoughts] [file]``: write the shown chat to a file; without one, ask for its name."""
        flag, _, rest = argument.partition(" ")
        thoughts = flag == "--thoughts"
        path = rest.strip() if thoughts else argument
        if self._controller.thread.conversation is None and not self._controller.thread.path:
            self._screen.show_notice("There is nothing to export yet.", "warning")
            return
        if path:
            self._export(path, thoughts)
            return
        from app.conversations.exporting import suggested_path
        from app.tui.screens.dialogues import AskText

        self._screen.app.push_screen(
            AskText("Export to file (.md or .json)", str(suggested_path(self._controller.thread.title))),
            lambda text: self._export(text, thoughts) if text else None,
        )

    def _export(self, path: str, thoughts: bool = False) -> None:
        from app.chat.thread import export_thread
        from app.conversations.exporting import export_problem

        thread, file = self._controller.thread, Path(path).expanduser()
        try:
            written = export_thread(self._controller.store, thread, file, thoughts=thoughts)
        except (OSError, StoreError) as error:
            self._screen.show_notice(export_problem(Path(path), error), "error")
        else:
            self._screen.show_notice(f"Exported to {written}.")

    def take_in(self, file: str = "") -> None:
        """Import the chats in ``file``; without one, ask for its name."""
        from app.chat.saving import import_file

        if file:
            self._controller.run_in_background(import_file(self._controller, file))
            return
        from app.tui.screens.dialogues import AskText

        self._screen.app.push_screen(
            AskText("Import chats from file (JSON, ZIP, or logs.db of llm)"),
            lambda text: self.take_in(text) if text else None,
        )
