"""The common part of the protocols: from the fields of a request to the engine's request, and from its answer back."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, get_args

import msgspec

from app.serve.pictures import PICTURE_KINDS, Composed, check_pictures, picture_file
from app.serve.replies import Refused
from engine.ipc.messages import Constraint, Finished, Message, Sample, Sampling, Tool, ToolChoice

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
NaturalOrAll = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
"""A number of tokens; -1: all that there are, or fit."""
Switch = bool | Annotated[int, msgspec.Meta(ge=0, le=1)]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=2.0)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]

MOST_STOPS = 64
"""Maximum number of stop texts of one request."""
_EFFORTS: Mapping[str, tuple[bool | None, str]] = {
    "none": (False, ""),
    "minimal": (None, "low"),
    "low": (None, "low"),
    "medium": (None, "medium"),
    "high": (None, "high"),
    "xhigh": (None, "high"),
    "max": (None, "high"),
    "default": (None, ""),
}
"""Thinking and effort of the engine, by OpenAI's ``reasoning_effort``. Empty: the person's own."""
MOST_ITEMS = 10_000
"""Maximum number of messages of a request, and of parts of one message."""


@dataclass(frozen=True)
class Defaults:
    """The person's own settings, which hold where a request says nothing."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    thinking: bool | None = None
    effort: str = ""


# --- text ---------------------------------------------------------------------------------------------------------


class ContentPart(msgspec.Struct):
    """A part of a message's content. Kinds that hold text or a picture are read."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    source: Any = None


Content = str | Annotated[list[str | ContentPart], msgspec.Meta(max_length=MOST_ITEMS)] | None
_TEXT = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_NOT_READ = {
    "image": "a picture that this model is not shown",
    "audio": "a recording that this model cannot hear",
    "video": "a film that this model cannot see",
    "document": "a document that this model cannot read",
    "file": "a file that this model cannot read",
    "screenshot": "a picture that this model is not shown",
}
"""Placeholders in the prompt for unsupported parts, by a word in the name of their kind."""
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")


def composed(content: Content, where: str, *, asked: bool, sees: bool) -> Composed:
    """The text of a message and its pictures, with a line for each part that holds something else.

    ``asked``: it is what the person asks now. ``sees``: the model gets pictures. Raises Refused for a picture that
    cannot be read, and for another such part of what is asked.
    """
    read = Composed()
    if content is None or isinstance(content, str):
        read.text(content or "")
        return read
    for part in content:
        if isinstance(part, str):
            read.text(part)
        elif part.type == "refusal":
            read.text(part.refusal or "")
        elif part.type in _TEXT:
            read.text(part.text or "")
        elif part.type in PICTURE_KINDS and sees:
            read.picture(picture_file(part.source if part.image_url is None else part.image_url, where))
        elif part.type not in _THOUGHTS:
            read.text(line_for(part.type, where, asked=asked, sees=sees))
    return read


def line_for(kind: str, where: str, *, asked: bool, sees: bool = False) -> str:
    """The placeholder for a part of a ``kind`` that is not read. Raises Refused if it is ``asked``."""
    if asked:
        reads = "text and pictures" if sees else "text"
        raise Refused(f"This model reads {reads} only, not {kind[:50]!r}: leave that part out.", parameter=where)
    known = next((said for word, said in _NOT_READ.items() if word in kind), None)
    return f"[{known or f'a part of the kind {kind[:50]} that this model cannot read'}]"


def result_text(given: Any) -> str:
    """A tool's result as text. Other parts become a line each; objects without a kind become JSON."""
    parts = given if isinstance(given, list) else [given]
    return "\n".join(_part_text(part) for part in parts if part is not None)


