"""Folders that earlier versions prepared: they hold what they held, damage is named, and they can be rewritten."""

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
from engine.models.folders.opening import open_model
from engine.models.folders.prepare import needs_preparing, prepare, read_prepared, verify
from engine.models.folders.weight_layout import layout_of
from engine.models.formats.model_files import ExpertWeights
from tests.support.old_bank import write_old_bank
from tests.support.opened_experts import experts_of
from tests.support.progress import quiet
from tests.support.random_examples import examples
from tests.support.tiny_families import TINY_MOE_FAMILIES

FAMILIES = tuple(family for family in TINY_MOE_FAMILIES if not family.startswith("nemotron_h"))
"""Those whose experts have gates: others are newer."""

TinyModel = Callable[..., Path]
PARTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


@pytest.fixture(scope="module")
def banks(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """``banks(family, dtype)``: the bank of that tiny model, not to be changed."""
    root = tmp_path_factory.mktemp("banks")

    def bank_of(family: str, dtype: str = "bfloat16") -> Path:
        folder = root / f"{family}-{dtype}"
        if not folder.exists():
            write_old_bank(tiny_model(family, dtype=dtype), folder)
        return folder

    return bank_of


@pytest.fixture
def bank(banks: Callable[..., Path], tmp_path: Path) -> Path:
    """A bank that may be damaged."""
    return Path(shutil.copytree(banks("mixtral"), tmp_path / "bank"))


def layer_path(bank: Path, layer: int) -> Path:
    return bank / "experts" / f"layer-{layer:05}.slabs"


def present(weights: ExpertWeights) -> dict[str, Any]:
    return {name: getattr(weights, name) for name in PARTS if getattr(weights, name) is not None}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_bank_holds_what_the_plain_folder_holds(
    tiny_model: TinyModel, banks: Callable[..., Path], family: str, dtype: str
):
    plain, prepared = open_model(tiny_model(family, dtype=dtype)), open_model(banks(family, dtype))
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


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_are_views_of_the_slabs(banks: Callable[..., Path], family: str):
    folder = banks(family)
    experts = experts_of(folder)
    names = [name for name, _ in layout_of(folder).files]
    for layer in experts.layers:
        for expert in range(experts.count):
            weights, place = experts.expert(layer, expert), experts.place(layer, expert)
            assert {span.file.path.name for span in place.spans} == {layer_path(folder, layer).name}
            first, stop = place.spans[0].address, max(span.address + span.nbytes for span in place.spans)
            assert first % 64 == 0
            for tensor in present(weights).values():
                assert tensor.words.flags.c_contiguous
                assert first <= tensor.words.ctypes.data <= stop - tensor.nbytes
            assert weights.gate_up is not None
            assert np.array_equal(weights.gate_up.words, np.concatenate([weights.gate.words, weights.up.words]))
            runs = layout_of(folder).experts[layer, expert]
            assert {names[run.file] for run in runs} == {f"experts/layer-{layer:05}.slabs"}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_it_is_rewritten_in_its_place(tiny_model: TinyModel, banks: Callable[..., Path], tmp_path: Path, family: str):
    folder = Path(shutil.copytree(banks(family), tmp_path / "model.prepared"))
    assert needs_preparing(folder) == (
        True, "It was prepared by an earlier version, whose files only this program reads."
    )  # fmt: skip
    prepare(folder, folder, quiet)
    assert needs_preparing(folder) == (False, "It is prepared already.")
    assert not (folder / "bank.json").exists() and not (folder / "experts").exists()
    assert read_prepared(folder) is not None
    verify(folder)
    mine, theirs = open_model(folder), open_model(tiny_model(family, dtype="bfloat16"))
    assert {name: t.words.tobytes() for name, t in mine.trunk()} == {n: t.words.tobytes() for n, t in theirs.trunk()}
    assert mine.experts is not None and theirs.experts is not None
    for layer in theirs.experts.layers:
        for expert in range(theirs.experts.count):
            ours, source = present(mine.experts.expert(layer, expert)), present(theirs.experts.expert(layer, expert))
            assert ours.keys() == source.keys()
            assert all(np.array_equal(ours[name].words, source[name].words) for name in ours)


def test_the_trunk_is_a_safetensors_file_as_others_read_it(banks: Callable[..., Path]):
    from safetensors import safe_open

    folder = banks("mixtral")
    with safe_open(folder / "trunk.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(name for name, _ in open_model(folder).trunk())
        assert file.metadata() == {"format": "pt"}


def test_an_expert_that_is_not_there_is_a_mistake_of_the_caller(banks: Callable[..., Path]):
    experts = experts_of(banks("qwen2_moe"))
    for layer, expert in ((1, 0), (0, 6), (0, -1)):
        with pytest.raises(IndexError):
            experts.expert(layer, expert)


# --- damage -------------------------------------------------------------------------------------------------------


def test_a_short_layer_is_refused_at_opening(bank: Path):
    path = layer_path(bank, 1)
    os.truncate(path, path.stat().st_size - 64)
    with pytest.raises(ModelError, match=r"layer-00001\.slabs is damaged: it has"):
        open_model(bank)


def test_a_missing_layer_or_trunk_is_refused_at_opening(bank: Path):
    layer_path(bank, 1).unlink()
    with pytest.raises(ModelError, match=r"layer-00001\.slabs is missing"):
        open_model(bank)
    (bank / "trunk.safetensors").unlink()
    with pytest.raises(ModelError, match=r"trunk\.safetensors cannot be read"):
        open_model(bank)


def test_a_file_changed_while_open_is_noticed(bank: Path):
    experts = experts_of(bank)
    experts.check_unchanged()
    os.truncate(layer_path(bank, 1), 64)
    experts.check_unchanged(0)
    with pytest.raises(ModelError, match="was changed while the model was open"):
        experts.check_unchanged(1)
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
    [
        {"slab": None},
        {"slab": {"dtype": "BF16", "size": 64, "parts": []}},
        {"slab": {"dtype": "BF16", "size": 64, "parts": [{"name": "gate", "shape": [1, 1], "offset": -64}]}},
    ],
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
