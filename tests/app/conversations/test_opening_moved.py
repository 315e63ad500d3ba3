"""A database whose file is deleted, moved or replaced while it is open."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from app.conversations.database import SqliteStore
from app.conversations.opening import open_store
from app.conversations.store import StoreError

SAID = "The file of the chats was deleted or moved. All of them are written again to"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "conversations.sqlite"


def asked(store: SqliteStore, text: str, conversation: int | None = None) -> int:
    """A question in a conversation, or in a new one; the conversation."""
    conversation = conversation or store.create(model="m").id
    store.add(conversation, "user", text, parent=None)
    return conversation


def everything(path: Path) -> list[str]:
    """All messages that the next start finds."""
    store = open_store(path)
    found = [message.content for chat in store.conversations() for message in store.messages(chat.id)]
    assert store.notices == []
    store.close()
    return sorted(found)


def delete_file(path: Path) -> None:
    path.unlink()


def delete_files(path: Path) -> None:
    for file in path.parent.glob("conversations.sqlite*"):
        file.unlink()


def delete_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def move_file(path: Path) -> None:
    path.rename(path.with_name("elsewhere.sqlite"))


def move_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


WAYS = (delete_file, delete_files, delete_folder, move_file, move_folder)


@pytest.mark.parametrize("lose", WAYS)
def test_a_file_that_is_gone_is_written_again_with_all_that_was_in_it(lose: Callable[[Path], None], path: Path) -> None:
    store = open_store(path)
    conversation = asked(store, "before")
    lose(path)
    asked(store, "after", conversation)
    assert store.notices == [f"{SAID} {path}."]
    assert path.stat().st_mode & 0o077 == 0
    store.close()
    assert everything(path) == ["after", "before"]


@pytest.mark.parametrize("lose", WAYS)
def test_it_is_noticed_without_a_change_too(lose: Callable[[Path], None], path: Path) -> None:
    store = open_store(path)
    asked(store, "before")
    lose(path)
    store.look_after_file()
    assert store.notices == [f"{SAID} {path}."] and path.exists()
    store.look_after_file()
    assert len(store.notices) == 1
    store.close()
    assert everything(path) == ["before"]


@pytest.mark.parametrize("lose", WAYS)
def test_leaving_at_once_loses_nothing(lose: Callable[[Path], None], path: Path) -> None:
    store = open_store(path)
    asked(store, "before")
    lose(path)
    store.close()
    assert everything(path) == ["before"]


@pytest.mark.parametrize("lose", WAYS)
def test_two_programs_go_on_in_the_same_new_file(lose: Callable[[Path], None], path: Path) -> None:
    first, second = open_store(path), open_store(path)
    asked(first, "first")
    conversation = asked(second, "second")
    lose(path)
    asked(first, "first again")
    asked(second, "second again", conversation)
    asked(first, "first at last")
    second.close()
    asked(first, "after the other")
    first.close()
    assert everything(path) == [
        "after the other", "first", "first again", "first at last", "second", "second again",
    ]  # fmt: skip


def test_a_file_system_without_hard_links_will_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    store = open_store(path)
    conversation = asked(store, "before")
    path.unlink()
    asked(store, "after", conversation)
    store.close()
    assert everything(path) == ["after", "before"]


def test_another_file_in_its_place_is_left_alone(path: Path) -> None:
    other = path.with_name("other.sqlite")
    foreign = open_store(other)
    asked(foreign, "foreign")
    foreign.close()
    store = open_store(path)
    conversation = asked(store, "before")
    other.rename(path)
    asked(store, "after", conversation)
    (notice,) = store.notices
    kept = store.path
    assert notice == f"Another file was put in the place of {path}. What is open here goes on in {kept}."
    store.close()
    assert everything(path) == ["foreign"]
    assert everything(kept) == ["after", "before"]


def test_what_is_no_database_in_its_place_is_left_alone(path: Path) -> None:
    store = open_store(path)
    asked(store, "before")
    path.unlink()
    path.write_text("a note")
    asked(store, "after")
    kept = store.path
    store.close()
    assert path.read_text() == "a note" and everything(kept) == ["after", "before"]


def test_a_file_that_cannot_be_written_again_is_a_sentence_until_it_can(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.conversations import database

    copy = database.copy_database

    def refuse(connection: sqlite3.Connection, target: Path) -> None:
        raise OSError(28, "No space left on device")

    store = open_store(path)
    conversation = asked(store, "before")
    path.unlink()
    monkeypatch.setattr(database, "copy_database", refuse)
    with pytest.raises(StoreError, match="are gone and cannot be written again: No space left on device"):
        asked(store, "after", conversation)
    assert [message.content for message in store.messages(conversation)] == ["before"]
    monkeypatch.setattr(database, "copy_database", copy)
    asked(store, "after", conversation)
    store.close()
    assert everything(path) == ["after", "before"]
