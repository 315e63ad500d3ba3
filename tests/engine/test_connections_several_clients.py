"""Several programs at one engine process: who gets which events, in which order they are answered, who ends what."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.ipc import engine_sockets
from engine.ipc.engine_sockets import connect, engine_key, listen, reachable_engines, sockets_folder
from engine.ipc.messages import (
    AnyEvent,
    Bench,
    Cancel,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    Notice,
    Piece,
    Progress,
    Sharing,
    Shutdown,
    Timing,
    Watch,
)
from engine.session.session import MOST_TOGETHER
from tests.engine.attached import AttachedProgram, the_socket
from tests.engine.engine_process import PATIENCE_S, EngineProcess
from tests.support.eventually import eventually

PROMPT = [5, 17, 101, 42, 9, 77, 30]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the engines of the tests have it: programs with other variables have other engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def kept_engine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path_factory.mktemp("home")) as process:
        yield process


@pytest.fixture
def engine(kept_engine: EngineProcess, model: Path, monkeypatch: pytest.MonkeyPatch) -> EngineProcess:
    """An engine that can be shared, with the model loaded, for tests that leave it so."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(kept_engine.home))
    assert isinstance(kept_engine.ask(Load(id=1, model=str(model), share=True))[-1], Loaded)
    return kept_engine


@pytest.fixture
def own_engine(home: Path, model: Path) -> Iterator[EngineProcess]:
    """One that the test ends."""
    with EngineProcess(home) as process:
        assert isinstance(process.ask(Load(id=1, model=str(model), share=True))[-1], Loaded)
        yield process


def finished(events: Any) -> Finished:
    last = list(events)[-1]
    assert isinstance(last, Finished), last
    return last


def answering(program: EngineProcess | AttachedProgram, request: int) -> None:
    """Begin an endless answer and wait for its first piece."""
    program.send(Generate(id=request, prompt_ids=PROMPT))
    next(event for event in program.events(request) if isinstance(event, Piece))


def test_the_same_model_is_shared_and_another_is_refused(engine: EngineProcess, model: Path) -> None:
    with AttachedProgram() as other:
        (loaded,) = other.ask(Load(id=1, model=str(model), share=True))
        assert isinstance(loaded, Loaded) and loaded.facts.load_s == 0.0
        for different in (
            Load(id=2, model=str(model), context_limit=77, share=True),
            Load(id=3, model="nowhere", share=True),
            Bench(id=4, kind="decode", load=Load(id=4, model=str(model))),
        ):
            for program in (engine, other):
                (refused,) = program.ask(different)
                assert isinstance(refused, Failed) and refused.kind == "in-use"
        mine = finished(engine.ask(Generate(id=5, prompt_ids=PROMPT, max_tokens=4)))
        theirs = finished(other.ask(Generate(id=5, prompt_ids=PROMPT, max_tokens=4)))
        assert mine.token_ids == theirs.token_ids and theirs.prefilled_tokens == 0
    assert isinstance(engine.ask(Load(id=6, model=str(model), context_limit=77, share=True))[-1], Loaded), "alone again"


def test_events_go_to_who_asked(engine: EngineProcess, model: Path) -> None:
    with AttachedProgram() as other:
        answering(engine, 7)
        other.send(Watch(id=2, timing=True))
        # Also while another's answer runs.
        assert isinstance(other.ask(Load(id=3, model=str(model), share=True))[-1], Loaded)
        other.send(Cancel(id=4, target=7), Generate(id=7, prompt_ids=PROMPT, max_tokens=3))
        theirs = finished(other.events(7))
        engine.send(Cancel(id=8, target=7))
        mine = finished(engine.events(7))
        assert (mine.finish_reason, theirs.finish_reason) == ("cancelled", "length")
        assert mine.timing is None and isinstance(theirs.timing, Timing)


def test_answers_are_under_way_together(engine: EngineProcess) -> None:
    """Short ones end while a long one goes on, whoever asks, and each is what it would be alone."""
    alone = finished(engine.ask(Generate(id=9, prompt_ids=PROMPT, max_tokens=5))).token_ids
    with AttachedProgram() as other:
        answering(engine, 10)
        other.send(*(Generate(id=number, prompt_ids=PROMPT, max_tokens=5, client="a") for number in (21, 22)))
        finished(other.events(22))
        answers = [event for event in other.seen if isinstance(event, Finished)]
        assert [(answer.id, answer.token_ids) for answer in answers] == [(21, alone), (22, alone)]
        assert finished(engine.ask(Generate(id=11, prompt_ids=PROMPT, max_tokens=5))).token_ids == alone
        engine.send(Cancel(id=14, target=10))
        assert finished(engine.events(10)).finish_reason == "cancelled"


