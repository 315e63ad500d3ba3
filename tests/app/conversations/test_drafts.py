"""Attachments, drafts and earlier questions in the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from app.attachments.attachment import Attachment
from app.conversations.database import SqliteStore
from app.conversations.drafts import Draft
from app.conversations.opening import PAGE_BYTES, open_store
from tests.app.attachments.pictures import picture

A, B = Attachment("a.py", "print(1)\n"), Attachment("b.py", "print(2)\n")
COPY = Attachment("copy of a.py", A.text)
PICTURE = picture("a.png", 300, 200)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "conversations.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    opened = open_store(path)
    yield opened
    opened.close()


def pictures(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [digest for (digest,) in connection.execute("SELECT digest FROM picture")]


def texts(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [text for (text,) in connection.execute("SELECT text FROM attached_text ORDER BY text")]


def test_a_text_is_stored_once_and_removed_with_its_last_message(store: SqliteStore, path: Path) -> None:
    first, second = store.create(model="m").id, store.create(model="m").id
    asked = store.add(first, "user", "q", parent=None, attachments=[A, B])
    store.add(second, "user", "q", parent=None, attachments=[COPY])
    assert asked.attachments == (A, B) == store.shown(first)[0].attachments
    assert store.shown(second)[0].attachments == (COPY,)
    assert [record.attachments for record in store.messages(first)] == [(A, B)]
    assert store.siblings(asked.id)[0].attachments == (A, B)
    assert texts(path) == [A.text, B.text]
    deletion = store.delete(first)
    store.restore(deletion)
    assert store.shown(first)[0].attachments == (A, B)
    store.delete(first)
    store.close()
    assert texts(path) == [A.text]
    with closing(open_store(path)) as again:
        assert again.shown(second)[0].attachments == (COPY,)


def test_a_picture_is_stored_once_and_removed_with_its_last_message(store: SqliteStore, path: Path) -> None:
    first, second = store.create(model="m").id, store.create(model="m").id
    files = (PICTURE, A, replace(PICTURE, name="again.png"))
    asked = store.add(first, "user", "q", parent=None, attachments=files)
    store.add(second, "user", "q", parent=None, attachments=[PICTURE])
    assert asked.attachments == files == store.shown(first)[0].attachments
    shown = store.shown(first)[0].attachments
    assert shown[0].picture is shown[2].picture, "it is in memory once"
    assert store.siblings(asked.id)[0].attachments == files
    assert pictures(path) == [PICTURE.digest]
    store.restore(store.delete(first))
    assert store.shown(first)[0].attachments == files
    store.delete(first)
    store.close()
    assert pictures(path) == [PICTURE.digest]
    with closing(open_store(path)) as again:
        assert again.shown(second)[0].attachments == (PICTURE,)
        again.delete(second)
    assert pictures(path) == []
    assert PICTURE.data not in path.read_bytes()


def test_attachments_and_drafts_of_a_damaged_database_are_recovered(store: SqliteStore, path: Path) -> None:
    conversation = store.create(model="m").id
    other = picture("other.png", colour="blue")
    files = (A, PICTURE, COPY, other, PICTURE)
    store.add(conversation, "user", "q", parent=None, attachments=files)
    store._connection.execute("UPDATE picture SET data = x'00' WHERE digest = ?", (other.digest,))
    store.keep_draft(conversation, Draft("typed", {"[Pasted 12 lines]": "x\n" * 12}))
    store.keep_draft(0, Draft("new"))
    store.close()
    data = bytearray(path.read_bytes())
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'conversation_updated'"
        ).fetchone()
    data[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = b"\xff" * PAGE_BYTES
    path.write_bytes(data)
    with closing(open_store(path)) as again:
        assert "damaged" in again.notices[0]
        # What is no longer the picture that it was is lost.
        assert again.shown(conversation)[0].attachments == (A, PICTURE, COPY, PICTURE)
        assert again.draft(conversation) == Draft("typed", {"[Pasted 12 lines]": "x\n" * 12})
        assert again.draft(0) == Draft("new")


def test_a_draft_is_replaced_removed_and_leaves_with_its_conversation(store: SqliteStore, path: Path) -> None:
    conversation = store.create(model="m").id
    for draft in (Draft("one"), Draft("two", {"[Pasted 11 lines]": "…"}), None, Draft("three")):
        store.keep_draft(conversation, draft)
        assert store.draft(conversation) == draft
    for damaged in ("{", "[1]", '{"a": 1}'):
        store._connection.execute("UPDATE draft SET pastes = ?", (damaged,))
        assert store.draft(conversation) == Draft("three")
    store.keep_draft(0, Draft("new"))
    store.delete(conversation)
    store.close()
    with closing(open_store(path)) as again:
        assert again.draft(conversation) is None and again.draft(0) == Draft("new")


def test_questions_are_found_by_their_beginning_newest_first_and_once(store: SqliteStore) -> None:
    long = "x" * 70
    asked = ["why is the sky blue?", "where?", "Why?", "where?", "who?", f"{long}1", f"{long}2", "WHY", "\U0010ffff!"]
    for text in asked:
        question = store.add(store.create(model="m").id, "user", text, parent=None)
        store.add(question.conversation, "assistant", "why not", parent=question.id)
    assert store.questions("wh") == ["who?", "where?", "why is the sky blue?"]
    assert store.questions("wh", limit=1) == ["who?"]
    assert store.questions(f"{long}1") == [f"{long}1"] and store.questions(long) == [f"{long}2", f"{long}1"]
    assert store.questions("", limit=3) == ["\U0010ffff!", "WHY", f"{long}2"]
    assert store.questions("%") == [] and store.questions("\ud800") == []
    store.delete(store.search("Why?")[0].conversation.id)
    plan = store._connection.execute(
        "EXPLAIN QUERY PLAN SELECT content FROM message WHERE role = 'user' AND deleted = ''"
        " AND substr(content, 1, 64) >= 'a' AND substr(content, 1, 64) < 'b' ORDER BY id DESC LIMIT 9"
    ).fetchall()
    assert any("message_question" in row[3] for row in plan)


def test_the_schema_fits_in_the_first_page(store: SqliteStore, path: Path) -> None:
    """Without it nothing of a damaged database can be read."""
    store.close()
    leaf_of_a_table = 0x0D
    assert path.read_bytes()[100] == leaf_of_a_table
