"""The log of the ``llm`` command: its ``logs.db``, with the tables of versions up to 0.31 (``responses``) and of later
ones (``turns``), and what ``llm logs --json`` prints of it."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.conversations.importing.parts import (
    LONGEST_TEXT,
    MOST_MESSAGES,
    Allowance,
    ImportedConversation,
    ImportedMessage,
    ImportProblem,
    ImportTooLarge,
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
from app.conversations.records import Generation, Thoughts, generation_of
from app.text_safety import one_line

HEADER = b"SQLite format 3\0"
_STEPS = 10_000_000
"""Steps of SQLite's virtual machine between two looks at how much was done."""
_MOST_LOOKS = 500
"""Number of those looks after which reading is given up."""
_LONGEST_VALUE = 4 * LONGEST_TEXT
"""Maximum bytes of a value in the database."""
_MOST_READ = 500_000_000
"""Maximum bytes that are read of a database, of the columns that are looked at."""
_ROW_SIZE = 50
"""Number of bytes that a row counts beside its values."""
_MOST_FRAGMENTS = 500
"""Number of fragments of a prompt that are looked at. Each is searched for in the prompt."""
_ANSWER = ("model", "resolved_model", "options_json", "input_tokens", "output_tokens", "duration_ms", "datetime_utc")
"""The columns of an answer's figures."""
Row = Mapping[str, Any]


