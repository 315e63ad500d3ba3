"""What is said to a client whose request is not answered, in the form of its protocol."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.ipc.messages import Failed

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""``error.type`` of Anthropic's errors by status. Any other client's mistake is an ``invalid_request_error``."""


class Refused(Exception):
    """A request is not answered. The text is one sentence for the person who wrote or uses the client.

    ``status``: the HTTP status. ``code``: OpenAI's word for the case, if it has one. ``parameter``: the field that is
    wrong.
    """

    def __init__(self, text: str, status: int = 400, *, code: str | None = None, parameter: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.parameter = parameter


Protocol = Literal["openai", "anthropic"]


STOPPED = "The server is being stopped."
TOO_LONG = "context_length_exceeded"
_TOO_LONG_SAID: dict[Protocol, str] = {
    "openai": "This model's maximum context length is exceeded: ",
    "anthropic": "prompt is too long: ",
}
"""Beginnings by which clients know that they must shorten the conversation."""


def error_object(refused: Refused, protocol: Protocol) -> dict[str, object]:
    """The error's JSON in ``protocol``."""
    said = _TOO_LONG_SAID[protocol] if refused.code == TOO_LONG else ""
    message = f"{said}{refused}"
    if protocol == "anthropic":
        usual = "api_error" if refused.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_KINDS.get(refused.status, usual)
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        refused.status, "server_error" if refused.status >= 500 else "invalid_request_error"
    )
    error = {"message": message, "type": kind, "param": refused.parameter, "code": refused.code}
    return {"error": error}


def error_json(refused: Refused, protocol: Protocol) -> bytes:
    return msgspec.json.encode(error_object(refused, protocol))


def protocol_of(path: str) -> Protocol:
    """The protocol whose errors a client of ``path`` can read."""
    return "anthropic" if path.startswith(("/v1/messages", "/v1/v1/messages")) else "openai"


def refused_by_engine(failed: Failed) -> Refused:
    """The engine's own sentence, with the status that its kind of failure has."""
    match failed.kind:
        case "context":
            return Refused(failed.error, 400, code=TOO_LONG, parameter="messages")
        case "bad-input" | "model":
            return Refused(failed.error, 400)
        case "memory":
            return Refused(failed.error, 503, code="insufficient_memory")
        case _:
            return Refused(failed.error, 500)
