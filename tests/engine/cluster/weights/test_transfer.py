"""Shares: what is sent is what a node holds, byte by byte, whatever form the head's folder has, and nothing twice."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights import shard_store, transfer
from engine.cluster.weights.shard_store import Need, ShardStore
from engine.cluster.weights.transfer import Wanted, decode_offer, encode_offer, stream
from engine.cluster.weights.weight_fingerprint import held_of
from engine.errors import Cancelled, ModelError
from engine.models.folders import model_folder
from engine.models.folders.opening import open_model
from engine.models.folders.prepare import prepare
from engine.models.folders.shard_files import read_shard
from engine.models.folders.weight_layout import layout_of
from engine.models.store import local_models
from tests.support.old_bank import write_old_bank
from tests.support.opened_experts import experts_of
from tests.support.progress import quiet
from tests.support.shards import assert_same_experts, offer_part, send

pytestmark = pytest.mark.usefixtures("home")


TinyModel = Callable[..., Path]


@pytest.fixture
def shares(tmp_path: Path) -> ShardStore:
    """A node's, with a folder of its own."""
    (tmp_path / "node").mkdir()
    return ShardStore(tmp_path / "node", "head")


@pytest.fixture
def prepared(tiny_model: TinyModel, tmp_path: Path) -> Path:
    prepare(tiny_model("mixtral", dtype="bfloat16"), tmp_path / "prepared", quiet)
    return tmp_path / "prepared"


def every_second(folder: Path, first: int = 0) -> dict[int, list[int]]:
    """Half of the experts: odd and even ones in turn, one layer fewer."""
    found = layout_of(folder)
    return {layer: list(range((first + layer) % 2, found.count, 2)) for layer in found.layers}


def blocks(folder: Path) -> int:
    """Bytes of disk that the files of weights take."""
    files = [*folder.glob("*.safetensors"), *folder.glob("experts/*")]
    return sum(path.stat().st_blocks * 512 for path in files)


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["published", "prepared", "bank"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "dbrx", "deepseek_v3", "llama4_text"])
def test_a_share_hands_out_what_the_whole_model_has(
    tiny_model: TinyModel, shares: ShardStore, tmp_path: Path, family: str, form: str
):
    folder = tiny_model(family, dtype="bfloat16", shards=form == "published")
    if form == "prepared":
        prepare(folder, tmp_path / "prepared", quiet)
        folder = tmp_path / "prepared"
    if form == "bank":
        folder = write_old_bank(folder, tmp_path / "bank")
    held = every_second(folder)
    offered = decode_offer(encode_offer(offer_part(folder, held)))
    need = send(shares, folder, offered)
    assert need.nbytes == offered.nbytes and need.has_bytes == 0
    assert_same_experts(need.folder, folder, held)
    share, whole = open_model(need.folder), open_model(folder)
    assert share.config == whole.config and share.trunk_bytes == whole.trunk_bytes
    trunk = {name: tensor.words.tobytes() for name, tensor in whole.trunk()}
    assert {name: tensor.words.tobytes() for name, tensor in share.trunk()} == trunk
    assert share.experts is not None and whole.experts is not None
    pairs = sum(map(len, held.values()))
    assert share.experts.nbytes * len(whole.experts.layers) * whole.experts.count == whole.experts.nbytes * pairs
    assert shares.need(offered, quiet) == Need(need.folder, (), 0, offered.nbytes)


