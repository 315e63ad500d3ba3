"""The question of ``ask``, from its flags, its stdin and the person's settings."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from app.attachments.attachment import Attachment, pictures_of, question_message
from app.attachments.reading import AttachmentError, FileReader
from app.commands.options import check_peers, persona_named, settings_with
from app.commands.output import WorkFailed, notify
from app.settings.fields import Value
from app.settings.schema import Settings
from engine.ipc.messages import MOST_PICTURE_BYTES, Constraint, Generate, Load, Message, Sampling
from engine.planning.units import byte_size

_LARGEST_TOKEN_ID = 2**31 - 1
_LARGEST_SCHEMA = 128 * 1024
"""Maximum bytes of a JSON schema, as in the engine."""


@dataclass(frozen=True)
class Flags:
    """The command line as given."""

    prompt: str | None = None
    stdin: bool | None = None
    """True if stdin is read besides the prompt; None: if it is a file, or a pipe with its first byte there in time."""
    files: list[str] = field(default_factory=list)
    """Paths of text files and pictures that are attached to the question."""
    prompt_ids: str | None = None
    system: str | None = None
    persona: str | None = None
    """Name of the persona whose system prompt, model and values override the person's settings."""
    settings: Mapping[str, Value] = field(default_factory=dict)
    """Values that override the persona and the person's settings, by their keys."""
    stop: list[str] = field(default_factory=list)
    schema: str | None = None
    """Path of a JSON schema that the answer must satisfy."""
    peers: list[str] = field(default_factory=list)
    as_json: bool = False


@dataclass(frozen=True)
class Question:
    """A checked question from the command line. The ids of its requests are set when they are sent."""

    generate: Generate
    as_json: bool
    settings: Settings
    """The settings that the model is loaded and a ring is formed by. ``peers`` are tried besides theirs."""
    peers: tuple[str, ...] = ()
    attached: tuple[Attachment, ...] = ()
    """The files that are in ``generate``."""

    @property
    def load(self) -> Load:
        return self.settings.load


def question_from(flags: Flags) -> Question:
    """The question. Raises WorkFailed (status 2) for flags that contradict each other, or if there is none."""
    if flags.prompt is not None and flags.prompt_ids is not None:
        raise WorkFailed("give either a PROMPT or --prompt-ids, not both", status=2)
    if flags.system is not None and flags.prompt_ids is not None:
        raise WorkFailed("--system cannot be used with --prompt-ids, which need no template", status=2)
    if flags.files and flags.prompt_ids is not None:
        raise WorkFailed("--file cannot be used with --prompt-ids, which are no text", status=2)
    if "" in flags.stop:
        raise WorkFailed("--stop cannot be empty", status=2)
    settings = settings_with(flags.settings, None if flags.persona is None else persona_named(flags.persona))
    generate = _generate(flags, settings)
    attached = _attached(flags.files)
    if flags.prompt_ids is not None:
        generate = msgspec.structs.replace(generate, prompt_ids=parse_ids(flags.prompt_ids))
    else:
        generate = msgspec.structs.replace(generate, messages=_messages(flags, settings, attached))
    peers = check_peers(flags.peers, ring=settings.partitioning == "ring")
    return Question(generate=generate, as_json=flags.as_json, settings=settings, peers=peers, attached=attached)


def parse_ids(text: str) -> list[int]:
    """``1,2,3`` as numbers. Raises WorkFailed (status 2)."""
    ids = []
    for word in text.split(","):
        digits = word.strip()
        if not (digits.isascii() and digits.isdecimal()) or len(digits) > 10 or int(digits) > _LARGEST_TOKEN_ID:
            raise WorkFailed(f"--prompt-ids takes token ids such as 1,2,3; {word.strip()[:40]!r} is not one", status=2)
        ids.append(int(digits))
    return ids


def _generate(flags: Flags, settings: Settings) -> Generate:
    # A flag for sampling turns a beam search of the settings off, unless there is a flag for beams too.
    given = {key: flags.settings[key] for key in Sampling.__struct_fields__ if key in flags.settings}
    beams = 1 if given and "beams" not in flags.settings else settings.beams
    return Generate(
        id=0,
        sampling=settings.sampling if beams == 1 else Sampling(**cast(dict[str, Any], given)),
        max_tokens=settings.max_tokens,
        stop=[_as_typed(text) for text in flags.stop],
        constraint=None if flags.schema is None else Constraint(kind="schema", text=_schema(Path(flags.schema))),
        beams=beams,
        length_penalty=settings.length_penalty,
        thinking=settings.thinks,
        effort=settings.thinking_effort,
        program="ask",
        with_timing=flags.as_json,
    )


