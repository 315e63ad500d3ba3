"""GGUF files on their way to other machines: sparse copies named like them, the head's own file left as it is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from engine.cluster.weights.own_shard import OwnShard
from engine.cluster.weights.shard_store import ShardStore
from engine.cluster.weights.transfer import decode_offer, encode_offer, stream
from engine.cluster.weights.weight_fingerprint import identity_of, known_weights
from engine.cluster.worker.model_provider import find_provided
from engine.errors import ModelError
from engine.models.architectures.gguf_parts import llama3_divisors
from engine.models.folders import model_folder
from engine.models.folders.opening import open_model
from engine.models.folders.prepare import prepare
from engine.models.folders.sizes import sizes_of
from engine.models.folders.weight_layout import layout_of
from engine.models.formats.gguf_file import GgufFile
from engine.models.store import local_models
from engine.models.store.gguf_folder import open_gguf
from tests.engine.cluster.lacking_machine import Having, copied, own_shard
from tests.support.opened_experts import experts_of
from tests.support.progress import quiet
from tests.support.shards import offer_part, send
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("home")


def kind_of(name: str) -> Kind:
    return Kind.Q8_0 if "ffn_down" in name and name.startswith("blk.0.") else Kind.Q4_0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A split GGUF file in a folder of its own, with a name that has odd characters."""
    (tmp_path / "elsewhere").mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "vocab_size": 192}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    source = write_tiny_model(tmp_path / "source", "mixtral", dtype="float32", **sizes)
    path = tmp_path / "elsewhere" / "My model (Q4).gguf"
    return write_tiny_gguf(path, source, "llama", quantised=kind_of, parts=3)


@pytest.fixture
def folder(file: Path) -> Path:
    return open_gguf(file, quiet)


def half(folder: Path) -> dict[int, list[int]]:
    found = layout_of(folder)
    return {layer: list(range(layer % 2, found.count, 2)) for layer in found.layers}


def content(file: Path) -> dict[str, tuple[str, int]]:
    """What the files of the model hold, and when they were changed."""
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in file.parent.iterdir()
    }


def test_a_shard_is_a_sparse_copy_with_files_of_its_own(file: Path, folder: Path, tmp_path: Path) -> None:
    before = content(file)
    layout, held = layout_of(folder), half(folder)
    offered = decode_offer(encode_offer(offer_part(folder, held)))
    shares = ShardStore(tmp_path / "node", "head")
    need = send(shares, folder, offered)
    mine = need.folder
    names = sorted(path.name for path in mine.glob("*.gguf"))
    assert names == sorted(name for name, _ in layout.files) and len(names) == 3
    assert all(name.startswith("My-model-Q4-") for name in names)
    for name, size in layout.files:
        path = mine / name
        assert path.is_file() and not path.is_symlink() and path.stat().st_size == size
    files = [((mine / name).read_bytes(), (folder / name).read_bytes()) for name, _ in layout.files]
    for piece in layout.trunk:
        for _, number, entry in piece:
            ours, theirs = files[number]
            assert ours[entry.start : entry.stop] == theirs[entry.start : entry.stop]
    for (layer, expert), runs in layout.experts.items():
        for run in runs:
            ours, theirs = (each[run.start : run.stop] for each in files[run.file])
            assert ours == (theirs if expert in held[layer] else bytes(len(theirs)))
    # Opened, it is a part of the same model, with the sizes of the whole.
    there, here = open_model(folder), open_model(mine)
    assert there.experts is not None and here.experts is not None
    assert here.paired_rotary == there.paired_rotary is True
    assert sizes_of(here) == sizes_of(there)
    assert here.experts.nbytes == sum(
        there.experts.place(layer, 0).nbytes * len(numbers) for layer, numbers in held.items()
    )
    assert known_weights(mine) == known_weights(folder) == offered.identity.weights != ""
    # What is given up leaves holes; nothing of it is written to the head's files.
    shares.keep_only(mine, {layer: numbers[:1] for layer, numbers in held.items()})
    assert shares.need(offered, quiet).nbytes == sum(
        there.experts.place(layer, 0).nbytes * (len(numbers) - 1) for layer, numbers in held.items()
    )
    assert content(file) == before


