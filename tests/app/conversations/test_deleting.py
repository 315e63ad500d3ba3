"""Deletions of messages and conversations, their undoing, and their removal from disk."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.conversations.database import SqliteStore
from app.conversations.opening import open_store
from app.conversations.records import Deletion, MessageRecord
from app.conversations.store import StoreError
from tests.support.random_examples import examples


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = open_store(tmp_path / "data" / "conversations.sqlite")
    yield store
    store.close()


def _texts(messages: list[MessageRecord]) -> list[str]:
    return [message.content for message in messages]


def _everything(store: SqliteStore, conversation: int) -> tuple[object, ...]:
    facts = store.conversation(conversation)
    return facts.title, facts.leaf, list(store.messages(conversation))


def _two_answers(store: SqliteStore) -> tuple[int, dict[str, int]]:
    """q1 has the answers a and b; q2 with its answer c follows a, q3 follows b and is shown."""
    conversation = store.create(model="m").id
    ids: dict[str, int] = {}
    for text, parent in (("q1", None), ("a", "q1"), ("q2", "a"), ("c", "q2"), ("b", "q1"), ("q3", "b")):
        role = "user" if text.startswith("q") else "assistant"
        ids[text] = store.add(conversation, role, text, parent=ids[parent] if parent else None).id
    return conversation, ids


def test_a_message_is_deleted_with_what_follows_and_comes_back(store: SqliteStore) -> None:
    conversation, ids = _two_answers(store)
    before = _everything(store, conversation)
    deletion = store.delete_message(ids["b"])
    assert _texts(store.shown(conversation)) == ["q1", "a", "q2", "c"], "the other answer is shown"
    assert store.shown(conversation)[1].siblings == 1
    assert _texts(store.siblings(ids["a"])) == ["a"] and store.search("q3") == []
    with pytest.raises(StoreError, match="may have been deleted"):
        store.select(ids["q3"])
    with pytest.raises(StoreError):
        store.add(conversation, "user", "below a deleted one", parent=ids["b"])
    assert store.restore(deletion).leaf == ids["q3"]
    assert _everything(store, conversation) == before
    assert [hit.message for hit in store.search("q3")] == [ids["q3"]]


def test_all_alternatives_may_go_at_once(store: SqliteStore) -> None:
    conversation, ids = _two_answers(store)
    before = _everything(store, conversation)
    deletion = store.delete_message(ids["b"], alternatives=True)
    assert len(deletion.messages) == 5 and _texts(store.shown(conversation)) == ["q1"]
    store.restore(deletion)
    assert _everything(store, conversation) == before


def test_a_deletion_elsewhere_leaves_the_shown_branch(store: SqliteStore) -> None:
    conversation, ids = _two_answers(store)
    store.delete_message(ids["c"])
    assert _texts(store.shown(conversation)) == ["q1", "b", "q3"]


def test_a_conversation_goes_with_its_last_message_and_comes_back(store: SqliteStore) -> None:
    conversation, ids = _two_answers(store)
    before = _everything(store, conversation)
    deletion = store.delete_message(ids["q1"])
    assert deletion.whole and store.conversations() == [] and store.search("q1") == []
    with pytest.raises(StoreError, match="no conversation"):
        store.change(conversation, title="x")
    store.restore(deletion)
    assert _everything(store, conversation) == before
    whole = store.delete(conversation)
    assert store.conversations() == []
    assert store.restore(whole).title == "q1" and _everything(store, conversation) == before


def test_a_title_made_from_a_deleted_question_goes_with_it(store: SqliteStore) -> None:
    conversation = store.create(model="m").id
    first = store.add(conversation, "user", "secret question", parent=None)
    store.add(conversation, "user", "plain question", parent=None)
    deletion = store.delete_message(first.id)
    assert store.conversation(conversation).title == "plain question"
    store.restore(deletion)
    assert store.conversation(conversation).title == "secret question"
    store.change(conversation, title="Mine")
    store.delete_message(first.id)
    assert store.conversation(conversation).title == "Mine"


def test_a_growing_answer_that_was_deleted_comes_back_whole(store: SqliteStore) -> None:
    conversation = store.create(model="m").id
    question = store.add(conversation, "user", "q", parent=None)
    answer = store.add(conversation, "assistant", "", parent=question.id, state="writing")
    deletion = store.delete_message(answer.id)
    store.update(answer.id, content="the whole zebra", state="stopped")
    assert _texts(store.shown(conversation)) == ["q"] and store.search("zebra") == []
    store.restore(deletion)
    assert _texts(store.shown(conversation)) == ["q", "the whole zebra"] and len(store.search("zebra")) == 1


def test_what_was_deleted_is_gone_from_the_disk_when_the_store_is_closed(store: SqliteStore) -> None:
    conversation = store.create(model="m").id
    kept = store.add(conversation, "user", "kept", parent=None)
    gone = store.add(conversation, "assistant", "Quetzalcoatlus northropi " * 3000, parent=kept.id)
    elsewhere = store.create(model="m", title="Title of Quetzalcoatlus").id
    store.add(elsewhere, "user", "and quetzalcoatlus again", parent=None)
    store.delete_message(gone.id)
    store.delete(elsewhere)
    store.close()
    left = b"".join(path.read_bytes() for path in store.path.parent.iterdir())
    assert b"kept" in left and b"uetzalcoatlus" not in left and b"northropi" not in left
    again = open_store(store.path)
    assert _texts(again.shown(conversation)) == ["kept"]
    again.close()


def test_another_programs_deletions_stay_until_it_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    first = open_store(path)
    conversation, ids = _two_answers(first)
    deletion = first.delete_message(ids["b"])
    second = open_store(path)
    assert _texts(second.shown(conversation)) == ["q1", "a", "q2", "c"]
    second.close()
    assert first.restore(deletion).leaf == ids["q3"]
    first.close()


def test_deletions_of_a_program_that_crashed_are_removed_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    ready = open_store(path)
    conversation, ids = _two_answers(ready)
    ready.close()
    program = (
        "import os, sys; from pathlib import Path; from app.conversations.opening import open_store;"
        f"store = open_store(Path({str(path)!r})); store.delete_message({ids['b']}); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)
    with sqlite3.connect(path) as before:
        assert before.execute("SELECT count(*) FROM message").fetchone() == (6,)
    again = open_store(path)
    assert again._connection.execute("SELECT count(*) FROM message").fetchone() == (4,)
    assert _texts(again.shown(conversation)) == ["q1", "a", "q2", "c"]
    again.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(8), deadline=None)
@given(choices=st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.booleans()), max_size=8))
def test_undoing_deletions_in_turn_brings_everything_back(
    store: SqliteStore, choices: list[tuple[int, bool, bool]]
) -> None:
    conversation, _ = _two_answers(store)
    states: list[tuple[object, ...]] = []
    done: list[Deletion] = []
    for place, alternatives, whole in choices:
        try:
            there = list(store.messages(conversation))
        except StoreError:
            break
        states.append(_everything(store, conversation))
        if whole:
            done.append(store.delete(conversation))
        else:
            done.append(store.delete_message(there[place % len(there)].id, alternatives=alternatives))
    while done:
        store.restore(done.pop())
        assert _everything(store, conversation) == states.pop()
    store.delete(conversation)
