"""The engine as a process: its pipes, its end, and what it does when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.host import Host, physical_cores
from engine.ipc.messages import (
    AnyEvent,
    AnyRequest,
    BeamEstimates,
    Cancel,
    Done,
    EstimateBeams,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    MachineMeasured,
    MeasureMachine,
    Message,
    Notice,
    OpenNetwork,
    Piece,
    Plan,
    Prefill,
    Progress,
    ProtocolError,
    Pull,
    Shutdown,
    Timing,
    Watch,
    pack,
    request_reader,
)
from engine.moe.kernels.bindings import choose
from engine.process_life import EXIT_BAD_FRAME, EXIT_THREAD_FAILED, end_with_thread, environment
from tests.engine import host_hooks, watched_sockets
from tests.engine.engine_process import PATIENCE_S, EngineProcess
from tests.support.hooked_engine import hooked
from tests.support.tiny_models import ENDLESS

PROMPT = [5, 17, 101, 42, 9, 77, 30]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def shared_engine(home: Path, model: Path) -> Iterator[EngineProcess]:
    with EngineProcess(home) as process:
        assert isinstance(process.ask(Load(id=1, model=str(model)))[-1], Loaded)
        yield process


@pytest.fixture
def engine(shared_engine: EngineProcess) -> EngineProcess:
    """A running engine with the model loaded, shared by tests that leave it so."""
    return shared_engine


def finished(events: list[Any]) -> Finished:
    assert isinstance(events[-1], Finished), events[-1]
    return events[-1]


def test_greedy_answers_equal_transformers(engine: EngineProcess, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    theirs = reference.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, pad_token_id=0)
    events = engine.ask(Generate(id=2, prompt_ids=PROMPT, max_tokens=40))
    found = finished(events)
    assert found.token_ids == theirs[0, len(PROMPT) :].tolist()
    assert isinstance(events[0], Prefill)
    again = finished(engine.ask(Generate(id=3, prompt_ids=[*PROMPT, *found.token_ids, 8], max_tokens=3)))
    assert again.prefilled_tokens == 2


def test_loading_tells_its_progress_and_facts(home: Path, model: Path) -> None:
    with EngineProcess(home) as process:
        *progress, loaded = process.ask(Load(id=1, model=str(model), context_limit=77, cpu_threads=1))
        assert progress and all(isinstance(event, Progress) for event in progress)
        assert isinstance(loaded, Loaded)
        facts = loaded.facts
        assert (facts.name, facts.family) == ("tiny", "mixtral")
        assert facts.runtime == ("native" if choose("float32").native else "torch")
        assert (facts.experts, facts.experts_per_token, facts.context_limit) == (8, 2, 77)
        assert facts.load_s > 0
        assert facts.sampling is not None and facts.sampling.temperature is not None


def test_cancelling_an_answer(engine: EngineProcess) -> None:
    engine.send(Generate(id=4, prompt_ids=PROMPT))
    events = engine.events(4)
    seen = next(event.tokens for event in events if isinstance(event, Piece))
    engine.send(Cancel(target=4, id=5))
    stopped = finished(list(events))
    assert stopped.finish_reason == "cancelled"
    assert seen <= stopped.completion_tokens < ENDLESS
    resumed = finished(engine.ask(Generate(id=6, prompt_ids=[*PROMPT, *stopped.token_ids], max_tokens=2)))
    assert resumed.prefilled_tokens == 1


def test_cancelling_what_waits_and_what_is_unknown(engine: EngineProcess) -> None:
    engine.send(Cancel(id=9, target=12345))
    engine.send(Generate(id=7, prompt_ids=PROMPT), Generate(id=8, prompt_ids=PROMPT), Cancel(id=9, target=8))
    waiting = finished(list(engine.events(8)))
    assert (waiting.finish_reason, waiting.completion_tokens) == ("cancelled", 0), (
        "before the answer that it waited for"
    )
    engine.send(Cancel(id=10, target=7))
    assert finished(list(engine.events(7))).finish_reason == "cancelled"


def test_cancelling_a_load(home: Path, model: Path) -> None:
    with EngineProcess(home) as process:
        process.send(Load(id=1, model=str(model)), Cancel(id=2, target=1))
        end = list(process.events(1))[-1]
        assert isinstance(end, Failed) and "Stopped" in end.error
        assert isinstance(process.ask(Load(id=3, model=str(model)))[-1], Loaded)


def test_beams_are_estimated_during_an_answer(engine: EngineProcess) -> None:
    engine.send(Generate(id=20, prompt_ids=PROMPT))
    next(event for event in engine.events(20) if isinstance(event, Piece))
    estimates = engine.ask(EstimateBeams(id=21, widths=[1, 2, 16], context_tokens=500))[-1]
    assert isinstance(estimates, BeamEstimates)
    assert [estimate.width for estimate in estimates.estimates] == [1, 2, 16]
    engine.send(Cancel(id=22, target=20))
    assert finished(list(engine.events(20))).finish_reason == "cancelled"


def test_watching_begins_and_ends_during_an_answer(engine: EngineProcess) -> None:
    engine.send(Generate(id=30, prompt_ids=PROMPT))
    events = engine.events(30)
    next(event for event in events if isinstance(event, Piece))
    engine.send(Watch(id=31, timing=True))
    timing = next(event for event in events if isinstance(event, Timing))
    assert timing.decode.tokens >= 1
    assert sum(map(sum, timing.expert_use)) > 0
    engine.send(Watch(id=32, timing=False), Cancel(id=33, target=30))
    assert finished(list(events)).timing is not None


def test_mistakes_are_answered_and_the_engine_goes_on(engine: EngineProcess, tmp_path: Path) -> None:
    cases: list[tuple[AnyRequest, str, str]] = [
        (Load(id=40, model="no such model"), "bad-input", "no such model"),
        (Load(id=41, model=str(tmp_path)), "", str(tmp_path)),
        (Pull(id=43, model="nonsense model"), "bad-input", "nonsense model"),
    ]
    for request, kind, text in cases:
        end = engine.ask(request)[-1]
        assert isinstance(end, Failed)
        assert text in end.error and "Traceback" not in end.error
        assert kind in ("", end.kind)
        assert end.kind != "internal"


def test_questions_without_a_model(home: Path) -> None:
    with EngineProcess(home) as process:
        for request in (Generate(id=1, prompt_ids=[1]), EstimateBeams(id=2, widths=[1], context_tokens=1)):
            end = process.ask(request)[-1]
            assert isinstance(end, Failed)
            assert (end.kind, "No model is loaded" in end.error) == ("bad-input", True)
        measured = process.ask(MeasureMachine(id=3))[-1]
        assert isinstance(measured, MachineMeasured)
        assert measured.memory_bytes > 1e8 and measured.memory_read > 1e8


def test_a_model_that_is_not_here_says_how_to_get_it(home: Path) -> None:
    with EngineProcess(home) as process:
        end = process.ask(Load(id=1, model="someone/some-model"))[-1]
        assert isinstance(end, Failed)
        assert "privatellm models pull someone/some-model" in end.error


def test_words_for_a_model_without_tokenizer(engine: EngineProcess, model: Path) -> None:
    assert isinstance(engine.ask(Load(id=50, model=str(model)))[-1], Loaded)
    end = engine.ask(Generate(id=51, messages=[Message("user", "hello")]))[-1]
    assert isinstance(end, Failed) and end.kind == "bad-input"
    assert finished(engine.ask(Generate(id=52, prompt_ids=PROMPT, max_tokens=2))).completion_tokens == 2


# --- the end of the process -------------------------------------------------------------------------------------------


def test_ends_with_its_input_whatever_it_does(home: Path, model: Path) -> None:
    with EngineProcess(home) as process:
        assert isinstance(process.ask(Load(id=1, model=str(model)))[-1], Loaded)
        process.send(Generate(id=2, prompt_ids=PROMPT))
        next(event for event in process.events(2) if isinstance(event, Piece))
        process.stdin.close()
        assert process.wait_for_end() == 0


def test_ends_with_its_input_while_loading(home: Path, model: Path) -> None:
    with EngineProcess(home) as process:
        process.send(Load(id=1, model=str(model)))
        assert isinstance(next(process.events(1)), Progress)
        process.stdin.close()
        assert process.wait_for_end() == 0


def test_ends_when_asked(home: Path) -> None:
    with EngineProcess(home, cold=True) as process:
        process.send(Shutdown(id=1))
        assert process.wait_for_end() == 0


def test_ends_when_nobody_reads(home: Path, model: Path) -> None:
    with EngineProcess(home) as process:
        assert isinstance(process.ask(Load(id=1, model=str(model)))[-1], Loaded)
        process.send(Generate(id=2, prompt_ids=PROMPT))
        process.stdout.close()
        assert process.process.wait(PATIENCE_S) == 0


def test_ends_with_its_input_while_its_output_is_full(home: Path, model: Path) -> None:
    """The screen hangs: nobody reads, the pipe is full. Then it dies."""
    with EngineProcess(home) as process:
        assert isinstance(process.ask(Load(id=1, model=str(model)))[-1], Loaded)
        process.send(*(Generate(id=number, prompt_ids=[number % 160] * 30, max_tokens=1) for number in range(2, 1500)))
        process.stdin.close()
        assert process.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_a_killed_engine_leaves_nothing_in_the_way_of_the_next(home: Path, model: Path) -> None:
    answers = []
    for _ in range(2):
        with EngineProcess(home) as process:
            assert isinstance(process.ask(Load(id=1, model=str(model)))[-1], Loaded)
            answers.append(finished(process.ask(Generate(id=2, prompt_ids=PROMPT, max_tokens=5))).token_ids)
            process.send(Generate(id=3, prompt_ids=PROMPT))
            next(event for event in process.events(3) if isinstance(event, Piece))
            process.process.send_signal(signal.SIGKILL)
            assert process.wait_for_end() == -signal.SIGKILL
    assert answers[0] == answers[1]


def test_children_end_with_it(home: Path) -> None:
    with EngineProcess(home, hooked(host_hooks.with_a_child)) as process:
        process.send(Pull(id=1, model="anything"))
        progress = next(event for event in process.events(1) if isinstance(event, Progress))
        child = psutil.Process(int(progress.stage))
        process.stdin.close()
        assert process.wait_for_end() == 0
        assert psutil.wait_procs([child], PATIENCE_S)[1] == []


def test_ctrl_c_belongs_to_the_screen(home: Path) -> None:
    with EngineProcess(home, cold=True) as process:
        os.killpg(process.process.pid, signal.SIGINT)
        end = process.ask(Generate(id=1, prompt_ids=[1]))[-1]
        assert isinstance(end, Failed) and end.kind == "bad-input"


def test_a_stopped_engine_goes_on(home: Path, model: Path) -> None:
    with EngineProcess(home) as process:
        process.process.send_signal(signal.SIGSTOP)
        process.send(Load(id=1, model=str(model)), Generate(id=2, prompt_ids=PROMPT, max_tokens=3))
        process.process.send_signal(signal.SIGCONT)
        assert finished(list(process.events(2))).completion_tokens == 3


# --- the pipes --------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_stray_prints_go_to_the_log(tmp_path: Path, model: Path) -> None:
    with EngineProcess(tmp_path, hooked(host_hooks.noisy), cold=True) as process:
        assert isinstance(process.ask(Load(id=1, model=str(model)))[-1], Loaded)
        assert finished(process.ask(Generate(id=2, prompt_ids=PROMPT, max_tokens=50))).completion_tokens == 50
        log = ""
        while "noise is over" not in log:
            process.ask(Generate(id=3, prompt_ids=PROMPT, max_tokens=5))
            log = process.log()
    for source in ("python", "the system", "native code", "a child"):
        assert f"noise of {source}" in log


def test_a_chat_opens_no_socket(tmp_path: Path, model: Path) -> None:
    seen = tmp_path / "sockets"
    with EngineProcess(tmp_path, hooked(watched_sockets.watched, seen=str(seen)), cold=True) as process:
        assert isinstance(process.ask(Load(id=1, model=str(model)))[-1], Loaded)
        assert finished(process.ask(Generate(id=2, prompt_ids=PROMPT, max_tokens=5, with_timing=True)))
        assert finished(process.ask(Generate(id=3, prompt_ids=PROMPT, max_tokens=5, beams=3)))
    assert seen.read_text() == ""


def test_a_bug_is_one_sentence_and_the_log_has_the_rest(tmp_path: Path, model: Path) -> None:
    with EngineProcess(tmp_path, hooked(host_hooks.failing_answers)) as process:
        assert isinstance(process.ask(Load(id=1, model=str(model)))[-1], Loaded)
        end = process.ask(Generate(id=2, prompt_ids=PROMPT))[-1]
        assert isinstance(end, Failed)
        assert end.kind == "internal"
        assert "ZeroDivisionError: division by (" in end.error and "engine.log" in end.error
        assert "Traceback" in process.log()
        assert isinstance(process.ask(Load(id=3, model=str(model)))[-1], Loaded)


@pytest.mark.parametrize(
    "held", [2**64, "\ud800", object(), "x" * 2**27], ids=["number", "surrogate", "object", "long"]
)
def test_what_no_frame_can_hold_is_not_packed(held: object) -> None:
    with pytest.raises(ProtocolError):
        pack(Done(id=1, path="x", detail=held))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["surrogate", "long"])
def test_an_answer_that_no_frame_can_hold_is_an_error(home: Path, kind: str) -> None:
    with EngineProcess(home, hooked(host_hooks.answering_plans_with, kind=kind)) as process:
        for request in (1, 2):
            failed = process.ask(Plan(id=request, load=Load(id=request, model="x")))[-1]
            assert isinstance(failed, Failed)
            assert "could not be sent" in failed.error


def test_a_thread_that_fails_ends_the_engine_with_a_word(home: Path) -> None:
    """Nobody waits for ever for what that thread was to say."""
    with EngineProcess(home, hooked(host_hooks.failing_thread)) as process:
        process.send(OpenNetwork(id=1, listen="127.0.0.1:0"))
        notices = [event.text for event in iter(process.next, None) if isinstance(event, Notice)]
        assert "network-state failed with LookupError" in notices[-1]
        assert process.wait_for_end() == EXIT_THREAD_FAILED
        assert "nobody caught this" in process.log()


def test_a_thread_of_somebody_else_may_fail(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    try:
        json.loads("{")
    except ValueError as error:
        end_with_thread(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)), said.append)
    assert not said
    assert "JSONDecodeError" in capsys.readouterr().err


def test_a_system_that_starts_no_more_threads_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a limit of processes."""
    sent: list[AnyEvent] = []
    host = Host(sent.append)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    host.take(Plan(id=1, load=Load(id=1, model="nowhere/at-all")))
    assert isinstance(sent[-1], Failed)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100,
        b"\x00\x00\x00\x01\xc0",
        pack(Cancel(id=1, target=2)).replace(b"cancel", b"launch"),
        pack(Shutdown(id=1)).replace(b"id", b"ix"),
    ],
    ids=["length", "http", "nil", "unknown", "field"],
)
def test_a_bad_frame_ends_the_engine_with_a_word(home: Path, data: bytes) -> None:
    with EngineProcess(home) as process:
        process.send_bytes(data)
        notice = process.next()
        assert isinstance(notice, Notice)
        assert "no request" in notice.text
        assert process.wait_for_end() == EXIT_BAD_FRAME


