"""Conversations in the form that a chat template takes: whatever a client sends, nothing of it is refused or lost.

What a template does not take is found by trying: small conversations are put through it, and it must neither refuse
them nor leave out what they say. Each is tried when a conversation has the like of it, once for a template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Message, PictureFile, ToolCall

Render = Callable[[Sequence[Message]], str]
"""Puts messages through the template. Raises ModelError if it refuses them."""

_CUT = Message("user", "[What was said before is left out.]")
"""The question where a conversation begins with an answer."""
_TAKEN_NOTE = Message("assistant", "OK.")
"""The answer between a tool's result and the next question, where roles must alternate."""
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The one form of a call's id that all templates take."""


@dataclass(frozen=True, eq=False)
class _Trial:
    """Messages, and words that must be in what the template makes of them."""

    messages: Sequence[Message]
    words: Sequence[str]


def _called(*names: str, digits: str = "0", **more: Any) -> Message:
    calls = [
        ToolCall(id=f"{place}{digits * 8}", name=name, arguments=f'{{"q": "qvalue{place}"}}')
        for place, name in enumerate(names)
    ]
    return Message("assistant", more.pop("content", ""), tool_calls=calls, **more)


_SYSTEM, _LATE = Message("system", "qsystem"), Message("system", "qlate")
_QUESTION, _NEXT = Message("user", "qquestion"), Message("user", "qnext")
_ANSWER = Message("assistant", "qanswer")
_RESULT, _OTHER_RESULT = (Message("tool", f"qresult{place}", tool_call_id=f"{place}00000000") for place in "01")
_LOOP = (_QUESTION, _called("qtool"), _RESULT)

_SYSTEM_FIRST = _Trial((_SYSTEM, _QUESTION), ("qsystem", "qquestion"))
_SYSTEM_ALONE = _Trial((_SYSTEM,), ("qsystem",))
_SYSTEM_LATE = _Trial((_SYSTEM, _QUESTION, _ANSWER, _LATE, _NEXT), ("qsystem", "qlate"))
_SYSTEM_BESIDE_CALLS = _Trial((_SYSTEM, *_LOOP), ("qsystem",))
_NO_QUESTION = _Trial((_ANSWER,), ())
_TWO_QUESTIONS = _Trial((_QUESTION, _NEXT), ("qquestion", "qnext"))
_CALL = _Trial(_LOOP, ())
_ONE_CALL = _Trial(_LOOP, ("qvalue0", "qresult0"))
_NAMED_CALL = _Trial(_LOOP, ("qtool",))
_TWO_CALLS = _Trial((_QUESTION, _called("qtool", "qother"), _RESULT, _OTHER_RESULT), ("qvalue0", "qvalue1"))
_LONG_ID = _Trial(
    (_QUESTION, _called("qtool", digits="call_"), msgspec.structs.replace(_RESULT, tool_call_id="0" + "call_" * 8)), ()
)
_TEXT_AND_THOUGHTS = _Trial((_QUESTION, _called("qtool", content="qtext", reasoning="qthought"), _RESULT), ())