def test_what_a_wrong_head_sent_is_used_with_that_head_only(
    tiny_model: TinyModel, prepared: Path, tmp_path: Path, home: Path
):
    """It says that its other weights are the same model as the right head's."""
    models = home / "models"
    prepare(tiny_model("mixtral", dtype="bfloat16", seed=1), tmp_path / "wrong", quiet)
    held = every_second(prepared)
    right, wrong = offer_part(prepared, held, name="a model"), offer_part(tmp_path / "wrong", held, name="a model")
    assert wrong.identity != right.identity and wrong.layout == right.layout
    forged = msgspec.structs.replace(wrong, identity=right.identity)
    theirs = send(ShardStore(models, "wrong head"), tmp_path / "wrong", forged)
    shares = ShardStore(models, "head")
    assert held_of(right.identity.weights, "head") == ({}, False)
    assert shares.need(right, quiet).nbytes == right.nbytes
    mine = send(shares, prepared, right)
    assert_same_experts(mine.folder, prepared, held)
    assert_same_experts(theirs.folder, tmp_path / "wrong", held)
    assert mine.folder != theirs.folder
    assert held_of(right.identity.weights, "head") == ({layer: held[layer] for layer in held}, True)
    # Even in the very folder that the right head's share would have, as short forms of long names may be equal.
    shutil.rmtree(mine.folder)
    theirs.folder.rename(mine.folder)
    assert shares.need(right, quiet).nbytes == right.nbytes
    assert_same_experts(send(shares, prepared, right).folder, prepared, held)


def test_only_the_trunk_and_the_own_experts_are_sent_and_take_room(
    tiny_model: TinyModel, shares: ShardStore, tmp_path: Path
):
    folder = tiny_model("mixtral", hidden_size=192, intermediate_size=384, vocab_size=200)
    layout = layout_of(folder)
    held = {layer: [layer] for layer in layout.layers}
    offered = offer_part(folder, held)
    settings = sum(path.stat().st_size for path in layout.settings)
    own = 3 * layout.expert_bytes
    assert offered.nbytes == settings + layout.headers[0] + layout.trunk_bytes + own
    need = shares.need(offered, quiet)
    sent = [transfer.decode_chunk(data) for data in stream(folder, offered, need.wanted)]
    assert sum(len(chunk.data) for chunk in sent) == offered.nbytes
    assert max(len(chunk.data) for chunk in sent) <= transfer.CHUNK_BYTES
    shares.receive(offered, need.wanted, map(transfer.encode_chunk, sent), quiet)
    file = need.folder / "model.safetensors"
    assert file.stat().st_size == (folder / "model.safetensors").stat().st_size
    # Every run may begin and end within a block of the file system.
    runs = sum(len(item.runs) for item in offered.items)
    assert blocks(need.folder) <= layout.headers[0] + layout.trunk_bytes + own + 2 * 4096 * runs
    assert blocks(need.folder) < blocks(folder) / 2


def test_a_share_without_trunk_has_experts_only(prepared: Path, shares: ShardStore):
    held = every_second(prepared)
    offered = offer_part(prepared, held, trunk=False)
    assert offered.nbytes < offer_part(prepared, held).nbytes - layout_of(prepared).trunk_bytes + 1
    need = send(shares, prepared, offered)
    assert_same_experts(need.folder, prepared, held)
    share = open_model(need.folder)
    assert share.trunk_bytes == 0
    with pytest.raises(ModelError, match="without its trunk"):
        list(share.trunk())
    whole = offer_part(prepared, held)
    later = send(shares, prepared, whole)
    assert later.nbytes == layout_of(prepared).trunk_bytes
    assert len(list(open_model(later.folder).trunk())) == len(list(open_model(prepared).trunk()))


def test_a_later_placement_fetches_the_difference(prepared: Path, shares: ShardStore):
    layout = layout_of(prepared)
    send(shares, prepared, offer_part(prepared, every_second(prepared)))
    held = {layer: list(range(layout.count)) for layer in layout.layers}
    offered = offer_part(prepared, held)
    need = send(shares, prepared, offered)
    assert need.nbytes == layout.expert_bytes * layout.count * len(layout.layers) // 2
    assert need.has_bytes == offered.nbytes - need.nbytes
    assert_same_experts(need.folder, prepared, held)


def test_experts_are_given_up_only_for_room(prepared: Path, shares: ShardStore, monkeypatch: pytest.MonkeyPatch):
    first, second = every_second(prepared), every_second(prepared, 1)
    folder = send(shares, prepared, offer_part(prepared, first)).folder
    layout = layout_of(prepared)
    both = {layer: list(range(layout.count)) for layer in layout.layers}
    send(shares, prepared, offer_part(prepared, second))
    assert_same_experts(folder, prepared, both)

    before = blocks(folder)
    assert shares.keep_only(folder, first) > 0
    assert blocks(folder) < before
    assert_same_experts(folder, prepared, first)

    # Now there is room for one reserve only: those that are not wanted go.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, shard_store.RESERVE_BYTES))
    with pytest.raises(ModelError, match="are missing") as caught:
        send(shares, prepared, offer_part(prepared, second))
    assert caught.value.kind == "disk"
    assert read_shard(folder).experts == dict.fromkeys(layout.layers, ())


