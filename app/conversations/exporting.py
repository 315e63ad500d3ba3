"""A conversation as Markdown or JSON, and as a file that the person names."""

from __future__ import annotations

import dataclasses
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from app.attachments.attachment import with_attachments
from app.conversations.records import Conversation, MessageRecord

_HEADINGS = {"user": "You", "assistant": "Model"}
_ENDINGS = {"stopped": "stopped", "failed": "failed", "writing": "still being written"}


def as_markdown(conversation: Conversation, shown: Sequence[MessageRecord], *, thoughts: bool = False) -> str:
    """The shown branch as Markdown with front matter. The texts of messages are not changed. ``thoughts``: with the
    model's thoughts, each as a quotation before its answer."""
    title = " ".join(conversation.title.split()) or "Conversation"
    parts = [front_matter(conversation, shown), f"# {title}"]
    if conversation.system:
        parts += ["## System prompt", conversation.system]
    for message in shown:
        heading = _HEADINGS[message.role]
        if message.role == "assistant" and message.model:
            heading = message.model
        if message.state in _ENDINGS:
            heading += f" ({_ENDINGS[message.state]})"
        parts.append(f"## {heading}")
        if thoughts and message.thoughts.text:
            parts.append(quoted(message.thoughts.text))
        parts.append(with_attachments(message.content, message.attachments))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def quoted(text: str) -> str:
    """``text`` as a quotation of Markdown."""
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def as_json(conversation: Conversation, messages: Iterable[MessageRecord], *, thoughts: bool = False) -> str:
    """All branches as JSON: ``{"format": 1, "conversation": {...}, "messages": [...]}``, with pictures in base64."""
    left_out = {"siblings", "sibling_index"} if thoughts else {"siblings", "sibling_index", "thoughts"}
    records = [
        {key: value for key, value in dataclasses.asdict(message).items() if key not in left_out}
        for message in messages
    ]
    content = {"format": 1, "conversation": dataclasses.asdict(conversation), "messages": records}
    return json_text(content, ensure_ascii=False)


def json_text(content: object, *, ensure_ascii: bool = True) -> str:
    """``content`` as JSON with indents. Bytes, of pictures, are in base64."""
    text = json.dumps(content, ensure_ascii=ensure_ascii, indent=2, default=lambda data: b64encode(data).decode())
    return text + "\n"


def suggested_path(title: str) -> Path:
    """A file name in the current folder that does not exist yet."""
    stem = re.sub(r"[^\w-]+", "-", title.lower()).strip("-")[:50] or "conversation"
    path = Path.cwd() / f"{stem}.md"
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{stem}-{number}.md")
    return path


def export_form(path: Path) -> str:
    """``json`` for a file of that name, else ``markdown``."""
    return "json" if path.suffix.lower() == ".json" else "markdown"


def write_export(path: Path, text: str) -> Path:
    """Write ``text`` to ``path``, which is returned. An existing file is never overwritten. Raises OSError."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    return path


def export_problem(path: Path, error: Exception) -> str:
    """One sentence for what :func:`write_export` or the store raised."""
    folder = path.expanduser().absolute().parent
    if isinstance(error, FileNotFoundError) and not folder.exists():
        shown = str(path.parent) if path.parent != Path() else str(folder)
        return f"Export failed: the folder {shown} does not exist."
    if isinstance(error, FileExistsError):
        return f"Export failed: {path} already exists; choose another name."
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).rstrip(".")
    return f"Export to {path} failed: {reason}."


# --- front matter ----------------------------------------------------------------------------------------------------


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
