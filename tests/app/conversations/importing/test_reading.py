"""Conversations of other programs: what is read of each format, and what is done about files that are none."""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.attachments.attachment import Attachment
from app.commands.root import run
from app.conversations.database import SqliteStore
from app.conversations.importing import reading
from app.conversations.importing.open_webui import without_folded
from app.conversations.importing.parts import ImportedConversation, ImportedNode, ImportProblem, moment, tree
from app.conversations.importing.reading import FORMATS, read_conversations
from app.conversations.opening import open_store
from app.conversations.records import Generation, Role, Thoughts
from tests.app.attachments.pictures import picture, png
from tests.app.conversations.importing.exports import CHATGPT, CLAUDE, OPEN_WEBUI, new_log, old_log
from tests.support.random_examples import examples


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = open_store(tmp_path / "conversations.sqlite")
    yield store
    store.close()


def read(path: Path, content: object) -> list[ImportedConversation]:
    path.write_text(json.dumps(content))
    return list(read_conversations(path).conversations)


def test_chatgpt_with_its_branches(tmp_path: Path) -> None:
    (found,) = read(tmp_path / "conversations.json", [CHATGPT])
    assert (found.origin, found.title, found.system, found.model) == ("chatgpt:c-1", "Bees", "Be brief.", "gpt-5")
    assert (found.created, found.updated, found.pinned, found.archived) == (1700000000.5, 1700000100.0, True, False)
    question, first, second = found.messages
    assert (question.role, question.content) == ("user", "[image]\n\nWhy do bees dance?")
    assert (first.content, first.parent, first.model, first.created) == ("First.", 0, "gpt-4", 1700000002.0)
    assert (second.content, second.parent, second.model) == ("Second.", 0, "gpt-5")
    assert second.thoughts == Thoughts("Dance\n\nThey show the way.", seconds=7.0)
    assert found.leaf == 2


def test_chatgpts_marks_in_an_answer_become_what_it_shows(tmp_path: Path) -> None:
    cited = "\ue200cite\ue202turn0search1\ue201"
    answer = {
        "author": {"role": "assistant"}, "content": {"content_type": "text", "parts": [
            f"Rain {cited} in \ue200entity\ue202[\"place\",\"Paris\",\"city\"]\ue201,"
            " \ue200url\ue202see\ue202https://e.org\ue201\ue200navlist\ue202x\ue201."]},
        "metadata": {"content_references": [{"matched_text": cited, "alt": "([Site](https://s.org))"},
                                            {"matched_text": " ", "alt": "never"}]},
    }  # fmt: skip
    thought = {**answer, "channel": "analysis"}
    mapping = {"a": {"message": answer, "parent": None}, "b": {"message": thought, "parent": "a"}}
    (found,) = read(tmp_path / "c.json", [{**CHATGPT, "mapping": mapping, "current_node": "a"}])
    assert [m.content for m in found.messages] == ["Rain ([Site](https://s.org)) in Paris, [see](https://e.org)."]


def test_chatgpt_without_ids_or_parents(tmp_path: Path) -> None:
    mapping = {key: {part: value for part, value in node.items() if part not in ("id", "parent")}
               for key, node in CHATGPT["mapping"].items()}  # type: ignore[attr-defined] # fmt: skip
    nameless = {"title": "Bees", "mapping": mapping, "current_node": "a2"}
    other = {**nameless, "mapping": {**mapping, "a2": mapping["a1"]}}
    first, second = read(tmp_path / "c.json", [nameless, other])
    assert [(m.content, m.parent) for m in first.messages[1:]] == [("First.", 0), ("Second.", 0)]
    # Each has a name of its own, which it keeps.
    assert len({first.origin, second.origin, "chatgpt:"}) == 3
    assert read(tmp_path / "d.json", [nameless])[0].origin == first.origin


