"""The commands of the chat: one table for slash commands, the command palette and the help. No Textual."""

from __future__ import annotations

from dataclasses import dataclass

from app.tui.shortcuts import key


@dataclass(frozen=True)
class Command:
    """``action`` is the chat screen's action; with ``argument`` (its name in the help) it is given the rest of the
    line."""

    name: str
    title: str
    help: str
    action: str
    key: str = ""
    argument: str = ""


COMMANDS: tuple[Command, ...] = (
    Command("help", "Help", "Keys and commands", "help", key("help")),
    Command("new", "New chat", "Start an empty one", "new", "ctrl+n"),
    Command("chats", "Chats", "Resume, search, rename, export, delete", "chats", key("chats")),
    Command("model", "Model", "Choose, fetch or load a model", "model", key("model"), "[name]"),
    Command("beams", "Beams", "Beam width, candidates and their scores", "beams", key("beams"), "[width]"),
    Command("timing", "Timing", "Where each token's time goes, and which experts it used", "timing", key("timing")),
    Command("machines", "Machines", "Find, pair and forget machines; form a ring of them", "machines", key("machines")),
    Command("settings", "Settings", "Model, sampling, partitioning, colours", "settings", "ctrl+s"),
    Command("again", "Answer again", "Another answer to the last question; the old one stays", "again", "ctrl+r"),
    Command("edit", "Edit the last question", "Its old wording stays, as a branch", "edit_last"),
    Command("copy", "Copy the last answer", "To the clipboard, as Markdown", "copy_last"),
    Command("code", "Copy the last block of code", "To the clipboard", "copy_code"),
    Command("rename", "Rename the chat", "Give it a title", "rename", "", "[title]"),
    Command("export", "Export the chat", "To a Markdown or JSON file", "export", "", "[file]"),
    Command("stop", "Stop the answer", "The text so far stays", "stop", "escape"),
    Command("quit", "Quit", "Everything is kept", "quit_chat", "ctrl+q"),
)

_ALIASES = {
    "exit": "quit", "resume": "chats", "retry": "again", "regenerate": "again", "peers": "machines", "?": "help",
}  # fmt: skip

_BY_NAME = {command.name: command for command in COMMANDS} | {
    alias: command for alias, name in _ALIASES.items() for command in COMMANDS if command.name == name
}


@dataclass(frozen=True)
class Call:
    """A command with what was typed behind it."""

    command: Command
    argument: str = ""


class UnknownCommand(ValueError):
    """The text is one sentence for the person."""


def parse(text: str) -> Call | None:
    """The command ``text`` calls; None if it is a question. Raises UnknownCommand.

    A question may begin with a slash if it looks like no command: a path, several lines, ``//`` (taken literally).
    """
    if not text.startswith("/") or "\n" in text:
        return None
    word, _, argument = text[1:].partition(" ")
    if not word or "/" in word:
        return None
    command = _BY_NAME.get(word.lower())
    if command is None:
        near = [name for name in _BY_NAME if name.startswith(word.lower()[:2])]
        hint = f"did you mean /{near[0]}?" if near else "/help lists them."
        raise UnknownCommand(f"There is no command /{word}; {hint}")
    if argument.strip() and not command.argument:
        raise UnknownCommand(f"/{command.name} takes no arguments.")
    return Call(command, argument.strip())
