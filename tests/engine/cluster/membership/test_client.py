"""What it means that a call of another machine ended without an answer."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from engine.cluster.membership.client import NobodyListens, NotInTime, Unreachable, _translated
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused, ask
from engine.cluster.transport.exchange import PeerLost
from engine.errors import ModelError


class _Ended(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    def __init__(self, status: grpc.StatusCode, text: str) -> None:
        self._status, self._text = status, text

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._text

    def _none(self, *_: Any) -> None:
        return None

    initial_metadata = trailing_metadata = is_active = time_remaining = cancel = add_callback = _none


@pytest.mark.parametrize(
    ("status", "text", "kind", "gone"),
    [
        (grpc.StatusCode.UNKNOWN, "Stream removed", Unreachable, True),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", Unreachable, True),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", NobodyListens, True),
        (grpc.StatusCode.UNAVAILABLE, "connect: Connection refused (111)", NobodyListens, True),
        # A cable is out: that says nothing about the machine's program.
        (grpc.StatusCode.UNAVAILABLE, "Stream removed (recvmsg:Connection timed out (110))", Unreachable, True),
        (grpc.StatusCode.UNAVAILABLE, "getsockopt(SO_ERROR): No route to host", Unreachable, True),
        (grpc.StatusCode.UNAVAILABLE, "error: Network is unreachable", Unreachable, True),
        (grpc.StatusCode.UNAVAILABLE, "keepalive watchdog timeout", Unreachable, True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", NotInTime, True),
        (grpc.StatusCode.ABORTED, "node 2 is gone", PeerLost, True),
        # What the other machine's own program says: it is there.
        (grpc.StatusCode.INTERNAL, "", ModelError, False),
        (grpc.StatusCode.FAILED_PRECONDITION, "disk: The disk is full.", ModelError, False),
    ],
)
def test_a_broken_connection_is_no_refusal(
    status: grpc.StatusCode, text: str, kind: type[Exception], gone: bool
) -> None:
    error = _translated(_Ended(status, text))
    assert type(error) is kind

    def fails() -> None:
        raise error

    with pytest.raises(NodeRefused) as refused:
        ask(Candidate("id", "node", None, (), ""), fails)  # type: ignore[arg-type]
    assert refused.value.gone is gone