def _part_text(part: Any) -> str:
    match part:
        case str():
            return part
        case {"text": str(text)} | {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return text
        case {"type": "tool_reference", "tool_name": str(name)}:
            return f"[the tool {name[:100]}]"
        case {"type": "search_result", "content": [*inner]}:
            return "\n".join(one["text"] for one in inner if isinstance(one, dict) and isinstance(one.get("text"), str))
        case {"type": str(kind)}:
            return line_for(kind, "", asked=False)
        case _:
            return as_text(part)


def last_question(roles: Sequence[str]) -> int:
    """The index of the person's last question among messages of these ``roles``; -1 if there is none.

    Texts that a program adds to a tool's result are not questions, and a question for which tools were called has been
    handled already.
    """
    place = max((place for place, role in enumerate(roles) if role == "user"), default=-1)
    return -1 if "tool" in roles[max(0, place - 1) :] else place


def merged(messages: list[Message]) -> list[Message]:
    """Neighbouring system messages as one: templates take one at the beginning. Raises Refused for too many
    pictures."""
    check_pictures(messages)
    result: list[Message] = []
    for role, group in groupby(messages, lambda message: message.role):
        if role == "system":
            result.append(Message("system", "\n\n".join(message.content for message in group)))
        else:
            result += group
    return result


# --- how it is answered -------------------------------------------------------------------------------------------


def sampling_of(defaults: Defaults, given: Mapping[str, Any]) -> Sampling:
    """The person's sampling with what a request gives instead."""
    values = {key: value for key, value in given.items() if value is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if values.get("seed") == -1:  # other servers' word for any
        del values["seed"]
    elif "seed" in values:
        values["seed"] %= 2**64
    return msgspec.structs.replace(defaults.sampling, **values)


def stops_of(stop: str | list[str] | None, where: str = "stop") -> list[str]:
    """The stop texts that are not empty. Raises Refused for more than each token of an answer can be compared with."""
    stops = [text for text in ([stop] if isinstance(stop, str) else stop or ()) if text]
    if len(stops) > MOST_STOPS:
        raise Refused(f"There are {len(stops):,} stop texts: give {MOST_STOPS} at most.", parameter=where)
    return stops


def most_tokens(*given: int | None, usual: int | None) -> int | None:
    """The first of the limits that are ``given``, or the ``usual`` one; None for -1: what fits."""
    limit = next((number for number in given if number is not None), usual)
    return None if limit == -1 else limit


def thinking_of(effort: str | None, defaults: Defaults, switch: bool | None = None) -> tuple[bool | None, str]:
    """Whether the model thinks, and how long. ``switch`` overrides the former. Raises Refused for an unknown effort."""
    if effort is None:
        return (defaults.thinking if switch is None else switch), defaults.effort
    if effort not in _EFFORTS:
        raise Refused(
            f"The reasoning effort {effort[:50]!r} is unknown: use one of {', '.join(_EFFORTS)}.",
            parameter="reasoning_effort",
        )
    thinks, wanted = _EFFORTS[effort]
    wanted = wanted or defaults.effort
    if switch is not None:
        return switch, wanted
    return (defaults.thinking if thinks is None else thinks), wanted


class AnswerFormat(msgspec.Struct):
    """The form that an answer must have: OpenAI's ``response_format`` in both its spellings, and two kinds of our
    own, ``regex`` and ``grammar``."""

    type: str = "text"
    name: str | None = None
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | bool | None = None
    regex: str = ""
    grammar: str = ""

    def constraint(self, where: str) -> Constraint | None:
        """Raises Refused."""
        match self.type:
            case "text":
                return None
            case "json_object" if self.schema in (None, True, {}) and self.json_schema is None:
                return Constraint(kind="json")
            case "json_schema" | "json_object":
                schema = self.schema if self.json_schema is None else self.json_schema.get("schema")
                if schema is None:
                    raise Refused("The format json_schema needs a schema.", parameter=where)
                return Constraint(kind="schema", text=as_text(schema))
            case "regex" if self.regex:
                return Constraint(kind="regex", text=self.regex)
            case "grammar" if self.grammar:
                return Constraint(kind="grammar", text=self.grammar)
            case _:
                raise Refused(
                    f"The format {self.type[:50]!r} is unknown: use text, json_object or json_schema, or regex or "
                    "grammar with a text of that name.",
                    parameter=where,
                )


def as_text(value: object) -> str:
    """``value`` as JSON text, its keys in their order. Raises Refused for one that is nested too deeply."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise Refused("The body is nested too deeply.") from None


# --- the answer ---------------------------------------------------------------------------------------------------


def answers_of(finished: Finished, count: int = 1) -> list[Sample]:
    """All answers to a request for ``count``, whether samples or beams."""
    if finished.beams:
        return [
            Sample(
                text=beam.text,
                token_ids=beam.token_ids,
                finish_reason="stop" if beam.finished else "length",
                reasoning=beam.reasoning,
            )
            for beam in finished.beams[:count]
        ]
    if finished.samples:
        return finished.samples
    fields = {name: getattr(finished, name) for name in Sample.__struct_fields__}
    return [Sample(**fields)]


def timings(finished: Finished) -> dict[str, object]:
    """The figures of llama.cpp's server, and why a part of the prompt was read again; None where it was not."""
    prompt_s, speed = finished.ttft_s, finished.tokens_per_s
    return {
        "cache_n": finished.cached_tokens,
        "prompt_n": finished.prefilled_tokens,
        "prompt_ms": prompt_s * 1000,
        "prompt_per_second": finished.prefilled_tokens / prompt_s if prompt_s > 0 else 0.0,
        "predicted_n": finished.completion_tokens,
        "predicted_ms": 1000 * finished.completion_tokens / speed if speed > 0 else 0.0,
        "predicted_per_second": speed,
        "draft_n": finished.drafted_tokens,
        "draft_n_accepted": finished.accepted_tokens,
        "read_again": finished.read_again,
    }


# --- tools -----------------------------------------------------------------------------------------------------------


_WORDS = (*get_args(ToolChoice), "any")


class NamedTool(msgspec.Struct):
    """A tool by its name, in the form of either protocol of OpenAI."""

    name: str = ""
    function: NamedTool | None = None

    @property
    def wanted(self) -> str:
        return self.name or (self.function.name if self.function is not None else "")


class ToolChoiceObject(NamedTool):
    """A ``tool_choice`` that is an object: one tool, or the allowed ones (``mode`` says whether one must be called)."""

    type: str = ""
    mode: str = "auto"
    tools: list[NamedTool] | None = None
    allowed_tools: ToolChoiceObject | None = None


def tool_of(name: str, description: str | None, schema: dict[str, Any] | None) -> Tool:
    """A function that a client offers. ``schema``: the JSON schema of its parameters."""
    return Tool(name=name, description=description or "", parameters="" if schema is None else as_text(schema))


def chosen(tools: Sequence[Tool], choice: str | ToolChoiceObject | None) -> dict[str, Any]:
    """The fields of ``Generate`` for ``tools`` and OpenAI's ``tool_choice``. Raises Refused."""
    if choice is None or isinstance(choice, str):
        return offered(tools, choice)
    if choice.type == "allowed_tools":
        allowed = choice.allowed_tools or choice
        names = [tool.wanted for tool in allowed.tools or ()]
        known = {tool.name: tool for tool in tools}
        for name in names:
            _check_known(name, known)
        return offered([known[name] for name in dict.fromkeys(names)], allowed.mode)
    if choice.wanted:
        return offered(tools, None, choice.wanted)
    return offered(tools, choice.type if choice.type in _WORDS else None)


def offered(tools: Sequence[Tool], word: str | None, name: str = "") -> dict[str, Any]:
    """The fields of ``Generate`` that say which ``tools`` may be called: as ``word`` says (auto, none or required, and
    auto if it is None), or the one of this ``name``, which must be. Raises Refused."""
    fields: dict[str, Any] = {"tools": list(tools)}
    if name:
        _check_known(name, [tool.name for tool in tools])
        return fields | {"tool_choice": "required", "forced_tool": name}
    if word is None:
        return fields
    if word not in _WORDS:
        raise Refused(f"The tool choice {word[:50]!r} is unknown: use auto, none or required.", parameter="tool_choice")
    word = "required" if word == "any" else word
    if word == "required" and not tools:
        raise Refused("A tool must be called, but there are no tools.", parameter="tool_choice")
    return fields | {"tool_choice": word}


def _check_known(name: str, names: Container[str]) -> None:
    if name not in names:
        raise Refused(f"There is no tool {name[:100]!r} among the tools.", parameter="tool_choice")
