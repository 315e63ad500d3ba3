"""Clocks that are years apart, and disks that are full where weights are received."""

from __future__ import annotations

import contextlib
import datetime
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.errors import ModelError
from engine.ipc.messages import Failed, Load, Loaded, NetworkState, Pair, Progress
from engine.models.folders.shard_files import read_shard
from tests.faults import hooks
from tests.faults.ring_faults import EXACT, Machine, Oracle, Ring, write_large_model
from tests.support.eventually import PATIENCE_S, eventually
from tests.support.hooked_engine import hooked

pytestmark = pytest.mark.slow

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long shift(void) {
    const char *text = getenv("CLOCK_SHIFT");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, found);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) found->tv_sec += shift();
    return status;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    if (!status) { found->tv_sec = now.tv_sec; found->tv_usec = now.tv_nsec / 1000; }
    return status;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""
YEARS_AHEAD, YEARS_BACK = 3650 * 86400, -5000 * 86400


@pytest.fixture(scope="module")
def wrong_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that moves the clock on the wall for every library of a process, gRPC and OpenSSL too."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("a process's clock is shifted by a library that is compiled here, on Linux")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    library = folder / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(folder / "clock.c"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


def shifted(library: Path, seconds: int) -> dict[str, str]:
    return {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(seconds)}


def test_the_clock_is_really_wrong(wrong_clock: Path) -> None:
    """Or the other tests would show nothing."""
    import os

    command = [sys.executable, "-c", "import time, datetime; print(time.time()); print(datetime.datetime.now().year)"]
    environment = {**os.environ, **shifted(wrong_clock, YEARS_AHEAD)}
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()
    assert float(said[0]) - time.time() == pytest.approx(YEARS_AHEAD, abs=60)
    assert int(said[1]) == (datetime.datetime.now() + datetime.timedelta(seconds=YEARS_AHEAD)).year


@pytest.mark.soak
def test_clocks_years_apart(wrong_clock: Path, model: Path, alone: Oracle, tmp_path: Path) -> None:
    """One node is ten years ahead and one is fourteen back: they are paired, form, answer, lose each other and come
    back."""
    with Ring(0) as ring:
        others = [Machine(tmp_path / name, name) for name in ("ahead", "back")]
        try:
            for other, seconds in zip(others, (YEARS_AHEAD, YEARS_BACK), strict=True):
                other.environment = shifted(wrong_clock, seconds)
            begun = [other.begin(lend=True) for other in others]
            for other, request in zip(others, begun, strict=True):
                other.opened(request)
                found = other.engine.wait(lambda event: isinstance(event, NetworkState) and bool(event.code))
                assert isinstance(found, NetworkState)
                assert 100 <= found.code_seconds <= 120
                ring.engine.ask(Pair(id=ring.engine.new_id(), peer=other.address, code=found.code))
            ring.machines += others
            eventually(lambda: list(ring.states().values()) == ["ready"] * 2)
            loaded = ring.load(model).facts.ring
            assert loaded is not None
            assert len(loaded.nodes) == 3
            assert ring.answer(24).token_ids == alone(24).token_ids
            gone = others[0]
            asked = ring.ask(60)
            ring.until_tokens(asked, 8)
            gone.kill()
            assert ring.finished(asked).token_ids == alone(60).token_ids
            eventually(lambda: ring.state_of(gone) in ("lost", "paired"))
            gone.start(lend=True)
            eventually(lambda: ring.state_of(gone) == "ready")
            assert ring.answered_by_all(24) == alone(24).token_ids
        finally:
            for other in others:
                other.close()


