"""The chat application. Screens other than the chat are imported when they are first opened."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from textual import constants, events, on
from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.screen import Screen
from textual.theme import Theme

from app.chat.commands.table import BY_NAME, COMMANDS
from app.chat.starting import Start
from app.chat.state import AnswerEnded, SettingsChanged
from app.clipboard import passed_on
from app.conversations.opening import DATABASE, open_store
from app.conversations.store import ConversationStore
from app.engine_client import Engine, EngineClient
from app.machine import Machine
from app.settings.file import SettingsFile, open_settings
from app.settings.schema import THEMES, Settings
from app.tui.actions import title_of, why_not
from app.tui.chat.status import WHISPER_S
from app.tui.keymap import KEYMAP_FILE, bound, hint, key, readable, use
from app.tui.palette import RankedCommands, screen_commands
from app.tui.render.highlighting import Highlighter
from app.tui.render.thumbnails import Thumbnails
from app.tui.screens.chat import ChatScreen
from app.tui.screens.updates import Updated
from app.tui.terminal.application import TerminalApp
from app.tui.terminal.graphics import Graphics


def starter_is_missing(model: str) -> bool:
    """Whether ``model`` is the starter and is not yet on this machine."""
    from engine.models.store.catalogue import STARTER
    from engine.models.store.local_models import resolve

    return model.strip().casefold() == STARTER and resolve(STARTER).folder is None


class ChatApp(TerminalApp):
    """The chat application. ``machine`` decides which settings are greyed (default: this machine)."""

    TITLE = "privatellm"
    CSS_PATH: ClassVar[str] = str(files("assets") / "styles" / "privatellm.tcss")
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-medium")]  # noqa: RUF012 (declared by App)
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {RankedCommands}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(bound("quit"), "quit_chat", "Quit", show=False, priority=True, id="app.quit"),
        Binding("ctrl+p", "command_palette", "Menu", show=False, priority=True, id="app.menu"),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, id="app.suspend"),
        Binding("question_mark", "keys_here", "Keys of this place", show=False, id="app.keys_here"),
        Binding("ctrl+c", "interrupt", "Interrupt", show=False, system=True, id="app.interrupt"),
    ]

    def __init__(
        self,
        engine: Engine,
        store: ConversationStore,
        settings: SettingsFile,
        *,
        machine: Machine | None = None,
        is_missing: Callable[[str], bool] = starter_is_missing,
        start: Start | None = None,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.store = store
        self.settings_file = settings
        self.machine = machine
        self.highlighter = Highlighter()
        self.thumbnails = Thumbnails(self._write_sequences, self.sixels)
        self._asked_for_graphics = False
        # If the model of the settings file cannot be used, the default model must not be fetched in its place.
        self._is_missing = lambda model: "model" not in settings.refused and is_missing(model)
        self.chat: ChatScreen | None = None
        self._start = start
        self._keymap_problems = self._use_keymap(settings.path.with_name(KEYMAP_FILE))

    def _use_keymap(self, file: Path) -> tuple[str, ...]:
        """Use the person's keys; returns what is wrong with them."""
        use({})
        if not file.exists():
            return ()
        from app.tui.keymap_file import keymap_of

        keymap = keymap_of(file)
        use(keymap.keys)
        self.set_keymap({id: ",".join(keys) for id, keys in keymap.keys.items()})
        return keymap.problems

    @property
    def settings(self) -> Settings:
        return self.settings_file.settings

    def on_mount(self) -> None:
        self._show_theme()
        self._show_looks()
        self.theme_changed_signal.subscribe(self, self._theme_chosen)
        self.chat = ChatScreen(
            self.engine,
            self.store,
            self.settings_file,
            self._is_missing,
            self.highlighter,
            self.thumbnails,
            self.machine,
        )
        self.push_screen(self.chat)
        if self._start is not None:
            self._start.begin(self.chat.controller)
        notices = [*self.settings_file.notices, *self._keymap_problems, *self.store.notices]
        if notices:
            self.chat.show_notice(" ".join(notices), "warning")
        # What imports allocated stays until the end, so the collector need not examine it again and again.
        gc.freeze()

    async def on_unmount(self) -> None:
        await self.highlighter.close()
        await self.thumbnails.close()

    @on(Updated)
    def _updated(self, event: Updated) -> None:
        if isinstance(event.update, AnswerEnded) and event.update.entry.state != "stopped" and not self.app_focus:
            self._signal_end()
        if isinstance(event.update, SettingsChanged):
            if "theme" in event.update.keys:
                self._show_theme()
            if "drawn_pictures" in event.update.keys:
                self.show_graphics()
            self._show_looks()

    def _signal_end(self) -> None:
        """Tell that an answer has ended: the person does another thing."""
        wanted = self.settings.answer_signal
        if wanted != "off" and self.chat is not None:
            self.chat.show_ended_unseen(True)
        if wanted in ("bell", "notification"):
            self._write_sequences("\a")
        if wanted == "notification":
            self._write_sequences(passed_on("\x1b]9;privatellm: an answer has ended.\a", os.environ))

    def watch_app_focus(self, focus: bool) -> None:
        """The terminal's window got the focus, or lost it, if the terminal reports that."""
        if focus and self.chat is not None:
            self.chat.show_ended_unseen(False)

    def _show_looks(self) -> None:
        """Follow the settings that say how things are shown."""
        self.animation_level = "none" if self.settings.reduced_motion else constants.TEXTUAL_ANIMATIONS
        if self.chat is not None and self.chat.is_mounted:
            self.chat.show_looks()

        if self.settings.drawn_pictures and not self._asked_for_graphics:
            self._asked_for_graphics = True
            self.ask_for_graphics()

    def show_graphics(self) -> None:
        self.thumbnails.use(self.graphics if self.settings.drawn_pictures else Graphics())
        if self.chat is not None and self.chat.is_mounted:
            self.chat.show_pictures()

    def _show_theme(self) -> None:
        if self.settings.theme in self.available_themes:
            self.theme = self.settings.theme

    def _theme_chosen(self, _: Theme) -> None:
        """Save a theme that was chosen in the palette. What a terminal with few colours shows instead is not."""
        if self.chat is not None and self.theme != self.settings.theme and self.theme in THEMES:
            problem = self.chat.controller.change_settings({"theme": self.theme})
            if problem:
                self.notify(problem, severity="error", markup=False)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        chat = self.chat
        if chat is None or screen is not chat:
            yield from screen_commands(screen, ["suspend_process"])
            yield from super().get_system_commands(screen)
            return
        for command in COMMANDS:
            keys = f" ({hint(command)})" if command.shortcut is not None else ""
            yield SystemCommand(command.title, command.help + keys, lambda c=command: chat.run_command(c))
        yield SystemCommand("Theme", "Choose the colours", self.action_change_theme)
        yield from screen_commands(screen, ["cut_or_edit", "back", "suspend_process", "quit_chat", *BY_NAME])

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return not getattr(self.screen, "takes_all_keys", False) if self.screen_stack else True

    async def _check_bindings(self, key: str, priority: bool = False) -> bool:
        handled = await super()._check_bindings(key, priority)
        if not handled and not priority:
            self._say_why_not(key)
        return handled

    def _say_why_not(self, key: str) -> None:
        """Say why ``key`` does nothing, if it does something at other times."""
        for node, bindings in self.screen._modal_binding_chain:
            for binding in bindings.key_to_bindings.get(key, ()):
                _, action, parameters = self._parse_action(binding.action, node)
                if node.check_action(action, parameters) is not False:
                    continue
                self._whisper(why_not(node, action, parameters) or f"{title_of(binding)} is not possible now.")
                return

    def _whisper(self, text: str) -> None:
        if self.chat is not None and self.screen is self.chat:
            self.chat.notice.whisper(text)
        else:
            self.notify(text, markup=False, timeout=WHISPER_S)

    def get_key_display(self, binding: Binding) -> str:
        return readable(super().get_key_display(binding))

    @property
    def main_screen(self) -> Screen[Any] | None:
        return self.chat

    @property
    def log_words(self) -> str:
        return "the log: /log"

    @property
    def kept_words(self) -> str:
        unsaved = self.chat.controller.unsaved if self.chat is not None else 0
        return "what could be saved is saved" if unsaved else "your chats are saved"

    @property
    def may_write_copies(self) -> bool:
        # A temporary chat leaves nothing on the disk.
        return self.chat is None or self.chat.controller.thread.memory is None

    async def action_quit_chat(self) -> None:
        """Leave, at the latest when :attr:`patience_s` is over. If messages are not saved, warn the first time and
        stay."""
        chat = self.chat
        if chat is None:
            self.exit(0)
            return
        await chat.controller.settle()
        if chat.controller.unsaved and not self._warned(chat):
            return
        self.leave_in_time()
        await chat.close()
        self.exit(0)

    async def keep(self) -> None:
        if self.chat is not None:
            await self.chat.close()

    def _warned(self, chat: ChatScreen) -> bool:
        if chat.warned_unsaved:
            return True
        chat.warned_unsaved = True
        count = chat.controller.unsaved
        some = "1 message is" if count == 1 else f"{count} messages are"
        chat.show_notice(
            f"{some} not saved. Press {key('quit')} again to quit, or use /export FILE to keep the text.", "error"
        )
        return False

    def action_interrupt(self) -> None:
        """ctrl+c: stop the answer. If there is nothing to stop, show how to leave."""
        if self.chat is None or not self.chat.controller.stop():
            self.notify(f"Press {key('quit')} to quit.", markup=False)

    def action_help(self) -> None:
        """Show help about the focused widget."""
        from app.tui.screens.dialogues import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.screen.focused))

    def action_keys_here(self) -> None:
        """Show the keys that count where the focus is."""
        from app.tui.screens.dialogues import KeySheet

        self.push_screen(KeySheet(self.screen))

    def on_resize(self, event: events.Resize) -> None:
        if self.chat is not None and self.chat.is_mounted:
            self.chat.panels.fit(event.size.width)
            self.chat.chats.fit(event.size.width)


def database_path() -> Path:
    from engine.system.locations import ensure

    return ensure("data") / DATABASE


def run_chat(start: Start | None = None) -> int:
    """Open the chat on this terminal until the person leaves; the exit status. Raises SettingError."""
    from app.conversations.store import StoreError
    from app.tui.terminal.output import guarded_output

    try:
        store = open_store(database_path())
    except (StoreError, OSError) as error:
        import sys

        print(f"privatellm: {error}", file=sys.stderr)  # noqa: T201
        return 1
    try:
        settings = open_settings()
        if start is not None:
            start.choose_model(settings)
        with guarded_output():
            return asyncio.run(_run(store, settings, start))
    finally:
        store.close()


async def _run(store: ConversationStore, settings: SettingsFile, start: Start | None) -> int:
    engine = EngineClient(share=True)
    return await ChatApp(engine, store, settings, start=start).run_to_end(engine)
