"""What goes wrong with a database: killed writers, locks, damage, a full disk, other versions."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.conversations import opening
from app.conversations.database import is_alive
from app.conversations.drafts import Draft
from app.conversations.opening import PAGE_BYTES, Migration, known_migrations, open_store
from app.conversations.recovering import recover_into
from app.conversations.searching import SearchIndex
from app.conversations.store import StoreError, explain

NEXT = len(known_migrations()) + 1
"""Number of a migration that this program does not have."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "conversations.sqlite"


def _filled(path: Path, conversations: int = 3, turns: int = 10, size: int = 40) -> None:
    store = open_store(path)
    for number in range(conversations):
        conversation = store.create(model="m", title=f"talk {number}").id
        parent = None
        for turn in range(turns):
            text = f"text {number}.{turn} " + "x" * size
            parent = store.add(conversation, "user" if turn % 2 == 0 else "assistant", text, parent=parent).id
    store.close()


# --- writers ------------------------------------------------------------------------------------------------------

_WRITER = """
import sys, time
from pathlib import Path
from app.conversations.opening import open_store
store = open_store(Path(sys.argv[1]))
conversation = store.create(model="m")
question = store.add(conversation.id, "user", "q", parent=None)
answer = store.add(conversation.id, "assistant", "", parent=question.id, state="writing")
text = ""
for number in range(10_000_000):
    text += f"{number} "
    store.update(answer.id, content=text)
    print(number, flush=True)
    time.sleep(0.005)
"""


def test_kill_9_of_a_writer_keeps_what_was_written(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = 0
        while said < 20:
            said = int(writer.stdout.readline())
        beside = open_store(path)
        (conversation,) = beside.conversations()
        assert beside.shown(conversation.id)[-1].state == "writing" and beside.notices == []
        beside.close()
        writer.send_signal(signal.SIGKILL)
        said = int((writer.stdout.read().splitlines() or [said])[-1])
    store = open_store(path)
    answer = store.shown(conversation.id)[-1]
    assert answer.state == "stopped"
    assert len(answer.content.split()) > said
    assert len(store.notices) == 1 and "what there was is kept" in store.notices[0]
    assert store.conversation(conversation.id).leaf == answer.id
    assert [hit.message for hit in store.search("17")] == [answer.id]
    store.close()
    assert open_store(path).notices == []


def test_a_closed_store_of_this_process_is_no_writer(path: Path) -> None:
    first = open_store(path)
    conversation = first.create(model="m").id
    first.add(conversation, "assistant", "part", parent=None, state="writing")
    beside = open_store(path)
    assert beside.shown(conversation)[0].state == "writing"
    first.close()
    assert open_store(path).shown(conversation)[0].state == "stopped"


@pytest.mark.parametrize("token", ["", "x", "1", "1:", "1:2:3", "999999999:1.0:1", "-1:0:0", f"{10**30}:1:1"])
def test_tokens_of_nobody(token: str) -> None:
    assert not is_alive(token)


def test_threads_take_turns(path: Path) -> None:
    store = open_store(path)
    conversation = store.create(model="m").id

    def write() -> None:
        for _ in range(25):
            store.add(conversation, "user", "x", parent=None)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(store.messages(conversation))) == 100
    store.close()


# --- locked, read-only, full --------------------------------------------------------------------------------------


def test_locked_is_said_and_passes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_LOCK_WAIT_S", 0.01)
    store = open_store(path)
    conversation = store.create(model="m").id
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked by another program") as caught:
        store.add(conversation, "user", "q", parent=None)
    assert caught.value.reason == "locked"
    assert store.shown(conversation) == []
    with pytest.raises(StoreError) as caught:
        _open_with_a_migration_to_apply(path)
    assert caught.value.reason == "locked"
    other.execute("COMMIT")
    store.add(conversation, "user", "q", parent=None)
    assert len(store.shown(conversation)) == 1
    other.close()


def _open_with_a_migration_to_apply(path: Path) -> None:
    more = Migration(NEXT, "0009_more.sql", "CREATE TABLE more (id INTEGER);")
    open_store(path, migrations=[*known_migrations(), more])


def test_disk_full_is_said_and_nothing_is_half_written(path: Path) -> None:
    store = open_store(path)
    conversation = store.create(model="m").id
    message = store.add(conversation, "assistant", "begun", parent=None, state="writing").id
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(StoreError, match="no space left") as caught:
        store.update(message, content="long " * 20_000)
    assert caught.value.reason == "full"
    assert store.shown(conversation)[0].content == "begun"
    store._connection.execute("PRAGMA max_page_count = 1000000")
    store.update(message, content="long " * 20_000)
    assert store.shown(conversation)[0].content == "long " * 20_000
    store.close()


def test_an_unexplained_failure_on_a_full_disk_is_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    assert explain(error, path).reason == "other"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    assert explain(error, path).reason == "full"


def test_a_folder_that_cannot_be_made_or_a_path_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        open_store(tmp_path / "file" / "c.sqlite")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="cannot be opened"):
        open_store(tmp_path / "folder")


