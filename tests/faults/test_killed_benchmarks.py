"""Benchmarks that start processes of their own, ended or killed while they run: nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine.system.temporary_folders import QUIET_LOOKS, is_remover, remove, temporary_folder
from tests.faults.ring_faults import write_model
from tests.support.eventually import eventually

THERE_S = 100.0
GONE_S = 120.0
NODE = {"ring": "engine.host", "exchange": "engine.bench.exchange_node"}
"""The module that a node's process runs."""
MARK = "PRIVATELLM_TEST_MARK"
WAYS = [
    (signal.SIGINT, "command"),
    (signal.SIGTERM, "command"),
    (signal.SIGKILL, "command"),
    (signal.SIGKILL, "engine"),
]
SAMPLED = [
    ("ring", "preparing", signal.SIGKILL, "engine"),
    ("ring", "measuring", signal.SIGTERM, "command"),
    ("exchange", "measuring", signal.SIGINT, "command"),
    ("exchange", "preparing", signal.SIGKILL, "command"),
]
"""Each kind, stage and way once at least; a ring's processes take seconds to start."""


def descendants(mark: str) -> list[psutil.Process]:
    """Everything that was started on behalf of one benchmark, whoever is its parent now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def engine_of(started: psutil.Process) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        return next((one for one in started.children() if "engine.host" in one.cmdline()), None)
    return None


def nodes(kind: str, mark: str) -> list[psutil.Process]:
    """The benchmark's own nodes; one may end while it is looked at."""
    found = []
    for process in descendants(mark):
        with contextlib.suppress(psutil.Error):
            if NODE[kind] in process.cmdline():
                found.append(process)
    return found


def linked_nodes(kind: str, mark: str) -> int:
    """How many of them are connected with another one."""
    found = 0
    for process in nodes(kind, mark):
        with contextlib.suppress(psutil.Error):
            found += any(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections("inet"))
    return found


def start(kind: str, model: Path, folder: Path, mark: str) -> subprocess.Popen[bytes]:
    temporary = folder / "temporary"
    temporary.mkdir(parents=True, exist_ok=True)
    arguments = ["bench", kind, *([str(model)] if kind == "ring" else []), "--rounds", "500", "--nodes", "2"]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "app.cli", *arguments],
        env={
            **os.environ,
            "PRIVATELLM_HOME": str(folder / "home"),
            "TMPDIR": str(temporary),
            "OMP_NUM_THREADS": "1",
            MARK: mark,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def removers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if is_remover(one.cmdline())]


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage", "number", "whom"),
    [
        pytest.param(*row, marks=() if row in SAMPLED else pytest.mark.soak)
        for row in ((kind, stage, *how) for kind in NODE for stage in ("preparing", "measuring") for how in WAYS)
    ],
)
def test_nothing_is_left(tmp_path: Path, kind: str, stage: str, number: signal.Signals, whom: str) -> None:
    """``preparing``: what will be removed is there; ``measuring``: so are the nodes, connected with one another."""
    model = write_model(tmp_path)
    # The whole path, as another run of the tests on this machine may be at the same one.
    mark = str(tmp_path)

    def so_far() -> bool:
        assert bench.poll() is None, "it ended before it could be killed"
        if stage == "measuring":
            return linked_nodes(kind, mark) == 2
        if kind == "ring":
            return any((tmp_path / "temporary").iterdir())
        return bool(nodes(kind, mark))

    with start(kind, model, tmp_path, mark) as bench:
        try:
            eventually(so_far, THERE_S, f"it was never {stage}")
            victim = engine_of(psutil.Process(bench.pid)) if whom == "engine" else None
            assert whom == "command" or victim is not None
            (victim or bench).send_signal(number)
            bench.wait(GONE_S)
            eventually(lambda: not descendants(mark), GONE_S, "a process is left")
            eventually(lambda: not list((tmp_path / "temporary").iterdir()), GONE_S, "a folder is left")
        finally:
            for one in (bench, *descendants(mark)):
                with contextlib.suppress(psutil.Error):
                    one.kill()


def test_a_folder_lives_as_long_as_it_is_used(tmp_path: Path) -> None:
    with temporary_folder("some-", tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        # A process that has just been started has no arguments yet, for a moment.
        eventually(removers)
        (remover,) = removers()
        (folder / "file").write_text("something")
    assert not list(tmp_path.iterdir())
    assert not removers()
    assert not remover.is_running()


def test_a_folder_is_removed_when_what_it_is_used_for_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it failed"), temporary_folder("some-", tmp_path):
        raise ValueError("it failed")
    assert not list(tmp_path.iterdir())
    assert not removers()


def test_a_folder_that_is_written_into_meanwhile_is_removed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    (folder / "early").mkdir(parents=True)
    looks = 0

    def writes_late(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks in (2, 2 + QUIET_LOOKS):
            (folder / "late").mkdir(parents=True)

    monkeypatch.setattr("engine.system.temporary_folders.time", SimpleNamespace(sleep=writes_late))
    remove(folder)
    assert looks == 2 + 2 * QUIET_LOOKS
    assert not folder.exists()