class Histories:
    """Makes conversations fit one template. ``takes_tools``: whether the template writes calls and their results."""

    def __init__(self, takes_tools: bool) -> None:
        self._takes_tools = takes_tools
        self._tried: dict[_Trial, bool] = {}

    def fitted(self, messages: Sequence[Message], render: Render) -> list[Message]:
        """``messages`` as the template takes them. Raises Cancelled as ``render`` does."""
        fitting = paired(messages)
        if any(message.tool_calls for message in fitting):
            takes_calls = self._takes_tools and self._takes(_CALL, render)
            fitting = self._with_fitting_calls(fitting, render) if takes_calls else _told(fitting)
        fitting = self._with_fitting_systems(fitting, render)
        if not any(message.role == "user" for message in fitting) and not self._takes(_NO_QUESTION, render):
            fitting = _with_question(fitting)
        by_turns = _alternating(fitting)
        return fitting if by_turns == fitting or self._takes(_TWO_QUESTIONS, render) else by_turns

    def takes_several_calls(self, render: Render) -> bool:
        """Whether an answer may call several tools at once."""
        return self._takes_tools and (self._takes(_TWO_CALLS, render) or not self._takes(_ONE_CALL, render))

    def _takes(self, trial: _Trial, render: Render) -> bool:
        if trial not in self._tried:
            try:
                text = render(trial.messages)
            except Cancelled:
                raise
            except ModelError:
                self._tried[trial] = False
            else:
                self._tried[trial] = all(word in text for word in trial.words)
        return self._tried[trial]

    def _with_fitting_calls(self, messages: list[Message], render: Render) -> list[Message]:
        if any(len(message.tool_calls) > 1 for message in messages) and not self.takes_several_calls(render):
            messages = _one_by_one(messages)
        if any(_SHORT_ID.fullmatch(call.id) is None for message in messages for call in message.tool_calls) and (
            not self._takes(_LONG_ID, render)
        ):
            messages = [_with_short_ids(message) for message in messages]
        if self._takes(_ONE_CALL, render) and not self._takes(_NAMED_CALL, render):
            messages = _with_naming_ids(messages)
        if any(message.tool_calls and message.reasoning and message.content for message in messages) and (
            not self._takes(_TEXT_AND_THOUGHTS, render)
        ):
            messages = [
                msgspec.structs.replace(message, content="") if message.tool_calls and message.reasoning else message
                for message in messages
            ]
        return messages

    def _with_fitting_systems(self, messages: list[Message], render: Render) -> list[Message]:
        """A system message that is not taken where it stands becomes part of the next question."""
        places = [place for place, message in enumerate(messages) if message.role == "system"]
        if not places:
            return messages
        roles = {message.role for message in messages}
        if (
            not self._takes(_SYSTEM_FIRST, render)
            or ("user" not in roles and not self._takes(_SYSTEM_ALONE, render))
            or ("tool" in roles and self._takes(_ONE_CALL, render) and not self._takes(_SYSTEM_BESIDE_CALLS, render))
        ):
            return _moved(messages, places)
        if places[-1] > 0 and not self._takes(_SYSTEM_LATE, render):
            return _moved(messages, [place for place in places if place > 0])
        return messages


