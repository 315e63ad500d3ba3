"""A model is copied from machines that have it: what arrives is what was there, is checked, and nothing comes twice."""

from __future__ import annotations

import shutil
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cluster.head.lacked_model import copy_model
from engine.cluster.membership.control_messages import ModelHere, OfferPiece, WantedModel, WantedWeights
from engine.cluster.weights.shard_store import ShardStore
from engine.cluster.weights.source import FolderSource
from engine.cluster.weights.transfer import Item, Offer, decode_chunk, encode_chunk, offer
from engine.cluster.worker import model_provider
from engine.cluster.worker.lending import ClusterWorker
from engine.cluster.worker.model_provider import ProvidedModel, find_provided
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import LendTerms
from engine.models.folders import model_folder
from engine.models.folders.prepare import prepare
from engine.models.folders.shard_files import read_shard
from engine.models.store import local_models
from tests.engine.cluster.lacking_machine import KEY, NAME, Having, TinyModel, copied, models, there
from tests.engine.cluster.paired_nodes import Nodes
from tests.support.eventually import eventually
from tests.support.progress import quiet
from tests.support.shards import offer_part, send

__all__ = ["models", "there"]
pytestmark = pytest.mark.usefixtures("no_keyring")


def content(folder: Path | None) -> dict[str, bytes]:
    assert folder is not None
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("family", "prepared"),
    [
        ("mixtral", False),
        ("mixtral", True),
        ("qwen2_moe", True),
        ("gpt_oss", False),
        ("gpt_oss", True),
        ("llama", False),
    ],
)
def test_what_arrives_is_what_was_there(
    tiny_model: TinyModel, models: Path, tmp_path: Path, family: str, prepared: bool
):
    folder = tiny_model(family, dtype="bfloat16", shards=not prepared)
    if prepared:
        prepare(folder, tmp_path / "prepared", quiet)
        folder = tmp_path / "prepared"
    got = copied(Having(folder))
    assert got == models / KEY
    assert content(got) == content(folder)
    assert local_models.resolve(NAME).folder == got
    assert local_models.partial_downloads() == []


def test_what_was_stopped_goes_on_where_it_was(there: Path, models: Path):
    first = Having(there)
    come: list[int] = []

    def stop(data: bytes) -> bytes:
        come.append(decode_chunk(data).item)
        if len(come) > 30:
            raise Cancelled("Stopped.")
        return data

    first.change = stop
    with pytest.raises(Cancelled):
        copied(first)
    assert [name for name, _ in local_models.partial_downloads()] == [NAME]
    assert local_models.resolve(NAME).folder is None
    # Another machine that has the same goes on.
    second = Having(there)
    got = copied(second)
    assert content(got) == content(there)
    arrived = {first.offered.items[item].key for item in come if item != come[-1]}
    assert arrived and second.asked
    assert not arrived & set(second.asked)


def test_removing_the_model_removes_what_has_arrived_of_it(there: Path, models: Path):
    source = Having(there)
    done = 0

    def stop(*_: object) -> None:
        nonlocal done
        done += 1
        if done > 15:
            raise Cancelled("Stopped.")

    with pytest.raises(Cancelled):
        copied(source, progress=stop)
    local_models.remove(NAME)
    assert [path for path in models.iterdir() if not path.name.startswith(".")] == []


def test_parts_that_together_are_whole_are_put_together(
    there: Path, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
):
    """They lie as shares on two machines; some experts on both."""
    halves = []
    whole = offer(there, quiet)
    for node in range(2):
        held = {layer: [e for e in experts if e % 2 == node or e == 0] for layer, experts in whole.held.items()}
        wanted = offer_part(there, held, name=NAME)
        monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / f"node-{node}"))
        shares = ShardStore(tmp_path / f"node-{node}" / "models", "me")
        folder = send(shares, there, wanted).folder
        halves.append(Having(folder, ProvidedModel(folder, NAME, False).source(quiet).offered, f"node {node}"))
        assert halves[node].offered.identity == wanted.identity
        assert {item.key for item in halves[node].offered.items} == {item.key for item in wanted.items}
    monkeypatch.setenv("PRIVATELLM_HOME", str(models.parent))
    assert copied(parts=halves[:1]) is None
    assert not any(key.startswith("expert") for key in halves[0].asked)
    assert content(copied(parts=halves)) == content(there)
    keys = [key for half in halves for key in half.asked if key.startswith("expert")]
    assert len(keys) == len(set(keys))


# --- what a machine may do that means harm, or is broken --------------------------------------------------------------


