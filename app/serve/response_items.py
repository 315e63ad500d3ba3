"""The conversation of a request to ``/v1/responses``: items of many kinds, as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from app.serve.asking import Content, as_text, last_question, merged, result_text, text_of
from app.serve.refusals import Refused
from engine.ipc.messages import Message, ToolCall

_ROLES = {"developer": "system"}
_KNOWN_ROLES = ("system", "user", "assistant")


class InputItem(msgspec.Struct):
    """One item; its ``type`` says which fields count."""

    type: str = "message"
    role: str = "user"
    content: Any = None
    summary: Any = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    action: Any = None
    operation: Any = None
    output: Any = None

    @property
    def is_call(self) -> bool:
        """Whether the client was called. Calls of tools that ran elsewhere have no result for the model to read."""
        return self.type.endswith("_call") and bool(self.call_id)

    @property
    def is_result(self) -> bool:
        return self.type.endswith("_output")

    def call(self) -> ToolCall:
        name = self.name or self.type.removesuffix("_call")
        given = self.arguments
        if given is None and self.input is not None:
            given = {"input": self.input}
        if given is None:
            given = self.action if self.action is not None else self.operation
        text = given if isinstance(given, str) else "" if given is None else as_text(given)
        return ToolCall(id=self.call_id or "", name=qualified(self.namespace or "", name), arguments=text)


def messages_of(items: Sequence[InputItem]) -> list[Message]:
    """The conversation. Items that say nothing to a model are left out. Raises Refused for an unknown role, and for
    something else than text in the person's last question."""
    asked = last_question(["tool" if item.is_result else item.role if item.type == "message" else "" for item in items])
    found: list[Message] = []
    thoughts = ""
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if item.type == "reasoning":
            thoughts = result_text(item.content) or result_text(item.summary)
        elif item.type == "message":
            message = _message(item, where, thoughts, asked=number == asked)
            thoughts = ""
            found.append(message)
        elif item.is_call:
            if not found or found[-1].role != "assistant" or thoughts:
                found.append(Message("assistant", "", thoughts))
            thoughts = ""
            found[-1].tool_calls.append(item.call())
        elif item.is_result:
            found.append(Message("tool", result_text(item.output), tool_call_id=item.call_id or item.id or ""))
        elif item.type == "item_reference":
            raise Refused(
                "Nothing is kept between requests here: send the item itself instead of its item_reference.",
                parameter=f"{where}.type",
            )
    return merged(found)


def _message(item: InputItem, where: str, thoughts: str, *, asked: bool) -> Message:
    role = _ROLES.get(item.role, item.role)
    if role not in _KNOWN_ROLES:
        raise Refused(f"The role {item.role[:50]!r} is unknown.", parameter=f"{where}.role")
    try:
        content = msgspec.convert(item.content, Content)
    except msgspec.ValidationError as error:
        raise Refused(f"{where}.content: {error}.", parameter=f"{where}.content") from None
    text = text_of(content, f"{where}.content", asked=asked)
    return Message(role, text, thoughts if role == "assistant" else "")  # type: ignore[arg-type]


def qualified(namespace: str, name: str) -> str:
    """The one name by which the model knows the function ``name`` of a ``namespace`` (empty: none)."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name
