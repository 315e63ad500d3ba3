"""The bank's format: slabs as promised, and damage that is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.models.architectures.families import ExpertLayers
from engine.models.folders.bank import BankExperts, layer_path, slab_layout, verify
from engine.models.folders.opening import open_model
from engine.models.folders.prepare import prepare
from engine.models.formats.model_files import ExpertWeights
from tests.support.progress import quiet
from tests.support.random_examples import examples
from tests.support.tiny_models import TINY_MOE_FAMILIES

TinyModel = Callable[..., Path]
PARTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


@pytest.fixture(scope="module")
def banks(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """``banks(family, dtype)``: the bank of that tiny model, not to be changed."""
    root = tmp_path_factory.mktemp("banks")

    def bank_of(family: str, dtype: str = "bfloat16") -> Path:
        folder = root / f"{family}-{dtype}"
        if not folder.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PRIVATELLM_HOME", str(root / "home"))
                prepare(tiny_model(family, dtype=dtype), folder, quiet)
        return folder

    return bank_of


@pytest.fixture
def bank(banks: Callable[..., Path], tmp_path: Path) -> Path:
    """A bank that may be damaged."""
    return Path(shutil.copytree(banks("mixtral"), tmp_path / "bank"))


def present(weights: ExpertWeights) -> dict[str, Any]:
    return {name: getattr(weights, name) for name in PARTS if getattr(weights, name) is not None}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", TINY_MOE_FAMILIES)
def test_a_bank_holds_what_the_plain_folder_holds(
    tiny_model: TinyModel, banks: Callable[..., Path], family: str, dtype: str
):
    plain, prepared = open_model(tiny_model(family, dtype=dtype)), open_model(banks(family, dtype))
    assert prepared.prepared
    assert prepared.config == plain.config
    assert prepared.trunk_bytes == plain.trunk_bytes
    trunk = dict(plain.trunk())
    assert {name: t.words.tobytes() for name, t in prepared.trunk()} == {n: t.words.tobytes() for n, t in trunk.items()}
    assert all(tensor.dtype == trunk[name].dtype for name, tensor in prepared.trunk())
    mine, theirs = prepared.experts, plain.experts
    assert mine is not None and theirs is not None
    assert (mine.layers, mine.count, mine.dtype, mine.nbytes) == (
        theirs.layers,
        theirs.count,
        theirs.dtype,
        theirs.nbytes,
    )
    for layer in mine.layers:
        for expert in range(mine.count):
            ours, source = present(mine.expert(layer, expert)), present(theirs.expert(layer, expert))
            assert ours.keys() == source.keys()
            for name, tensor in ours.items():
                assert tensor.dtype == source[name].dtype
                assert np.array_equal(tensor.words, source[name].words), (layer, expert, name)


@pytest.mark.parametrize("family", TINY_MOE_FAMILIES)
def test_one_expert_is_one_contiguous_aligned_slab(banks: Callable[..., Path], family: str):
    experts = open_model(banks(family)).experts
    assert isinstance(experts, BankExperts)
    for layer in experts.layers:
        for expert in range(experts.count):
            (slab,) = experts.place(layer, expert).spans
            start, stop = slab.address, slab.address + slab.nbytes
            assert start % 64 == 0
            weights = experts.expert(layer, expert)
            for tensor in present(weights).values():
                assert tensor.words.flags.c_contiguous
                assert start <= tensor.words.ctypes.data
                assert tensor.words.ctypes.data + tensor.nbytes <= stop
            assert weights.gate_up is not None
            both = np.concatenate([weights.gate.words, weights.up.words])
            assert np.array_equal(weights.gate_up.words, both)
            assert weights.gate_up.words.flags.c_contiguous


@given(st.sampled_from(["BF16", "F32"]), st.integers(1, 300), st.integers(1, 300), st.booleans())
def test_parts_of_a_slab_do_not_overlap(dtype: str, hidden: int, ffn: int, has_bias: bool):
    layout = slab_layout(dtype, ExpertLayers(hidden, ffn, 4, (0,)), has_bias)
    width = {"BF16": 2, "F32": 4}[dtype]
    position = 0
    for place in layout.parts:
        assert place.offset >= position
        assert place.offset - position < 64
        assert place.offset % 64 == 0 or place.name == "up"
        position = place.offset + width * int(np.prod(place.shape))
    up = next(place for place in layout.parts if place.name == "up")
    assert up.offset == ffn * hidden * width
    assert position <= layout.size < position + 64
    assert layout.size % 64 == 0
    assert len(layout.parts) == (6 if has_bias else 3)


def test_the_trunk_is_a_safetensors_file_as_others_read_it(banks: Callable[..., Path]):
    from safetensors import safe_open

    folder = banks("mixtral")
    with safe_open(folder / "trunk.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(name for name, _ in open_model(folder).trunk())
        assert file.metadata() == {"format": "pt"}


def test_an_expert_that_is_not_there_is_a_mistake_of_the_caller(banks: Callable[..., Path]):
    experts = open_model(banks("qwen2_moe")).experts
    assert experts is not None
    for layer, expert in ((1, 0), (0, 6), (0, -1)):
        with pytest.raises(IndexError):
            experts.expert(layer, expert)


# --- damage -------------------------------------------------------------------------------------------------------


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 1]))


def test_a_sound_bank_verifies_and_counts_every_byte(bank: Path):
    counts: list[int] = []
    verify(bank, counts.append)
    size = (bank / "trunk.safetensors").stat().st_size + sum(p.stat().st_size for p in (bank / "experts").iterdir())
    assert sum(counts) == size


def test_one_wrong_bit_in_an_expert_is_found_and_named(bank: Path):
    experts = open_model(bank).experts
    assert isinstance(experts, BankExperts)
    flip_byte(layer_path(bank, 2), 5 * experts.layout.size + 17)
    with pytest.raises(ModelError, match=r"layer-00002\.slabs is damaged: the checksum of expert 5 of layer 2"):
        verify(bank)


def test_one_wrong_bit_in_the_trunk_is_found_and_named(bank: Path):
    flip_byte(bank / "trunk.safetensors", (bank / "trunk.safetensors").stat().st_size - 1)
    with pytest.raises(ModelError, match=r"trunk\.safetensors is damaged: its checksum is wrong"):
        verify(bank)


def test_a_short_layer_is_refused_at_opening(bank: Path):
    path = layer_path(bank, 1)
    os.truncate(path, path.stat().st_size - 64)
    for check in (open_model, verify):
        with pytest.raises(ModelError, match=r"layer-00001\.slabs is damaged: it has"):
            check(bank)


def test_a_missing_layer_or_trunk_is_refused_at_opening(bank: Path):
    layer_path(bank, 1).unlink()
    with pytest.raises(ModelError, match=r"layer-00001\.slabs is missing"):
        open_model(bank)
    (bank / "trunk.safetensors").unlink()
    with pytest.raises(ModelError, match=r"trunk\.safetensors cannot be read"):
        open_model(bank)


def test_a_file_changed_while_open_is_noticed(bank: Path):
    experts = open_model(bank).experts
    assert experts is not None
    experts.check_unchanged()
    os.truncate(layer_path(bank, 1), 64)
    with pytest.raises(ModelError, match="was changed while the model was open"):
        experts.check_unchanged()


def edit_manifest(bank: Path, **changes: Any) -> None:
    path = bank / "bank.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": null}', "\x00"])
def test_a_manifest_that_is_none(bank: Path, text: str):
    (bank / "bank.json").write_text(text)
    with pytest.raises(ModelError, match=r"bank\.json is (damaged|of format None).*prepare the model again"):
        open_model(bank)


def test_a_manifest_of_another_version(bank: Path):
    edit_manifest(bank, format=2)
    with pytest.raises(ModelError, match="of format 2, not 1"):
        open_model(bank)


@pytest.mark.parametrize(
    "changes",
    [{"experts": 4}, {"layers": []}, {"slab": None}, {"slab": {"dtype": "BF16", "size": 64, "parts": []}}],
)
def test_a_manifest_that_does_not_fit(bank: Path, changes: dict[str, Any]):
    edit_manifest(bank, **changes)
    with pytest.raises(ModelError, match=r"does not fit the model's config\.json"):
        open_model(bank)


def test_a_manifest_of_another_family_or_type(bank: Path):
    edit_manifest(bank, family="olmoe")
    with pytest.raises(ModelError, match=r"of a olmoe model and config\.json of a mixtral model"):
        open_model(bank)
    slab = json.loads((bank / "bank.json").read_text())["slab"]
    edit_manifest(bank, slab=slab | {"dtype": "F7"})
    with pytest.raises(ModelError, match="knows no type F7"):
        open_model(bank)


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(["format", "family", "activation", "source", "trunk", "experts", "slab", "layers", "other"])


@settings(max_examples=examples(40))
@given(st.dictionaries(FIELDS, JSON, min_size=1))
def test_any_manifest_ends_in_a_bank_or_one_sentence(changes: dict[str, Any]):
    with pytest.MonkeyPatch.context() as patch:
        original = json.loads((_shared_bank / "bank.json").read_text())
        patch.setattr(Path, "read_bytes", _reading_manifest(json.dumps(original | changes).encode()))
        try:
            open_model(_shared_bank)
        except ModelError as error:
            assert "bank.json" in str(error)


_shared_bank = Path()
_read_bytes = Path.read_bytes


def _reading_manifest(data: bytes) -> Callable[[Path], bytes]:
    return lambda path: data if path.name == "bank.json" else _read_bytes(path)


@pytest.fixture(autouse=True, scope="module")
def shared_bank(banks: Callable[..., Path]) -> None:
    global _shared_bank  # noqa: PLW0603 (hypothesis does not mix with fixtures of a test)
    _shared_bank = banks("mixtral")