def _schema(path: Path) -> str:
    """The text of a file with a JSON schema. Raises WorkFailed (status 2) if it is none."""
    try:
        data = _read_bytes(path, _LARGEST_SCHEMA)
    except OSError as error:
        raise WorkFailed(f"--schema: {path} cannot be read: {error.strerror or error}", status=2) from error
    if len(data) > _LARGEST_SCHEMA:
        raise WorkFailed(f"--schema: {path} has more than {byte_size(_LARGEST_SCHEMA)}", status=2)
    try:
        text = data.decode()
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WorkFailed(f"--schema: {path} is no JSON: {error}", status=2) from error
    if not isinstance(found, dict):
        raise WorkFailed(f"--schema: {path} is no JSON object, as a JSON schema must be", status=2)
    return text


def _read_bytes(path: Path, most: int) -> bytes:
    """The bytes of ``path``, of a larger file only ``most`` + 1 of them."""
    with path.open("rb") as file:
        return file.read(most + 1)


def _attached(files: Sequence[str]) -> tuple[Attachment, ...]:
    """Raises WorkFailed (status 2)."""
    try:
        with FileReader() as reader:
            attached = tuple(reader.read(Path(path)) for path in files)
    except AttachmentError as error:
        raise WorkFailed(str(error).removesuffix("."), status=2) from error
    total = sum(len(picture.data) for picture in pictures_of(attached))
    if total > MOST_PICTURE_BYTES:
        raise WorkFailed(
            f"the pictures are {byte_size(total)} together; at most {byte_size(MOST_PICTURE_BYTES)} can be attached",
            status=2,
        )
    return attached


def _messages(flags: Flags, settings: Settings, attached: Sequence[Attachment]) -> list[Message]:
    prompt = _prompt(flags)
    if not prompt.strip():
        raise WorkFailed("the question is empty", status=2)
    system = settings.system_prompt if flags.system is None else flags.system
    messages = [Message("system", _as_typed(system))] if system else []
    return [*messages, question_message(prompt, attached, sees=True)]


def _prompt(flags: Flags) -> str:
    """The argument followed by what was piped in, or one of them alone."""
    if flags.prompt is None:
        if flags.stdin is False:
            raise WorkFailed("there is no question: --no-stdin needs a PROMPT", status=2)
        return read_prompt()
    piped = read_piped(wait=flags.stdin) if flags.stdin is not False else ""
    return "\n\n".join(filter(None, [_as_typed(flags.prompt), piped]))


def _as_typed(text: str) -> str:
    """An argument decoded as UTF-8. Bytes that the locale cannot decode arrive as half surrogate pairs.

    Raises WorkFailed (status 2).
    """
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise WorkFailed("the question is not UTF-8 text", status=2) from None


# --- stdin ---------------------------------------------------------------------------------------------------------

FIRST_BYTE_S = 3.0
"""Seconds to wait for the first byte of a pipe if there is a prompt too. A pipe may be inherited and never used (a job
of a CI service, ``ssh host privatellm ask hi``). A pipeline's usually has its first byte or its end at once."""

LARGEST = 32 * 1024 * 1024
"""Maximum bytes of a question, far above any context. Input without end (``yes |``) must not fill the memory."""


def read_prompt() -> str:
    """The question from stdin. Raises WorkFailed (status 2) if there is none."""
    if sys.stdin is None or sys.stdin.closed:
        raise WorkFailed("there is no question: stdin is closed, so pass it as an argument", status=2)
    if sys.stdin.isatty():
        notify("Type the question, then press ctrl-d:")
    return _read()


def read_piped(*, wait: bool | None) -> str:
    """The text on stdin besides a prompt: the rest of a file, or all of a pipe or socket; otherwise empty.

    ``wait``: wait for a pipe however long it takes. Otherwise one without a byte within :data:`FIRST_BYTE_S` is not
    read, and a notice is printed. Raises WorkFailed (status 2) for text that is not UTF-8.
    """
    descriptor = _descriptor()
    if descriptor is None:
        return ""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return _read()
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return ""
    if not wait and not select.select([descriptor], [], [], FIRST_BYTE_S)[0]:
        notify(
            f"note: nothing arrived on stdin within {FIRST_BYTE_S:.0f} s, so only the prompt is asked; use --stdin to "
            "wait for a slow command, or --no-stdin to ignore stdin"
        )
        return ""
    return _read()


def _descriptor() -> int | None:
    """The file descriptor of stdin; None if it is closed or has none."""
    try:
        if sys.stdin is None or sys.stdin.closed:
            return None
        descriptor = sys.stdin.fileno()
        os.fstat(descriptor)
    except (OSError, ValueError):
        return None
    return descriptor


def _read() -> str:
    try:
        data = sys.stdin.buffer.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise WorkFailed(f"the question on stdin is longer than {byte_size(LARGEST)}", status=2)
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WorkFailed(f"the question on stdin is not UTF-8 text (byte {error.start})", status=2) from error
    except OSError as error:
        raise WorkFailed(f"stdin cannot be read: {error.strerror or error}", status=2) from error
    return text.removesuffix("\n")
