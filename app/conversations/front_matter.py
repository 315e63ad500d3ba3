"""The YAML front matter of an exported conversation: title, date, model, and how its answers were made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from app.conversations.records import Conversation, MessageRecord


def front_matter(conversation: Conversation, shown: Sequence[MessageRecord]) -> str:
    """The front matter with its two lines of dashes. Values that are not known are left out."""
    facts: dict[str, object] = {"title": conversation.title, "created": _moment(conversation.created)}
    if conversation.model:
        facts["model"] = conversation.model
    persona = conversation.own_values.get("persona")
    if isinstance(persona, str) and persona:
        facts["persona"] = persona
    lines = [f"{key}: {value if key == 'created' else scalar(value)}" for key, value in facts.items()]
    answers = [_of_answer(message) for message in shown if message.role == "assistant"]
    if any(answers):
        lines += ["answers:", *(f"  - {_flow(answer)}" for answer in answers)]
    return "\n".join(["---", *lines, "---"])


def scalar(value: object) -> str:
    """``value`` in the part of JSON that is YAML, too."""
    text = json.dumps(value, ensure_ascii=False)
    # YAML wants these escaped, JSON does not.
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def _of_answer(message: MessageRecord) -> dict[str, object]:
    facts: dict[str, object] = {"model": message.model} if message.model else {}
    facts |= message.generation.known
    if message.tokens:
        facts["tokens"] = message.tokens
    if message.tokens_per_s:
        facts["tokens_per_s"] = round(message.tokens_per_s, 2)
    if message.thoughts.tokens:
        facts["thought_tokens"] = message.thoughts.tokens
    if message.finish_reason:
        facts["finish_reason"] = message.finish_reason
    return {key: round(value, 3) if key == "ttft_s" and isinstance(value, float) else value
            for key, value in facts.items()}  # fmt: skip


def _flow(facts: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{key}: {scalar(value)}" for key, value in facts.items()) + "}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