def paired(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with the results of calls right behind these, in their order, all of them with ids.

    A result without an id belongs to the first call that has none yet. One that belongs to no call is the user's.
    """
    result: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if message.role == "tool":
            result.append(_as_question(message))
            continue
        if not message.tool_calls:
            result.append(message)
            continue
        calls = [
            call if call.id else msgspec.structs.replace(call, id=f"call{len(result) % 1000:03}{number % 100:02}")
            for number, call in enumerate(message.tool_calls)
        ]
        result.append(msgspec.structs.replace(message, tool_calls=calls))
        results: list[Message] = []
        others: list[Message] = []
        while place < len(messages) and messages[place].role in ("tool", "system"):
            (results if messages[place].role == "tool" else others).append(messages[place])
            place += 1
        result += _results_of(calls, results) + others
    return result


def _results_of(calls: Sequence[ToolCall], results: Sequence[Message]) -> list[Message]:
    """The ``results`` in the order of their ``calls``, then those that are of none as questions."""
    order = {call.id: place for place, call in enumerate(calls)}
    by_place: dict[int, Message] = {}
    left: list[Message] = []
    for result in results:
        place = order.get(result.tool_call_id)
        if place is None or place in by_place:
            left.append(result)
        else:
            by_place[place] = result
    for place, call in enumerate(calls):
        if place not in by_place and left:
            by_place[place] = msgspec.structs.replace(left.pop(0), tool_call_id=call.id)
    return [by_place[place] for place in sorted(by_place)] + [_as_question(result) for result in left]


def _as_question(result: Message, name: str = "a tool") -> Message:
    return Message("user", f"[The result of {name}]\n{result.content}")


def _told(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with calls and results in words, for a template that knows none."""
    result: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        if message.role == "tool":
            result.append(_as_question(message, names[message.tool_call_id]))
            continue
        names |= {call.id: call.name for call in message.tool_calls}
        calls = [f"[I call {call.name} with {call.arguments or '{}'}]" for call in message.tool_calls]
        content = "\n".join([*filter(None, [message.content]), *calls])
        result.append(msgspec.structs.replace(message, content=content, tool_calls=[]))
    return result


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Each call in a message of its own, before its result."""
    result: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if len(message.tool_calls) < 2:
            result.append(message)
            continue
        results: dict[str, Message] = {}
        while place < len(messages) and messages[place].role == "tool":
            results[messages[place].tool_call_id] = messages[place]
            place += 1
        for number, call in enumerate(message.tool_calls):
            first = msgspec.structs.replace(message, tool_calls=[call])
            result.append(first if number == 0 else Message("assistant", "", tool_calls=[call]))
            if call.id in results:
                result.append(results.pop(call.id))
    return result


def _with_short_ids(message: Message) -> Message:
    calls = [msgspec.structs.replace(call, id=_short(call.id)) for call in message.tool_calls]
    named = _short(message.tool_call_id) if message.role == "tool" else ""
    return msgspec.structs.replace(message, tool_calls=calls, tool_call_id=named)


def _with_naming_ids(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with ids that name the tool, for a template that writes nothing else of it."""
    result: list[Message] = []
    ids: dict[str, str] = {}
    count = 0
    for message in messages:
        if message.tool_calls:
            ids = {call.id: f"functions.{call.name}:{count + place}" for place, call in enumerate(message.tool_calls)}
            count += len(ids)
        calls = [msgspec.structs.replace(call, id=ids[call.id]) for call in message.tool_calls]
        named = ids[message.tool_call_id] if message.role == "tool" else ""
        result.append(msgspec.structs.replace(message, tool_calls=calls, tool_call_id=named))
    return result


def _short(identifier: str) -> str:
    if _SHORT_ID.fullmatch(identifier) is not None:
        return identifier
    return blake2b(identifier.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _moved(messages: Sequence[Message], places: Sequence[int]) -> list[Message]:
    """The messages at ``places`` as part of the question after or else before them, or else as one of its own."""
    moving = set(places)
    result: list[Message] = []
    waiting: list[str] = []
    for place, message in enumerate(messages):
        if place in moving:
            waiting.append(message.content)
            continue
        if waiting and message.role == "user":
            result.append(_joined([*(Message("user", text) for text in waiting), message]))
        else:
            if waiting:
                _add_question(result, waiting)
            result.append(message)
        waiting = []
    if waiting:
        _add_question(result, waiting)
    return result


def _add_question(messages: list[Message], texts: Sequence[str]) -> None:
    if messages and messages[-1].role == "user":
        messages[-1] = _joined([messages[-1], *(Message("user", text) for text in texts)])
    else:
        messages.append(Message("user", "\n\n".join(texts)))


def _with_question(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with a question before the first answer."""
    place = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    return [*messages[:place], _CUT, *messages[place:]]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Questions and answers by turns, neighbours of one kind as one."""
    if next((message.role for message in messages if message.role != "system"), "user") == "assistant":
        messages = _with_question(messages)
    groups: list[list[Message]] = []
    for message in messages:
        before = groups[-1][-1] if groups else None
        if before is not None and message.role == before.role != "tool" and not before.tool_calls:
            groups[-1].append(message)
            continue
        if before is not None and message.role == "user" and (before.role == "tool" or before.tool_calls):
            groups.append([_TAKEN_NOTE])
        groups.append([message])
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _joined(messages: Sequence[Message]) -> Message:
    """Neighbours as one. Only the last of them may have calls."""
    content, pictures = "", list[PictureFile]()
    for message in messages:
        before = f"{content}\n\n" if content and message.content else content
        pictures += [PictureFile(each.data, each.place + len(before)) for each in message.pictures]
        content = before + message.content
    return msgspec.structs.replace(
        messages[-1],
        content=content,
        pictures=pictures,
        reasoning="\n\n".join(message.reasoning for message in messages if message.reasoning),
    )