def test_frames_in_single_bytes(home: Path) -> None:
    with EngineProcess(home) as process:
        for byte in pack(Generate(id=1, prompt_ids=[1])):
            process.send_bytes(bytes([byte]))
        assert isinstance(list(process.events(1))[-1], Failed)


REQUESTS = [Cancel(id=3, target=1), Generate(id=1, prompt_ids=[1, 2]), Load(id=2, model="é"), Shutdown(id=9)]


@settings(deadline=None)
@given(st.lists(st.sampled_from(REQUESTS), max_size=6), st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_frames_survive_any_cutting(requests: list[AnyRequest], cuts: list[int]) -> None:
    data = b"".join(pack(request) for request in requests)
    reader, found, at = request_reader(), [], 0
    for index in range(len(data)):
        size = cuts[index % len(cuts)]
        found += reader.feed(data[at : at + size])
        at += size
    assert found == requests


@given(st.binary(max_size=200), st.integers(0, 60), st.integers(0, 255))
def test_fuzzed_frames_are_requests_or_a_protocol_error(data: bytes, at: int, byte: int) -> None:
    frame = bytearray(pack(REQUESTS[1]))
    frame[at % len(frame)] = byte
    for stream in (data, bytes(frame), bytes(frame) + data):
        try:
            for request in request_reader().feed(stream):
                assert isinstance(request, AnyRequest)
        except ProtocolError as error:
            assert str(error)


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file in the way")
    with EngineProcess(tmp_path, cold=True) as process:
        notice = process.next()
        assert isinstance(notice, Notice)
        assert "keeps no log" in notice.text


LOGGING = """
import os, sys
from pathlib import Path
from engine.process_life import LogFile
log = LogFile(Path(sys.argv[1]), limit=1000)
for number in range(100):
    os.write(1, b"%03d" % number + b"x" * 96 + b"\\n")
    log.roll_if_large()
"""


def test_the_log_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "engine.log"
    subprocess.run([sys.executable, "-c", LOGGING, str(path)], check=True)
    assert path.read_bytes().endswith(b"099" + b"x" * 96 + b"\n") or path.stat().st_size == 0
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["engine.log", "engine.log.1"]
    assert all(file.stat().st_size <= 1100 for file in files)
    assert path.stat().st_mode & 0o077 == 0


def test_environment_keeps_libraries_off_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = environment(8)
    assert found["HF_HUB_OFFLINE"] == found["TRANSFORMERS_OFFLINE"] == "1"
    assert found["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert environment(8)["OMP_NUM_THREADS"] == "8"
    assert int(found["LRU_CACHE_CAPACITY"]) == int(found["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) <= 128
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)