def with_setting(offered: Offer, name: str, data: bytes) -> Offer:
    """The offer with that file beside the weights, in the place of one of this name if there is one."""
    key = f"setting/{name}"
    items = [item for item in offered.items if item.key != key]
    return msgspec.structs.replace(offered, items=(Item(key, len(data), zlib.crc32(data)), *items))


@pytest.mark.parametrize("name", ["weights.pkl", "modeling_tiny.pyc", "run.sh", "model.bin", "hook.so"])
def test_a_file_that_belongs_to_no_model_is_refused_before_anything_comes(there: Path, models: Path, name: str):
    source = Having(there, with_setting(offer(there, quiet), name, b"harm"))
    with pytest.raises(ModelError, match=r"studio: an offer has the file .*, which belongs to no model"):
        copied(source)
    assert source.asked == []
    assert local_models.partial_downloads() == []


def test_a_model_that_cannot_run_is_refused_before_its_weights_come(there: Path, tmp_path: Path):
    whole = offer(there, quiet)
    other = shutil.copytree(there, tmp_path / "other")
    data = (there / "config.json").read_bytes().replace(b'"mixtral"', b'"unheard-of"')
    (other / "config.json").write_bytes(data)
    source = Having(other, with_setting(whole, "config.json", data))
    with pytest.raises(ModelError, match="unheard-of"):
        copied(source)
    assert {key.partition("/")[0] for key in source.asked} <= {"setting", "header"}


def test_a_damaged_chunk_is_not_kept(there: Path):
    source = Having(there)

    def damage(data: bytes) -> bytes:
        chunk = decode_chunk(data)
        if not source.offered.items[chunk.item].key.startswith("expert"):
            return data
        wrong = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]
        return encode_chunk(msgspec.structs.replace(chunk, data=wrong, checksum=zlib.crc32(wrong)))

    source.change = damage
    with pytest.raises(ModelError, match=r"studio: expert/.* arrived with another checksum"):
        copied(source)
    source.change = lambda data: data
    assert content(copied(source)) == content(there)


def test_another_model_than_was_offered_is_not_kept(tiny_model: TinyModel, there: Path):
    """Every item agrees with its checksum, and together they are another model."""
    wrong = tiny_model("mixtral", dtype="bfloat16", shards=True, seed=1)
    lie = msgspec.structs.replace(offer(wrong, quiet), identity=offer(there, quiet).identity)
    with pytest.raises(ModelError, match="studio: another model arrived"):
        copied(Having(wrong, lie))
    assert local_models.resolve(NAME).folder is None
    assert content(copied(Having(there))) == content(there)


def test_what_is_no_file_of_this_model_is_not_taken_over(there: Path, tiny_model: TinyModel, models: Path):
    """A model of another form was begun under the name."""
    source = Having(tiny_model("qwen2_moe", dtype="bfloat16"))

    def stop(data: bytes) -> bytes:
        if source.offered.items[decode_chunk(data).item].key.startswith("expert"):
            raise Cancelled("Stopped.")
        return data

    source.change = stop
    with pytest.raises(Cancelled):
        copied(source)
    assert (models / f"{KEY}{model_folder.RECEIVED}{model_folder.PARTIAL}").is_dir()
    assert content(copied(Having(there))) == content(there)


def test_a_full_disk_is_said_before_weights_come(there: Path, monkeypatch: pytest.MonkeyPatch):
    source = Having(there)
    usage = shutil.disk_usage(there)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=(64 << 20) + 100_000))
    with pytest.raises(ModelError, match="Copying owner/tiny from studio needs") as caught:
        copied(source)
    assert caught.value.kind == "disk"
    assert {key.partition("/")[0] for key in source.asked} <= {"setting", "header"}


# --- what is given ----------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(there: Path, models: Path) -> Path:
    return shutil.copytree(there, models / KEY)


@pytest.mark.parametrize("key", ["../models/owner--tiny", "/etc", ".", "", "owner--tiny/", "owner--tiny\0", "x.share"])
def test_only_a_folder_of_the_models_folder_can_be_named(installed: Path, key: str):
    assert find_provided(KEY, NAME, "anybody") == ProvidedModel(installed, NAME, True)
    assert find_provided(key, NAME, "anybody") is None


