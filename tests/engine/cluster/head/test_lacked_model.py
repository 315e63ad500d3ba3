"""A model that the head has not whole: what it takes of it, from whom, and what becomes of machines that fail."""

from __future__ import annotations

import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cluster.head.capacity_wait import CapacityError
from engine.cluster.head.lacked_model import LackedModel, find_lacked
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights import shard_store
from engine.cluster.weights.own_shard import KEPT, NotWhole, OwnShard
from engine.cluster.weights.source import FolderSource, SourceFailed
from engine.cluster.weights.transfer import Chunk, Offer, decode_chunk, encode_chunk, offer, stream
from engine.cluster.worker import model_provider
from engine.cluster.worker.lending import ClusterWorker
from engine.cluster.worker.model_provider import ProvidedModel
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Load
from engine.models.folders.prepare import prepare
from engine.models.folders.shard_files import read_shard
from engine.models.store import local_models
from engine.models.text.tokenizer import load_tokenizer
from engine.runtimes.choosing import choose_runtime
from engine.runtimes.model_headers import read_headers
from tests.engine.cluster.lacking_machine import KEY, NAME, Having, TinyModel, models, own_shard, there
from tests.engine.cluster.paired_nodes import Nodes
from tests.support.progress import quiet

__all__ = ["models", "there"]
FAMILIES = ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3")
HELD = {0: (0, 3), 1: (1,), 2: (2, 3)}

pytestmark = pytest.mark.usefixtures("no_keyring")


def sparse(folder: Path) -> bytes:
    """Everything in the files of weights."""
    return b"".join(
        path.read_bytes() for path in sorted(folder.rglob("*")) if path.suffix in (".safetensors", ".slabs")
    )


@pytest.mark.parametrize(
    ("family", "prepared"),
    [*((family, False) for family in FAMILIES), *((family, True) for family in FAMILIES), ("llama", False)],
)
def test_headers_are_all_that_a_plan_takes(
    tiny_model: TinyModel, models: Path, tmp_path: Path, family: str, prepared: bool
):
    folder = tiny_model(family, dtype="bfloat16")
    if prepared:
        prepare(folder, tmp_path / "prepared", quiet)
        folder = tmp_path / "prepared"
    source = Having(folder)
    own = own_shard(source)
    assert own.folder.parent == models
    assert not any(key.startswith(("trunk/", "expert/")) for key in source.asked)
    load = Load(id=0, model=NAME, partitioning="ring")
    ours, theirs = read_headers(own.folder, load), read_headers(folder, load)
    assert (ours.sizes, ours.shape, ours.profile, ours.not_native) == (
        theirs.sizes, theirs.shape, theirs.profile, theirs.not_native,
    )  # fmt: skip
    assert str(ours.refused) == str(theirs.refused)
    assert choose_runtime(load, own.folder) == choose_runtime(load, folder)
    assert (load_tokenizer(own.folder) is None) == (load_tokenizer(folder) is None)
    # It is no model to load by itself, and found again when it is asked for once more.
    assert local_models.installed() == []
    found = OwnShard.find(NAME, "me")
    assert found is not None and found.offered == own.offered == source.offered
    assert OwnShard.find(NAME, "another") is None
    assert OwnShard.find("owner/other", "me") is None


def moved(offered: Offer) -> Offer:
    """Two experts of the same size lie where the other one does."""
    experts = [number for number, item in enumerate(offered.items) if item.key.startswith("expert/0/")][:2]
    items = list(offered.items)
    first, second = (items[number] for number in experts)
    items[experts[0]] = msgspec.structs.replace(first, runs=second.runs)
    items[experts[1]] = msgspec.structs.replace(second, runs=first.runs)
    return msgspec.structs.replace(offered, items=tuple(items))


def test_an_offer_that_does_not_fit_its_own_headers_is_none(there: Path, models: Path):
    honest = offer(there, quiet, NAME)
    identity = msgspec.structs.replace(honest.identity, config="0" * 32)
    for lie, wrong in (
        (moved(honest), "in places where it has none"),
        (msgspec.structs.replace(honest, identity=identity), "another model arrived"),
        (msgspec.structs.replace(honest, trunk_pieces=honest.trunk_pieces + 1), "another model arrived"),
    ):
        with pytest.raises(RingProtocolError, match=wrong):
            own_shard(Having(there, lie))
    with pytest.raises(NotWhole):
        own_shard(Having(there, msgspec.structs.replace(honest, items=honest.items[:-1])))
    assert list(models.glob("*.share")) == []


