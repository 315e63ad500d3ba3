"""ChatGPT's export: ``conversations.json``, a list of conversations, each a tree of nodes by id (``mapping``)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from app.conversations.importing.parts import (
    ImportedConversation,
    ImportedMessage,
    ImportedNode,
    file_mark,
    moment,
    name,
    number,
    rows,
    table,
    text,
    tree,
)
from app.conversations.records import NO_THOUGHTS, Thoughts

_MARK = re.compile("\ue200([^\ue200\ue201]*)\ue201")
"""Pattern of a mark in an answer: a kind and its values, which are parted by U+E202."""
_LEFT = re.compile("[\ue200-\ue206]")


def is_conversation(found: Mapping[str, Any]) -> bool:
    return isinstance(found.get("mapping"), dict)


def conversation(entry: Mapping[str, Any]) -> ImportedConversation:
    """The conversation with all its branches."""
    records = {key: table(value) for key, value in entry["mapping"].items()}
    above = {child: key for key, record in records.items() for child in rows(record.get("children"))
             if isinstance(child, str)}  # fmt: skip
    nodes = {key: _node(record, above.get(key)) for key, record in records.items()}
    messages, leaf = tree(nodes, name(entry.get("current_node")))
    models = [message.model for message in messages if message.model]
    return ImportedConversation(
        origin=f"chatgpt:{name(entry.get('conversation_id')) or name(entry.get('id'))}",
        title=name(entry.get("title")),
        system=_system(entry["mapping"]),
        model=name(entry.get("default_model_slug")) or (models[-1] if models else ""),
        created=moment(entry.get("create_time")),
        updated=moment(entry.get("update_time")),
        messages=messages,
        leaf=leaf,
        archived=entry.get("is_archived") is True,
        pinned=entry.get("is_starred") is True,
    )


def _node(found: Mapping[str, Any], above: str | None) -> ImportedNode:
    """The node of the tree. ``above``: the one that names it among its children."""
    message = table(found.get("message"))
    named = found.get("parent")
    parent = named if isinstance(named, str) else above
    content, metadata = table(message.get("content")), table(message.get("metadata"))
    role = table(message.get("author")).get("role")
    kind = content.get("content_type")
    if role == "assistant" and kind in ("thoughts", "reasoning_recap"):
        return ImportedNode(parent, None, _thoughts(content, metadata, kind))
    # What is sent to a tool, and hidden instructions, are no part of what was said.
    hidden = metadata.get("is_visually_hidden_from_conversation") is True or message.get("channel") == "analysis"
    if role not in ("user", "assistant") or hidden or message.get("recipient") not in (None, "", "all"):
        return ImportedNode(parent, None)
    body = _without_marks(_said(content), metadata)
    if not body.strip():
        return ImportedNode(parent, None)
    return ImportedNode(
        parent,
        ImportedMessage(
            role,
            body,
            created=moment(message.get("create_time")),
            model=name(metadata.get("model_slug")) if role == "assistant" else "",
            state="stopped" if message.get("status") == "in_progress" else "complete",
            only_named=sum(_is_pointer(part) for part in rows(content.get("parts"))),
        ),
    )


def _said(content: Mapping[str, Any]) -> str:
    kind = content.get("content_type")
    if kind == "code":
        code = text(content.get("text"))
        language = name(content.get("language"))
        return f"```{'' if language == 'unknown' else language}\n{code}\n```" if code else ""
    if kind in ("text", "multimodal_text"):
        return "\n\n".join(filter(None, map(_part, rows(content.get("parts")))))
    return ""


def _without_marks(body: str, metadata: Mapping[str, Any]) -> str:
    """``body`` with what the program shows in place of its marks: links of citations, names of people and places.

    What is put in is not looked at again, and no more of it than what ``body`` and all references have.
    """
    if "\ue200" not in body:
        return body
    references = {
        text(reference.get("matched_text")): text(reference.get("alt"))
        for reference in map(table, rows(metadata.get("content_references")))
    }
    left = len(body) + sum(map(len, references.values()))

    def shown(mark: re.Match[str]) -> str:
        nonlocal left
        alternative = references.get(mark.group())
        if alternative is None:
            return _shown(mark)
        left -= len(alternative)
        return alternative if left >= 0 else ""

    return _LEFT.sub("", _MARK.sub(shown, body))


def _shown(mark: re.Match[str]) -> str:
    kind, *values = mark.group(1).split("\ue202")
    if kind == "entity" and values:
        try:
            entity = rows(json.loads(values[0]))
        except (ValueError, RecursionError):
            return values[0]
        return next((value for value in entity[1:2] if isinstance(value, str)), "")
    if kind == "url" and len(values) > 1:
        return f"[{values[0]}]({values[1]})"
    return ""


def _part(part: object) -> str:
    if isinstance(part, str):
        return text(part)
    found = table(part)
    if not _is_pointer(part):
        return text(found.get("text"))
    return file_mark(name(found["content_type"]).removesuffix("_asset_pointer").replace("_", " "))


def _is_pointer(part: object) -> bool:
    """Whether ``part`` is a picture or another file, of which the export has only the name."""
    return name(table(part).get("content_type")) not in ("", "audio_transcription")


def _thoughts(content: Mapping[str, Any], metadata: Mapping[str, Any], kind: str) -> Thoughts:
    seconds = number(metadata.get("finished_duration_sec"))
    if kind == "reasoning_recap":
        return Thoughts(seconds=seconds) if seconds else NO_THOUGHTS
    steps = [table(step) for step in rows(content.get("thoughts"))]
    parts = [part for step in steps for part in (text(step.get("summary")), text(step.get("content"))) if part]
    return Thoughts("\n\n".join(parts))


def _system(mapping: Mapping[str, Any]) -> str:
    """The custom instructions, or the first system message that says something."""
    for value in mapping.values():
        message = table(table(value).get("message"))
        content = table(message.get("content"))
        role = table(message.get("author")).get("role")
        if content.get("content_type") == "user_editable_context":
            wanted = (text(content.get("user_profile")), text(content.get("user_instructions")))
            if any(wanted):
                return "\n\n".join(filter(None, wanted))
        elif role == "system":
            said = _said(content)
            if said.strip():
                return said
    return ""
