"""The log of the ``llm`` command: its ``logs.db``, with the tables of versions up to 0.31 (``responses``) and of later
ones (``turns``), and what ``llm logs --json`` prints of it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
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
    file_mark,
    moment,
    name,
    number,
    rows,
    table,
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
    names = {str(row["id"]): row["name"] for row in source.execute("SELECT id, name FROM conversations")}
    answers: list[dict[str, Any]] = [
        dict(row) for row in source.execute("SELECT * FROM responses ORDER BY datetime_utc, id")
    ]
    for kind in ("prompt_fragments", "system_fragments"):
        given = _fragments(source, kind)
        for row in answers:
            row[kind] = given.get(row.get("id"), [])
            row["conversation_name"] = names.get(str(row.get("conversation_id")))
    attached = _attachments(source)
    for row in answers:
        row["attachments"] = attached.get(row.get("id"), [])
    return _by_conversation(answers)


def _attachments(source: sqlite3.Connection) -> dict[Any, list[Any]]:
    """The types of the files that ``-a`` gave to each response, in the form in which ``llm logs --json`` has them."""
    found: dict[Any, list[Any]] = {}
    if source.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'prompt_attachments'").fetchone():
        for response, kind in source.execute(
            "SELECT p.response_id, a.type FROM prompt_attachments p JOIN attachments a ON a.id = p.attachment_id"
            ' ORDER BY p.response_id, p."order"'
        ):
            found.setdefault(response, []).append({"type": kind})
    return found


def _fragments(source: sqlite3.Connection, kind: str) -> dict[Any, list[Any]]:
    """What ``-f`` or ``--sf`` gave to each response, in the form in which ``llm logs --json`` has it."""
    found: dict[Any, list[Any]] = {}
    if source.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (kind,)).fetchone():
        for response, content in source.execute(
            f"SELECT p.response_id, f.content FROM {kind} p JOIN fragments f ON f.id = p.fragment_id"
            ' ORDER BY p.response_id, p."order"'
        ):
            found.setdefault(response, []).append({"content": content})
    return found


def is_printed(entry: Mapping[str, Any]) -> bool:
    """Whether ``entry`` is one of those that ``llm logs --json`` prints: a question with its answer."""
    return {"prompt", "response", "conversation_id", "datetime_utc"} <= entry.keys()


def printed_conversations(entries: Iterable[Row]) -> list[ImportedConversation]:
    """The conversations of the entries that ``llm logs --json`` printed."""
    ordered = sorted(entries, key=lambda entry: (text(entry.get("datetime_utc")), text(entry.get("id"))))
    return [conversation for _, conversation in _by_conversation(ordered)]


def _by_conversation(answers: Iterable[Row]) -> Iterator[tuple[str, ImportedConversation]]:
    grouped: dict[str, list[Row]] = {}
    for row in answers:
        grouped.setdefault(str(row.get("conversation_id") or row.get("id") or ""), []).append(row)
    for key, own in grouped.items():
        messages = [message for row in own[:MOST_MESSAGES] for message in _pair(row)]
        parts = (*_given(own[0], "system"), text(own[0].get("system")))
        system = "\n\n".join(part.strip() for part in parts if part.strip())
        yield key, _conversation(key, own[0].get("conversation_name"), own, messages, system)


def _given(row: Row, kind: str) -> list[str]:
    """The fragments of the prompt or the system prompt that are not already in it, as they are since 0.32."""
    fragments = (text(table(fragment).get("content")) for fragment in rows(row.get(f"{kind}_fragments")))
    return [fragment for fragment in fragments if fragment.strip() not in text(row.get(kind))]


def _pair(row: Row) -> list[ImportedMessage]:
    asked = moment(row.get("datetime_utc"))
    named = [file_mark(table(file).get("type")) for file in rows(row.get("attachments"))]
    said = "\n".join(filter(None, (*named, *_given(row, "prompt"), text(row.get("prompt")))))
    question = ImportedMessage("user", said, created=asked, only_named=len(named))
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
    return generation_of({**_decoded(row.get("options_json")), "prompt_tokens": row.get("input_tokens")})


def _decoded(value: object) -> Mapping[str, Any]:
    """A JSON object, decoded or not; empty if ``value`` is neither."""
    try:
        return table(json.loads(value) if isinstance(value, str) else value)
    except (ValueError, RecursionError):
        return {}


def _conversation(
    key: str, title: object, own: list[Row], messages: list[ImportedMessage], system: str
) -> ImportedConversation:
    times = [time for time in (moment(row.get("datetime_utc")) for row in own) if time is not None]
    return ImportedConversation(
        origin=f"llm:{name(key)}",
        title=name(title),
        system=system,
        model=name(own[-1].get("model")) if own else "",
        created=min(times, default=None),
        updated=max(times, default=None),
        messages=chain(messages),
    )


# --- later: a tree of messages, and threads that end at one of them --------------------------------------------------


def _new(source: sqlite3.Connection) -> Iterator[tuple[str, ImportedConversation]]:
    records = {str(row["hash"]): dict(row) for row in source.execute("SELECT hash, parent_hash, role FROM messages")}
    parts: dict[str, list[Row]] = {}
    for row in source.execute("SELECT message_hash, type, text, payload FROM parts ORDER BY message_hash, position"):
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
    """The text and the thoughts of a message."""
    said, thought = [], []
    for part in parts:
        content = part.get("text")
        if content is None:
            content = _put_together(source, _decoded(part.get("payload")))
        if part.get("type") == "text":
            said.append(text(content))
        elif part.get("type") == "reasoning":
            thought.append(text(content))
    return "\n\n".join(filter(None, said)), "\n\n".join(filter(None, thought))


def _put_together(source: sqlite3.Connection, payload: Mapping[str, Any]) -> str:
    """The text of a part that is kept as a list of literal pieces and of fragments."""
    pieces = []
    for piece in map(table, rows(payload.get("text_ref"))):
        if "literal" in piece:
            pieces.append(text(piece["literal"]))
        else:
            found = source.execute(
                "SELECT content FROM fragments WHERE id = ?", (whole(piece.get("fragment")),)
            ).fetchone()
            pieces.append(text(found[0]) if found else "")
    return "".join(pieces)
