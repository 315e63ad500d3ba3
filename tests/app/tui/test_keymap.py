"""Commands that are typed, told from questions."""

from __future__ import annotations

import pytest

from app.tui import keymap


def test_commands_are_told_from_questions() -> None:
    call = keymap.parse("/beams 4")
    assert call is not None
    assert (call.command.name, call.argument) == ("beams", "4")
    assert keymap.parse("What about /help?") is None
    assert keymap.parse("/usr/bin is a folder") is None
    assert keymap.parse("//help") is None


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
    assert keymap.unescaped(text) == text


def test_two_slashes_ask_the_name_of_a_command() -> None:
    assert keymap.unescaped("//help") == "/help"
    assert keymap.parse("/help\nand more") is None
    with pytest.raises(keymap.UnknownCommand, match="did you mean /help"):
        keymap.parse("/helo")
    with pytest.raises(keymap.UnknownCommand, match="no arguments"):
        keymap.parse("/new please")
