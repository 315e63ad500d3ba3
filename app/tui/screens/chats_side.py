"""The place of the list of conversations: beside the chat where there is room, else a screen of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from app.chat.controller import ChatController
from app.chat.state import EntryAdded, EntryChanged, PathChanged, StatusChanged, TitleChanged, Update, UserNotice
from app.tui.keymap import bound
from app.tui.render.key_footer import KeyFooter
from app.tui.screens.chat_browser import ChatBrowser, ConversationChosen

if TYPE_CHECKING:
    from app.tui.screens.chat_browser import ChatBrowser

BESIDE_FROM = 120
"""Columns of a terminal from which on the list fits beside the chat."""
BESIDE_PANEL_FROM = 150
"""Columns from which on it also fits while another panel is open at the other side."""


class ChatsSide:
    """Shows the list of conversations beside the chat, and remembers that in the setting ``show_chats``.

    ``panel_is_open``: is there a panel at the other side? ``open_screen`` shows the list as a screen, where there is no
    room. ``on_left`` is called when the list is closed.
    """

    def __init__(
        self,
        screen: Screen[Any],
        controller: ChatController,
        panel_is_open: Callable[[], bool],
        open_screen: Callable[[], None],
        on_left: Callable[[], None],
    ) -> None:
        self.browser: ChatBrowser | None = None
        self._screen = screen
        self._controller = controller
        self._panel_is_open = panel_is_open
        self._open_screen = open_screen
        self._on_left = on_left
        self._seen: tuple[int | None, str] = (None, "")

    @property
    def focused(self) -> bool:
        """Has the list the focus?"""
        focused = self._screen.focused
        return focused is not None and self.browser is not None and self.browser in focused.ancestors_with_self

    def toggle(self) -> None:
        """Show the list. One that is shown gets the focus; with the focus it is closed."""
        if not self._fits():
            self._open_screen()
        elif not self._wanted:
            self._remember(True)
            self.fit()
            self._focus()
        elif self.focused:
            self._remember(False)
            self.fit()
            self._on_left()
        else:
            self._focus()

    def fit(self, columns: int | None = None) -> None:
        """Show or hide the list, as was wanted and as there is room in a terminal that is ``columns`` wide."""
        if not self._screen.is_mounted:
            return
        place = self._screen.query_one("#chats-side")
        shown = self._wanted and self._fits(columns)
        if shown == place.display and (self.browser is not None or not shown):
            return
        left = self.focused and not shown
        place.display = shown
        if not shown:
            if left:
                self._on_left()
            return
        if self.browser is None:
            from app.tui.screens.chat_browser import ChatBrowser

            self.browser = ChatBrowser(self._controller, dense=True)
            place.mount(self.browser)
        else:
            self.browser.look_again()

    def handle_update(self, update: Update) -> None:
        """The controller changed something."""
        browser = self.browser
        if browser is None or not browser.is_mounted or not self._screen.query_one("#chats-side").display:
            return
        match update:
            case StatusChanged():
                thread = self._controller.thread
                before, self._seen = self._seen, (thread.conversation, thread.title)
                if before != self._seen:
                    browser.look_again()
                else:
                    browser.show_current()
            case PathChanged() | EntryAdded() | EntryChanged(live=False) | TitleChanged() | UserNotice():
                browser.look_again()

    def _focus(self) -> None:
        if self.browser is not None:
            self.browser.focus_search()

    @property
    def _wanted(self) -> bool:
        return self._controller.options.show_chats

    def _fits(self, columns: int | None = None) -> bool:
        wide = self._screen.app.size.width if columns is None else columns
        return wide >= (BESIDE_PANEL_FROM if self._panel_is_open() else BESIDE_FROM)

    def _remember(self, shown: bool) -> None:
        problem = self._controller.change_settings({"show_chats": shown})
        if problem:
            self._controller.notify(problem, "warning")


# --- a screen of its own ---------------------------------------------------------------------------------------------


class ConversationsScreen(Screen[ConversationChosen | None]):
    """Screen whose result is the conversation to show."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(bound("chats"), "dismiss(None)", "Close", show=False, priority=True, id="chats.leave"),
        Binding(bound("help"), "app.help", "Help", priority=True, id="chats.help"),
    ]

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self._controller = controller

    def compose(self) -> ComposeResult:
        yield Static("Chats", classes="screen-title", markup=False)
        yield ChatBrowser(self._controller)
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one(ChatBrowser).focus_search()

    def handle_update(self, update: Update) -> None:
        """The controller changed something, such as whether a chat is being answered."""
        if isinstance(update, StatusChanged):
            self.query_one(ChatBrowser).show_current()
        elif isinstance(update, TitleChanged):
            self.query_one(ChatBrowser).look_again()

    @on(ChatBrowser.Chosen)
    def _chosen(self, event: ChatBrowser.Chosen) -> None:
        self.dismiss(event.chosen)

    @on(ChatBrowser.Left)
    def _left(self) -> None:
        self.dismiss(None)

    @on(ChatBrowser.ArchivedShown)
    def _archived(self, event: ChatBrowser.ArchivedShown) -> None:
        title = "Archived chats" if event.archived else "Chats"
        self.query_one(".screen-title", Static).update(Content(title))