def test_what_is_left_out_is_said(tmp_path: Path, store: SqliteStore) -> None:
    empty = {**CLAUDE, "uuid": "u-2", "chat_messages": []}
    picture = {"sender": "human", "text": "", "files": [{"file_name": "a.png"}]}
    path = tmp_path / "c.json"
    path.write_text(json.dumps([CHATGPT, empty, "odd", {**CLAUDE, "chat_messages": [picture]}, OPEN_WEBUI]))
    found = read_conversations(path)
    assert found.left_out == "Left out: 1 chat without text, 1 entry that is no chat, 3 pictures and files."
    texts = [chat.messages[0].content for chat in found.conversations]
    assert texts == ["[image]\n\nWhy do bees dance?", "[a.png]", "[image]\n\nSoup?"]
    assert read_conversations(old_log(tmp_path / "logs.db")).left_out == ""


def test_claude(tmp_path: Path) -> None:
    (found,) = read(tmp_path / "conversations.json", [CLAUDE])
    assert (found.origin, found.title, found.created) == ("claude:u-1", "Rain", 1740823200.0)
    assert [(m.role, m.content, m.parent) for m in found.messages] == [
        ("user", "Haiku?", None), ("assistant", "Rain on\n\nthe roof", 0), ("user", "Thanks", 1),
    ]  # fmt: skip
    assert found.messages[0].attachments == (Attachment("rules.txt", "5-7-5"),)
    assert found.messages[1].thoughts.text == "Count."
    branched = [{**message, "parent_message_uuid": "m1" if place else "none"}
                for place, message in enumerate(CLAUDE["chat_messages"])]  # fmt: skip
    (found,) = read(tmp_path / "c.json", [{**CLAUDE, "chat_messages": branched}])
    assert [message.parent for message in found.messages] == [None, 0, 0]


def test_open_webui(tmp_path: Path) -> None:
    (found,) = read(tmp_path / "chat-export.json", [OPEN_WEBUI])
    assert (found.origin, found.title, found.system, found.archived) == ("open-webui:w-1", "Soup", "You cook.", True)
    question, first, second = found.messages
    assert question.attachments == (Attachment("pantry.txt", "leeks"),)
    assert (first.content, first.parent, first.generation) == ("Lentils.", 0, Generation(temperature=0.4, seed=11))
    assert first.thoughts == Thoughts("Cheap.", seconds=2.0)
    assert (second.content, second.model, second.tokens, second.tokens_per_s) == ("Onions.", "llama", 9, 30.5)
    assert second.thoughts == Thoughts("hot & cheap", seconds=4.0)
    assert found.leaf == 2


def test_llm_up_to_0_31(tmp_path: Path) -> None:
    found = read_conversations(old_log(tmp_path / "logs.db"))
    (chat,) = found.conversations
    assert found.program == "llm" and (chat.origin, chat.title, chat.system) == ("llm:k", "Tea", "Be kind.")
    assert [m.content for m in chat.messages] == ["Tea?", "Yes.", "And milk?", "Yes."]
    answer = chat.messages[1]
    assert (answer.tokens, answer.tokens_per_s, answer.parent) == (10, 5.0, 0)
    assert answer.generation == Generation(temperature=0.5, prompt_tokens=7)
    assert chat.created == moment("2024-05-01T10:00:00+00:00")


def test_llm_puts_the_fragments_of_a_prompt_before_it(tmp_path: Path) -> None:
    path = old_log(tmp_path / "logs.db")
    with closing(sqlite3.connect(path)) as log:
        log.executescript(
            "CREATE TABLE fragments (id INTEGER PRIMARY KEY, content TEXT);"
            'CREATE TABLE prompt_fragments (response_id TEXT, fragment_id INTEGER, "order" INTEGER);'
            'CREATE TABLE system_fragments (response_id TEXT, fragment_id INTEGER, "order" INTEGER);'
            "INSERT INTO fragments VALUES (1, 'one'), (2, 'two');"
            "INSERT INTO prompt_fragments VALUES ('r0', 2, 0), ('r0', 1, 1);"
            "INSERT INTO system_fragments VALUES ('r0', 1, 0);"
            "CREATE TABLE attachments (id TEXT PRIMARY KEY, type TEXT, path TEXT, url TEXT, content BLOB);"
            'CREATE TABLE prompt_attachments (response_id TEXT, attachment_id TEXT, "order" INTEGER);'
            "INSERT INTO attachments VALUES ('x', 'image/png', 'a.png', NULL, NULL);"
            "INSERT INTO prompt_attachments VALUES ('r0', 'x', 0);"
        )
    found = read_conversations(path)
    (chat,) = found.conversations
    assert (chat.system, chat.messages[0].content) == ("one\n\nBe kind.", "[image/png]\ntwo\none\nTea?")
    assert found.left_out == "Left out: 1 picture or file."
    assert chat.messages[2].content == "And milk?"


