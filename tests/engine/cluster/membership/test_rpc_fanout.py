"""Asking several machines at once, and ending that: what is raised, and that nobody waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.cluster.membership.client import CallGroup, Unreachable
from engine.cluster.membership.control_messages import DataPiece, EmptyBody, Received
from engine.cluster.membership.rpc_fanout import NodeRefused, stopped_by, until_done
from engine.cluster.membership.server import RpcMethod
from engine.cluster.weights.weight_fingerprint import identity_of, known_weights
from engine.errors import Cancelled, ModelError
from tests.engine.cluster.paired_nodes import Nodes
from tests.support.tiny_models import write_tiny_model

PATIENCE_S = 120.0


def stop() -> None:
    raise Cancelled("Stopped.")


def done(result: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(result)
    return future


def test_waiting_ends_when_all_are_done_or_one_failed() -> None:
    until_done([done(1), done(2)], stop)
    failed: Future[int] = Future()
    failed.set_exception(NodeRefused("id", "It has no room."))
    with pytest.raises(NodeRefused, match="no room"):
        until_done([Future(), failed], stop)
    asked: list[Future[int]] = [Future(), done(1)]
    told: list[int] = []

    def tell() -> None:
        told.append(len(told))
        if len(told) == 3:
            asked[0].set_result(0)

    until_done(asked, tell)
    assert told == [0, 1, 2]
    with pytest.raises(Cancelled):
        until_done([Future()], stop)


def test_work_that_cannot_ask_is_stopped_from_beside_it() -> None:
    ended = threading.Event()
    with pytest.raises(Cancelled) as found, stopped_by(stop, ended.set):
        assert ended.wait(PATIENCE_S)
        raise ConnectionError("the link was closed")
    assert isinstance(found.value.__cause__, ConnectionError)
    ended.clear()
    with pytest.raises(Cancelled), stopped_by(stop, ended.set):
        assert ended.wait(PATIENCE_S)  # it went well, but nobody wants it any more
    with pytest.raises(ConnectionError), stopped_by(lambda: None, ended.set):
        raise ConnectionError("gone")
    before = ended.is_set()
    with stopped_by(lambda: None, ended.clear):
        pass
    assert ended.is_set() is before
    assert not [thread for thread in threading.enumerate() if thread.name == "asking whether to stop"]


def test_calls_are_ended_on_both_sides(pair: Nodes) -> None:
    given_up, begun = threading.Event(), threading.Event()

    def receive(caller, pieces):  # type: ignore[no-untyped-def]
        next(pieces)
        begun.set()
        while caller.active():
            time.sleep(0.01)
        given_up.set()
        return Received(nbytes=0)

    pair.nodes[1].add_methods({"Receive": RpcMethod(DataPiece, receive, "up")})
    client, calls, never = pair.client(1, pair.identities[0]), CallGroup(), threading.Event()

    def pieces() -> Iterator[DataPiece]:
        yield DataPiece(data=b"x")
        never.wait(PATIENCE_S)

    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.upload, "Receive", pieces(), Received, calls)
            assert begun.wait(PATIENCE_S)
            calls.end()
            with pytest.raises(Unreachable, match="ended here"):
                running.result(PATIENCE_S)
        assert given_up.wait(PATIENCE_S)
        with pytest.raises(Unreachable):
            client.call("Beat", pair.nodes[0].load(), EmptyBody, calls=calls)
    finally:
        never.set()
        client.close()


def test_what_an_upload_raises_is_raised_here(pair: Nodes) -> None:
    def receive(caller, pieces):  # type: ignore[no-untyped-def]
        for _ in pieces:
            continue
        return Received(nbytes=0)

    def refuse(caller, pieces):  # type: ignore[no-untyped-def]
        next(pieces)
        raise ModelError("The disk is full.", kind="disk")

    def failing() -> Iterator[DataPiece]:
        yield DataPiece(data=b"x")
        raise ModelError("The file became shorter.")

    def endless() -> Iterator[DataPiece]:
        while True:
            yield DataPiece(data=bytes(1 << 16))

    pair.nodes[1].add_methods(
        {"Receive": RpcMethod(DataPiece, receive, "up"), "Offer": RpcMethod(DataPiece, refuse, "up")}
    )
    client = pair.client(1, pair.identities[0])
    try:
        with pytest.raises(ModelError, match="became shorter"):
            client.upload("Receive", failing(), Received, CallGroup())
        # The other side's reason counts, although what is sent to it ends with it.
        with pytest.raises(ModelError, match="disk is full"):
            client.upload("Offer", endless(), Received, CallGroup())
    finally:
        client.close()


def test_what_is_known_of_weights_is_told_without_reading_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    folder = write_tiny_model(tmp_path / "tiny", "mixtral")
    assert known_weights(folder) == ""
    known = identity_of(folder).weights
    assert known_weights(folder) == known != ""
    weights = next(folder.glob("*.safetensors"))
    weights.touch()
    assert known_weights(folder) == ""
    assert known_weights(tmp_path / "gone") == ""
