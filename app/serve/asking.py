"""What the protocols share: from the fields of a request to what the engine is asked, and from its answer back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any

import msgspec

from app.serve.refusals import Refused
from engine.ipc.messages import Constraint, Finished, Message, Sample, Sampling

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
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
}
"""Thinking and effort of the engine, by OpenAI's ``reasoning_effort``."""


@dataclass(frozen=True)
class Defaults:
    """The person's own settings, which hold where a request says nothing."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    thinking: bool | None = None
    effort: str = ""


# --- text ---------------------------------------------------------------------------------------------------------


class ContentPart(msgspec.Struct):
    """A part of a message's content. Kinds that hold text are read, others refused."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None


Content = str | list[ContentPart] | None
_TEXT = ("text", "input_text", "output_text")


def text_of(content: Content, where: str) -> str:
    """The text of a message. Raises Refused for a part that holds something else."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type not in _TEXT:
            raise Refused(f"This model reads text only, not {part.type[:50]!r}: leave that part out.", parameter=where)
        else:
            texts.append(part.text or "")
    return "\n".join(texts)


def merged(messages: list[Message]) -> list[Message]:
    """Neighbouring system messages as one: templates take one at the beginning."""
    found: list[Message] = []
    for role, group in groupby(messages, lambda message: message.role):
        if role == "system":
            found.append(Message("system", "\n\n".join(message.content for message in group)))
        else:
            found += group
    return found


# --- how it is answered -------------------------------------------------------------------------------------------


def sampling_of(defaults: Defaults, given: Mapping[str, Any]) -> Sampling:
    """The person's sampling with what a request gives instead."""
    said = {key: value for key, value in given.items() if value is not None}
    return msgspec.structs.replace(defaults.sampling, **said)


def stops_of(stop: str | list[str] | None, where: str = "stop") -> list[str]:
    """Raises Refused for an empty one, and for more than each token of an answer can be compared with."""
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > MOST_STOPS:
        raise Refused(f"There are {len(stops):,} stop texts: give {MOST_STOPS} at most.", parameter=where)
    if "" in stops:
        raise Refused("A stop text cannot be empty: leave it out.", parameter=where)
    return stops


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
    if switch is not None:
        return switch, wanted
    return (defaults.thinking if thinks is None else thinks), wanted


class AnswerFormat(msgspec.Struct):
    """The form that an answer must have: OpenAI's ``response_format`` in both its spellings, and two kinds of our
    own, ``regex`` and ``grammar``."""

    type: str = "text"
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | bool | None = None
    regex: str = ""
    grammar: str = ""

    def constraint(self, where: str) -> Constraint | None:
        """Raises Refused."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return Constraint(kind="json")
            case "json_schema":
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
    """``value`` as JSON text, its keys in their order."""
    return msgspec.json.encode(value).decode()


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