def test_what_llm_logs_prints_as_json(tmp_path: Path) -> None:
    def entry(number: int, chat: str | None, **values: Any) -> dict[str, Any]:
        return {"id": f"r{number}", "model": "mini", "prompt": f"Q{number}", "system": "Be kind.", "response": "Yes.",
                "options_json": {"seed": 3}, "reasoning": None, "conversation_id": chat, "conversation_name": "Tea",
                "duration_ms": 500, "datetime_utc": f"2026-08-04T10:0{number}:00+00:00", "output_tokens": 5,
                "prompt_fragments": [], **values}  # fmt: skip

    path = tmp_path / "logs.json"
    given = {"prompt_fragments": [{"content": "a file"}]}
    entries = [entry(2, "k", **given, prompt="a file\nQ2"), entry(1, "k", **given), entry(3, None, reasoning="Hm.")]
    path.write_text(json.dumps(entries))
    found = read_conversations(path)
    chat, alone = found.conversations
    assert found.program == "llm" and (chat.origin, chat.title, chat.system) == ("llm:k", "Tea", "Be kind.")
    # Older versions print the prompt without its fragments, newer ones with them.
    assert [m.content for m in chat.messages] == ["a file\nQ1", "Yes.", "a file\nQ2", "Yes."]
    answer = chat.messages[1]
    assert (answer.generation.seed, answer.tokens, answer.tokens_per_s) == (3, 5, 10.0)
    assert alone.origin == "llm:r3" and alone.messages[1].thoughts.text == "Hm."


def test_llm_since_0_32(tmp_path: Path) -> None:
    chat, circle = read_conversations(new_log(tmp_path / "logs.db")).conversations
    assert (chat.origin, chat.system, chat.model) == ("llm:k", "Be kind.", "mini")
    assert [(m.content, m.model) for m in chat.messages] == [("a file\nTea?", ""), ("Yes.", "mini")]
    assert chat.messages[1].thoughts.text == "Hm." and chat.messages[1].tokens == 4
    assert [m.content for m in circle.messages] == ["round"]


def test_an_archive_and_the_same_file_twice(tmp_path: Path, store: SqliteStore) -> None:
    archive = tmp_path / "export.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("user.json", "{}")
        file.writestr("conversations-000.json", json.dumps([CHATGPT]))
        file.writestr("inside/conversations-001.json", json.dumps([{**CHATGPT, "conversation_id": "c-2"}, "odd"]))
    found = read_conversations(archive)
    assert (found.program, len(found.conversations), found.unread) == ("ChatGPT", 2, 1)
    assert str(store.take_in(found.conversations)) == "2 new, 0 already here"
    assert str(store.take_in(read_conversations(archive).conversations)) == "0 new, 2 already here"
    chat = next(chat for chat in store.conversations() if chat.origin == "chatgpt:c-1")
    shown = store.shown(chat.id)
    assert [message.content for message in shown] == ["[image]\n\nWhy do bees dance?", "Second."]
    assert (shown[1].siblings, shown[1].sibling_index) == (2, 1)
    assert [hit.conversation.origin for hit in store.search("dance")]
    # Who deletes it and imports it again has it again.
    deletion = store.delete(chat.id)
    assert str(store.take_in(read_conversations(archive).conversations)) == "1 new, 1 already here"
    assert store.restore(deletion).origin == ""


