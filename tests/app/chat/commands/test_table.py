"""The table of commands: what is typed is told from questions, and names, keys and wordings are sound."""

from __future__ import annotations

import pytest

from app.chat.commands import table
from app.chat.commands.table import COMMANDS


def test_commands_are_told_from_questions() -> None:
    call = table.parse("/beams 4")
    assert call is not None
    assert (call.command.name, call.argument) == ("beams", "4")
    assert table.parse("What about /help?") is None
    assert table.parse("/usr/bin is a folder") is None
    assert table.parse("//help") is None


@pytest.mark.parametrize(
    "text",
    [
        "// @ts-check\nconst x = 1;",
        "// why does this fail",
        "//",
        "///",
        "//find the end",
        "//help\n//me",
        "//usr",
        "/ a",
    ],
)
def test_a_text_that_begins_with_slashes_loses_nothing(text: str) -> None:
    assert table.unescaped(text) == text


def test_two_slashes_ask_the_name_of_a_command() -> None:
    assert table.unescaped("//help") == "/help"
    assert table.parse("/help\nand more") is None
    with pytest.raises(table.UnknownCommand, match="did you mean /help"):
        table.parse("/helo")
    with pytest.raises(table.UnknownCommand, match="no arguments"):
        table.parse("/new please")


def test_every_name_and_alias_calls_its_own_command() -> None:
    words = [(word, command) for command in COMMANDS for word in (command.name, *command.aliases)]
    assert len({word for word, _ in words}) == len(words)
    for word, command in words:
        call = table.parse(f"/{word.upper()} value" if command.argument else f"/{word.upper()}")
        assert call is not None and call.command is command


def test_a_command_s_wordings_are_sentences_without_a_full_stop() -> None:
    for command in COMMANDS:
        for text in (command.title, command.help, *filter(None, [command.help_in_lines])):
            assert text[0].isupper() or text.startswith("ctrl+")
            assert text == text.strip() and not text.endswith(".")
        assert command.help_in_lines != command.help


def test_only_arguments_have_values_to_offer() -> None:
    offered = [command for command in COMMANDS if command.values is not None]
    assert offered and all(command.argument for command in offered)
