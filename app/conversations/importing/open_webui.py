"""Open WebUI's export: a list of chats, each with a tree of messages by id (``chat.history.messages``)."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from app.attachments.attachment import Attachment
from app.conversations.importing.parts import (
    ImportedConversation,
    ImportedMessage,
    ImportedNode,
    chain,
    file_mark,
    moment,
    name,
    number,
    rows,
    table,
    text,
    tree,
    whole,
)
from app.conversations.records import NO_THOUGHTS, Generation, Thoughts, generation_of

_OPENING, _CLOSING = re.compile('<details type="(reasoning|tool_calls|code_interpreter)"'), "</details>"
_DURATION = re.compile(r'duration="(\d{1,6})')


def is_conversation(found: Mapping[str, Any]) -> bool:
    chat = table(found.get("chat"))
    return isinstance(chat.get("history"), dict) or isinstance(chat.get("messages"), list)


def conversation(entry: Mapping[str, Any]) -> ImportedConversation:
    """The chat with all its branches."""
    chat = table(entry.get("chat"))
    models = [name(model) for model in rows(chat.get("models"))]
    model = models[0] if models else ""
    history = table(chat.get("history"))
    records = {key: table(value) for key, value in table(history.get("messages")).items()}
    settings = table(chat.get("params"))
    generation = generation_of(settings)
    leaf = None
    if records:
        nodes = {
            key: ImportedNode(_parent(record), _message(record, model, generation)) for key, record in records.items()
        }
        messages, leaf = tree(nodes, name(history.get("currentId")) or None)
    else:
        listed = [table(record) for record in rows(chat.get("messages"))]
        made = [_message(record, model, generation) for record in listed]
        messages = chain([message for message in made if message is not None])
    return ImportedConversation(
        origin=f"open-webui:{name(entry.get('id')) or name(chat.get('id'))}",
        title=name(entry.get("title")) or name(chat.get("title")),
        system=text(chat.get("system")) or text(settings.get("system")),
        model=model,
        created=moment(entry.get("created_at")) or moment(chat.get("timestamp")),
        updated=moment(entry.get("updated_at")),
        messages=messages,
        leaf=leaf,
        archived=entry.get("archived") is True,
        pinned=entry.get("pinned") is True,
    )


def _parent(record: Mapping[str, Any]) -> str | None:
    parent = record.get("parentId")
    return parent if isinstance(parent, str) else None


def _message(record: Mapping[str, Any], model: str, generation: Generation) -> ImportedMessage | None:
    role = record.get("role")
    if role not in ("user", "assistant"):
        return None
    content = text(record.get("content"))
    if role == "user":
        return _question(record, content)
    body, thoughts = without_folded(content)
    thoughts = thoughts if thoughts.text else _thoughts_beside(record)
    failed = bool(record.get("error"))
    if not body.strip() and not thoughts.text and not failed:
        return None
    usage = table(record.get("usage")) or table(record.get("info"))
    return ImportedMessage(
        "assistant",
        body,
        created=moment(record.get("timestamp")),
        model=name(record.get("model")) or model,
        state="failed" if failed else "stopped" if record.get("done") is False else "complete",
        tokens=whole(usage.get("completion_tokens")) or whole(usage.get("eval_count")),
        tokens_per_s=number(usage.get("response_token/s")),
        thoughts=thoughts,
        generation=generation,
    )


def _question(record: Mapping[str, Any], body: str) -> ImportedMessage | None:
    """A question with its files: those whose text is in the export are attached, the others are named."""
    made: list[Attachment] = []
    named: list[str] = []
    for entry in map(table, rows(record.get("files"))):
        file = table(entry.get("file"))
        content = text(table(file.get("data")).get("content"))
        title = name(file.get("filename")) or name(entry.get("name"))
        if content:
            made.append(Attachment(title or "attachment", content))
        else:
            named.append(file_mark(title or entry.get("type")))
    body = "\n\n".join([*named, body]) if body else "\n\n".join(named)
    if not body.strip() and not made:
        return None
    created = moment(record.get("timestamp"))
    return ImportedMessage("user", body, created=created, attachments=tuple(made), only_named=len(named))


def without_folded(content: str) -> tuple[str, Thoughts]:
    """An answer without what is folded in it, the thoughts and the uses of tools, and those thoughts."""
    unfolded: list[str] = []
    thoughts: list[str] = []
    seconds, place = 0.0, 0
    while (opening := _OPENING.search(content, place)) is not None:
        end = content.find(_CLOSING, opening.end())
        if end < 0:
            break
        unfolded.append(content[place : opening.start()])
        place = end + len(_CLOSING)
        if opening.group(1) == "reasoning":
            tag, _, inside = content[opening.start() : end].partition(">")
            duration = _DURATION.search(tag)
            seconds += float(duration.group(1)) if duration else 0.0
            thoughts.append(_unfolded(inside))
    if not unfolded:
        return content, NO_THOUGHTS
    unfolded.append(content[place:])
    return "".join(unfolded).strip("\n"), Thoughts(text("\n\n".join(filter(None, thoughts))), seconds=seconds)


def _thoughts_beside(record: Mapping[str, Any]) -> Thoughts:
    """The thoughts of an answer that is kept as a list of outputs beside its text."""
    thoughts, seconds = [], 0.0
    for output in map(table, rows(record.get("output"))):
        if output.get("type") == "reasoning":
            parts = (*rows(output.get("content")), *rows(output.get("summary")))
            thoughts += [text(table(part).get("text")) for part in parts]
            seconds += number(output.get("duration"))
    return Thoughts("\n\n".join(filter(None, thoughts)), seconds=seconds)


def _unfolded(inside: str) -> str:
    before, closing, after = inside.partition("</summary>")
    lines = html.unescape(after if closing else before).strip("\n").split("\n")
    return "\n".join(line.removeprefix("> ").removeprefix(">") for line in lines)
