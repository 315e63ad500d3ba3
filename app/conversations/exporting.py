"""A conversation as Markdown or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from datetime import datetime

from app.conversations.records import Conversation, MessageRecord

_HEADINGS = {"user": "You", "assistant": "Model"}
_ENDINGS = {"stopped": "stopped", "failed": "failed", "writing": "still being written"}


def as_markdown(conversation: Conversation, shown: Sequence[MessageRecord]) -> str:
    """The branch that is shown, as a person reads it. Message texts are kept as they are."""
    title = " ".join(conversation.title.split()) or "Conversation"
    parts = [f"# {title}"]
    facts = [f"- started {_moment(conversation.created)}"]
    if conversation.model:
        facts.append(f"- model {conversation.model}")
    parts.append("\n".join(facts))
    if conversation.system:
        parts += ["## System prompt", conversation.system]
    for message in shown:
        heading = _HEADINGS[message.role]
        if message.role == "assistant" and message.model:
            heading = message.model
        if message.state in _ENDINGS:
            heading += f" ({_ENDINGS[message.state]})"
        parts += [f"## {heading}", message.content]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def as_json(conversation: Conversation, messages: Iterable[MessageRecord]) -> str:
    """Everything, with all branches: ``{"format": 1, "conversation": {...}, "messages": [...]}``."""
    records = [
        {key: value for key, value in dataclasses.asdict(message).items() if key not in ("siblings", "sibling_index")}
        for message in messages
    ]
    content = {"format": 1, "conversation": dataclasses.asdict(conversation), "messages": records}
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %z")