def test_what_is_kept_beside_the_share_is_believed_only_if_it_goes_with_it(there: Path, models: Path):
    own = own_shard(Having(there))
    kept = (own.folder / KEPT).read_bytes()
    for data in (b"", kept[:-1], kept[:40]):
        (own.folder / KEPT).write_bytes(data)
        assert OwnShard.find(NAME, "me") is None
    (own.folder / KEPT).write_bytes(kept)
    config = (own.folder / "config.json").read_bytes()
    (own.folder / "config.json").write_bytes(config[:-1] + b" ")
    assert OwnShard.find(NAME, "me") is None
    assert own_shard(Having(there)).offered == own.offered
    assert (own.folder / "config.json").read_bytes() == config


# --- over links of paired machines ---------------------------------------------------------------------------------


class Places:
    """What each lent machine of this process gives: they have one models folder."""

    def __init__(self, folders: Mapping[int, Path]) -> None:
        self.folders = dict(folders)
        self.read: list[str] = []
        """From whom weights were taken, a call each."""
        self.change: Callable[[str, bytes], bytes] = lambda who, data: data


@pytest.fixture
def places(three: Nodes, there: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    """Bob and Carl have the model."""
    made = Places(dict.fromkeys((1, 2), there))

    class Told(FolderSource):
        def chunks(self, *given: Any) -> Iterator[bytes]:  # type: ignore[override]
            made.read.append(self.name)
            for data in super().chunks(*given):
                yield made.change(self.name, data)

    class Given(ProvidedModel):
        def source(self, progress: Any) -> FolderSource:
            found = super().source(progress)
            return Told(self.who, found.folder, found.offered)  # type: ignore[attr-defined]

    class Gives(model_provider.ModelProvider):
        def _find(self, caller: Any, wanted: Any) -> ProvidedModel | None:
            index = three.nodes.index(self._node)
            if wanted.key != KEY or index not in made.folders:
                return None
            found = Given(made.folders[index], NAME, True)
            object.__setattr__(found, "who", self._node.name)
            return found

    monkeypatch.setattr("engine.cluster.worker.lending.ModelProvider", Gives)
    lenders = [ClusterWorker(node) for node in three.nodes[1:]]
    yield made
    for lender in lenders:
        lender.close()


def lacked(nodes: Nodes, progress: Any = quiet) -> LackedModel:
    found = find_lacked(nodes.nodes[0], local_models.resolve(NAME), progress)
    assert found is not None
    return found


def here(model: LackedModel) -> dict[int, tuple[int, ...]]:
    return {layer: experts for layer, experts in read_shard(model.folder).experts.items() if experts}


def test_the_head_takes_its_share_and_no_more(three: Nodes, places: Places, there: Path):
    model = lacked(three)
    assert here(model) == {} and not read_shard(model.folder).has_trunk
    assert len(places.read) == 1
    model.take(HELD, quiet)
    assert here(model) == HELD and read_shard(model.folder).has_trunk
    whole, mine = sparse(there), sparse(model.folder)
    assert len(whole) == len(mine) and whole != mine
    # Nobody is asked for what is here; an expert more is one more call.
    places.read.clear()
    places.folders.clear()
    lacked(three).take(HELD, quiet)
    assert places.read == []
    places.folders[2] = there
    model.take({**HELD, 1: (1, 2)}, quiet)
    assert places.read == ["Carl"]
    assert here(model)[1] == (1, 2)


def test_nobody_has_it(three: Nodes, places: Places):
    places.folders.clear()
    assert find_lacked(three.nodes[0], local_models.resolve(NAME), quiet) is None


def test_what_a_machine_failed_to_give_comes_from_another_one(three: Nodes, places: Places, there: Path):
    model = lacked(three)
    given: list[tuple[int, int]] = []

    def fail(who: str, data: bytes) -> bytes:
        chunk = decode_chunk(data)
        given.append((chunk.item, chunk.offset))
        if len(given) == 13:
            raise ModelError("the disk of it is broken.", "disk")
        return data

    places.read.clear()
    places.change = fail
    model.take(HELD, quiet)
    assert sorted(places.read) == ["Bob", "Carl"]
    assert here(model) == HELD
    assert len(given) == len(set(given)) + 1  # what had come is not sent again


def test_damage_is_noticed_before_it_is_passed_on_and_named_if_nobody_else_has_it(three: Nodes, places: Places):
    model = lacked(three)
    del places.folders[2]

    def damage(who: str, data: bytes) -> bytes:
        chunk = decode_chunk(data)
        bad = chunk.data[:-1] + bytes([chunk.data[-1] ^ 1])
        return encode_chunk(Chunk(chunk.item, chunk.offset, zlib.crc32(bad), bad))

    places.change = damage
    source = model.take(None, quiet)
    part = source.offered.part(HELD, trunk=True)
    wanted = shard_store.missing_in(model.folder, part, three.identities[0].node_id)
    with pytest.raises(SourceFailed):
        list(source.chunks(part, wanted, lambda: None))
    with pytest.raises(CapacityError) as failed:
        model.take(HELD, quiet)
    assert "arrived with another checksum than was offered" in str(failed.value)
    assert "(Bob: " in str(failed.value) and "privatellm models pull owner/tiny" in str(failed.value)
    assert failed.value.missing > 0 and failed.value.lines == (str(failed.value),)
    assert here(model) == {}


def test_another_version_of_the_model_is_not_mixed_in(three: Nodes, places: Places, tiny_model: TinyModel):
    model = lacked(three)
    places.folders = dict.fromkeys((1, 2), tiny_model("mixtral", dtype="bfloat16", shards=True, seed=9))
    with pytest.raises(CapacityError, match=r"\(Bob: it has another version .* `privatellm models remove owner-tiny--"):
        model.take(HELD, quiet)
    assert here(model) == {}


def test_a_shard_that_takes_the_rest_is_the_model(three: Nodes, places: Places, there: Path, models: Path):
    model = lacked(three)
    model.take(HELD, quiet)
    shard, held = model.folder, here(model)
    del places.folders[1]
    assert held and model.take_whole(quiet) == (models / KEY, "Copied from Carl.")
    assert not shard.exists() and list(models.glob("*.partial")) == []
    assert {path.name: path.read_bytes() for path in (models / KEY).iterdir()} == {
        path.name: path.read_bytes() for path in there.iterdir()
    }


def test_a_shard_of_an_older_version_gives_way_to_the_whole_of_todays(
    three: Nodes, places: Places, models: Path, tiny_model: TinyModel
):
    model = lacked(three)
    model.take(HELD, quiet)
    places.folders = {2: tiny_model("mixtral", dtype="bfloat16", shards=True, seed=9)}
    assert model.take_whole(quiet) == (models / KEY, "Copied from Carl.")
    assert sparse(models / KEY) == sparse(places.folders[2])
    assert not model.folder.exists()


def test_a_shard_stays_when_nobody_has_the_rest(three: Nodes, places: Places):
    model = lacked(three)
    model.take(HELD, quiet)
    places.folders = {}
    with pytest.raises(CapacityError, match=r"are on no machine that is there now; .* had all of it"):
        model.take_whole(quiet)
    assert here(model) == HELD


def test_the_disk_is_looked_at_before_anything_is_taken(three: Nodes, places: Places, monkeypatch: pytest.MonkeyPatch):
    model = lacked(three)
    places.read.clear()
    usage = shutil.disk_usage(model.folder)
    monkeypatch.setattr(shard_store.shutil, "disk_usage", lambda path: usage._replace(free=shard_store.RESERVE_BYTES))
    with pytest.raises(ModelError, match=r"on the disk of .* are missing") as refused:
        model.take(HELD, quiet)
    assert refused.value.kind == "disk"
    assert places.read == []


def test_taking_ends_when_it_is_stopped_although_nothing_comes_and_goes_on_later(three: Nodes, places: Places):
    model = lacked(three)
    reached, release = threading.Event(), threading.Event()
    come: list[int] = []

    def stuck(who: str, data: bytes) -> bytes:
        come.append(decode_chunk(data).item)
        if len(come) == 12:
            reached.set()
            release.wait(60)
        return data

    def progress(*_: object) -> None:
        if reached.is_set():
            raise Cancelled("Stopped.")

    places.change = stuck
    try:
        with pytest.raises(Cancelled):
            model.take(HELD, progress)
    finally:
        release.set()
    places.change = lambda who, data: data
    model.take(HELD, quiet)
    assert here(model) == HELD


def test_what_is_here_and_what_is_elsewhere_come_in_the_order_that_was_asked_for(
    three: Nodes, places: Places, there: Path
):
    """As a follower asks for it: one machine is called once for all that it gives."""
    model = lacked(three)
    source = model.take(HELD, quiet)
    places.read.clear()
    every = {layer: tuple(range(4)) for layer in range(3)}
    part = source.offered.part(every, trunk=True)
    wanted = shard_store.missing_in(Path("nowhere"), part, "other")
    came = [decode_chunk(data) for data in source.chunks(part, wanted, lambda: None)]
    assert len(places.read) == 1
    whole = [decode_chunk(data) for data in stream(there, part, wanted)]
    assert came == whole