def test_the_same_file_on_another_machine_is_the_same_model(
    file: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = offer_part(folder, half(folder))
    mine = identity_of(folder, quiet)
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "other"))
    there = tmp_path / "there"
    there.mkdir()
    for part in file.parent.iterdir():
        (there / part.name).write_bytes(part.read_bytes())
    other = open_gguf(there / file.name, quiet)
    assert other != folder and identity_of(other, quiet) == mine
    assert mine.quantisation == "Q4_0" and mine.weights
    need = ShardStore(local_models.locate("models"), "head").need(offered, quiet)
    assert need.whole and need.folder == other and need.wanted == ()
    # One bit of an expert makes another model, of which nothing is taken over.
    layout = layout_of(other)
    run = layout.experts[min(layout.experts)][0]
    name = next(part for part in there.iterdir() if part.name.endswith(layout.files[run.file][0][-18:]))
    damaged = bytearray(name.read_bytes())
    damaged[run.start + 3] ^= 1
    name.write_bytes(damaged)
    assert identity_of(other, quiet).weights != mine.weights
    assert not ShardStore(local_models.locate("models"), "head").need(offered, quiet).whole


def test_a_link_in_place_of_a_file_is_not_written_through(file: Path, folder: Path, tmp_path: Path) -> None:
    before = content(file)
    offered = offer_part(folder, half(folder))
    shares = ShardStore(tmp_path / "node", "head")
    need = shares.need(offered, quiet)
    need.folder.mkdir(parents=True)
    for name, _ in offered.files:
        (need.folder / name).symlink_to((folder / name).readlink())
    with pytest.raises(ModelError, match="could not be written"):
        shares.receive(offered, need.wanted, stream(folder, offered, need.wanted), quiet)
    assert content(file) == before


def test_a_copy_of_the_model_has_real_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Having(folder)
    mine = identity_of(folder, quiet)
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "other"))
    got = copied(source, model="owner/name:Q4_0")
    assert got == local_models.locate("models") / "owner--name--Q4_0"
    assert local_models.resolve("owner/name:Q4_0").folder == got
    files = sorted(got.glob("*.gguf"))
    assert len(files) == 3 and not any(path.is_symlink() for path in files)
    assert all(path.read_bytes() == (folder / path.name).read_bytes() for path in files)
    assert identity_of(got, quiet).weights == mine.weights
    with GgufFile(files[1]) as gguf:
        assert gguf.paths == tuple(files)


def test_a_copy_has_what_only_the_configuration_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_model(tmp_path / "llama", "llama", rope_theta=500000.0)
    parameters = {"rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters["original_max_position_embeddings"] = 8192
    divisors = llama3_divisors(parameters, 8).astype(np.float32)
    path = write_tiny_gguf(tmp_path / "l3.gguf", source, "llama", extra_tensors={"rope_freqs.weight": divisors})
    having = Having(open_gguf(path, quiet))
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "other"))
    got = copied(having, model="owner/name:F32")
    assert (got / "l3.gguf").read_bytes() == path.read_bytes()


def test_a_head_keeps_only_its_share(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Having(folder)
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "other"))
    shard = own_shard(source)
    part = shard.offered.part(half(folder), trunk=True)
    wanted = shard.missing(part)
    shard.receive(part, wanted, stream(folder, part, wanted), quiet)
    experts = experts_of(shard.folder)
    assert {layer: list(experts.held(layer)) for layer in experts.layers} == half(folder)
    assert OwnShard.find(shard.offered.identity.name, "me") is not None


def test_a_persons_own_file_is_not_given(folder: Path) -> None:
    """Its folder lies in the models folder; the file does not."""
    assert folder.parent == local_models.locate("models") and model_folder.is_complete(folder)
    assert find_provided(folder.name, "tiny", "anybody") is None


def test_a_gguf_file_is_no_copy_of_prepared_weights(folder: Path, tmp_path: Path) -> None:
    """Its weights are packed, or in another order: what is offered with the same configuration is not taken from it."""
    source = write_tiny_model(tmp_path / "plain", "mixtral", num_local_experts=4)
    prepare(source, tmp_path / "prepared", quiet)
    offered = offer_part(tmp_path / "prepared", half(tmp_path / "prepared"))
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    need = ShardStore(folder.parent, "head").need(offered, quiet)
    (folder / "config.json").write_bytes(config)
    assert not need.whole and len(need.wanted) == len(offered.items)
    with pytest.raises(ModelError, match="holds the weights of a GGUF file"):
        prepare(folder, tmp_path / "made", quiet)
