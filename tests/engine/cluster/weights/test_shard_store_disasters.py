"""Shares survive what really happens: a node that is killed while it receives, a disk that is really full."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.cluster.weights.shard_store import ShardStore
from engine.cluster.weights.transfer import Offer, encode_offer
from engine.errors import ModelError
from engine.models.folders.opening import open_model
from engine.models.folders.prepare import prepare
from engine.models.folders.shard_files import read_shard
from engine.models.folders.weight_layout import layout_of
from tests.support.progress import quiet
from tests.support.shards import assert_same_experts, offer_part, send

pytestmark = pytest.mark.usefixtures("home")


TinyModel = Callable[..., Path]

RECEIVER = """
import os, signal, sys
from pathlib import Path
from engine.cluster.weights import shard_store
from engine.cluster.weights.shard_store import ShardStore
from engine.cluster.weights.transfer import decode_offer, stream

shard_store.SYNC_BYTES = 200_000
models, source, offered, limit = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
offered = decode_offer(offered.read_bytes())
shares = ShardStore(models, "head")

def progress(stage, done, total, unit):
    if stage == "receiving weights" and done >= limit:
        os.kill(os.getpid(), signal.SIGKILL)

need = shares.need(offered, progress)
shares.receive(offered, need.wanted, stream(source, offered, need.wanted), progress)
"""


@pytest.fixture
def prepared(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """Some megabytes."""
    prepare(tiny_model("mixtral", hidden_size=96, intermediate_size=192), tmp_path / "prepared", quiet)
    return tmp_path / "prepared"


@pytest.fixture
def offered(prepared: Path) -> Offer:
    layout = layout_of(prepared)
    return offer_part(prepared, {layer: range(0, layout.count, 2) for layer in layout.layers})


def assert_complete(shares: ShardStore, offered: Offer, prepared: Path) -> None:
    need = shares.need(offered, quiet)
    assert need.wanted == ()
    share, whole = open_model(need.folder), open_model(prepared)
    assert [(name, tensor.words.tobytes()) for name, tensor in share.trunk()] == [
        (name, tensor.words.tobytes()) for name, tensor in whole.trunk()
    ]
    assert_same_experts(need.folder, prepared, offered.held)


def test_a_node_that_is_killed_again_and_again(prepared: Path, offered: Offer, tmp_path: Path):
    models, sent = tmp_path / "node", tmp_path / "offer"
    sent.write_bytes(encode_offer(offered))
    shares = ShardStore(models, "head")
    missing = [offered.nbytes]
    for _ in range(3):
        arguments = [sys.executable, "-c", RECEIVER, str(models), str(prepared), str(sent), str(missing[-1] // 2)]
        done = subprocess.run(arguments, cwd=Path(__file__).parents[4], timeout=120, check=False)
        assert done.returncode == -signal.SIGKILL
        missing.append(shares.need(offered, quiet).nbytes)
        assert missing[-1] < missing[-2] or missing[-2] < 800_000
    assert missing[-1] < offered.nbytes / 2
    send(shares, prepared, offered)
    assert_complete(shares, offered, prepared)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.call(command):
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(prepared: Path, offered: Offer, small_disk: Path, monkeypatch: pytest.MonkeyPatch):
    shares = ShardStore(small_disk, "head")
    need = shares.need(offered, quiet)
    with pytest.raises(ModelError, match="are missing; make room") as caught:
        send(shares, prepared, offered)
    assert caught.value.kind == "disk" and list(small_disk.iterdir()) in (
        [],
        [small_disk / f".{need.folder.name}.lock"],
    )

    # Another program takes the room while the share is received.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 10**12))
    with pytest.raises(
        ModelError, match=r"is full \(No space left on device\): \d+ MB of this machine's share"
    ) as caught:
        send(shares, prepared, offered)
    assert caught.value.kind == "disk"
    manifest = read_shard(need.folder)
    named = sum(map(len, manifest.experts.values()))
    assert named < sum(map(len, offered.held.values()))
    again = shares.need(offered, quiet)
    assert 0 < again.nbytes <= offered.nbytes

    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    send(shares, prepared, offered)
    assert_complete(shares, offered, prepared)
