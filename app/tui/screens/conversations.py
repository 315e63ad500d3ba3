"""The screen of the conversations, for terminals without room for them beside the chat."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from app.chat.controller import ChatController
from app.chat.state import StatusChanged, TitleChanged, Update
from app.tui.keymap import bound
from app.tui.render.key_footer import KeyFooter
from app.tui.screens.chat_browser import ChatBrowser, ConversationChosen


class ConversationsScreen(Screen[ConversationChosen | None]):
    """Its result is the conversation to show."""

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
