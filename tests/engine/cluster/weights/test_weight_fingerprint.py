"""Two machines have the same model if and only if its weights, configuration and tokenizer are the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from engine.cluster.weights.weight_fingerprint import differences, identity_of
from engine.models.folders.prepare import prepare
from engine.models.folders.shard_files import ModelIdentity
from engine.models.folders.weight_layout import layout_of
from tests.support.old_bank import write_old_bank
from tests.support.progress import quiet

pytestmark = pytest.mark.usefixtures("home")


TinyModel = Callable[..., Path]


@pytest.fixture
def model(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A model that may be changed."""
    folder = Path(shutil.copytree(tiny_model("mixtral", dtype="bfloat16"), tmp_path / "model"))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "dbrx", "qwen2_moe"])
def test_prepared_copies_are_the_same_whatever_they_were_made_of(tiny_model: TinyModel, tmp_path: Path, family: str):
    one, other = tmp_path / "one" / "prepared", tmp_path / "other" / "prepared"
    prepare(tiny_model(family, dtype="bfloat16"), one, quiet)
    prepare(tiny_model(family, dtype="bfloat16", shards=True), other, quiet)
    identity = identity_of(one)
    assert identity == identity_of(other)
    assert (identity.quantisation, identity.family) == ("bfloat16", family)
    assert layout_of(one).fingerprint == layout_of(other).fingerprint


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_copies_of_a_folder_are_the_same(tiny_model: TinyModel, tmp_path: Path, family: str):
    whole = tiny_model(family, dtype="bfloat16")
    shutil.copytree(whole, tmp_path / "copy")
    assert differences(identity_of(whole), identity_of(tmp_path / "copy")) is None


def test_an_earlier_versions_prepared_copy_is_the_same_as_todays(model: Path, tmp_path: Path):
    prepare(model, tmp_path / "new" / "prepared", quiet)
    write_old_bank(model, tmp_path / "old" / "prepared")
    new, old = (identity_of(tmp_path / each / "prepared") for each in ("new", "old"))
    assert new == old


def test_weights_that_differ_in_one_bit(model: Path):
    before = identity_of(model)
    layout = layout_of(model)
    for runs in (layout.experts[2, 7], layout.experts[0, 0]):
        file = model / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[runs[0].stop - 1] ^= 1
        file.write_bytes(data)
        after = identity_of(model)
        assert after.weights != before.weights
        assert before.weights[:12] in str(differences(before, after)) and after.weights[:12] in str(
            differences(before, after)
        )
        before = after


def test_a_trunk_that_differs(model: Path):
    before = identity_of(model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert "weights" in str(differences(before, identity_of(model)))


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("tokenizer.json", {"version": "1.1"}, "tokenizer"),
        ("config.json", {"rms_norm_eps": 0.25}, "configuration"),
        ("config.json", {"transformers_version": "9.9"}, None),
        ("generation_config.json", {"temperature": 0.1}, None),
    ],
)
def test_what_lies_beside_the_weights(model: Path, name: str, change: dict[str, object], named: str | None):
    before = identity_of(model)
    settings = json.loads((model / name).read_bytes())
    (model / name).write_text(json.dumps({**settings, **change}))
    said = differences(before, identity_of(model))
    assert (said is None) if named is None else f"differ in the {named}" in str(said)


@pytest.mark.parametrize(
    ("field", "value"), [("version", 2), ("family", "mixtral2"), ("quantisation", "4-bit in groups of 64")]
)
def test_both_values_are_named(model: Path, field: str, value: object):
    mine = identity_of(model)
    theirs = msgspec.structs.replace(mine, name="the other's", **{field: value})
    said = str(differences(mine, theirs))
    assert str(getattr(mine, field)) in said and str(value) in said and "the other's" in said
    assert differences(mine, msgspec.structs.replace(mine, name="another name")) is None


def test_weights_are_read_once(model: Path, home: Path):
    seen: list[int] = []

    def count(stage: str, done: int, total: int, unit: str) -> None:
        seen.append(done)

    first = identity_of(model, count)
    layout = layout_of(model)
    assert seen[-1] == layout.trunk_bytes + layout.expert_bytes * len(layout.experts)
    seen.clear()
    assert identity_of(model, count) == first
    assert seen == []
    (model / "model.safetensors").touch()
    assert identity_of(model, count) == first
    assert seen
    for kept in (home / "data" / "checksums").iterdir():
        kept.write_text("{")
    assert isinstance(identity_of(model), ModelIdentity)