def test_a_node_that_has_the_model_is_sent_nothing(prepared: Path, shares: ShardStore, tmp_path: Path):
    shutil.copytree(prepared, tmp_path / "node" / "its-own-copy")
    held = every_second(prepared)
    offered = offer_part(prepared, held)
    need = shares.need(offered, quiet)
    assert need == Need(tmp_path / "node" / "its-own-copy", (), 0, offered.nbytes, whole=True)


@pytest.mark.parametrize("what", ["an expert", "the trunk", "the tokenizer", "the configuration"])
def test_a_copy_that_differs_is_not_used(tiny_model: TinyModel, shares: ShardStore, tmp_path: Path, what: str):
    head = Path(shutil.copytree(tiny_model("mixtral"), tmp_path / "head"))
    (head / "tokenizer.json").write_text('{"version": "1.0"}')
    copy = Path(shutil.copytree(head, tmp_path / "node" / "copy"))
    layout = layout_of(head)
    offered = offer_part(head, every_second(head))
    assert shares.need(offered, quiet).whole
    if what == "the tokenizer":
        (copy / "tokenizer.json").write_text('{"version": "1.1"}')
    elif what == "the configuration":
        config = json.loads((copy / "config.json").read_bytes())
        (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    else:
        run = layout.experts[0, 0][0] if what == "an expert" else transfer.runs_of(layout.trunk[0])[0]
        with (copy / "model.safetensors").open("r+b") as file:
            file.seek(run.start)
            file.write(bytes(byte ^ 1 for byte in (head / "model.safetensors").read_bytes()[run.start : run.start + 1]))
    need = shares.need(offered, quiet)
    assert not need.whole and need.nbytes == offered.nbytes


def test_an_interrupted_transfer_goes_on_within_an_item(
    prepared: Path, shares: ShardStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1000)
    held = every_second(prepared)
    offered = offer_part(prepared, held)
    received = 0
    needs = []

    def cut(chunks: Iterator[bytes], count: int) -> Iterator[bytes]:
        nonlocal received
        for _, data in zip(range(count), chunks, strict=False):
            received += len(transfer.decode_chunk(data).data)
            yield data
        raise ConnectionResetError("the head is gone")

    for _ in range(3):
        need = shares.need(offered, quiet)
        needs.append(need.nbytes)
        with pytest.raises((ModelError, ConnectionResetError)):
            shares.receive(offered, need.wanted, cut(stream(prepared, offered, need.wanted), 40), quiet)
    assert needs[0] - needs[2] > 50_000
    need = send(shares, prepared, offered)
    assert any(want.start for want in need.wanted)
    assert received + need.nbytes == offered.nbytes
    assert_same_experts(need.folder, prepared, held)


def test_what_was_begun_goes_on_behind_the_items_of_another_placement(
    prepared: Path, shares: ShardStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1000)
    few, more = (
        offer_part(prepared, dict.fromkeys(layout_of(prepared).layers, experts), trunk=False)
        for experts in ((1,), (0, 1))
    )
    need = shares.need(few, quiet)
    chunks = list(stream(prepared, few, need.wanted))
    with pytest.raises(ModelError, match="stopped sending"):
        shares.receive(few, need.wanted, chunks[:-1], quiet)
    need = send(shares, prepared, more)
    assert need.wanted[0].start == 0 < need.wanted[-1].start
    assert shares.need(more, quiet).wanted == ()
    assert_same_experts(need.folder, prepared, dict.fromkeys(layout_of(prepared).layers, (0, 1)))


def test_it_can_be_stopped_and_what_came_is_kept(prepared: Path, shares: ShardStore):
    offered = offer_part(prepared, every_second(prepared))
    need = shares.need(offered, quiet)
    count = iter(range(1000))
    with pytest.raises(Cancelled):
        shares.receive(
            offered, need.wanted, stream(prepared, offered, need.wanted), quiet, should_stop=lambda: next(count) > 6
        )
    assert 0 < len(shares.need(offered, quiet).wanted) < len(need.wanted)


def test_a_stream_that_ends_early_says_so(prepared: Path, shares: ShardStore):
    offered = offer_part(prepared, every_second(prepared))
    need = shares.need(offered, quiet)
    with pytest.raises(ModelError, match="stopped sending after"):
        shares.receive(offered, need.wanted, list(stream(prepared, offered, need.wanted))[:-3], quiet)
    # An expert of a prepared model is two runs of bytes, and each run a chunk.
    assert len(shares.need(offered, quiet).wanted) == 2


def test_damage_on_the_way_is_refused(prepared: Path, shares: ShardStore):
    offered = offer_part(prepared, every_second(prepared))
    need = shares.need(offered, quiet)
    chunks = list(stream(prepared, offered, need.wanted))
    damaged = bytearray(chunks[-1])
    damaged[-1] ^= 1
    with pytest.raises(RingProtocolError, match="damaged on its way"):
        shares.receive(offered, need.wanted, [*chunks[:-1], bytes(damaged)], quiet)
    left = shares.need(offered, quiet)
    (last,) = left.wanted
    assert last.item == need.wanted[-1].item and last.start > 0

    # With a checksum that fits the chunk, the item's does not fit.
    sent = transfer.decode_chunk(chunks[-1])
    wrong = bytes(len(sent.data))
    forged = transfer.encode_chunk(transfer.Chunk(sent.item, sent.offset, zlib.crc32(wrong), wrong))
    with pytest.raises(RingProtocolError, match="another checksum"):
        shares.receive(offered, left.wanted, [forged], quiet)
    assert shares.need(offered, quiet).wanted == (Wanted(last.item),)
    layer, expert = transfer.expert_of(offered.items[last.item].key) or (0, 0)
    assert expert not in read_shard(need.folder).experts[layer]


@pytest.mark.parametrize("order", ["reversed", "twice", "more"])
def test_only_what_was_asked_for_is_taken(prepared: Path, shares: ShardStore, order: str):
    offered = offer_part(prepared, every_second(prepared))
    need = shares.need(offered, quiet)
    chunks = list(stream(prepared, offered, need.wanted))
    sent = {"reversed": chunks[::-1], "twice": [chunks[0], *chunks], "more": [*chunks, chunks[0]]}[order]
    with pytest.raises(RingProtocolError):
        shares.receive(offered, need.wanted, sent, quiet)


@pytest.mark.parametrize("failing", ["pwrite", "fsync"])
def test_a_full_disk_is_named_and_nothing_half_counted(
    prepared: Path, shares: ShardStore, monkeypatch: pytest.MonkeyPatch, failing: str
):
    held = every_second(prepared)
    offered = offer_part(prepared, held)
    left = iter(range(1000))
    genuine = getattr(os, failing)

    def full(*arguments: Any) -> Any:
        if next(left) >= (9 if failing == "pwrite" else 8):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return genuine(*arguments)

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(ModelError, match=r"is full .* [kM]B of this machine's share did not fit") as caught:
        send(shares, prepared, offered)
    assert caught.value.kind == "disk"
    monkeypatch.undo()
    again = send(shares, prepared, offered)
    assert 0 < again.nbytes <= offered.nbytes
    assert_same_experts(again.folder, prepared, held)


def test_too_little_room_is_refused_before_anything_is_received(
    prepared: Path, shares: ShardStore, monkeypatch: pytest.MonkeyPatch
):
    offered = offer_part(prepared, every_second(prepared))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(ModelError, match=r"needs another .* are missing; make room"):
        send(shares, prepared, offered)
    assert not shares.folder(offered).exists()


def test_a_head_whose_files_changed_says_so(tiny_model: TinyModel, shares: ShardStore, tmp_path: Path):
    head = Path(shutil.copytree(tiny_model("mixtral"), tmp_path / "head"))
    offered = offer_part(head, every_second(head))
    need = shares.need(offered, quiet)
    with (head / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelError, match="was changed since it was offered"):
        list(stream(head, offered, need.wanted))


def test_wanting_what_was_not_offered_is_refused(prepared: Path):
    offered = offer_part(prepared, every_second(prepared))
    for wanted in ([Wanted(len(offered.items))], [Wanted(-1)], [Wanted(0, 1 << 40)]):
        with pytest.raises(RingProtocolError, match="was wanted and not offered"):
            list(stream(prepared, offered, wanted))


def test_a_share_is_no_model_to_load_or_list(prepared: Path, home: Path):
    models = home / "models"
    need = send(ShardStore(models, "head"), prepared, offer_part(prepared, every_second(prepared), name="a model"))
    assert need.folder.parent == models and need.folder.name.startswith("a-model--")
    assert local_models.installed() == []
    with pytest.raises(ModelError, match="share of a model that a ring runs"):
        local_models.resolve(str(need.folder))
    with pytest.raises(ModelError, match="There is no model"):
        local_models.resolve(need.folder.name)
    assert local_models.shards() == [(need.folder.name, pytest.approx(need.nbytes, abs=200_000))]
    freed = local_models.shards()[0][1]
    assert local_models.remove(need.folder.name) == freed > 0
    assert local_models.shards() == [] and not need.folder.exists()


def test_a_damaged_or_foreign_share_is_received_anew(prepared: Path, shares: ShardStore):
    held = every_second(prepared)
    offered = offer_part(prepared, held)
    folder = send(shares, prepared, offered).folder
    (folder / model_folder.SHARD_MANIFEST).write_bytes(b"{")
    with pytest.raises(ModelError, match="is damaged"):
        open_model(folder)
    assert send(shares, prepared, offered).nbytes == offered.nbytes
    assert_same_experts(folder, prepared, held)
    (folder / "config.json").write_text("{}")
    assert [offered.items[want.item].key for want in shares.need(offered, quiet).wanted] == ["setting/config.json"]


def test_an_item_that_came_whole_and_was_not_compared_comes_again(prepared: Path, shares: ShardStore):
    offered = offer_part(prepared, every_second(prepared))
    need = shares.need(offered, quiet)
    last = offered.items[need.wanted[-1].item]
    shares.receive(offered, need.wanted[:-1], stream(prepared, offered, need.wanted[:-1]), quiet)
    begun = shard_store.Begun(last.key, last.nbytes, last.checksum)
    shard_store._write_manifest(need.folder, msgspec.structs.replace(read_shard(need.folder), begun=begun))
    again = send(shares, prepared, offered)
    assert (again.wanted, again.nbytes) == (need.wanted[-1:], last.nbytes)
    assert shares.need(offered, quiet).wanted == ()


def test_an_empty_file_beside_the_weights_is_not_missed(tiny_model: TinyModel, shares: ShardStore, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_model("mixtral"), tmp_path / "head"))
    (folder / "README.md").touch()
    offered = offer_part(folder, every_second(folder))
    send(shares, folder, offered)
    assert shares.need(offered, quiet).wanted == ()


PAIRS = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 7)), min_size=1, max_size=10)


@given(st.lists(PAIRS, min_size=1, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
def test_whatever_placements_follow_each_other_nothing_is_sent_twice(
    prepared: Path, placements: list[set[tuple[int, int]]]
):
    layout = layout_of(prepared)
    with tempfile.TemporaryDirectory() as node:
        shares = ShardStore(Path(node), "head")
        here: set[tuple[int, int]] = set()
        for number, pairs in enumerate(placements):
            held = {layer: sorted(e for at, e in pairs if at == layer) for layer in layout.layers}
            offered = offer_part(prepared, held)
            need = send(shares, prepared, offered)
            other = offered.nbytes - len(pairs) * layout.expert_bytes
            assert need.nbytes == len(pairs - here) * layout.expert_bytes + (other if number == 0 else 0)
            assert need.has_bytes == offered.nbytes - need.nbytes
            here |= pairs
            experts = experts_of(need.folder)
            assert {(at, e) for at in layout.layers for e in experts.held(at)} == here