# --- damage -------------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_database_is_put_aside(path: Path) -> None:
    path.write_bytes(b"this is not a database, " * 100)
    store = open_store(path)
    (aside,) = path.parent.glob("conversations.damaged-*.sqlite")
    assert aside.read_bytes().startswith(b"this is not")
    assert len(store.notices) == 1 and aside.name in store.notices[0] and "0 conversations" in store.notices[0]
    assert store.conversations() == []
    store.create(model="m")
    store.close()


@pytest.mark.sampled
@pytest.mark.parametrize("page", [2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 20, 31])
def test_what_is_readable_of_a_damaged_database_is_recovered(path: Path, page: int) -> None:
    _filled(path, conversations=4, turns=30, size=700)
    data = bytearray(path.read_bytes())
    data[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = b"\xde\xad\xbe\xef" * (PAGE_BYTES // 4)
    path.write_bytes(data)
    store = open_store(path)
    (aside,) = path.parent.glob("conversations.damaged-*.sqlite")
    assert aside.name in store.notices[0]
    texts = {message.content.split()[1] for item in store.conversations() for message in store.messages(item.id)}
    # Whatever page is lost, also a table's root: text and order are there a second time, in the indexes.
    assert texts == {f"{number}.{turn}" for number in range(4) for turn in range(30)}
    for item in store.conversations():
        shown = store.shown(item.id)
        assert [message.role for message in shown] == ["user", "assistant"] * 15
        assert [message.id for message in shown] == sorted(message.id for message in shown)
    store.create(model="m")
    store.close()
    assert open_store(path).notices == []


def test_a_lost_page_of_messages_is_filled_from_the_indexes(path: Path) -> None:
    _filled(path, conversations=4, turns=30, size=700)
    with sqlite3.connect(path) as connection:
        query = "SELECT pageno FROM dbstat WHERE name = 'message' AND pagetype = 'leaf' ORDER BY pageno"
        try:
            pages = [page for (page,) in connection.execute(query)]
        except sqlite3.OperationalError:
            pytest.skip("this SQLite has no dbstat")
    data = bytearray(path.read_bytes())
    data[(pages[4] - 1) * PAGE_BYTES : pages[4] * PAGE_BYTES] = bytes(PAGE_BYTES)
    path.write_bytes(data)
    store = open_store(path)
    texts = {message.content.split()[1] for item in store.conversations() for message in store.messages(item.id)}
    assert len(texts) == 120
    assert sum(len(store.shown(item.id)) for item in store.conversations()) == len(texts)
    store.close()


def test_values_of_a_conversation_are_recovered(path: Path, tmp_path: Path) -> None:
    damaged = open_store(path)
    kept = damaged.create(model="m", own_values={"own": {"seed": 4}})
    lost = damaged.create(model="m")
    damaged._connection.execute("UPDATE conversation SET own_values = 'no JSON' WHERE id = ?", (lost.id,))
    damaged.close()
    store = open_store(tmp_path / "new.sqlite")
    recover_into(store._connection, path)
    assert store.conversation(kept.id).own_values == {"own": {"seed": 4}}
    assert store.conversation(lost.id).own_values == {}
    store.close()


def test_damage_found_while_running_is_said(path: Path) -> None:
    _filled(path, conversations=2, turns=30, size=700)
    store = open_store(path)
    conversation = store.conversations()[0].id
    with path.open("r+b") as file:
        for page in range(2, 30):
            file.seek(page * PAGE_BYTES)
            file.write(b"\xff" * PAGE_BYTES)
    store._connection.execute("PRAGMA cache_size = 0")
    store._connection.execute("PRAGMA shrink_memory")
    with pytest.raises(StoreError, match="damaged") as caught:
        list(store.messages(conversation))
    assert caught.value.reason == "damaged"


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE message_words_data SET block = x'00ff00ff'",
        "DELETE FROM message_words_data WHERE id > 10",
        "DELETE FROM message_words_content",
        "DELETE FROM message_words_docsize",
        "DELETE FROM message_words_config",
        "DELETE FROM message_words_data",
    ],
)
def test_a_damaged_search_index_costs_no_message(path: Path, harm: str) -> None:
    _filled(path, conversations=2, turns=20, size=100)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(harm)
        connection.commit()
    store = open_store(path)
    kept, other = store.conversations()
    shown = store.shown(kept.id)
    assert len(shown) == 20 and len(store.search(shown[0].content.split()[1])) >= 1
    store.add(kept.id, "user", "asked in spite of it", parent=shown[-1].id)
    store.delete(other.id)
    store.close()
    store = open_store(path)
    assert store.notices == []
    assert [item.id for item in store.conversations()] == [kept.id]
    assert [hit.conversation.id for hit in store.search("in spite of it")] == [kept.id]
    store.close()


