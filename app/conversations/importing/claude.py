"""Claude's export: ``conversations.json``, a list of conversations with their messages in order (``chat_messages``)."""

from __future__ import annotations

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
    rows,
    table,
    text,
    tree,
)
from app.conversations.records import Thoughts


def is_conversation(found: Mapping[str, Any]) -> bool:
    return isinstance(found.get("chat_messages"), list)


def conversation(entry: Mapping[str, Any]) -> ImportedConversation:
    """The conversation; with its branches where the messages name the ones before them."""
    records = [table(record) for record in rows(entry.get("chat_messages"))]
    model = name(entry.get("model"))
    nodes: dict[str, ImportedNode] = {}
    for place, record in enumerate(records):
        parent = record.get("parent_message_uuid")
        key = name(record.get("uuid")) or f"message {place}"
        nodes[key] = ImportedNode(parent if isinstance(parent, str) else None, _message(record, model))
    leaf = None
    if any(node.parent in nodes for node in nodes.values()):
        messages, leaf = tree(nodes, name(entry.get("current_leaf_message_uuid")) or None)
    else:
        messages = chain([node.message for node in nodes.values() if node.message is not None])
    return ImportedConversation(
        origin=f"claude:{name(entry.get('uuid'))}",
        title=name(entry.get("name")),
        model=model,
        created=moment(entry.get("created_at")),
        updated=moment(entry.get("updated_at")),
        messages=messages,
        leaf=leaf,
        pinned=entry.get("is_starred") is True,
    )


def _message(record: Mapping[str, Any], model: str) -> ImportedMessage | None:
    sender = record.get("sender")
    if sender not in ("human", "assistant"):
        return None
    blocks = [table(block) for block in rows(record.get("content"))]
    body = "\n\n".join(filter(None, (text(block.get("text")) for block in blocks if block.get("type") == "text")))
    thought = [text(block.get("thinking")) for block in blocks if block.get("type") == "thinking"]
    files = [table(entry) for entry in rows(record.get("attachments"))]
    attachments = tuple(
        Attachment(name(entry.get("file_name")) or "attachment", text(entry.get("extracted_content")))
        for entry in files
        if text(entry.get("extracted_content"))
    )
    named = [file_mark(table(file).get("file_name")) for file in rows(record.get("files"))]
    body = "\n\n".join(filter(None, [*named, body or text(record.get("text"))]))
    if not body.strip() and not attachments:
        return None
    human = sender == "human"
    return ImportedMessage(
        "user" if human else "assistant",
        body,
        created=moment(record.get("created_at")),
        model="" if human else model,
        thoughts=Thoughts("\n\n".join(filter(None, thought))),
        attachments=attachments,
        only_named=len(named),
    )
