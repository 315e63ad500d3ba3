"""Small exports of the programs whose conversations are imported, one of each kind."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

CHATGPT = {
    "title": "Bees", "create_time": 1700000000.5, "update_time": 1700000100.0, "conversation_id": "c-1",
    "current_node": "a2", "default_model_slug": "gpt-5", "is_archived": False, "is_starred": True,
    "mapping": {
        "root": {"id": "root", "message": None, "parent": None, "children": ["sys"]},
        "sys": {"message": {"author": {"role": "system"}, "content": {"content_type": "text", "parts": [""]}},
                "parent": "root", "children": ["ctx"]},
        "ctx": {"message": {"author": {"role": "user"}, "content": {
                    "content_type": "user_editable_context", "user_profile": "", "user_instructions": "Be brief."},
                    "metadata": {"is_visually_hidden_from_conversation": True}}, "parent": "sys", "children": ["q"]},
        "q": {"message": {"author": {"role": "user"}, "create_time": 1700000001.0,
                          "content": {"content_type": "multimodal_text", "parts": [
                              {"content_type": "image_asset_pointer", "asset_pointer": "file-service://x"},
                              "Why do bees dance?"]}}, "parent": "ctx", "children": ["a1", "t"]},
        "a1": {"message": {"author": {"role": "assistant"}, "create_time": 1700000002.0,
                           "status": "finished_successfully", "content": {"content_type": "text", "parts": ["First."]},
                           "metadata": {"model_slug": "gpt-4"}}, "parent": "q", "children": []},
        "t": {"message": {"author": {"role": "assistant"}, "create_time": 1700000003.0, "content": {
                  "content_type": "thoughts", "thoughts": [{"summary": "Dance", "content": "They show the way."}]}},
              "parent": "q", "children": ["r"]},
        "r": {"message": {"author": {"role": "assistant"}, "content": {
                  "content_type": "reasoning_recap", "content": "Thought for 7 seconds"},
                  "metadata": {"finished_duration_sec": 7}}, "parent": "t", "children": ["tool"]},
        "tool": {"message": {"author": {"role": "tool"}, "content": {"content_type": "execution_output", "text": "42"}},
                 "parent": "r", "children": ["a2"]},
        "a2": {"message": {"author": {"role": "assistant"}, "create_time": 1700000010.0,
                           "content": {"content_type": "text", "parts": ["Second."]},
                           "metadata": {"model_slug": "gpt-5"}}, "parent": "tool", "children": []},
    },
}  # fmt: skip
CLAUDE = {
    "uuid": "u-1", "name": "Rain", "created_at": "2025-03-01T10:00:00.000000Z", "updated_at": "2025-03-01T10:05:00Z",
    "chat_messages": [
        {"uuid": "m1", "sender": "human", "text": "Haiku?", "created_at": "2025-03-01T10:00:01Z",
         "content": [{"type": "text", "text": "Haiku?"}],
         "attachments": [{"file_name": "rules.txt", "extracted_content": "5-7-5"}], "files": []},
        {"uuid": "m2", "sender": "assistant", "text": "old", "created_at": "2025-03-01T10:00:09Z", "content": [
            {"type": "thinking", "thinking": "Count."}, {"type": "text", "text": "Rain on"},
            {"type": "tool_use", "name": "artifacts"}, {"type": "text", "text": "the roof"}]},
        {"uuid": "m3", "sender": "human", "text": "Thanks", "content": []},
    ],
}  # fmt: skip
OPEN_WEBUI = {
    "id": "w-1", "title": "Soup", "created_at": 1710000000, "updated_at": 1710000500, "archived": True, "pinned": False,
    "chat": {
        "models": ["qwen3"], "params": {"system": "You cook.", "temperature": 0.4, "seed": 11},
        "history": {"currentId": "b", "messages": {
            "q": {"id": "q", "parentId": None, "childrenIds": ["a", "b"], "role": "user", "content": "Soup?",
                  "timestamp": 1710000001, "files": [
                      {"type": "file", "name": "x", "file": {"filename": "pantry.txt", "data": {"content": "leeks"}}},
                      {"type": "image", "url": "data:image/png;base64,"}]},
            "a": {"id": "a", "parentId": "q", "role": "assistant", "content": "Lentils.", "model": "qwen3",
                  "timestamp": 1710000002, "done": True, "output": [
                      {"type": "reasoning", "duration": 2, "content": [{"type": "output_text", "text": "Cheap."}]},
                      {"type": "message", "content": [{"type": "output_text", "text": "Lentils."}]}]},
            "b": {"id": "b", "parentId": "q", "role": "assistant", "model": "llama", "timestamp": 1710000003,
                  "content": '<details type="reasoning" done="true" duration="4">\n<summary>Thought for 4 seconds'
                             "</summary>\n&gt; hot &amp; cheap\n</details>\nOnions.",
                  "usage": {"completion_tokens": 9, "response_token/s": 30.5}},
        }},
    },
}  # fmt: skip


def old_log(path: Path) -> Path:
    with closing(sqlite3.connect(path)) as log:
        log.executescript(
            "CREATE TABLE conversations (id TEXT, name TEXT, model TEXT);"
            "CREATE TABLE responses (id TEXT, model TEXT, prompt TEXT, system TEXT, options_json TEXT, response TEXT,"
            " conversation_id TEXT, duration_ms INT, datetime_utc TEXT, input_tokens INT, output_tokens INT);"
        )
        log.execute("INSERT INTO conversations VALUES ('k', 'Tea', 'mini')")
        for number, asked in enumerate(("Tea?", "And milk?")):
            log.execute(
                "INSERT INTO responses VALUES"
                " (?, 'mini', ?, 'Be kind.', '{\"temperature\": 0.5}', 'Yes.', 'k', 2000, ?, 7, 10)",
                (f"r{number}", asked, f"2024-05-01T10:0{number}:00"),
            )
        log.commit()
    return path


def new_log(path: Path) -> Path:
    with closing(sqlite3.connect(path)) as log:
        log.executescript(
            "CREATE TABLE messages (hash TEXT PRIMARY KEY, parent_hash TEXT, role TEXT);"
            "CREATE TABLE parts (id INTEGER PRIMARY KEY, message_hash TEXT, position INTEGER, type TEXT, text TEXT,"
            " payload TEXT);"
            "CREATE TABLE fragments (id INTEGER PRIMARY KEY, content TEXT);"
            "CREATE TABLE threads (id TEXT, name TEXT, tip_message_hash TEXT);"
            "CREATE TABLE turns (id TEXT, thread_id TEXT, tip_message_hash TEXT, model TEXT, resolved_model TEXT,"
            " options_json TEXT, input_tokens INTEGER, output_tokens INTEGER, duration_ms INTEGER, datetime_utc TEXT);"
            "INSERT INTO messages VALUES ('s', NULL, 'system'), ('q', 's', 'user'), ('a', 'q', 'assistant'),"
            " ('x', 'y', 'user'), ('y', 'x', 'assistant');"
            "INSERT INTO parts VALUES (1, 's', 0, 'text', 'Be kind.', NULL),"
            " (2, 'q', 0, 'text', NULL,"
            """ '{"text_ref": [{"fragment": 1}, {"literal": "\\nTea?"}, {"fragment": 9}]}'),"""
            " (3, 'a', 0, 'reasoning', 'Hm.', NULL), (4, 'a', 1, 'text', 'Yes.', NULL),"
            " (5, 'y', 0, 'text', 'round', NULL);"
            "INSERT INTO fragments VALUES (1, 'a file');"
            "INSERT INTO threads VALUES ('k', 'Tea', 'a'), ('circle', '', 'y');"
            "INSERT INTO turns VALUES ('t', 'k', 'a', 'mini', '', '{}', 3, 4, 1000, '2026-08-04T10:00:00+00:00');"
        )
    return path
