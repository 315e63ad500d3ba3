"""The keymap file: which keys it gives to which actions, and what is said of the rest."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.binding import Binding
from textual.widgets import Input

import app
from app.chat.commands.table import BY_NAME
from app.tui import keymap
from app.tui.actions import all_actions
from app.tui.keymap import HOMES, TERMINAL_APP, either, hint, key, with_keys
from app.tui.keymap_file import Assignments, BadKey, Keymap, key_named, read, resolve
from app.tui.screens.dialogues import HelpScreen, help_text
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, notice, ready, wait_until


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("ctrl+b", "ctrl+b"), (" Ctrl + B ", "ctrl+b"), ("F11", "f11"), ("esc", "escape"), ("return", "enter"),
        ("PgUp", "pageup"), ("?", "question_mark"), ("ctrl+]", "ctrl+right_square_bracket"), ("N", "N"),
        ("shift+n", "N"), ("shift+alt+Left", "alt+shift+left"), ("ctrl++", "ctrl+plus"), ("+", "plus"),
        ("option+enter", "alt+enter"), ("ctrl+space", "ctrl+at"), ("é", "é"), ("ctrl+_", "ctrl+underscore"),
    ],
)  # fmt: skip
def test_keys_are_known_by_the_names_people_use(written: str, name: str) -> None:
    assert key_named(written) == name == key_named(name)


@pytest.mark.parametrize(
    "written", ["", "strg+b", "ctrl+", "f99", "ctrl+pageupp", "\x1b", "ctrl+ctrl", "ctrl+i", "ctrl+["]
)
def test_what_is_no_key_is_refused(written: str) -> None:
    with pytest.raises(BadKey):
        key_named(written)


@pytest.mark.parametrize("name", sorted({key for action in all_actions() for key in action.keys} | TERMINAL_APP))
def test_every_key_of_ours_can_be_named(name: str) -> None:
    assert key_named(name) == name


@given(st.text(max_size=20))
def test_any_text_is_a_key_or_is_refused(text: str) -> None:
    try:
        assert key_named(key_named(text)) == key_named(text)
    except BadKey as error:
        assert "\n" not in str(error)


def written(tmp_path: Path, text: str) -> Assignments:
    file = tmp_path / "keymap.toml"
    file.write_text(text, "utf-8")
    return read(file)


def test_entries_are_read_however_they_are_written(tmp_path: Path) -> None:
    assert read(tmp_path / "keymap.toml") == Assignments()
    found = written(
        tmp_path, 'chat.beams = "ctrl+b, f11"\n"chat.new" = ["f12"]\nfoot = 3\n[prompt]\nsend = "ctrl+d"\nnewline = ","'
    )
    assert {id: [word.strip() for word in words] for id, words in found.keys.items()} == {
        "chat.beams": ["ctrl+b", "f11"], "chat.new": ["f12"], "prompt.send": ["ctrl+d"], "prompt.newline": [","],
    }  # fmt: skip
    assert found.problems == ('keymap.toml: foot needs keys in quotes, such as "ctrl+b,f4".',)


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    [problem] = written(tmp_path, "a.b = 1\na.b = 2\n").problems
    assert problem.startswith("keymap.toml cannot be read: ") and "line 2" in problem
    (tmp_path / "keymap.toml").write_bytes(b"\xff")
    assert read(tmp_path / "keymap.toml").problems == ("keymap.toml cannot be read: it is not UTF-8.",)


def resolved(**entries: str) -> Keymap:
    return resolve(Assignments({id.replace("__", "."): keys.split() for id, keys in entries.items()}), all_actions())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = " + "[" * 5000 + "]" * 5000, "it is nested too deeply"),
        ("[" + ".".join("a" * 5000) + "]\nb = 1", "it is nested too deeply"),
        ("a = 1\n" * 800_000, "it is larger than 4 MiB"),
    ],
    ids=("values", "tables", "size"),
)
def test_a_file_that_is_nested_or_large_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    assert written(tmp_path, text) == Assignments(problems=(f"keymap.toml cannot be read: {said}.",))


def test_what_cannot_be_used_is_said_and_the_rest_applies() -> None:
    found = resolved(chat__beams="f11 strg+b", chat__beems="f12", message__copy="y", chat__new="n", prompt__send="")
    assert found.keys["chat.beams"] == ("f11",) and found.keys["message.copy"] == ("y",)
    assert found.problems == (
        "keymap.toml: chat.beams: there is no key 'strg+b'.",
        "keymap.toml: there is no action 'chat.beems'. Did you mean chat.beams?",
        "keymap.toml: chat.new: n is typed into the prompt; use it with ctrl or alt.",
        "keymap.toml: prompt.send needs at least one key.",
    )


def test_a_key_is_for_one_action() -> None:
    taken = resolved(chat__beams="f5")
    assert taken.keys["chat.beams"] == ("f5",) and taken.keys["chat.timing"] == ("ctrl+t",)
    assert taken.problems == ("keymap.toml: f5 is for chat.beams; chat.timing keeps ctrl+t.",)
    swapped = resolved(chat__beams="f5", chat__timing="f4")
    assert swapped.problems == () and swapped.keys["chat.timing"] == ("f4",)
    # The first of two entries has it, and nothing loses its only key.
    twice = resolved(chat__beams="f11", chat__model="f11 f12")
    assert twice.keys["chat.beams"] == ("f11",) and twice.keys["chat.model"] == ("f12",)
    only = resolved(chat__beams="ctrl+n")
    assert only.keys["chat.beams"] == ("f4", "ctrl+b") and "chat.new" not in only.keys
    assert only.problems == ("keymap.toml: ctrl+n is for chat.new; chat.beams keeps f4 and ctrl+b.",)
    # A key of the chat acts before the prompt sees it.
    assert resolved(chat__beams="ctrl+j").keys["prompt.newline"] == ("shift+enter", "alt+enter", "ctrl+enter")
    # What is on another screen is not in the way.
    assert resolved(machines__look="p f11").problems == (
        "keymap.toml: p is for machines.pair; machines.look keeps f11.",
    )
    assert resolved(message__copy="l").problems == ()


def test_what_closes_a_screen_follows_what_opens_it() -> None:
    found = resolved(chat__machines="f11", chat__help="f12")
    assert found.keys["machines.close"] == ("escape", "f11")
    assert found.keys["help.close"] == ("escape", "q", "question_mark", "f12") and found.keys["settings.help"] == (
        "f12",
    )
    assert found.problems == ()
    assert resolved(chat__settings="f10").keys["settings.close"] == ("escape", "f10")


@given(st.dictionaries(st.sampled_from(sorted({action.id for action in all_actions()})),
                       st.lists(st.sampled_from(["f4", "f11", "ctrl+n", "ctrl+d", "x", "enter", "escape"]), min_size=1),
                       max_size=6))  # fmt: skip
def test_nothing_is_left_without_a_key(entries: dict[str, list[str]]) -> None:
    found = resolve(Assignments(entries), all_actions())
    assert all(found.keys.values())
    assert all("\n" not in problem for problem in found.problems)


def test_every_binding_has_an_id_of_its_own() -> None:
    """Two classes may share one for the same action, such as closing a panel."""
    meant: defaultdict[str, set[str]] = defaultdict(set)
    for action in all_actions():
        meant[action.id].add(action.title)
    assert {id: names for id, names in meant.items() if len(names) > 1} == {}
    assert set(HOMES.values()) <= set(meant)


def test_no_binding_lacks_an_id() -> None:
    from tests.app.tui.test_keymap_shortcuts import ours

    library = {binding.action for binding in Input.BINDINGS if isinstance(binding, Binding)}
    for kind in ours():
        for binding in kind.BINDINGS:
            assert isinstance(binding, Binding)
            assert binding.id is not None or binding.action in library, (kind, binding)


@pytest.mark.soak
def test_hints_are_not_made_before_the_keys_are_known() -> None:
    """A hint in a class or a module would keep the key that was there when it was imported."""
    for path in sorted((Path(app.__file__).parent / "tui").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        later = {id(call) for function in functions for call in ast.walk(function)}
        later |= {id(call) for node in ast.walk(tree) if isinstance(node, ast.Lambda) for call in ast.walk(node)}
        early = [
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and id(node) not in later and isinstance(node.func, ast.Name)
        ]
        assert not {"key", "keys", "either", "with_keys"} & set(early), path


def test_hints_name_the_keys_of_the_person() -> None:
    keymap.use({"chat.beams": ("f11", "ctrl+right_square_bracket", "f12")})
    try:
        assert (key("beams"), either("beams")) == ("f11", "f11 or ctrl+]")
        assert "f11 or ctrl+]" in help_text(None)
        assert hint(BY_NAME["beams"]) == "f11"
        assert with_keys("{beams} {nothing}") == "f11 or ctrl+] {nothing}"
    finally:
        keymap.use({})
    assert key("beams", "linux") == "f4"


async def test_the_help_of_a_screen_names_the_keys_of_the_person(make_app: MakeApp, home: Path) -> None:
    (home / "keymap.toml").write_text('message.copy = "y"\n')
    app = make_app()
    try:
        async with app.run_test(size=(80, 24)) as pilot:
            await ready(pilot, app)
            await ask(pilot, app, "Hello")
            await pilot.press("shift+tab")
            assert "`y`" in help_text(app.focused) and "`c`" not in help_text(app.focused)
            assert "`x`" in help_text(app.focused)
    finally:
        keymap.use({})


async def test_the_keys_of_the_file_work(make_app: MakeApp, engine: FakeEngine, home: Path) -> None:
    (home / "keymap.toml").write_text(
        'prompt.send = "ctrl+d"\nprompt.newline = "enter"\nchat.help = "f12"\nchat.x = "x"'
    )
    try:
        app = make_app()
        async with app.run_test(size=(80, 24)) as pilot:
            await ready(pilot, app)
            assert "there is no action 'chat.x'" in notice(app)
            assert app.chat is not None
            assert "ctrl+d" in app.chat.query_one("#welcome").render().plain
            await pilot.press("a", "enter", "b")
            assert app.chat.prompt.text == "a\nb"
            await pilot.press("ctrl+d")
            await wait_until(pilot, lambda: controller(app).thread.path)
            assert controller(app).thread.path[0].content == "a\nb"
            await pilot.press("f1")
            assert not isinstance(app.screen, HelpScreen)
            await pilot.press("f12")
            await wait_until(pilot, lambda: isinstance(app.screen, HelpScreen))
            await pilot.press("f12")
            await wait_until(pilot, lambda: not isinstance(app.screen, HelpScreen))
    finally:
        keymap.use({})