# --- disks --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 MB, of which a node of two gets about half."""
    folder = tmp_path_factory.mktemp("models") / "large"
    return write_large_model(folder, hidden_size=144, intermediate_size=704)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 MB: it takes a moment to send half of them."""
    folder = tmp_path_factory.mktemp("models") / "larger"
    return write_large_model(folder, hidden_size=288, intermediate_size=1408)


def form(ring: Ring, model: Path) -> Loaded | Failed:
    request = Load(id=ring.engine.new_id(), model=str(model), partitioning="ring", ring=replace(EXACT, overlap=False))
    ring.engine.send(request)
    found = ring.engine.wait(lambda event: isinstance(event, (Loaded, Failed)) and event.id == request.id, 120)
    assert isinstance(found, (Loaded, Failed))
    return found


def check_shard(folder: Path, model: Path) -> int:
    """What a share says that it holds is there, byte by byte; how many experts that is."""
    from engine.models.folders.weight_layout import layout_of

    shares = [path for path in folder.iterdir() if path.name.endswith("share")]
    if not shares or not (shares[0] / "share.json").exists():
        return 0
    manifest = read_shard(shares[0])
    whole = layout_of(model)
    count = 0
    for layer, experts in manifest.experts.items():
        for expert in experts:
            for run in whole.experts[layer, expert]:
                name = whole.files[run.file][0]
                assert read_at(shares[0] / name, run.start, run.stop) == read_at(model / name, run.start, run.stop)
            count += 1
    return count


def read_at(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def test_disk_that_takes_no_such_file(large: Path) -> None:
    """The follower may write no file beyond some megabytes: it is left out with the reason, and the answer comes."""
    with Ring(1, arguments={1: hooked(hooks.small_files, limit=5_000_000)}) as ring:
        since = ring.mark()
        loaded = form(ring, large)
        assert isinstance(loaded, Loaded), loaded
        told = " ".join([*ring.notices(since), *loaded.facts.notices])
        first = ring.answer(8).token_ids
        told = " ".join([told, *ring.notices(since)])
        assert "node 1 is left out of the ring" in told
        assert "disk" in told
        assert len(first) == 8
        models = ring.followers[0].home / "models"
        check_shard(models, large)
        # Room is made: at the next loading it takes part, and goes on with what is there.
        ring.followers[0].kill()
        eventually(lambda: ring.state_of(ring.followers[0]) in ("lost", "paired"))
        ring.followers[0].arguments = ring.head.arguments
        ring.followers[0].start(lend=True)
        eventually(lambda: ring.state_of(ring.followers[0]) == "ready")
        again = form(ring, large)
        assert isinstance(again, Loaded)
        assert again.facts.ring is not None
        assert len(again.facts.ring.nodes) == 2
        assert ring.answer(8).token_ids == first
        assert check_shard(models, large) == again.facts.ring.nodes[1].experts


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 300 MB. Mounting needs the right to."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_disk_with_room_for_a_part_of_its_share_is_given_that_part(small_disk: Path, large: Path) -> None:
    """Of 32 experts the node would hold half, but its disk takes about 10 MB: seven, which are sent and run."""
    with Ring(1) as ring:
        models = ring.followers[0].home / "models"
        models.rmdir()
        models.symlink_to(small_disk)
        with (small_disk / "something else").open("wb") as file:
            file.write(bytes(203_500_000))
        since = ring.mark()
        loaded = form(ring, large)
        assert isinstance(loaded, Loaded), loaded
        assert loaded.facts.ring is not None
        head, node = loaded.facts.ring.nodes
        assert (head.experts + node.experts, node.experts) == (32, 7)
        first = ring.answer(8).token_ids
        told = " ".join([*ring.notices(since), *loaded.facts.notices])
        assert re.search(r"node 1 has disk space for 9 MB of experts, less than it has memory for\.", told), told
        assert "left out" not in told
        assert check_shard(models, large) == node.experts
        # What is there counts as room: formed again, it keeps its part, and nothing is sent.
        (small_disk / "still more").write_bytes(bytes(30_000_000))
        again = form(ring, large)
        assert isinstance(again, Loaded), again
        assert again.facts.ring is not None
        kept = again.facts.ring.nodes[1]
        assert kept.experts == check_shard(models, large) == node.experts
        assert kept.has_bytes >= kept.expert_bytes + kept.trunk_bytes
        assert ring.answer(8).token_ids == first


def test_disk_without_room_is_left_out_with_what_is_missing(small_disk: Path, large: Path) -> None:
    with Ring(1) as ring:
        models = ring.followers[0].home / "models"
        models.rmdir()
        models.symlink_to(small_disk)
        with (small_disk / "something else").open("wb") as file:
            file.write(bytes(240_000_000))
        since = ring.mark()
        loaded = form(ring, large)
        assert isinstance(loaded, Loaded), loaded
        told = " ".join([*ring.notices(since), *loaded.facts.notices])
        assert len(ring.answer(8).token_ids) == 8
        told = " ".join([told, *ring.notices(since)])
        assert re.search(r"node 1 is left out: it lacks \d MB of disk space", told), told
        assert not [path for path in models.iterdir() if path.name.endswith("share")]


@pytest.mark.soak
def test_disk_that_somebody_else_fills_meanwhile(small_disk: Path, larger: Path) -> None:
    """It fills up for real, in the middle of receiving; what is said to be there is there."""
    with Ring(1) as ring:
        models = ring.followers[0].home / "models"
        models.rmdir()
        models.symlink_to(small_disk)
        since = ring.mark()
        request = Load(
            id=ring.engine.new_id(), model=str(larger), partitioning="ring", ring=replace(EXACT, overlap=False)
        )
        ring.engine.send(request)
        ring.engine.wait(
            lambda event: isinstance(event, Progress) and event.stage.startswith("sending weights"), PATIENCE_S
        )
        with contextlib.suppress(OSError), (small_disk / "something else").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        loaded = ring.engine.wait(lambda event: isinstance(event, (Loaded, Failed)) and event.id == request.id, 120)
        assert isinstance(loaded, Loaded), loaded
        first = ring.answer(8).token_ids
        told = " ".join([*ring.notices(since), *loaded.facts.notices])
        if loaded.facts.ring is not None and len(loaded.facts.ring.nodes) == 2:
            pytest.skip("the weights had arrived before the disk was full")
        assert "node 1 is left out of the ring" in told
        assert "disk" in told
        before = check_shard(models, larger)
        (small_disk / "something else").unlink()
        again = form(ring, larger)
        assert isinstance(again, Loaded), again
        assert again.facts.ring is not None
        assert len(again.facts.ring.nodes) == 2
        assert check_shard(models, larger) == again.facts.ring.nodes[1].experts > before
        assert ring.answer(8).token_ids == first


def test_a_refused_share_that_nobody_else_can_hold_is_a_sentence(small_disk: Path, large: Path) -> None:
    """Without that node the model does not fit: the failure says both."""
    with Ring(1) as ring:
        models = ring.followers[0].home / "models"
        models.rmdir()
        models.symlink_to(small_disk)
        with (small_disk / "something else").open("wb") as file:
            file.write(bytes(230_000_000))
        shares = {ring.head.identity.node_id: 15_000_000}
        choice = replace(EXACT, overlap=False, shares=shares)
        with pytest.raises(ModelError) as refused:
            ring.load(large, choice)
        assert "node 1 is left out: it lacks" in str(refused.value)
        assert "are missing" in str(refused.value)
        assert refused.value.kind == "memory"
