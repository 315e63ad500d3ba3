"""A machine that is killed and comes back, again and again: nothing of it is left behind on those that stay."""

from __future__ import annotations

import contextlib
import itertools
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from engine.bench.local_ring import LocalEngine
from engine.ipc.messages import OpenNetwork
from tests.faults.ring_faults import Machine, Oracle, Ring
from tests.support.engine_forks import forked
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

WARM = 2
SETTLE_LOOKS = 20
BYTES_A_ROUND = {3: 24_000_000, 60: 1_000_000}
"""By which a process may grow per kill, over the last half of so many rounds. In three it still takes memory for what
it does for the first time, as a forked process copies the pages that it writes to. Sixty tell what is left behind."""


@pytest.fixture(scope="module")
def expected(alone: Oracle) -> list[int]:
    return alone(12).token_ids


class Held:
    """What a process holds at the moment, and what lies in its home's models folder."""

    def __init__(self, machine: Machine) -> None:
        process = psutil.Process(machine.engine.process.pid)
        self.threads = process.num_threads()
        self.descriptors = process.num_fds()
        self.listening = sorted(
            one.laddr.port for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN
        )
        self.children = len(process.children(recursive=True))
        self.files = sorted(str(path.relative_to(machine.home)) for path in (machine.home / "models").rglob("*"))

    def more_than(self, before: Held) -> dict[str, tuple[object, object]]:
        """What it holds that it did not hold before, each as (now, before)."""
        few = {name: (getattr(self, name), getattr(before, name)) for name in ("threads", "descriptors")}
        more: dict[str, tuple[object, object]] = {name: pair for name, pair in few.items() if pair[0] > pair[1] + 3}
        same = {name: (getattr(self, name), getattr(before, name)) for name in ("listening", "children", "files")}
        return more | {name: pair for name, pair in same.items() if pair[0] != pair[1]}


def growth(sizes: Sequence[int]) -> float:
    """Bytes per round in the last half of the rounds: the median of the slopes between any two of them, because what an
    allocator takes or gives back at once, megabytes each time, is no growth."""
    last = sizes[len(sizes) // 2 :]
    return statistics.median((last[j] - last[i]) / (j - i) for i, j in itertools.combinations(range(len(last)), 2))


def memory_of(machine: Machine) -> int:
    """Bytes of memory of its process that belong to no file: a forked one maps the libraries as it comes to need
    them."""
    pid = machine.engine.process.pid
    with contextlib.suppress(OSError):
        (line,) = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("RssAnon:")]
        return int(line.split()[1]) * 1024
    return int(psutil.Process(pid).memory_info().rss)


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=pytest.mark.soak)])
def test_kills_and_returns_leave_nothing_behind(model: Path, expected: list[int], tmp_path: Path, rounds: int) -> None:
    """Every round: one follower is killed, the answer comes without it, it comes back, the answer comes with it. The
    head and the other follower stay all the time. The process that will come back is started ahead, so that a round
    takes about two seconds."""
    environments = {rank: {"TMPDIR": str(tmp_path)} for rank in range(3)}
    with Ring(2, environments=environments) as ring:
        ring.load(model)
        assert ring.answer(12).token_ids == expected
        gone, *others = ring.followers
        staying = [ring.head, *others]
        before: list[Held] = []
        sizes: list[list[int]] = [[] for _ in staying]
        spare = spare_process(gone)
        for number in range(rounds):
            if number == WARM:
                before = [Held(machine) for machine in staying]
            gone.kill()
            gone.engine.close()
            assert ring.answer(12).token_ids == expected
            eventually(lambda: ring.state_of(gone) in ("lost", "paired"))
            gone.engine = spare
            listen = f"{gone.host}:{gone.port}"
            spare.ask(OpenNetwork(id=spare.new_id(), name=gone.name, listen=listen, lend=True))
            spare = spare_process(gone)
            eventually(lambda: ring.state_of(gone) == "ready")
            assert ring.answered_by_all(12) == expected
            for machine, taken in zip(staying, sizes, strict=True):
                taken.append(memory_of(machine))
        spare.close()
        for machine, then in zip(staying, before, strict=True):
            left: dict[str, tuple[object, object]] = {}
            for _ in range(SETTLE_LOOKS):
                # What was ended a moment ago may still be ending.
                time.sleep(0.5)
                left = Held(machine).more_than(then)
                if not left:
                    break
            assert not left, f"{machine.name}: {left}"
            assert then.children == 0
        assert all(growth(taken) < BYTES_A_ROUND[rounds] for taken in sizes), sizes
        assert [path.name for path in tmp_path.iterdir()] == []
        ports = before[0].listening
        ring.head.signal(signal.SIGTERM)
        ring.engine.close()
        for port in ports:
            assert port_is_free(port)


def spare_process(machine: Machine) -> LocalEngine:
    """The process that ``machine`` comes back with; its network is not open yet."""
    return LocalEngine(machine.home, machine.environment, machine.arguments, forked)


def port_is_free(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    return True