def test_an_archive_without_conversations_is_called_so(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.writestr("user.json", "{}")
    with pytest.raises(ImportProblem, match=r"x\.zip is an archive without a file conversations\.json"):
        read_conversations(tmp_path / "x.zip")


def test_an_error_imports_nothing(store: SqliteStore, tmp_path: Path) -> None:
    (good,) = read(tmp_path / "a.json", CLAUDE)
    (bad,) = read(tmp_path / "b.json", CHATGPT)
    bad.messages[1].role = "tool"  # type: ignore[assignment]
    with pytest.raises(Exception, match="CHECK"):
        store.take_in([good, bad])
    assert store.conversations() == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "1 chat that is nested too deeply"),
        (b"1" * 5000, "no JSON"),
        (b"[]", "no conversations that are known"),
        (b'"text"', "no conversations that are known"),
        (b'[{"a": 1}, 3, null]', "no conversations that are known"),
        (b"PK\3\4 no archive", "whose end is missing, as after a download that stopped. Download or copy it again."),
        (b'[{"mapping": {}}, {"mapping": {"a": {}}}]', "export of ChatGPT with 2 chats, and no message in it has text"),
        (b'{"chat_messages": []}', "export of Claude with 1 chat, and no message"),
        (b'{"chat": {"messages": [{"role": "user", "content": " "}]}}', "Open WebUI with 1 chat, and no message"),
        (b'{"messages": []}', "export of privatellm with 1 chat, and no message"),
        (b"SQLite format 3\0 but damaged", "cannot be read as llm's log"),
    ],
)
def test_what_is_no_export_is_refused_in_a_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ImportProblem, match=said) as raised:
        read_conversations(path)
    assert "\n" not in str(raised.value) and str(raised.value).endswith(".")


def test_a_file_that_is_not_there_or_too_large_or_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportProblem, match="cannot be read"):
        read_conversations(tmp_path / "none")
    with pytest.raises(ImportProblem, match="is no file"):
        read_conversations(tmp_path)
    # Who opens it waits until somebody writes into it.
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ImportProblem, match="is no file"):
        read_conversations(tmp_path / "pipe")
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as file:
        for number in range(3):
            file.writestr(f"conversations-{number}.json", "[" + " " * 1000 + "]")
    monkeypatch.setattr(reading, "MOST_BYTES", 2500)
    with pytest.raises(ImportProblem, match="has more than"):
        read_conversations(bomb)
    (tmp_path / "large.json").write_text(" " * 3000)
    with pytest.raises(ImportProblem, match="has more than"):
        read_conversations(tmp_path / "large.json")


def test_circles_and_missing_parents_end(tmp_path: Path) -> None:
    def node(parent: str | None, said: str) -> dict[str, Any]:
        return {"parent": parent, "message": {"author": {"role": "user"}, "create_time": 5,
                                              "content": {"content_type": "text", "parts": [said]}}}  # fmt: skip

    mapping = {"a": node("c", "A"), "b": node("a", "B"), "c": node("b", "C"), "d": node("gone", "D"),
               "e": node("e", "E")}  # fmt: skip
    (found,) = read(tmp_path / "x.json", [{**CHATGPT, "mapping": mapping, "current_node": "c"}])
    assert sorted(message.content for message in found.messages) == list("ABCDE")
    assert all(message.parent is None or message.parent < place for place, message in enumerate(found.messages))
    assert found.leaf is not None and found.messages[found.leaf].content == "C"


@given(st.dictionaries(st.integers(0, 9).map(str), st.tuples(st.integers(0, 12).map(str), st.booleans()), max_size=10))
def test_any_tree_has_each_message_once_and_after_its_parent(shape: dict[str, tuple[str, bool]]) -> None:
    from app.conversations.importing.parts import ImportedMessage

    nodes = {
        key: ImportedNode(parent, ImportedMessage("user", key) if kept else None)
        for key, (parent, kept) in shape.items()
    }
    messages, leaf = tree(nodes, "0")
    assert sorted(message.content for message in messages) == sorted(key for key, (_, kept) in shape.items() if kept)
    assert all(message.parent is None or message.parent < place for place, message in enumerate(messages))
    assert leaf is None or 0 <= leaf < len(messages)


