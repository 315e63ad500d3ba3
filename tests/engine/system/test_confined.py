"""A confined process answers, and whatever it does instead of that is a reason within its limits."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator

import pytest

from engine.errors import Cancelled
from engine.system.confined import ConfinedProcess, GaveUp

MEMORY = 64 << 20


def started(cpu_s: float = 30.0) -> ConfinedProcess:
    return ConfinedProcess("tests.engine.system.confined_child", cpu_s=cpu_s, memory_bytes=MEMORY)


@pytest.fixture(scope="module")
def confined() -> Iterator[ConfinedProcess]:
    made = started()
    yield made
    made.close()


@pytest.mark.parametrize("request_", [b"", b"abc\n", bytes(range(256)) * 20_000])
def test_any_bytes_come_and_go(confined: ConfinedProcess, request_: bytes) -> None:
    assert confined.ask(request_) == request_[::-1]


def test_it_opens_no_file_and_no_socket(confined: ConfinedProcess) -> None:
    assert confined.ask(b"open") == b"Too many open files"
    assert confined.ask(b"connect") == b"Too many open files"


def test_it_ends_when_it_computes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    process = started(cpu_s=0.2)
    # Of processor time, which it gets slowly on a busy machine.
    monkeypatch.setattr("engine.system.confined.DEADLINE_S", 1e6)
    with pytest.raises(GaveUp, match=r"it does not end within 0\.2 seconds"):
        process.ask(b"loop")
    assert process.ask(b"ab") == b"ba"
    process.close()


def test_it_is_not_waited_for_longer_than_its_deadline(
    confined: ConfinedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("engine.system.confined.DEADLINE_S", 0.3)
        with pytest.raises(GaveUp, match=r"it does not end within 0\.3 seconds"):
            confined.ask(b"loop")
    assert confined.ask(b"ab") == b"ba"


@pytest.mark.skipif(sys.platform != "linux", reason="the system limits the memory of processes on Linux only")
def test_it_gets_no_more_memory_than_it_is_given(confined: ConfinedProcess) -> None:
    assert len(confined.ask(b"grow 1000000")) == 1_000_000
    with pytest.raises(GaveUp, match="its process ended by itself"):
        confined.ask(b"grow %d" % (MEMORY + (1 << 20)))


def test_an_answer_has_a_limit(confined: ConfinedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("engine.system.confined.ANSWER_BYTES", 1000)
        with pytest.raises(GaveUp, match="more than 64 MB of memory"):
            confined.ask(b"grow 100000")
    assert confined.ask(b"ab") == b"ba"


def test_it_is_given_up_when_somebody_says_so(confined: ConfinedProcess) -> None:
    asked = itertools.count()
    process = confined.process
    with pytest.raises(Cancelled):
        confined.ask(b"loop", lambda: next(asked) > 5)
    assert process.returncode is not None, "the process that was at it is gone"


def test_another_is_started_after_one_that_ended(confined: ConfinedProcess) -> None:
    with pytest.raises(GaveUp, match=r"its process ended by itself \(status 3\)"):
        confined.ask(b"die")
    assert confined.ask(b"ab") == b"ba"
    os.kill(confined.process.pid, 9)
    confined.process.wait()
    assert confined.ask(b"cd") == b"dc"


def test_it_ends_with_what_it_was_made_for() -> None:
    confined = started()
    process = confined.process
    del confined
    assert process.wait(120) is not None