class _Log:
    """A database of llm, which is only read. ``size`` is its file's, in bytes.

    A crafted one could make much of little by columns that are worked out when they are read, by views and virtual
    tables, or by rows that share their bytes. Hence only real columns of real tables are read, and what is read is
    counted.
    """

    def __init__(self, source: sqlite3.Connection, size: int) -> None:
        self._source = source
        self._left = Allowance(min(_MOST_READ, 10_000_000 + 4 * size))
        self._looks = 0
        for pragma in ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON"):
            source.execute(f"PRAGMA {pragma}")
        source.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        source.text_factory = self._text
        source.set_progress_handler(self._look, _STEPS)
        named = source.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
        self.tables = {str(name) for name, made in named if str(made).upper().startswith("CREATE TABLE")}

    def _look(self) -> int:
        """Ends what would take for ever."""
        self._looks += 1
        return self._looks > _MOST_LOOKS

    def _text(self, data: bytes) -> str:
        self._left.spend(len(data))
        return data.decode("utf-8", "replace")

    def rows(self, table: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The rows of ``table``, unsorted, with those of ``columns`` that it has; nothing if there is no such table.

        Sorting is left to Python: SQLite would read everything before the first row could be counted. Raises
        ImportProblem, ImportTooLarge and sqlite3.Error.
        """
        if table not in self.tables:
            return
        kinds = {str(row[1]): row[6] for row in self._source.execute(f'PRAGMA table_xinfo("{table}")')}
        if any(kinds.values()):
            raise ImportProblem(f"It is no log of llm: columns of its table {table} are worked out when they are read.")
        taken = [column for column in columns if column in kinds]
        if not taken:
            return
        quoted = ", ".join(f'"{column}"' for column in taken)
        for row in self._source.execute(f'SELECT {quoted} FROM "{table}"'):
            self._left.spend(_ROW_SIZE + sum(len(value) for value in row if isinstance(value, bytes)))
            yield dict(zip(taken, row, strict=True))


def conversations(path: Path, size: int, allowance: Allowance) -> list[ImportedConversation | None]:
    """The conversations of the database at ``path``, of ``size`` bytes; None for each that is too large, by itself or
    for ``allowance``. The database is only read. Raises ImportProblem."""
    shown = one_line(str(path))
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source:
            log = _Log(source, size)
            if not log.tables & {"responses", "turns"}:
                raise ImportProblem(f"{shown} is a SQLite database, but not a log of llm: it has no responses.")
            conversations_by_id: dict[str, ImportedConversation | None] = {}
            if {"responses", "conversations"} <= log.tables:
                conversations_by_id = dict(_old(log, allowance))
            if {"threads", "turns", "messages", "parts"} <= log.tables:
                conversations_by_id |= dict(_new(log, allowance))
            return list(conversations_by_id.values())
    except (sqlite3.Error, UnicodeDecodeError) as error:  # what SQLite says of damage may quote it
        raise ImportProblem(f"{shown} cannot be read as llm's log: {one_line(str(error))}.") from error
    except ImportTooLarge:
        raise ImportProblem(f"{shown} has more text than its size allows; it is damaged.") from None


def _in_order(rows: Iterable[Row], *keys: str) -> list[Row]:
    """``rows`` by ``keys``, numbers before texts."""

    def place(row: Row) -> list[tuple[float, str]]:
        values = (row.get(key) for key in keys)
        return [(value, "") if isinstance(value, int | float) else (math.inf, str(value or "")) for value in values]

    return sorted(rows, key=place)


def _fragments(log: _Log) -> dict[Any, str]:
    return {row.get("id"): text(row.get("content")) for row in log.rows("fragments", ("id", "content"))}


# --- up to 0.31: one row for each question with its answer -----------------------------------------------------------


def _old(log: _Log, allowance: Allowance) -> Iterator[tuple[str, ImportedConversation | None]]:
    names = {str(row.get("id")): row.get("name") for row in log.rows("conversations", ("id", "name"))}
    fragments = _fragments(log)
    kinds = {row.get("id"): row.get("type") for row in log.rows("attachments", ("id", "type"))}
    given = {f"{kind}_fragments": _references(log, f"{kind}_fragments", "fragment_id") for kind in ("prompt", "system")}
    attached = _references(log, "prompt_attachments", "attachment_id")
    answers = LoggedAnswers(allowance)
    for row in log.rows("responses", ("id", "conversation_id", "prompt", "system", "response", "reasoning", *_ANSWER)):
        for kind, references in given.items():
            row[kind] = [{"content": fragments.get(place)} for place in references.get(row.get("id"), ())]
        row["attachments"] = [{"type": kinds[place]} for place in attached.get(row.get("id"), ()) if place in kinds]
        row["conversation_name"] = names.get(str(row.get("conversation_id")))
        answers.add(row)
    yield from answers.named()


def _references(log: _Log, table: str, column: str) -> dict[Any, list[Any]]:
    """The values of ``column`` in ``table`` for each response, in order."""
    found: dict[Any, list[Any]] = {}
    for row in _in_order(log.rows(table, ("response_id", column, "order")), "order"):
        found.setdefault(row.get("response_id"), []).append(row.get(column))
    return found


def is_printed(entry: Mapping[str, Any]) -> bool:
    """Whether ``entry`` is one of those that ``llm logs --json`` prints: a question with its answer."""
    return {"prompt", "response", "conversation_id", "datetime_utc"} <= entry.keys()


@dataclass(frozen=True)
class _LoggedAnswer:
    """A question with its answer. ``messages`` None: they are too large."""

    id: str
    datetime_utc: str
    title: str
    model: str
    system: str
    messages: Sequence[ImportedMessage] | None


class LoggedAnswers:
    """Answers in the form of ``llm logs --json``. Of each only what is imported is kept, taken from ``allowance``."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._grouped: dict[str, list[_LoggedAnswer]] = {}

    def __bool__(self) -> bool:
        return bool(self._grouped)

    def add(self, row: Row) -> None:
        key = name(str(row.get("conversation_id") or row.get("id") or ""))
        system, messages = "", None
        with suppress(ImportTooLarge):
            parts = (*_given(row, "system", self._allowance), text(row.get("system")))
            system = "\n\n".join(part.strip() for part in parts if part.strip())
            self._allowance.spend(len(system))
            messages = _pair(row, self._allowance)
        self._grouped.setdefault(key, []).append(
            _LoggedAnswer(
                name(row.get("id")),
                name(row.get("datetime_utc")),
                name(row.get("conversation_name")),
                name(row.get("model")),
                system,
                messages,
            )
        )

    def conversations(self) -> Iterator[ImportedConversation | None]:
        """The conversations in no order; None for each that is too large."""
        return (conversation for _, conversation in self.named())

    def named(self) -> Iterator[tuple[str, ImportedConversation | None]]:
        """The conversations with their ids, in no order; None for each that is too large."""
        for key, answers in self._grouped.items():
            own = sorted(answers, key=lambda answer: (answer.datetime_utc, answer.id))
            messages = [message for answer in own for message in answer.messages or ()]
            too_large = len(messages) > MOST_MESSAGES or any(answer.messages is None for answer in own)
            yield key, None if too_large else _conversation(key, own, messages)


def _given(row: Row, kind: str, allowance: Allowance) -> list[str]:
    """The fragments that are not already part of the prompt or system prompt, as they are since 0.32."""
    listed = rows(row.get(f"{kind}_fragments"))[:_MOST_FRAGMENTS]
    fragments = [found for entry in listed if isinstance(found := table(entry).get("content"), str)]
    if not fragments:
        return []
    allowance.spend(sum(map(len, fragments)))
    said = text(row.get(kind))
    return [fragment for fragment in map(text, fragments) if fragment.strip() not in said]


def _pair(row: Row, allowance: Allowance) -> list[ImportedMessage]:
    asked = moment(row.get("datetime_utc"))
    named = [file_mark(table(file).get("type")) for file in rows(row.get("attachments"))]
    said = "\n".join(filter(None, (*named, *_given(row, "prompt", allowance), text(row.get("prompt")))))
    question = ImportedMessage("user", said, created=asked, only_named=len(named))
    answer = _answer(row, text(row.get("response")), Thoughts(text(row.get("reasoning"))))
    pair = [message for message in (question, answer) if message.content.strip() or message.thoughts.text]
    for message in pair:
        message.spend(allowance)
    return pair


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


def _conversation(key: str, own: Sequence[_LoggedAnswer], messages: list[ImportedMessage]) -> ImportedConversation:
    times = [time for time in (moment(answer.datetime_utc) for answer in own) if time is not None]
    return ImportedConversation(
        origin=f"llm:{key}",
        title=own[0].title if own else "",
        system=own[0].system if own else "",
        model=own[-1].model if own else "",
        created=min(times, default=None),
        updated=max(times, default=None),
        messages=chain(messages),
    )


# --- later: a tree of messages, and threads that end at one of them --------------------------------------------------


def _new(log: _Log, allowance: Allowance) -> Iterator[tuple[str, ImportedConversation | None]]:
    records = {str(row.get("hash")): row for row in log.rows("messages", ("hash", "parent_hash", "role"))}
    parts: dict[str, list[Row]] = {}
    for row in _in_order(log.rows("parts", ("message_hash", "position", "type", "text", "payload")), "position"):
        parts.setdefault(str(row.get("message_hash")), []).append(row)
    turns: dict[str, list[Row]] = {}
    for row in _in_order(log.rows("turns", ("id", "thread_id", "tip_message_hash", *_ANSWER)), "datetime_utc", "id"):
        turns.setdefault(str(row.get("thread_id")), []).append(row)
    fragments = _fragments(log)
    said_at: dict[str, tuple[str, str]] = {}
    """The texts put together so far. Threads that part share their beginning."""
    for row in log.rows("threads", ("id", "name", "tip_message_hash")):
        key, own = name(str(row.get("id"))), turns.get(str(row.get("id")), [])
        by_tip = {str(turn.get("tip_message_hash")): turn for turn in own}
        messages: list[ImportedMessage] = []
        system = ""
        try:
            for place in _path(records, row.get("tip_message_hash"), allowance):
                if place not in said_at:
                    said_at[place] = _texts(fragments, parts.get(place, []), allowance)
                body, thought = said_at[place]
                role = records[place].get("role")
                if role == "system":
                    system = system or body
                elif role == "user" and body.strip():
                    messages.append(ImportedMessage("user", body))
                elif role == "assistant" and (body.strip() or thought):
                    turn = by_tip.get(place, own[-1] if own else {})
                    messages.append(_answer(turn, body, Thoughts(thought)))
                    if len(messages) > 1 and messages[-2].role == "user":
                        messages[-2].created = messages[-1].created
                else:
                    continue
                if messages:
                    messages[-1].spend(allowance)
        except ImportTooLarge:
            yield key, None
            continue
        yield key, _thread(key, row.get("name"), own, system, messages)


def _thread(
    key: str, title: object, own: Sequence[Row], system: str, messages: list[ImportedMessage]
) -> ImportedConversation:
    dates = [(name(turn.get("datetime_utc")), name(turn.get("model"))) for turn in own]
    answers = [_LoggedAnswer("", date, name(title), model, system, ()) for date, model in dates]
    return _conversation(key, answers or [_LoggedAnswer("", "", name(title), "", system, ())], messages)


def _path(records: Mapping[str, Row], tip: object, allowance: Allowance) -> list[str]:
    """The hashes of the messages up to ``tip``. A circle ends it. Raises ImportTooLarge."""
    path: list[str] = []
    seen: set[str] = set()
    place = str(tip)
    while place in records and place not in seen:
        if len(path) == MOST_MESSAGES:
            raise ImportTooLarge
        allowance.spend(_ROW_SIZE)
        seen.add(place)
        path.append(place)
        place = str(records[place].get("parent_hash"))
    return path[::-1]


def _texts(fragments: Mapping[Any, str], parts: list[Row], allowance: Allowance) -> tuple[str, str]:
    """The text and the thoughts of a message."""
    answers, thought = [], []
    for part in parts:
        content = part.get("text")
        if content is None:
            content = _put_together(fragments, _decoded(part.get("payload")), allowance)
        if part.get("type") == "text":
            answers.append(text(content))
        elif part.get("type") == "reasoning":
            thought.append(text(content))
    return "\n\n".join(filter(None, answers)), "\n\n".join(filter(None, thought))


def _put_together(fragments: Mapping[Any, str], payload: Mapping[str, Any], allowance: Allowance) -> str:
    """The text of a part that is kept as a list of literal pieces and of fragments."""
    pieces = []
    for piece in map(table, rows(payload.get("text_ref"))):
        said = text(piece["literal"]) if "literal" in piece else fragments.get(whole(piece.get("fragment")), "")
        allowance.spend(len(said))
        pieces.append(said)
    return "".join(pieces)