# Values of wrong types at every place of a real export, or none.
ODD = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _with(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = _with(value[path[0]], path[1:], odd)
    return copied


@settings(max_examples=examples(80), deadline=None)
@given(st.sampled_from([CHATGPT, CLAUDE, OPEN_WEBUI]), st.data())
def test_values_of_wrong_types_raise_nothing(export: Any, data: st.DataObject) -> None:
    broken = _with(export, data.draw(st.sampled_from(sorted(_places(export), key=str))), data.draw(ODD))
    for known in FORMATS:
        if known.is_conversation(broken):
            for message in known.conversation(broken).messages:
                assert message.role in ("user", "assistant") and isinstance(message.content, str)


JSON = st.recursive(ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(["mapping", "chat_messages", "chat", "messages", "history", "message", "content", "role", "id"]),
    inner, max_size=4), max_leaves=12)  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(st.dictionaries(st.sampled_from(["mapping", "chat_messages", "chat", "messages", "conversation"]), JSON))
def test_any_json_is_read_or_left(found: dict[str, Any]) -> None:
    for known in FORMATS:
        if known.is_conversation(found):
            assert isinstance(known.conversation(found), ImportedConversation)


@pytest.mark.parametrize(
    ("content", "said", "thoughts"),
    [
        ("plain", "plain", ""),
        (
            '<details type="reasoning" done="false">never closed',
            '<details type="reasoning" done="false">never closed',
            "",
        ),
        ('a<details type="reasoning"><summary>S</summary>\n> x\n> y\n</details>b', "ab", "x\ny"),
        ('<details type="reasoning">bare</details>', "", "bare"),
        (
            '<details type="tool_calls" arguments="&quot;&quot;">\n<summary>Tool Executed</summary>\n</details>'
            '\nIt rains.\n<details type="code_interpreter">x</details>\n<details>said</details>',
            "It rains.\n\n<details>said</details>",
            "",
        ),
    ],
)
def test_thoughts_are_taken_out_of_answers(content: str, said: str, thoughts: str) -> None:
    found, thought = without_folded(content)
    assert (found, thought.text) == (said, thoughts)


# --- our own export --------------------------------------------------------------------------------------------------

WORDS = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=20)
MESSAGES = st.lists(
    st.tuples(st.sampled_from(["user", "assistant"]), WORDS, st.integers(0, 20), WORDS, st.none() | st.integers(0, 9)),
    min_size=1, max_size=8,
)  # fmt: skip


@pytest.mark.soak
@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MESSAGES, st.booleans())
def test_our_own_export_comes_back_whole(
    tmp_path_factory: pytest.TempPathFactory, made: list[tuple[Role, str, int, str, int | None]], pinned: bool
) -> None:
    folder = tmp_path_factory.mktemp("round")
    there, back = open_store(folder / "a.sqlite"), open_store(folder / "b.sqlite")
    try:
        chat = there.create(model="m", system="Be brief.", title="A title", own_values={"own": {"seed": 3}}).id
        numbers: list[int] = []
        for role, said, above, thought, seed in made:
            parent = numbers[above % len(numbers)] if numbers and above else None
            files = [picture("a.png"), Attachment("notes.txt", said)] if seed == 1 else []
            numbers.append(there.add(chat, role, said, parent=parent, model="m", attachments=files).id)
            there.update(
                numbers[-1], tokens=above, tokens_per_s=above / 3, finish_reason="stop", state="stopped",
                thoughts=Thoughts(thought, 2, 1.5), generation=Generation(temperature=0.1, seed=seed, ttft_s=0.123),
            )  # fmt: skip
        there.change(chat, pinned=pinned)
        path = folder / "export.json"
        path.write_text(there.export(chat, "json", thoughts=True), encoding="utf-8")
        assert str(back.take_in(read_conversations(path).conversations)) == "1 new, 0 already here"
        assert str(there.take_in(read_conversations(path).conversations)) == "0 new, 1 already here"
        again = json.loads(back.export(back.conversations()[0].id, "json", thoughts=True))
        assert _unnumbered(again) == _unnumbered(json.loads(path.read_text(encoding="utf-8")))
    finally:
        there.close()
        back.close()


