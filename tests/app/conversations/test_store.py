from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.conversations.database import SqliteStore
from app.conversations.deleting import title_from
from app.conversations.opening import open_store
from app.conversations.records import UNKNOWN, Generation, MessageRecord, generation_from
from app.conversations.searching import HIT_END, HIT_START
from app.conversations.store import ConversationStore, StoreError
from tests.support.random_examples import examples


class Clock:
    """Every look is a second later."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = open_store(tmp_path / "data" / "conversations.sqlite", clock=Clock())
    yield store
    store.close()


def _texts(messages: list[MessageRecord]) -> list[str]:
    return [message.content for message in messages]


def test_a_conversation_from_question_to_answer(store: SqliteStore) -> None:
    conversation = store.create(model="starter", system="Be brief.")
    assert (conversation.title, conversation.leaf, conversation.system) == ("", None, "Be brief.")
    question = store.add(conversation.id, "user", "Why is the sky blue?\nIn one line.", parent=None)
    answer = store.add(conversation.id, "assistant", "", parent=question.id, state="writing", model="starter")
    store.update(answer.id, content="Ray")
    store.update(answer.id, content="Rayleigh.", state="complete", tokens=3, tokens_per_s=9.5, finish_reason="stop")
    shown = store.shown(conversation.id)
    assert _texts(shown) == ["Why is the sky blue?\nIn one line.", "Rayleigh."]
    assert (shown[1].state, shown[1].tokens, shown[1].tokens_per_s) == ("complete", 3, 9.5)
    assert (shown[1].finish_reason, shown[1].model, shown[1].parent) == ("stop", "starter", question.id)
    again = store.conversation(conversation.id)
    assert (again.title, again.leaf) == ("Why is the sky blue?", answer.id)
    assert again.updated > conversation.updated


def test_everything_is_on_disk_after_each_call(store: SqliteStore) -> None:
    conversation = store.create(model="m")
    store.add(conversation.id, "user", "saved?", parent=None)
    with sqlite3.connect(store.path) as other:
        assert other.execute("SELECT content FROM message").fetchall() == [("saved?",)]
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_what_is_written_leaves_the_cache_of_the_disk_too(store: SqliteStore) -> None:
    """fullfsync matters on macOS only, where fsync ends at that cache."""
    found = {name: store._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "fullfsync")}
    assert found == {"synchronous": 2, "fullfsync": 1}


def test_the_file_is_its_owners_only(store: SqliteStore) -> None:
    store.create(model="m")
    for file in store.path.parent.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file


def test_newest_first_and_archived_apart(store: SqliteStore) -> None:
    first, second = store.create(model="m", title="one"), store.create(model="m", title="two")
    assert [item.title for item in store.conversations()] == ["two", "one"]
    store.add(first.id, "user", "hello", parent=None)
    assert [item.title for item in store.conversations()] == ["one", "two"]
    assert [item.title for item in store.conversations(limit=1)] == ["one"]
    store.change(second.id, archived=True)
    assert [item.title for item in store.conversations()] == ["one"]
    assert [item.title for item in store.conversations(archived=True)] == ["two"]


def test_changing_one_thing_leaves_the_others(store: SqliteStore) -> None:
    conversation = store.create(model="m", system="s", title="t")
    changed = store.change(conversation.id, title="")
    assert (changed.title, changed.system, changed.model, changed.archived) == ("", "s", "m", False)
    changed = store.change(conversation.id, model="other", system="")
    assert (changed.title, changed.system, changed.model) == ("", "", "other")


def test_a_conversation_keeps_values_of_its_own(store: SqliteStore) -> None:
    values = {"persona": "Po\udce9t", "own": {"temperature": 0.2, "seed": None}}
    assert store.create(model="m").own_values == {}
    found = store.create(model="m", own_values=values)
    assert store.conversation(found.id).own_values == values
    assert store.change(found.id, title="t").own_values == values
    assert json.loads(store.export(found.id, "json"))["conversation"]["own_values"] == values
    assert store.change(found.id, own_values={}).own_values == {}
    for damaged in ("{", "[1]", "null", "[" * 100_000):
        store._connection.execute("UPDATE conversation SET own_values = ? WHERE id = ?", (damaged, found.id))
        assert store.conversation(found.id).own_values == {}


def test_branches(store: SqliteStore) -> None:
    conversation = store.create(model="m").id
    question = store.add(conversation, "user", "q1", parent=None)
    first = store.add(conversation, "assistant", "a1", parent=question.id)
    follow = store.add(conversation, "user", "q2", parent=first.id)
    store.add(conversation, "assistant", "a2", parent=follow.id)
    second = store.add(conversation, "assistant", "b1", parent=question.id)
    assert _texts(store.shown(conversation)) == ["q1", "b1"]
    assert (second.siblings, second.sibling_index) == (2, 1)
    assert _texts(store.siblings(first.id)) == ["a1", "b1"]
    assert [item.sibling_index for item in store.siblings(second.id)] == [0, 1]
    assert _texts(store.select(first.id)) == ["q1", "a1", "q2", "a2"]
    assert _texts(store.shown(conversation)) == ["q1", "a1", "q2", "a2"]
    edited = store.add(conversation, "user", "q1 better", parent=None)
    assert _texts(store.siblings(edited.id)) == ["q1", "q1 better"]
    assert _texts(store.shown(conversation)) == ["q1 better"]
    assert _texts(list(store.messages(conversation))) == ["q1", "a1", "q2", "a2", "b1", "q1 better"]


@pytest.mark.soak
def test_a_thousand_turns_deep(store: SqliteStore) -> None:
    conversation = store.create(model="m").id
    parent: int | None = None
    for number in range(1200):
        parent = store.add(conversation, "user" if number % 2 == 0 else "assistant", str(number), parent=parent).id
    assert _texts(store.shown(conversation)) == [str(number) for number in range(1200)]
    store.delete(conversation)
    assert store.conversations() == [] and store.search("1199") == []


def test_deleting_leaves_nothing_and_numbers_are_not_used_again(store: SqliteStore) -> None:
    kept, gone = store.create(model="m").id, store.create(model="m").id
    store.add(kept, "user", "kept zebra", parent=None)
    last = store.add(gone, "user", "gone zebra", parent=None)
    store.delete(gone)
    assert [hit.message for hit in store.search("zebra")] == [store.shown(kept)[0].id]
    assert store.add(kept, "user", "x", parent=None).id > last.id
    assert store.create(model="m").id > gone
    with pytest.raises(StoreError, match=f"no conversation {gone}"):
        store.conversation(gone)


def test_what_does_not_exist_or_fit_is_refused(store: SqliteStore) -> None:
    one, other = store.create(model="m").id, store.create(model="m").id
    message = store.add(one, "user", "q", parent=None).id
    for call in (
        lambda: store.shown(99),
        lambda: store.update(99, content="x"),
        lambda: store.add(99, "user", "x", parent=None),
        lambda: store.add(other, "user", "x", parent=message),
        lambda: store.delete(99),
        lambda: store.select(99),
        lambda: store.export(one, "pdf"),
    ):
        with pytest.raises(StoreError):
            call()
    assert _texts(list(store.messages(other))) == []


# --- search -------------------------------------------------------------------------------------------------------


def test_search_finds_words_prefixes_and_signs(store: SqliteStore) -> None:
    conversation = store.create(model="m", title="Cooking").id
    store.add(conversation, "user", "How do I make crème brûlée?", parent=None)
    store.add(conversation, "assistant", "Use std::vector<int> && 日本語の文章", parent=None)
    for wanted in ("creme", "BRÛL", "make creme", "vector", "::vec", "&&", "本語", "rème b"):
        assert len(store.search(wanted)) == 1, wanted
    assert [hit.snippet for hit in store.search("cook")] == [f"{HIT_START}Cook{HIT_END}ing"]
    assert store.search("nothing like it") == [] and store.search("  ") == []
    (hit,) = store.search("brulee")
    assert f"{HIT_START}brûlée{HIT_END}" in hit.snippet


def test_search_finds_each_chat_once_and_says_how_often(store: SqliteStore) -> None:
    often, once, titled = (store.create(model="m", title=title).id for title in ("", "", "All about pollen"))
    for number in range(60):
        store.add(often, "user", f"pollen, and {'many other words ' * 5}{number}", parent=None)
    best = store.add(often, "user", "pollen pollen", parent=None).id
    store.add(once, "user", "A word about pollen and much else in between", parent=None)
    store.add(titled, "user", "Bees", parent=None)
    hits = store.search("pollen")
    assert [(hit.conversation.id, hit.messages) for hit in hits] == [(titled, 0), (often, 61), (once, 1)]
    assert hits[1].message == best and "pollen" in hits[1].snippet
    # Any part of a word is found without the index of words.
    assert [(hit.conversation.id, hit.messages) for hit in store.search("olle", 2)] == [(titled, 0), (once, 1)]
    store.delete(often)
    assert [hit.conversation.id for hit in store.search("pollen")] == [titled, once]


def test_search_follows_updates(store: SqliteStore) -> None:
    conversation = store.create(model="m").id
    message = store.add(conversation, "assistant", "alpha", parent=None, state="writing").id
    store.update(message, content="alpha beta")
    store.update(message, state="stopped")
    assert len(store.search("beta")) == 1
    store.update(message, content="gamma")
    assert store.search("beta") == [] and len(store.search("gamma")) == 1
    store.update(message, tokens=5)
    assert len(store.search("gamma")) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(12), deadline=None)
@given(text=st.text(st.one_of(st.sampled_from("\"'*()^:-+{}[]%_ aANDORNEAR\0\ue000"), st.characters()), max_size=20))
def test_any_text_may_be_searched_for_and_kept(store: SqliteStore, text: str) -> None:
    conversation = store.create(model="m", title="t").id
    message = store.add(conversation, "user", text, parent=None)
    kept = message.content
    assert kept == text or "\ufffd" in kept
    found = {hit.message for hit in store.search(text, limit=10_000)}
    if text.strip() and "\ue000" not in text:
        assert message.id in found
    store.delete(conversation)


def test_without_fts5_search_still_works_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.sqlite"
    with_index = open_store(path)
    conversation = with_index.create(model="m").id
    with_index.add(conversation, "user", "written with an index", parent=None)
    with_index.close()

    from app.conversations import searching

    monkeypatch.setattr(searching.SearchIndex, "_make", lambda self: False)
    without = open_store(path)
    assert "FTS5" in " ".join(without.notices)
    late = without.add(conversation, "user", "Written without one", parent=None)
    assert [hit.messages for hit in without.search("WRITTEN")] == [2]
    assert len(without.search("without")) == 1
    without.close()
    monkeypatch.undo()

    again = open_store(path)
    assert [hit.message for hit in again.search("without")] == [late.id]
    assert again._connection.execute("SELECT count(*) FROM message WHERE indexed = 0").fetchone() == (0,)
    deleted_without_index = "DELETE FROM message WHERE id = ?"
    again._connection.execute("UPDATE conversation SET leaf = NULL")
    again._connection.execute(deleted_without_index, (late.id,))
    again.close()
    last = open_store(path)
    assert last.search("without") == []
    assert last._connection.execute("SELECT count(*) FROM message_words").fetchone() == (1,)
    last.close()


# --- export, titles -----------------------------------------------------------------------------------------------


def test_export(store: SqliteStore) -> None:
    conversation = store.create(model="starter", system="Be brief.").id
    question = store.add(conversation, "user", "Q?", parent=None)
    store.add(conversation, "assistant", "first", parent=question.id, model="starter")
    store.add(conversation, "assistant", "```py\nx = 1\n```", parent=question.id, state="stopped", model="starter")
    markdown = store.export(conversation, "markdown")
    assert "---\n\n# Q?\n" in markdown and "Be brief." in markdown
    assert "## starter (stopped)\n\n```py\nx = 1\n```\n" in markdown and "first" not in markdown
    content = json.loads(store.export(conversation, "json"))
    assert [message["content"] for message in content["messages"]] == ["Q?", "first", "```py\nx = 1\n```"]
    assert content["messages"][2]["parent"] == question.id and content["conversation"]["system"] == "Be brief."


def test_front_matter_is_yaml_and_says_how_answers_were_made(store: SqliteStore) -> None:
    title = 'A "title": #1\x85 – ü'
    conversation = store.create(model="starter", title=title, own_values={"persona": "cook"}).id
    question = store.add(conversation, "user", "Q?", parent=None)
    answer = store.add(conversation, "assistant", "A.", parent=question.id, model="m: [1]")
    made = Generation(temperature=0.7, top_k=20, seed=7, ttft_s=0.12345)
    store.update(answer.id, tokens=5, tokens_per_s=9.555, finish_reason="stop", generation=made)
    found = yaml.safe_load(store.export(conversation, "markdown").split("---\n")[1])
    assert found.pop("created").timestamp() == int(store.conversation(conversation).created)
    assert found == {
        "title": title, "model": "starter", "persona": "cook",
        "answers": [{"model": "m: [1]", "temperature": 0.7, "top_k": 20, "seed": 7, "ttft_s": 0.123, "tokens": 5,
                     "tokens_per_s": 9.55, "finish_reason": "stop"}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("Hello", "Hello"),
        ("\n\n  ## A  heading \nmore", "A heading"),
        ("", ""),
        ("\x1b[31mred", "[31mred"),
        ("word " * 30, "word word word word word word word word word word word…"),
        ("x" * 100, "x" * 59 + "…"),
        ("import os\n" * 20 + "\nWhat does this do?\n", "What does this do?"),
        ("What does this do?\n" + "import os\n" * 20 + "# or that?", "What does this do?"),
        ("Explain:\n" + "import os\n" * 20 + "# or that?", "Explain:"),
        ("one\ntwo?", "one"),
    ],
)
def test_titles(question: str, title: str) -> None:
    assert title_from(question) == title


def test_a_title_given_is_not_replaced(store: SqliteStore) -> None:
    conversation = store.create(model="m", title="Mine").id
    store.add(conversation, "user", "question", parent=None)
    assert store.conversation(conversation).title == "Mine"


def test_open_store_gives_the_protocol(tmp_path: Path) -> None:
    store: ConversationStore = open_store(tmp_path / "c.sqlite")
    assert store.notices == [] and store.path == tmp_path / "c.sqlite"
    store.close()


def test_pins_and_origins(store: SqliteStore) -> None:
    first, second = store.create(model="m", title="one"), store.create(model="m", title="two")
    assert first.origin.startswith("privatellm:")
    assert first.origin != second.origin
    assert store.change(first.id, pinned=True).pinned
    assert [found.pinned for found in store.conversations()] == [False, True]
    assert not store.change(first.id, pinned=False).pinned


def test_how_an_answer_was_generated_is_kept(store: SqliteStore) -> None:
    conversation = store.create(model="m")
    question = store.add(conversation.id, "user", "hello", parent=None)
    answer = store.add(conversation.id, "assistant", "hi", parent=question.id)
    made = Generation(temperature=0.5, top_k=20, seed=7, prompt_tokens=12, ttft_s=0.25)
    store.update(answer.id, generation=made)
    assert [message.generation for message in store.shown(conversation.id)] == [UNKNOWN, made]


@pytest.mark.parametrize(
    "text", ["", "[", "[]", '{"seed": true, "top_p": "x", "ttft_s": NaN, "top_k": 1.5}', "[" * 9999]
)
def test_a_generation_that_cannot_be_read_is_unknown(text: str) -> None:
    assert generation_from(text) == UNKNOWN
