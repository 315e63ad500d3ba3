"""What an import makes of damaged and of crafted files: all that can be read, a word on the rest, and never much of
little."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import zipfile
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.conversations.importing import entries, parts, reading
from app.conversations.importing.parts import ImportProblem
from app.conversations.importing.reading import ReadFile, read_conversations
from tests.app.conversations.importing.exports import CHATGPT, CLAUDE, OPEN_WEBUI, new_log, old_log
from tests.support.random_examples import examples

SHORT = {"title": "Short", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
OPENED, CLOSED = "\ue200", "\ue201"


def read(path: Path, content: object) -> ReadFile:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return read_conversations(path)


def produced(found: ReadFile) -> int:
    """Characters of what was made of a file."""
    return sum(
        len(chat.title) + len(chat.system) + len(message.content) + len(message.thoughts.text) + len(message.model)
        + sum(len(file.name) + len(file.text) for file in message.attachments)
        for chat in found.conversations
        for message in chat.messages
    )  # fmt: skip


def chatgpt(mapping: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"title": "T", "conversation_id": "c", "mapping": mapping}]


def answer(said: str, references: list[dict[str, str]]) -> dict[str, Any]:
    return {"author": {"role": "assistant"}, "content": {"content_type": "text", "parts": [said]},
            "metadata": {"content_references": references}}  # fmt: skip


def titles(found: ReadFile) -> list[str]:
    return [chat.title for chat in found.conversations]


# --- much of little --------------------------------------------------------------------------------------------------


def test_references_do_not_grow_by_what_they_put_in(tmp_path: Path) -> None:
    mark = f"{OPENED}x{CLOSED}"
    said = answer(f"see {mark}", [{"matched_text": mark, "alt": mark * 10}] * 9)
    found = read(tmp_path / "c.json", chatgpt({"a": {"message": said}}))
    assert len(found.conversations[0].messages[0].content) < 100
    # Nor by being put in for each of many marks: what is put in is no more than what the message has.
    said = answer(f"see {mark * 1000}", [{"matched_text": mark, "alt": "y" * 5000}])
    found = read(tmp_path / "c.json", chatgpt({"a": {"message": said}}))
    assert 5000 <= produced(found) < 20_000
    said = answer(f"{mark} and {mark}", [{"matched_text": mark, "alt": "[1]"}])
    found = read(tmp_path / "c.json", chatgpt({"a": {"message": said}}))
    assert found.conversations[0].messages[0].content == "[1] and [1]"


MARKS = st.sampled_from(["a", f"{OPENED}a{CLOSED}", f"{OPENED}b{CLOSED}", OPENED, CLOSED, "\ue202", "url", "[", '"'])
TEXTS = st.lists(MARKS, max_size=12).map("".join)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.lists(st.tuples(TEXTS, TEXTS), max_size=8))
def test_no_references_make_more_than_was_read(tmp_path: Path, said: str, references: list[tuple[str, str]]) -> None:
    listed = [{"matched_text": matched, "alt": alternative} for matched, alternative in references]
    export = chatgpt({"a": {"message": answer(f"x{said}", listed)}})
    assert produced(read(tmp_path / "c.json", export)) <= len(json.dumps(export, ensure_ascii=False))


def test_thoughts_go_to_one_answer(tmp_path: Path) -> None:
    thought = {"author": {"role": "assistant"},
               "content": {"content_type": "thoughts", "thoughts": [{"content": "y" * 10_000}]}}  # fmt: skip
    mapping = {f"t{place}": {"message": thought, "parent": f"t{place - 1}"} for place in range(20)}
    mapping |= {f"a{place}": {"message": answer("x", []), "parent": "t19"} for place in range(500)}
    (chat,) = read(tmp_path / "c.json", chatgpt(mapping)).conversations
    assert [len(message.thoughts.text) for message in chat.messages] == [20 * 10_000 + 19 * 2, *[0] * 499]


def grown_log(path: Path, script: str) -> Path:
    old_log(path)
    with closing(sqlite3.connect(path)) as log:
        log.executescript(script)
    return path


@pytest.mark.parametrize("kept", ["virtual", "stored"])
def test_columns_that_are_worked_out_are_refused(tmp_path: Path, kept: str) -> None:
    path = tmp_path / "logs.db"
    with closing(sqlite3.connect(path)) as log:
        log.executescript(
            "CREATE TABLE conversations (id TEXT, name TEXT);"
            "CREATE TABLE responses (id TEXT, response TEXT, conversation_id TEXT, datetime_utc TEXT, prompt TEXT"
            f" GENERATED ALWAYS AS (replace(printf('%.50c','x'),'x',printf('%.10c','y'))) {kept});"
            "INSERT INTO responses VALUES ('r', 'a', 'k', '2026-01-01');"
        )
    with pytest.raises(ImportProblem, match="columns of its table responses are worked out"):
        read_conversations(path)


@pytest.mark.parametrize(
    "made",
    [
        "CREATE VIEW responses AS SELECT 'r' id, 'k' conversation_id, printf('%.9000000c', 'x') prompt;",
        "CREATE VIEW much AS SELECT 1 id, printf('%.9000000c', 'x') prompt;"
        "CREATE VIRTUAL TABLE responses USING fts5(id, prompt, content='much');",
    ],
)
def test_views_and_virtual_tables_are_not_read(tmp_path: Path, made: str) -> None:
    path = tmp_path / "logs.db"
    with closing(sqlite3.connect(path)) as log:
        log.executescript(f"CREATE TABLE conversations (id TEXT, name TEXT); {made}")
    with pytest.raises(ImportProblem, match="not a log of llm"):
        read_conversations(path)


def test_rows_that_share_their_bytes_are_counted(tmp_path: Path) -> None:
    # A default value is kept once, however many rows have it.
    path = grown_log(
        tmp_path / "logs.db",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500)"
        " INSERT INTO responses (id, conversation_id) SELECT i, 'k' FROM n;"
        f"ALTER TABLE responses ADD COLUMN reasoning TEXT DEFAULT '{'y' * 200_000}';",
    )
    assert path.stat().st_size < 500_000
    with pytest.raises(ImportProblem, match="more text than its size allows"):
        read_conversations(path)


def test_fragments_that_are_used_often_end_at_a_limit(tmp_path: Path) -> None:
    shared = (
        "CREATE TABLE fragments (id INTEGER PRIMARY KEY, content TEXT);"
        'CREATE TABLE prompt_fragments (response_id TEXT, fragment_id INTEGER, "order" INTEGER);'
        f"INSERT INTO fragments VALUES (1, '{'y' * 100_000}');"
        "INSERT INTO conversations VALUES ('large', 'Large', 'mini');"
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})"
        " INSERT INTO responses (id, conversation_id, prompt) SELECT 'l' || i, 'large', 'Q' FROM n;"
        "INSERT INTO prompt_fragments SELECT id, 1, 0 FROM responses WHERE conversation_id = 'large';"
    )
    found = read_conversations(grown_log(tmp_path / "few.db", shared.replace("{rows}", "20")))
    assert sorted(titles(found)) == ["Large", "Tea"] and produced(found) > 20 * 100_000
    path = grown_log(tmp_path / "many.db", shared.replace("{rows}", "5000"))
    found = read_conversations(path)
    assert titles(found) == ["Tea"] and found.left_out == "Left out: 1 chat that is too large."


def test_threads_that_share_a_beginning_end_at_a_limit(tmp_path: Path) -> None:
    path = new_log(tmp_path / "logs.db")
    with closing(sqlite3.connect(path)) as log:
        log.executescript(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000)"
            " INSERT INTO messages SELECT 'm' || i, 'm' || (i - 1), 'user' FROM n;"
            "INSERT INTO parts (message_hash, position, type, text) SELECT hash, 0, 'text', 'x' FROM messages;"
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000)"
            " INSERT INTO threads SELECT 't' || i, 'Deep', 'm2000' FROM n;"
        )
    found = read_conversations(path)
    assert len(found.conversations) < 100
    assert sum(len(chat.messages) for chat in found.conversations) < (10_000_000 + 100 * path.stat().st_size) / 500


def test_an_archive_that_unpacks_to_far_more_than_it_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "export.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("conversations.json", b"[" + b"[]," * 6_000_000 + b"[]]")
    with pytest.raises(ImportProblem, match=r"export\.zip has more than 10 MB of conversations"):
        read_conversations(path)


def test_entries_beyond_a_number_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MOST_ENTRIES", 5)
    members = {f"conversations-{number}.json": b"[{}, []]" for number in range(2)}
    kept = {"conversations-2.json": json.dumps([SHORT]).encode(), "conversations-3.json": b"[1, 2]"}
    found = read_conversations(archive_of(tmp_path / "x.zip", members | kept))
    assert titles(found) == ["Short"]
    assert found.left_out == "Left out: 4 entries that are no chats, all that follows 5 entries."
    found = read_conversations(archive_of(tmp_path / "x.zip", members | dict([*kept.items()][:1])))
    assert found.left_out == "Left out: 4 entries that are no chats."


@pytest.mark.soak
def test_a_chat_whose_values_would_fill_the_memory_is_left_out(tmp_path: Path) -> None:
    # As much memory as is taken for these is twenty times the file's size.
    full = b'{"messages": [' + b"[]," * 2_000_000 + b"[]]}"
    found = read(tmp_path / "x.json", b"[" + full + b"," + json.dumps(SHORT).encode() + b"]")
    assert titles(found) == ["Short"] and found.left_out == "Left out: 1 chat that is too large."


def test_messages_and_imports_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LONGEST_TEXT", 100)
    for role, part in (("user", {"content": "x" * 101}), ("assistant", {"thoughts": {"text": "x" * 101}}),
                       ("user", {"attachments": [{"name": "a", "text": "x" * 101}]})):  # fmt: skip
        found = read(tmp_path / "x.json", [{"messages": [{"role": role, **part}]}, SHORT])
        assert titles(found) == ["Short"] and "1 chat that is too large" in found.left_out
    monkeypatch.setattr(parts, "MOST_MESSAGES", 1)
    with pytest.raises(ImportProblem, match="1 chat that is too large"):
        read(tmp_path / "x.json", [SHORT])
    monkeypatch.setattr(parts, "MOST_MESSAGES", 10)
    monkeypatch.setattr(parts, "_MOST_PRODUCED", 7000)
    found = read(tmp_path / "x.json", [SHORT] * 20)
    assert (len(found.conversations), found.left_out) == (4, "Left out: 16 chats that are too large.")


def test_too_little_memory_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(400_000_000)
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from app.conversations.importing.reading import ImportProblem, read_conversations\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() if sys.argv[2] else 2 << 30\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000,) * 2)\n"
        "try: read_conversations(Path(sys.argv[1]))\n"
        "except ImportProblem as problem: print(problem)"
    )
    linux = "linux" if sys.platform == "linux" else ""
    if not linux:
        pytest.skip("the memory of a process can be limited on Linux")
    done = subprocess.run(
        [sys.executable, "-c", program, path, linux],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(reading.__file__).parents[3],
    )
    assert done.stdout == f"{path} needs more memory than there is.\n"


# --- damage ----------------------------------------------------------------------------------------------------------


def test_what_is_damaged_costs_itself_only(tmp_path: Path) -> None:
    good = json.dumps(SHORT).encode()
    damaged = good.replace(b'"a"', b'"\xff"'), good.replace(b": ", b" ", 1), b'{"messages": [1, }'
    deep = b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    content = b"[" + b",\n".join([good, damaged[0], deep, b'"odd"', damaged[1], good]) + b"]"
    found = read(tmp_path / "x.json", content)
    assert titles(found) == ["Short", "Short"]
    assert found.left_out == ("Left out: 1 entry that is no chat, 2 damaged chats, 1 chat that is nested too deeply.")
    # Where the end of a chat is not to be found, what stands before it is kept.
    for cut in (b"[" + good + b"," + good[:-9], b"[" + good + b"," + damaged[2] + b"," + good, b"[" + good + b"]]"):
        found = read(tmp_path / "x.json", cut)
        assert titles(found) == ["Short"] and found.left_out == "Left out: all that follows a damaged place."
    for encoding in ("utf-8-sig", "utf-16"):
        assert titles(read(tmp_path / "x.json", json.dumps([SHORT]).encode(encoding))) == ["Short"]


def test_a_damaged_database_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = old_log(tmp_path / "logs.db")
    # SQLite quotes the name, which is no UTF-8, in what it says.
    path.write_bytes(path.read_bytes().replace(b"responses", b"respon\xe9es", 1))
    with pytest.raises(ImportProblem, match=r"logs\.db cannot be read as llm's log: "):
        read_conversations(path)


def archive_of(path: Path, contents: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


def test_a_damaged_file_of_an_archive_costs_itself_only(tmp_path: Path) -> None:
    good = json.dumps([SHORT]).encode()
    noise = json.dumps([{**SHORT, "title": random.Random(1).randbytes(3000).hex()}]).encode()
    contents = {"conversations-000.json": good, "conversations-001.json": noise, "conversations-002.json": good[:-20],
                "a/conversations-003.json": b"[" + good[1:-1].replace(b'"a"', b'"\xff"') + b"," + good[1:]}  # fmt: skip
    path = archive_of(tmp_path / "export.zip", contents)
    data = bytearray(path.read_bytes())
    data[data.index(b"conversations-001.json") + 1000] ^= 0xFF
    path.write_bytes(data)
    found = read_conversations(path)
    assert titles(found) == ["Short", "Short"]
    assert "conversations-001.json, which cannot be unpacked (" in found.left_out
    assert "all that follows a damaged place in conversations-002.json, 1 damaged chat in conversations-003.json" in (
        found.left_out
    )
    # If there is nothing else, the file is named too.
    path = archive_of(tmp_path / "export.zip", {"conversations-004.json": good[:-20]})
    with pytest.raises(ImportProblem, match=r"all that follows a damaged place in conversations-004\.json\.$"):
        read_conversations(path)


def test_answers_without_a_model_have_the_conversations(tmp_path: Path) -> None:
    named = {
        **SHORT,
        "model": "m",
        "messages": [*SHORT["messages"], {"role": "assistant", "content": "c", "model": "n"}],
    }
    (chat,) = read(tmp_path / "x.json", named).conversations
    assert [message.model for message in chat.messages] == ["", "m", "n"]
    without = answer("x", [])
    export = [{**chatgpt({"a": {"message": without}})[0], "default_model_slug": "gpt-5"}]
    assert read(tmp_path / "x.json", export).conversations[0].messages[0].model == "gpt-5"


# --- any damage ------------------------------------------------------------------------------------------------------


def kinds(folder: Path) -> dict[str, bytes]:
    printed = {"id": "r", "model": "mini", "prompt": "Q", "response": "A", "conversation_id": "k",
               "datetime_utc": "2026-08-04T10:00:00", "prompt_fragments": [{"content": "a file"}]}  # fmt: skip
    exports = {
        "chatgpt": [CHATGPT] * 4,
        "claude": [CLAUDE] * 4,
        "open-webui": [OPEN_WEBUI] * 4,
        "own": [SHORT] * 4,
        "llm-json": [printed] * 4,
    }
    made = {kind: json.dumps(export, ensure_ascii=False).encode() for kind, export in exports.items()}
    archive = archive_of(
        folder / "x.zip", {"conversations-0.json": made["chatgpt"], "conversations-1.json": made["claude"]}
    )
    logs = {"llm-old": old_log(folder / "old.db"), "llm-new": new_log(folder / "new.db")}
    return {**made, "zip": archive.read_bytes(), **{kind: path.read_bytes() for kind, path in logs.items()}}


KINDS = ("chatgpt", "claude", "open-webui", "own", "llm-json", "zip", "llm-old", "llm-new")


def mutated(data: bytes, chance: random.Random) -> bytes:
    """``data`` with bytes that are changed, cut out, repeated, or taken from elsewhere in it."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        start = chance.randrange(len(changed) + 1)
        end = min(len(changed), start + chance.choice([1, 1, 4, 30, 300]))
        match chance.randrange(6):
            case 0:
                changed[start:end] = chance.randbytes(end - start)
            case 1:
                del changed[start:end]
            case 2:
                changed[start:start] = changed[start:end] * chance.choice([1, 3, 50])
            case 3:
                other = chance.randrange(len(changed) + 1)
                changed[start:end] = changed[other : other + end - start]
            case 4:
                changed[start:end] = chance.choice([b"[", b"]", b"{", b"}", b'"', b",", b"1e999", b"null", b"\\ud800"])
            case 5:
                del changed[start + (len(changed) - start) // 2 :]
    return bytes(changed)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_export_is_read_or_refused_and_never_grows(tmp_path: Path, kind: str) -> None:
    data, path = kinds(tmp_path)[kind], tmp_path / "file"
    for seed in range(examples(200)):
        changed = mutated(data, random.Random(f"{kind} {seed}"))
        path.write_bytes(changed)
        size = len(changed)
        if kind == "zip":
            size = sum(info.file_size for info in zipfile.ZipFile(BytesIO(data)).infolist())
        try:
            found = read_conversations(path)
        except ImportProblem as problem:
            assert "\n" not in str(problem) and str(problem).endswith("."), seed
        else:
            assert found.conversations, seed
            assert produced(found) <= 20 * size, seed


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.sampled_from([b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b"a", b"1", b" ", b"{}", b"[]"])))
def test_entries_are_those_that_a_parser_finds(pieces: list[bytes]) -> None:
    data = b"[" + b"".join(pieces) + b"]"
    found = list(entries.entries(data))
    try:
        expected = json.loads(data)
    except ValueError:
        return
    assert found == [entry if isinstance(entry, dict) else None for entry in expected]
