"""The ``logs.db`` of the ``llm`` command: SQLite, with the tables of versions up to 0.31 (``responses``) and of later
ones (``turns``)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from app.conversations.generation import Generation, generation_of
from app.conversations.importing.parts import (
    MOST_MESSAGES,
    ImportedConversation,
    ImportedMessage,
    ImportProblem,
    chain,
    moment,
    name,
    number,
    text,
    whole,
)
from app.conversations.records import Thoughts

HEADER = b"SQLite format 3\0"
_STEPS = 10_000_000
"""Steps of SQLite's virtual machine between two looks at how much was done."""
_MOST_LOOKS = 500
"""Number of those looks after which reading is given up."""
Row = Mapping[str, Any]


def conversations(path: Path) -> list[ImportedConversation]:
    """The conversations of the database at ``path``, which is only read. Raises ImportProblem."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source:
            _guard(source)
            source.row_factory = sqlite3.Row
            tables = {row[0] for row in source.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables & {"responses", "turns"}:
                raise ImportProblem(f"{path} is a SQLite database, but not a log of llm: it has no responses.")
            found = dict(_old(source)) if {"responses", "conversations"} <= tables else {}
            if {"threads", "turns", "messages", "parts"} <= tables:
                found |= dict(_new(source))
            return list(found.values())
    except sqlite3.Error as error:
        raise ImportProblem(f"{path} cannot be read as llm's log: {error}.") from error


def _guard(source: sqlite3.Connection) -> None:
    """Have nothing run that a crafted database brings with it, and an end to what would take for ever."""
    for pragma in ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON"):
        source.execute(f"PRAGMA {pragma}")
    source.text_factory = lambda data: data.decode("utf-8", "replace")
    looks = 0

    def look() -> int:
        nonlocal looks
        looks += 1
        return looks > _MOST_LOOKS

    source.set_progress_handler(look, _STEPS)


# --- up to 0.31: one row for each question with its answer -----------------------------------------------------------


def _old(source: sqlite3.Connection) -> Iterator[tuple[str, ImportedConversation]]:
    names = {str(row["id"]): row for row in source.execute("SELECT id, name, model FROM conversations")}
    answers: dict[str, list[Row]] = {}
    for row in source.execute("SELECT * FROM responses ORDER BY datetime_utc, id"):
        facts = dict(row)
        answers.setdefault(str(facts.get("conversation_id") or facts.get("id")), []).append(facts)
    for key, rows in answers.items():
        facts = dict(names[key]) if key in names else {}
        messages = [message for row in rows[:MOST_MESSAGES] for message in _pair(row)]
        yield key, _conversation(key, facts.get("name"), rows, messages, text(rows[0].get("system")))


def _pair(row: Row) -> list[ImportedMessage]:
    asked = moment(row.get("datetime_utc"))
    question = ImportedMessage("user", text(row.get("prompt")), created=asked)
    answer = _answer(row, text(row.get("response")), Thoughts(text(row.get("reasoning"))))
    return [message for message in (question, answer) if message.content.strip() or message.thoughts.text]


def _answer(row: Row, said: str, thoughts: Thoughts) -> ImportedMessage:
    tokens, seconds = whole(row.get("output_tokens")), number(row.get("duration_ms")) / 1000
    return ImportedMessage(
        "assistant",
        said,
        created=moment(row.get("datetime_utc")),
        model=name(row.get("resolved_model")) or name(row.get("model")),
        tokens=tokens,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        thoughts=thoughts,
        generation=_options(row),
    )


def _options(row: Row) -> Generation:
    try:
        options = json.loads(row.get("options_json") or "{}")
    except (ValueError, TypeError, RecursionError):
        options = {}
    return generation_of({**(options if isinstance(options, dict) else {}), "prompt_tokens": row.get("input_tokens")})


def _conversation(
    key: str, title: object, rows: list[Row], messages: list[ImportedMessage], system: str
) -> ImportedConversation:
    times = [time for time in (moment(row.get("datetime_utc")) for row in rows) if time is not None]
    return ImportedConversation(
        origin=f"llm:{name(key)}",
        title=name(title),
        system=system,
        model=name(rows[-1].get("model")) if rows else "",
        created=min(times, default=None),
        updated=max(times, default=None),
        messages=chain(messages),
    )


# --- later: a tree of messages, and threads that end at one of them --------------------------------------------------


def _new(source: sqlite3.Connection) -> Iterator[tuple[str, ImportedConversation]]:
    records = {str(row["hash"]): dict(row) for row in source.execute("SELECT hash, parent_hash, role FROM messages")}
    parts: dict[str, list[Row]] = {}
    for row in source.execute("SELECT id, message_hash, type, text FROM parts ORDER BY message_hash, position"):
        parts.setdefault(str(row["message_hash"]), []).append(dict(row))
    turns: dict[str, list[Row]] = {}
    for row in source.execute("SELECT * FROM turns ORDER BY datetime_utc, id"):
        turns.setdefault(str(row["thread_id"]), []).append(dict(row))
    for row in source.execute("SELECT id, name, tip_message_hash FROM threads").fetchall():
        key, own = str(row["id"]), turns.get(str(row["id"]), [])
        by_tip = {str(turn.get("tip_message_hash")): turn for turn in own}
        messages: list[ImportedMessage] = []
        system = ""
        for place in _path(records, row["tip_message_hash"]):
            said, thought = _texts(source, parts.get(place, []))
            role = records[place].get("role")
            if role == "system":
                system = system or said
            elif role == "user" and said.strip():
                messages.append(ImportedMessage("user", said))
            elif role == "assistant" and (said.strip() or thought):
                turn = by_tip.get(place, own[-1] if own else {})
                messages.append(_answer(turn, said, Thoughts(thought)))
                if len(messages) > 1 and messages[-2].role == "user":
                    messages[-2].created = messages[-1].created
        yield key, _conversation(key, row["name"], own, messages, system)


def _path(records: Mapping[str, Row], tip: object) -> list[str]:
    """The hashes of the messages up to ``tip``. A circle ends it."""
    path: list[str] = []
    seen: set[str] = set()
    place = str(tip)
    while place in records and place not in seen and len(path) < MOST_MESSAGES:
        seen.add(place)
        path.append(place)
        place = str(records[place].get("parent_hash"))
    return path[::-1]


def _texts(source: sqlite3.Connection, parts: list[Row]) -> tuple[str, str]:
    """The text and the thoughts of a message. Text that was given as fragments is put together again."""
    said, thought = [], []
    for part in parts:
        content = part.get("text")
        if content is None and part.get("type") == "text":
            content = "".join(
                str(row[0])
                for row in source.execute(
                    "SELECT f.content FROM part_fragments p JOIN fragments f ON f.id = p.fragment_id"
                    ' WHERE p.part_id = ? ORDER BY p."order"',
                    (part.get("id"),),
                )
            )
        if part.get("type") == "text":
            said.append(text(content))
        elif part.get("type") == "reasoning":
            thought.append(text(content))
    return "\n\n".join(filter(None, said)), "\n\n".join(filter(None, thought))
