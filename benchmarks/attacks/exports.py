"""Exports of other programs, as somebody else hands them over to be imported."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.attacks.campaign import Attack, Attempt, Refused
from benchmarks.attacks.mutating import spoiled, spoiled_tree

_MARK = "\ue200cite\ue202turn0\ue201"
_CHATGPT = {
    "title": "T", "conversation_id": "c", "current_node": "a", "default_model_slug": "m", "create_time": 1.7e9,
    "mapping": {
        "q": {"message": {"author": {"role": "user"}, "content": {"content_type": "text", "parts": ["Why?"]}},
              "parent": None, "children": ["t"]},
        "t": {"message": {"author": {"role": "assistant"}, "content": {
                  "content_type": "thoughts", "thoughts": [{"summary": "S", "content": "C"}]}}, "parent": "q"},
        "a": {"message": {"author": {"role": "assistant"},
                          "content": {"content_type": "text", "parts": [f"So {_MARK}."]},
                          "metadata": {"content_references": [{"matched_text": _MARK, "alt": f"[x]{_MARK}"}]}},
              "parent": "t"},
    },
}  # fmt: skip
_CLAUDE = {
    "uuid": "u", "name": "N", "created_at": "2026-03-01T10:00:00Z", "chat_messages": [
        {"uuid": "1", "sender": "human", "text": "A", "files": [{"file_name": "a.png"}],
         "attachments": [{"file_name": "b.txt", "extracted_content": "B"}]},
        {"uuid": "2", "sender": "assistant", "parent_message_uuid": "1",
         "content": [{"type": "thinking", "thinking": "T"}, {"type": "text", "text": "C"}]},
    ],
}  # fmt: skip
_OPEN_WEBUI = {
    "id": "w", "title": "W", "chat": {"models": ["m"], "params": {"temperature": 0.4}, "history": {
        "currentId": "a", "messages": {
            "q": {"parentId": None, "role": "user", "content": "Q", "files": [{"type": "image"}]},
            "a": {"parentId": "q", "role": "assistant", "content":
                  '<details type="reasoning" duration="4">\n<summary>S</summary>\n&gt; T\n</details>\nA'}}}},
}  # fmt: skip
_OWN = {"conversation": {"title": "O", "leaf": 2, "model": "m", "own_values": {"own": {"seed": 1}}}, "messages": [
    {"id": 1, "parent": None, "role": "user", "content": "Q", "attachments": [{"name": "n", "text": "T"}]},
    {"id": 2, "parent": 1, "role": "assistant", "content": "A", "thoughts": {"text": "T", "tokens": 1, "seconds": 2.0}},
]}  # fmt: skip
_PRINTED = {"id": "r", "model": "m", "prompt": "Q", "response": "A", "conversation_id": "k", "system": "S",
            "datetime_utc": "2026-08-04T10:00:00", "prompt_fragments": [{"content": "F"}]}  # fmt: skip
TREES: list[list[dict[str, Any]]] = [[tree] * 3 for tree in (_CHATGPT, _CLAUDE, _OPEN_WEBUI, _OWN, _PRINTED)]
_LOG = """
CREATE TABLE conversations (id TEXT, name TEXT, model TEXT);
CREATE TABLE responses (id TEXT, model TEXT, prompt TEXT, system TEXT, response TEXT, conversation_id TEXT,
    datetime_utc TEXT);
CREATE TABLE fragments (id INTEGER PRIMARY KEY, content TEXT);
CREATE TABLE prompt_fragments (response_id TEXT, fragment_id INTEGER, "order" INTEGER);
CREATE TABLE messages (hash TEXT PRIMARY KEY, parent_hash TEXT, role TEXT);
CREATE TABLE parts (id INTEGER PRIMARY KEY, message_hash TEXT, position INTEGER, type TEXT, text TEXT, payload TEXT);
CREATE TABLE threads (id TEXT, name TEXT, tip_message_hash TEXT);
CREATE TABLE turns (id TEXT, thread_id TEXT, tip_message_hash TEXT, model TEXT, datetime_utc TEXT);
INSERT INTO conversations VALUES ('k', 'Tea', 'm');
INSERT INTO responses VALUES ('r', 'm', 'Q', 'S', 'A', 'k', '2026-05-01'), ('s', 'm', 'Q', 'S', 'A', 'k', '2026-05-02');
INSERT INTO fragments VALUES (1, 'F');
INSERT INTO prompt_fragments VALUES ('r', 1, 0), ('s', 1, 0);
INSERT INTO messages VALUES ('q', NULL, 'user'), ('a', 'q', 'assistant');
INSERT INTO parts VALUES (1, 'q', 0, 'text', NULL, '{"text_ref": [{"fragment": 1}, {"literal": "L"}]}'),
    (2, 'a', 0, 'text', 'A', NULL);
INSERT INTO threads VALUES ('t', 'T', 'a');
INSERT INTO turns VALUES ('u', 't', 'a', 'm', '2026-08-04');
"""


@contextlib.contextmanager
def imported(home: Path) -> Iterator[Attempt]:
    """Exports of each kind, also packed, with spoiled values or bytes, are read into a store."""
    from app.conversations.importing.parts import ImportProblem
    from app.conversations.importing.reading import read_conversations
    from app.conversations.opening import open_store

    log, path = home / "logs.db", home / "export"
    with contextlib.closing(sqlite3.connect(log)) as source:
        source.executescript(_LOG)
    database = log.read_bytes()
    store = open_store(home / "conversations.sqlite")

    def attempt(draw: random.Random) -> None:
        kind = draw.randrange(len(TREES) + 2)
        unpacked = 0
        if kind == len(TREES):
            path.write_bytes(spoiled(database, draw))
        else:
            tree = draw.choice(TREES)
            trees = [spoiled_tree(entry, draw) for entry in tree] if draw.random() < 0.7 else tree
            data = json.dumps(trees).encode()
            unpacked = len(data)
            if kind > len(TREES):
                with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                    archive.writestr("conversations-0.json", data)
                    archive.writestr("conversations-1.json", json.dumps(draw.choice(TREES)))
                data = path.read_bytes()
            path.write_bytes(spoiled(data, draw) if draw.random() < 0.5 else data)
        size = path.stat().st_size + unpacked
        try:
            found = read_conversations(path)
        except ImportProblem as problem:
            raise Refused from problem
        made = sum(len(message.content) for chat in found.conversations for message in chat.messages)
        if made > 100 * size:
            raise AssertionError(f"{made} characters were made of {size} bytes")
        store.take_in(found.conversations)

    try:
        yield attempt
    finally:
        store.close()


ATTACKS = [Attack("exports of other programs", 20_000, imported)]
