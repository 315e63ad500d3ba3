"""What arrives is checked before it is believed: any bytes end in one error, no file outside of a share is touched."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights import transfer
from engine.cluster.weights.shard_store import ShardStore
from engine.cluster.weights.transfer import (
    CHUNK_BYTES,
    Chunk,
    Item,
    Offer,
    Wanted,
    decode_chunk,
    decode_offer,
    decode_wanted,
    encode_chunk,
    encode_offer,
    encode_wanted,
)
from engine.errors import ModelError
from engine.models.folders.shard_files import ModelIdentity, read_shard
from engine.models.formats.byte_map import Run, merged
from tests.support.progress import quiet
from tests.support.random_examples import examples

TinyModel = Callable[..., Path]
IDENTITY = ModelIdentity(
    version=1,
    name="m",
    family="mixtral",
    quantisation="bfloat16",
    config="c",
    tokenizer="t",
    weights="0123456789abcdef",
)


def an_offer(**changes: Any) -> Offer:
    good = Offer(
        identity=IDENTITY,
        layout="0123456789abcdef",
        files=(("model.safetensors", 1000),),
        items=(
            Item("setting/config.json", 2, zlib.crc32(b"{}")),
            Item("header/0", 100, 1, ((0, 0, 100),)),
            Item("trunk/0", 200, 1, ((0, 100, 200), (0, 300, 400))),
            Item("expert/0/3", 50, 1, ((0, 500, 550),)),
        ),
        trunk_pieces=1,
    )
    return msgspec.structs.replace(good, **changes)


def test_a_good_offer_survives_the_journey():
    assert decode_offer(encode_offer(an_offer())) == an_offer()
    assert an_offer().held == {0: (3,)}
    assert decode_wanted(encode_wanted([Wanted(1, 5)])) == (Wanted(1, 5),)
    chunk = Chunk(1, 2, zlib.crc32(b"abc"), b"abc")
    assert decode_chunk(encode_chunk(chunk)) == chunk


@given(st.binary(max_size=400))
def test_any_bytes(data: bytes):
    for decode in (decode_offer, decode_wanted, decode_chunk):
        try:
            decode(data)
        except RingProtocolError:
            continue


@given(st.data())
def test_an_offer_with_a_byte_changed(data: st.DataObject):
    encoded = bytearray(encode_offer(an_offer()))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] = data.draw(st.integers(0, 255))
    try:
        offered = decode_offer(bytes(encoded))
    except RingProtocolError:
        return
    transfer.check_offer(offered)  # what is let through is whole


BAD_NAMES = [
    "../model.safetensors",
    "/etc/model.safetensors",
    "a/b.safetensors",
    "experts/../../x.slabs",
    ".hidden.safetensors",
    "model.safetensors\n",
    "model.bin",
    "experts/layer-1.slabs",
    "experts/layer-٠٠٠٠١.slabs",
    "m" * 5_000_000 + ".safetensors",
    "",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=range(len(BAD_NAMES)))
def test_files_that_no_model_has(name: str):
    with pytest.raises(RingProtocolError, match="no file of weights"):
        decode_offer(encode_offer(an_offer(files=((name, 1000),))))


@pytest.mark.parametrize(
    "item",
    [
        Item("setting/../config.json", 2, 1),
        Item("setting/share.json", 2, 1),
        Item("setting/Share.JSON", 2, 1),
        Item("setting/share.json.", 2, 1),
        Item("setting/model.SafeTensors", 2, 1),
        Item("setting/modeling.PY ", 2, 1),
        Item("setting/.bashrc", 2, 1),
        Item("setting/model.safetensors", 2, 1),
        Item("setting/modeling.py", 2, 1),
        Item("setting/", 2, 1),
        Item("setting/config.json", 2, 1, ((0, 0, 2),)),
        Item("setting/config.json", -1, 1),
        Item("setting/config.json", 1 << 60, 1),
        Item("expert/0/1", 0, 1),
        Item("expert/0/x", 2, 1, ((0, 0, 2),)),
        Item("expert/0/1/2", 2, 1, ((0, 0, 2),)),
        Item("expert/0/1", 2, 1, ((0, 999, 1001),)),
        Item("expert/0/1", 2, 1, ((1, 0, 2),)),
        Item("expert/0/1", 2, 1, ((-1, 0, 2),)),
        Item("expert/0/1", 3, 1, ((0, 0, 2),)),
        Item("expert/0/1", 4, 1, ((0, 0, 2), (0, 1, 3))),
        Item("expert/0/1", 0, 1, ((0, 2, 2),)),
        Item("trunk/1", 2, 1, ((0, 0, 2),)),
        Item("trunk/²", 2, 1, ((0, 0, 2),)),
        Item("header/0", 4, 1, ((0, 0, 2), (0, 4, 6))),
        Item("program/0", 2, 1, ((0, 0, 2),)),
        Item("", 0, 0),
    ],
    ids=lambda item: f"{item.key}-{item.nbytes}-{len(item.runs)}",
)
def test_items_that_no_model_has(item: Item):
    with pytest.raises(RingProtocolError):
        decode_offer(encode_offer(an_offer(items=(item,))))


@pytest.mark.parametrize(
    "changes",
    [
        {"files": (("model.safetensors", 1000), ("model.safetensors", 1000))},
        {"files": (("model.safetensors", 0),)},
        {"files": (("model.safetensors", 1 << 50),)},
        {"items": (Item("header/0", 2, 1, ((0, 0, 2),)),) * 2},
        {"layout": "../../x"},
        {"identity": msgspec.structs.replace(IDENTITY, weights="../../../../home")},
        {"identity": msgspec.structs.replace(IDENTITY, name="\x1b[2J")},
        {"identity": msgspec.structs.replace(IDENTITY, family="x" * 201)},
        {"items": tuple(Item(f"setting/{number}.json", 900_000_000, 1) for number in range(2))},
    ],
)
def test_offers_that_mean_nothing(changes: dict[str, Any]):
    with pytest.raises(RingProtocolError):
        decode_offer(encode_offer(an_offer(**changes)))


def test_sizes_are_capped(monkeypatch: pytest.MonkeyPatch):
    large = Chunk(0, 0, 0, bytes(CHUNK_BYTES + 100))
    with pytest.raises(RingProtocolError, match="over the limit"):
        decode_chunk(encode_chunk(large))
    monkeypatch.setattr(transfer, "OFFER_LIMIT", 10)
    for decode, data in ((decode_offer, encode_offer(an_offer())), (decode_wanted, encode_wanted([Wanted(1)] * 20))):
        with pytest.raises(RingProtocolError, match="over the limit"):
            decode(data)


def test_a_share_is_not_written_through_a_link(tmp_path: Path):
    shares = ShardStore(tmp_path / "node", "head")
    offered = an_offer()
    folder = shares.folder(offered)
    folder.mkdir(parents=True)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (folder / "model.safetensors").symlink_to(mine)
    with pytest.raises(ModelError):
        shares.receive(offered, shares.need(offered, quiet).wanted, [], quiet)
    assert mine.read_text() == "mine"


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(10), deadline=None)
def test_any_stream_ends_in_one_error_and_counts_nothing(tmp_path: Path, stream: list[bytes]):
    shares = ShardStore(tmp_path / "node", "head")
    offered = an_offer()
    need = shares.need(offered, quiet)
    with pytest.raises(ModelError):
        shares.receive(offered, need.wanted, stream, quiet)
    manifest = read_shard(need.folder)
    assert manifest.other == () and manifest.experts == {}


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(1, 20)), max_size=8))
def test_merged_runs_hold_the_same_bytes_in_order(spans: list[tuple[int, int, int]]):
    runs = [Run(file, start, start + length) for file, start, length in spans]
    found = merged(runs)
    assert {(run.file, byte) for run in found for byte in range(run.start, run.stop)} == {
        (run.file, byte) for run in runs for byte in range(run.start, run.stop)
    }
    for before, after in itertools.pairwise(found):
        assert (before.file, before.stop) < (after.file, after.start)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 150))
def test_what_is_left_of_an_item(lengths: list[int], done: int):
    runs = [(number, 100, 100 + length) for number, length in enumerate(lengths)]
    whole = [(file, byte) for file, start, stop in runs for byte in range(start, stop)]
    left = transfer._after(runs, done)
    assert [(run.file, byte) for run in left for byte in range(run.start, run.stop)] == whole[done:]


def test_names_that_some_file_systems_take_for_the_same():
    settings = tuple(Item(f"setting/{name}", 2, zlib.crc32(b"{}")) for name in ("config.json", "Config.json"))
    with pytest.raises(RingProtocolError, match="twice"):
        decode_offer(encode_offer(an_offer(items=settings)))
    files = (("model.safetensors", 1000), ("Model.safetensors", 1000))
    with pytest.raises(RingProtocolError, match="no file of weights"):
        decode_offer(encode_offer(an_offer(files=files)))


def test_more_files_than_may_be_open():
    files = tuple((f"m{number}.safetensors", 1000) for number in range(5000))
    with pytest.raises(RingProtocolError, match="5000 files"):
        decode_offer(encode_offer(an_offer(files=files)))


def test_the_same_weights_are_not_sent_over_and_over(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    with pytest.raises(RingProtocolError, match="more than once"):
        next(transfer.stream(tmp_path, an_offer(), [Wanted(2)] * 1000))