def test_too_many_questions_wait_and_owners_take_turns(engine: EngineProcess) -> None:
    with AttachedProgram() as other:
        for number in range(MOST_TOGETHER):
            answering(engine, 100 + number)
        other.send(*(Generate(id=number, prompt_ids=PROMPT, max_tokens=1, client="a") for number in (21, 22)))
        other.send(Generate(id=31, prompt_ids=PROMPT, max_tokens=1, client="b"))
        other.until(lambda event: event.id == 31 and isinstance(event, Progress))
        engine.send(Cancel(id=14, target=100))
        assert finished(engine.events(100)).finish_reason == "cancelled"
        finished(other.events(22))
        assert [event.id for event in other.seen if isinstance(event, Finished)] == [21, 31, 22]
        for number in range(1, MOST_TOGETHER):
            engine.send(Cancel(id=200 + number, target=100 + number))
            assert finished(engine.events(100 + number)).finish_reason == "cancelled"


def test_who_goes_away_cancels_what_it_asked(engine: EngineProcess) -> None:
    with AttachedProgram() as other:
        for number in range(MOST_TOGETHER):
            answering(other, number + 5)
        engine.send(Generate(id=7, prompt_ids=PROMPT, max_tokens=2))
        next(event for event in engine.events(7) if isinstance(event, Progress))
    assert finished(engine.events(7)).completion_tokens == 2
    assert finished(engine.ask(Generate(id=8, prompt_ids=PROMPT, max_tokens=2))).completion_tokens == 2


@pytest.mark.parametrize("how", ["killed", "shutdown", "closed"])
def test_the_engine_goes_on_without_its_first_program_and_ends_with_the_last(
    own_engine: EngineProcess, model: Path, how: str
) -> None:
    """Its first program is known by its pipes, which close however it ends."""
    engine = own_engine
    path = the_socket()
    with AttachedProgram() as other:
        assert isinstance(other.ask(Load(id=1, model=str(model), share=True))[-1], Loaded)
        answering(engine, 5)
        if how == "shutdown":
            engine.send(Shutdown(id=6))
        else:
            engine.stdin.close()
            if how == "killed":
                engine.stdout.close()
        assert other.until(lambda event: isinstance(event, Sharing) and event.clients == 1)
        assert finished(other.ask(Generate(id=2, prompt_ids=PROMPT, max_tokens=5))).completion_tokens == 5
        with AttachedProgram() as third:
            assert isinstance(third.ask(Load(id=1, model=str(model), share=True))[-1], Loaded)
        if how != "killed":
            assert engine.stdout.read() is not None, "its side is closed"
    assert engine.process.wait(PATIENCE_S) == 0
    assert not path.exists()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 9])
def test_nonsense_ends_only_its_own_connection(engine: EngineProcess, data: bytes) -> None:
    with AttachedProgram() as other:
        other.socket.sendall(data)
        notice = other.until(lambda event: isinstance(event, Notice))
        assert isinstance(notice, Notice) and "no request" in notice.text
        while other.next() is not None:
            pass
    assert finished(engine.ask(Generate(id=5, prompt_ids=PROMPT, max_tokens=3))).completion_tokens == 3


def test_only_its_owner_can_reach_it(engine: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    path = the_socket()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert connect(path) is None, "an engine of another user"


def test_an_engine_of_another_installation_is_not_seen(engine: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    the_socket()
    monkeypatch.setenv("PRIVATELLM_KERNELS", "scalar")
    assert reachable_engines() == []


def test_what_a_killed_engine_leaves_is_removed(home: Path, model: Path) -> None:
    with EngineProcess(home) as process:
        process.ask(Load(id=1, model=str(model), share=True))
        path = the_socket()
        process.process.send_signal(signal.SIGKILL)
        process.process.wait(PATIENCE_S)
        assert path.exists()
        assert connect(path) is None
        assert not path.exists()


def test_a_long_path_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / ("long" * 40)))
    listening, path = listen(engine_key())
    with listening:
        assert len(str(path)) > 108 and reachable_engines() == [path]
        found = connect(path)
        assert found is not None
        found.close()


def test_without_unix_sockets_nothing_is_shared(home: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "data").mkdir()
    sockets_folder().write_text("in the way")
    with EngineProcess(home) as process:
        process.send(Load(id=1, model=str(model), share=True))
        notice = process.next()
        assert isinstance(notice, Notice) and "cannot be shared" in notice.text
        assert isinstance(list(process.events(1))[-1], Loaded)
    monkeypatch.setattr(engine_sockets, "CAN_SHARE", False)
    assert reachable_engines() == []


def test_no_engine_is_shared_that_nobody_shares(home: Path, model: Path) -> None:
    with EngineProcess(home) as process:
        assert isinstance(process.ask(Load(id=1, model=str(model)))[-1], Loaded)
        assert not sockets_folder().exists()
        assert not psutil.Process(process.process.pid).net_connections("unix")


def test_sharing_ends_with_a_model_that_is_not_shared(engine: EngineProcess, model: Path) -> None:
    the_socket()
    events: list[AnyEvent] = engine.ask(Load(id=2, model=str(model)))
    assert isinstance(events[-1], Loaded)
    eventually(lambda: not reachable_engines())
