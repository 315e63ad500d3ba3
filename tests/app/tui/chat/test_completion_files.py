"""``@`` in the prompt offers the files that can be attached."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path

import pytest

from app.tui.chat.completion import CompletionPopup, FileReferences
from tests.app.tui.screen_helpers import MakeApp, ready, wait_until


@pytest.fixture(autouse=True)
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = home / "notes"
    for name in ("readme.md", "src/main.py", "src/deep/prompt.py", "two words.txt", ".hidden"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("x")
    monkeypatch.chdir(path)
    return path


def run(work: Coroutine[None, None, None]) -> None:
    asyncio.run(work)


def offered(source: FileReferences, before: str, after: str = "") -> list[str]:
    """What is offered once the folder was listed."""
    source.complete(before, after)
    found = source.complete(before, after)
    return [candidate.replacement for candidate in found.candidates] if found is not None else []


def test_what_fits_is_offered() -> None:
    source = FileReferences(run, lambda: None)
    assert offered(source, "see @") == [
        "@src/", "@src/deep/", "@readme.md ", "@src/deep/prompt.py ", "@src/main.py ", '@"two words.txt" ',
    ]  # fmt: skip
    assert offered(source, "see @prom") == ["@src/deep/prompt.py "]
    assert offered(source, "see @pro") == ["@src/deep/prompt.py "]
    assert offered(source, "@src/") == ["@src/deep/", "@src/main.py ", "@src/deep/prompt.py "]
    assert offered(source, '@"two w') == ['@"two words.txt" ']
    assert offered(source, "@.h") == ["@.hidden "]
    assert offered(source, "@readme.md") == []
    assert offered(source, "me@readme") == [] and offered(source, "@re", "st") == [] and offered(source, "none") == []


def test_names_that_act_on_a_terminal_are_not_offered(folder: Path) -> None:
    for name in (b"bad\x1b[2J.txt", b"bad\xff.txt", b"bad\n.txt"):
        Path(os.fsdecode(bytes(folder) + b"/" + name)).write_text("x")
    (folder / "bad.txt").write_text("x")
    assert offered(FileReferences(run, lambda: None), "see @bad") == ["@bad.txt "]
    assert offered(FileReferences(run, lambda: None), "see @./bad") == ["@./bad.txt "]


def test_enter_takes_only_what_has_the_text_in_one_piece() -> None:
    source = FileReferences(run, lambda: None)
    for typed, taken in (("@prompt", True), ("@PROM", True), ("@spy", False)):
        source.complete(typed, "")
        found = source.complete(typed, "")
        assert found is not None and found.preselected is taken, typed


def test_paths_from_elsewhere_are_offered_folder_by_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    source = FileReferences(run, lambda: None)
    assert offered(source, f"@{folder}/s") == [f"@{folder}/src/", f'@"{folder}/two words.txt" ']
    assert offered(source, f"@{folder}/src/") == [f"@{folder}/src/deep/", f"@{folder}/src/main.py "]
    assert offered(source, "@~/src/m") == ["@~/src/main.py "]
    assert offered(source, "@../notes/re") == ["@../notes/readme.md "]
    assert offered(source, "@~nobody-of-that-name/x") == [] and offered(source, "@/no/such/folder/x") == []


def test_files_that_came_meanwhile_are_offered_for_the_next_reference(folder: Path) -> None:
    source = FileReferences(run, lambda: None)
    assert offered(source, "@new") == []
    (folder / "new.txt").write_text("x")
    assert offered(source, "something else") == []
    assert offered(source, "@new") == ["@new.txt "]


async def test_a_folder_and_then_a_file_are_taken_with_the_keys(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        prompt, popup = app.chat.prompt, app.chat.query_one(CompletionPopup)
        await pilot.press(*"see @dee")
        await wait_until(pilot, lambda: popup.display)
        await pilot.press("tab")
        assert prompt.text == "see @src/deep/"
        await wait_until(pilot, lambda: popup.display and popup.option_count == 1)
        await pilot.press("enter")
        assert prompt.text == "see @src/deep/prompt.py "
        await wait_until(pilot, lambda: not popup.display)
        await pilot.press("@")
        await wait_until(pilot, lambda: popup.display)
        await pilot.press("escape", "x")
        assert prompt.text == "see @src/deep/prompt.py @x" and not popup.display