def _unnumbered(export: dict[str, Any]) -> dict[str, Any]:
    """An export with places instead of the numbers that a store gives."""
    places = {message["id"]: place for place, message in enumerate(export["messages"])}
    for message in export["messages"]:
        message["parent"] = places.get(message["parent"])
        del message["id"], message["conversation"]
    export["conversation"]["leaf"] = places[export["conversation"]["leaf"]]
    del export["conversation"]["id"]
    return export


def exported_picture(**changes: object) -> dict[str, Any]:
    shown = {"data": base64.b64encode(png()).decode(), "width": 64, "height": 32, **changes}
    message = {"role": "user", "content": "a", "attachments": [{"name": "a.png", "text": "", "picture": shown}]}
    return {"messages": [message]}


def test_a_picture_of_an_export_comes_back(tmp_path: Path) -> None:
    (found,) = read(tmp_path / "x.json", exported_picture())
    assert found.messages[0].attachments == (picture("a.png", 64, 32),) and not found.messages[0].only_named


@pytest.mark.parametrize(
    "changes",
    [{"data": "?"}, {"data": 1}, {"data": ""}, {"data": base64.b64encode(b"a text of some length").decode()},
     {"width": 0}, {"width": -1}, {"height": 10**9}, {"width": "64"}, {"width": True}],
)  # fmt: skip
def test_what_is_no_picture_of_an_export_is_left_out_and_counted(tmp_path: Path, changes: dict[str, object]) -> None:
    (found,) = read(tmp_path / "x.json", exported_picture(**changes))
    assert (found.messages[0].attachments, found.messages[0].only_named) == ((), 1)


def test_a_chat_that_was_not_saved_comes_back(tmp_path: Path) -> None:
    content = {"title": "T", "system": "S", "messages": [{"role": "user", "content": "a"},
                                                         {"role": "assistant", "content": "b"}]}  # fmt: skip
    (found,) = read(tmp_path / "x.json", content)
    assert [(m.content, m.parent, m.state) for m in found.messages] == [("a", None, "complete"), ("b", 0, "complete")]
    assert found.origin == read(tmp_path / "y.json", content)[0].origin != "privatellm:"


# --- the command -----------------------------------------------------------------------------------------------------


def test_chats_are_listed_exported_and_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    assert run(["chats"]) == 0 and capsys.readouterr().out == ""
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([CHATGPT, CLAUDE]))
    assert run(["chats", "import", str(path)]) == 0
    out, error = capsys.readouterr()
    assert (out, error) == ("ChatGPT: 2 new, 0 already here.\n", "Left out: 1 picture or file.\n")
    assert run(["chats", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["title"], row["pinned"]) for row in rows] == [("Rain", False), ("Bees", True)]
    assert run(["chats", "export", str(rows[1]["id"]), "--thoughts"]) == 0
    out = capsys.readouterr().out
    assert out.startswith('---\ntitle: "Bees"\n') and "> They show the way." in out and out.endswith("Second.\n")
    target = tmp_path / "bees.json"
    assert run(["chats", "export", str(rows[1]["id"]), "-o", str(target)]) == 0
    assert json.loads(target.read_text())["conversation"]["origin"] == "chatgpt:c-1"
    assert run(["chats", "export", str(rows[1]["id"]), "-o", str(target)]) == 1
    assert "already exists" in capsys.readouterr().err
    assert run(["chats", "export", "99"]) == 1
    assert run(["chats", "import", str(tmp_path / "home")]) == 1
    assert "is no file" in capsys.readouterr().err