def test_unfinished_and_borrowed_folders_are_not_given(installed: Path, models: Path):
    installed.rename(models / f"{KEY}{model_folder.PARTIAL}")
    (models / "local--mine--0123456789abcdef").mkdir()
    shutil.copytree(models / f"{KEY}{model_folder.PARTIAL}", models / "local--mine--0123456789abcdef.prepared")
    for key in (
        KEY,
        f"{KEY}{model_folder.PARTIAL}",
        "local--mine--0123456789abcdef",
        "local--mine--0123456789abcdef.prepared",
    ):
        assert find_provided(key, NAME, "anybody") is None


def test_a_share_goes_back_only_to_the_head_that_sent_it(there: Path, models: Path):
    wanted = offer_part(there, {}, name=NAME)
    folder = send(ShardStore(models, "head"), there, wanted).folder
    assert read_shard(folder).head == "head"
    assert find_provided(KEY, NAME, "head") == ProvidedModel(folder, NAME, False)
    assert find_provided(KEY, NAME, "another head") is None
    assert find_provided(KEY, "owner/other", "head") is None


# --- between machines -------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path / "nodes", "Anna", "Bob", lend=True)
    eventually(nodes.ready)
    yield nodes
    nodes.close()


@pytest.mark.parametrize("given", [True, False])
def test_a_lender_gives_models_only_if_its_person_agrees(pair: Nodes, installed: Path, given: bool):
    client = pair.client(1, pair.identities[0])
    lender = ClusterWorker(pair.nodes[1], terms=LendTerms(give_models=given))
    wanted = WantedModel(key=KEY, name=NAME)
    try:
        assert client.call("ModelHere", wanted, ModelHere, 120) == ModelHere(whole=given)
        assert client.call("ModelHere", WantedModel(key="absent", name="absent"), ModelHere, 120) == ModelHere()
        assert any(piece.data for piece in client.stream("ModelOffer", wanted, OfferPiece, 120)) == given
        weights = WantedWeights(model=wanted, layout="", weights="", wanted=b"\x90")
        with pytest.raises(ModelError, match="another model" if given else "no such model"):
            list(client.stream("ModelWeights", weights, ModelHere, 120))
    finally:
        client.close()
        lender.close()


@pytest.fixture
def lent(pair: Nodes, there: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterWorker]:
    """Bob has the model elsewhere: the two machines of this process have one models folder."""
    monkeypatch.setattr(
        model_provider,
        "find_provided",
        lambda key, name, caller: ProvidedModel(there, name, True) if key == KEY else None,
    )
    lender = ClusterWorker(pair.nodes[1])
    yield lender
    lender.close()


def fetched(pair: Nodes, progress: Any = quiet, name: str = NAME) -> tuple[Path, str] | None:
    return copy_model(pair.nodes[0], local_models.resolve(name), progress)


def test_a_model_is_copied_over_the_link_of_paired_machines(
    pair: Nodes, lent: ClusterWorker, there: Path, models: Path
):
    assert fetched(pair, name="owner/absent") is None
    stages = []
    found = fetched(pair, lambda stage, *figures: stages.append(stage))
    assert found == (models / KEY, "Copied from Bob.")
    assert content(found[0]) == content(there)
    assert lent.take_notices() == ["Anna copies owner/tiny from this machine."]
    assert stages[0] == "asking the machines"


def test_copying_ends_when_it_is_stopped_although_nothing_comes(
    pair: Nodes, lent: ClusterWorker, monkeypatch: pytest.MonkeyPatch
):
    reached, release = threading.Event(), threading.Event()

    def stuck(*_: object) -> Iterator[bytes]:
        reached.set()
        release.wait(60)
        yield b""

    monkeypatch.setattr(FolderSource, "chunks", stuck)

    def progress(*_: object) -> None:
        if reached.is_set():
            raise Cancelled("Stopped.")

    try:
        with pytest.raises(Cancelled):
            fetched(pair, progress)
    finally:
        release.set()
    assert local_models.resolve(NAME).folder is None


def test_a_machine_that_fails_is_named_and_the_internet_is_not_asked_by_itself(
    pair: Nodes, lent: ClusterWorker, there: Path, monkeypatch: pytest.MonkeyPatch
):
    good = FolderSource.chunks

    def broken(*given: Any) -> Iterator[bytes]:
        for number, chunk in enumerate(good(*given)):
            if number == 10:
                raise ModelError("the disk of it is broken.", "disk")
            yield chunk

    monkeypatch.setattr(FolderSource, "chunks", broken)
    with pytest.raises(ModelError, match=r"Bob: the disk of it is broken\).*privatellm models pull owner/tiny"):
        fetched(pair)
    monkeypatch.setattr(FolderSource, "chunks", good)
    found = fetched(pair)
    assert found is not None and content(found[0]) == content(there)
