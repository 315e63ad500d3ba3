"""privatellm's own JSON export: one conversation with all its branches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from app.attachments.attachment import Attachment
from app.conversations.importing.parts import (
    ImportedConversation,
    ImportedMessage,
    ImportedNode,
    chain,
    digest,
    moment,
    name,
    number,
    picture,
    rows,
    table,
    text,
    tree,
    whole,
)
from app.conversations.records import State, Thoughts, generation_of

_KNOWN_ORIGINS = ("privatellm:", "chatgpt:", "claude:", "open-webui:", "llm:")


def is_conversation(found: Mapping[str, Any]) -> bool:
    return isinstance(found.get("messages"), list)


def conversation(found: Mapping[str, Any]) -> ImportedConversation:
    """The conversation of an export; of a chat that was not saved yet, only its shown branch."""
    facts = table(found.get("conversation")) or found
    records = [table(record) for record in rows(found.get("messages"))]
    leaf: int | None = None
    if any("id" in record for record in records):
        nodes = {
            _key(record.get("id")): ImportedNode(_key(record.get("parent")), _message(record)) for record in records
        }
        messages, leaf = tree(nodes, _key(facts.get("leaf")))
    else:
        made = [_message(record) for record in records]
        messages = chain([message for message in made if message is not None])
    own_values = facts.get("own_values")
    return ImportedConversation(
        origin=_origin(facts, messages),
        title=name(facts.get("title")),
        system=text(facts.get("system")),
        model=name(facts.get("model")),
        created=moment(facts.get("created")),
        updated=moment(facts.get("updated")),
        messages=messages,
        leaf=leaf,
        archived=facts.get("archived") is True,
        pinned=facts.get("pinned") is True,
        own_values=own_values if isinstance(own_values, dict) else {},
    )


def _key(number: object) -> str:
    return str(number) if isinstance(number, int) and abs(number) < 2**63 else ""


def _origin(facts: Mapping[str, Any], messages: list[ImportedMessage]) -> str:
    origin = name(facts.get("origin"))
    if origin.startswith(_KNOWN_ORIGINS):
        return origin
    return f"privatellm:{digest(facts.get('created'), messages)}"


def _message(record: Mapping[str, Any]) -> ImportedMessage | None:
    role, state = record.get("role"), record.get("state")
    if role not in ("user", "assistant"):
        return None
    thoughts = table(record.get("thoughts"))
    files = [_attachment(table(entry)) for entry in rows(record.get("attachments"))]
    return ImportedMessage(
        role,
        text(record.get("content")),
        created=moment(record.get("created")),
        model=name(record.get("model")),
        state=cast(State, state) if state in ("complete", "stopped", "failed") else "stopped" if state else "complete",
        tokens=whole(record.get("tokens")),
        tokens_per_s=number(record.get("tokens_per_s")),
        finish_reason=name(record.get("finish_reason")),
        thoughts=Thoughts(text(thoughts.get("text")), whole(thoughts.get("tokens")), number(thoughts.get("seconds"))),
        generation=generation_of(record.get("generation")),
        attachments=tuple(file for file in files if file is not None),
        only_named=files.count(None),
    )


def _attachment(entry: Mapping[str, Any]) -> Attachment | None:
    """An attached file; None for a picture that is none."""
    if entry.get("picture") is None:
        return Attachment(name(entry.get("name")), text(entry.get("text")))
    shown = picture(table(entry["picture"]))
    return None if shown is None else Attachment(name(entry.get("name")), picture=shown)