def test_a_file_that_is_kept_aside_is_not_held_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _filled(path)
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def recorded(*given: Any, **more: Any) -> sqlite3.Connection:
        opened.append(connect(*given, **more))
        return opened[-1]

    refusals = [StoreError("the search index is damaged", "damaged")]

    def index(connection: sqlite3.Connection) -> SearchIndex:
        if refusals:
            raise refusals.pop()
        return SearchIndex(connection)

    monkeypatch.setattr(sqlite3, "connect", recorded)
    monkeypatch.setattr("app.conversations.database.SearchIndex", index)
    store = open_store(path)
    assert "could be recovered" in store.notices[0]
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened[0].execute("SELECT 1")
    store.close()


# --- versions -----------------------------------------------------------------------------------------------------


def test_a_later_version_is_refused_and_left_alone(path: Path) -> None:
    _filled(path)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {NEXT}")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=rf"later privatellm \(schema {NEXT}, this one knows {NEXT - 1}\)"):
        open_store(path)
    assert path.read_bytes() == before and not list(path.parent.glob("*damaged*"))


def test_migrations_are_numbered_without_gaps() -> None:
    assert [migration.version for migration in known_migrations()] == list(range(1, len(known_migrations()) + 1))


def test_each_migration_is_applied_once_and_text_is_kept(path: Path) -> None:
    _filled(path)
    more = Migration(NEXT, "0009_stars.sql", "-- stars;\nALTER TABLE message ADD COLUMN star INTEGER DEFAULT 5;\n")
    steps = [*known_migrations(), more]
    for _ in range(2):
        store = open_store(path, migrations=steps)
        assert store._connection.execute("PRAGMA user_version").fetchone() == (NEXT,)
        assert store._connection.execute("SELECT count(*), min(star) FROM message").fetchone() == (30, 5)
        store.close()


def test_what_was_there_before_a_migration_is_kept_until_the_next_start(path: Path) -> None:
    _filled(path)
    steps = [*known_migrations(), Migration(NEXT, "0009_stars.sql", "DELETE FROM message;\n")]
    open_store(path, migrations=steps).close()
    backup = path.with_name(f"conversations.schema-{NEXT - 1}.sqlite")
    assert backup.stat().st_mode & 0o077 == 0
    with closing(sqlite3.connect(backup)) as kept:
        assert kept.execute("PRAGMA user_version").fetchone() == (NEXT - 1,)
        assert kept.execute("SELECT count(*) FROM message").fetchone() == (30,)
    open_store(path, migrations=steps).close()
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name]


def test_without_a_copy_of_what_is_there_nothing_is_migrated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _filled(path)

    def refuse(connection: sqlite3.Connection, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(opening, "copy_database", refuse)
    more = Migration(NEXT, "0009_stars.sql", "ALTER TABLE message ADD COLUMN star INTEGER;\n")
    with pytest.raises(StoreError, match=r"must be converted, .*No space left on device"):
        open_store(path, migrations=[*known_migrations(), more])
    store = open_store(path)
    assert store._connection.execute("PRAGMA user_version").fetchone() == (NEXT - 1,)
    store.close()


def test_a_new_database_needs_no_copy(path: Path) -> None:
    open_store(path).close()
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name]


def test_a_migration_that_fails_is_rolled_back(path: Path) -> None:
    _filled(path)
    bad = Migration(NEXT, "0009_bad.sql", "ALTER TABLE message ADD COLUMN star INTEGER;\nSELECT no_such_column;\n")
    with pytest.raises(StoreError, match="no such column"):
        open_store(path, migrations=[*known_migrations(), bad])
    store = open_store(path)
    assert store._connection.execute("PRAGMA user_version").fetchone() == (NEXT - 1,)
    assert len(store.conversations()) == 3
    store.close()


def test_opening_waits_while_another_program_makes_the_database(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite itself does not wait there for the other program's write."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(time, "sleep", lambda seconds: other.execute("ROLLBACK"))
    store = open_store(path)
    assert not other.in_transaction
    assert store.conversations() == []
    store.close()
    other.close()


@pytest.mark.soak
def test_two_programs_may_make_the_database_at_once(path: Path) -> None:
    script = "import sys; from pathlib import Path; from app.conversations.opening import open_store;" \
        "s = open_store(Path(sys.argv[1])); s.create(model='m'); s.close()"  # fmt: skip
    programs = [subprocess.Popen([sys.executable, "-c", script, str(path)]) for _ in range(4)]
    assert [program.wait() for program in programs] == [0, 0, 0, 0]
    store = open_store(path)
    assert len(store.conversations()) == 4 and store.notices == []
    store.close()


def test_drafts_and_edits_are_recovered_with_what_they_belong_to(path: Path) -> None:
    store = open_store(path)
    conversation = store.create(model="m").id
    message = store.add(conversation, "user", "a", parent=None).id
    kept = {0: Draft("new"), conversation: Draft("next"), -message: Draft("another a"), -99: Draft("of none")}
    for owner, draft in kept.items():
        store.keep_draft(owner, draft)
    store.close()
    aside = path.with_name("damaged.sqlite")
    path.rename(aside)
    store = open_store(path)
    recover_into(store._connection, aside)
    found = {owner: store.draft(owner) for owner in kept}
    store.close()
    assert found == {**kept, -99: None}
