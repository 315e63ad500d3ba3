"""Benchmarks that start processes of their own, ended or killed while they run: nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ring_faults import eventually, write_model

from engine.temporary_folders import is_remover, remove, temporary_folder

GONE_S = 30.0
MOMENTS_S = {"ring": 9.0, "exchange": 6.0}
"""Until when it is ended: by then it is in the middle of measuring."""
MOMENTS = 3
MARK = "PRIVATELLM_TEST_MARK"


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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ring", "exchange"])
@pytest.mark.parametrize(
    ("number", "whom"),
    [
        (signal.SIGINT, "command"),
        (signal.SIGTERM, "command"),
        (signal.SIGKILL, "command"),
        (signal.SIGKILL, "engine"),
    ],
    ids=["ctrl-c", "ended", "killed", "engine killed"],
)
def test_nothing_is_left(tmp_path: Path, kind: str, number: signal.Signals, whom: str) -> None:
    model = write_model(tmp_path)
    chosen = random.Random(f"{kind} {number} {whom}")
    for moment in range(MOMENTS):
        mark = f"{tmp_path.name} {moment}"
        with start(kind, model, tmp_path, mark) as bench:
            try:
                time.sleep(MOMENTS_S[kind] * (moment + chosen.random()) / MOMENTS)
                assert bench.poll() is None, "it ended before it could be killed"
                victim = engine_of(psutil.Process(bench.pid)) if whom == "engine" else None
                (victim or bench).send_signal(number)
                bench.wait(GONE_S)
                eventually(lambda mark=mark: not descendants(mark), GONE_S, "a process is left")
                assert not list((tmp_path / "temporary").iterdir())
            finally:
                for one in (bench, *descendants(mark)):
                    one.kill()


def test_a_folder_lives_as_long_as_it_is_used(tmp_path: Path) -> None:
    with temporary_folder("some-", tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
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
    monkeypatch.setattr("engine.temporary_folders.LOOK_S", 0.02)
    folder = tmp_path / "folder"
    late = subprocess.Popen(
        [sys.executable, "-c", "import os, sys, time; time.sleep(0.05); os.makedirs(sys.argv[1])", str(folder / "late")]
    )
    (folder / "early").mkdir(parents=True)
    monkeypatch.setattr("engine.temporary_folders.QUIET_LOOKS", 50)
    remove(folder)
    assert late.wait(10) == 0
    assert not folder.exists()
