"""A GGUF file is the model it was made from, where it lies; anything else is refused by name; damage is said, never a
crash."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.packed_blocks import WRITTEN, unpacked
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Load, Plan
from engine.models.architectures import gguf_tensors
from engine.models.architectures.families import renamed
from engine.models.architectures.gguf_architectures import architecture_of, config_of
from engine.models.architectures.gguf_tensors import entries_of
from engine.models.folders import model_folder
from engine.models.folders.opening import open_model
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.model_files import Change, ModelFiles, Order, StoredTensor, whole_bytes
from engine.models.formats.number_formats import is_packed
from engine.models.store import local_models
from engine.models.store.fetching import pull
from engine.models.store.gguf_folder import open_gguf
from engine.models.store.starter import to_bfloat16
from engine.models.text.tokenizer import load_tokenizer
from engine.session.loading import load_session
from engine.session.plan_model import plan_model
from tests.support.pairwise import pairwise
from tests.support.progress import quiet
from tests.support.random_examples import examples
from tests.support.tiny_families import family_of
from tests.support.tiny_gguf import ARCHITECTURES, READ_AS, Floats, whole_blocks, write_tiny_gguf
from tests.support.tiny_gguf_metadata import Layout
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_model(tmp_path / "source", "llama"), "llama")


def plain_values(tensor: StoredTensor) -> Floats:
    if is_packed(tensor.dtype):
        return unpacked(tensor.dtype, np.ascontiguousarray(tensor.words))
    words = np.array(tensor.words, order="C")
    if tensor.dtype == "BF16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    numbers = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "I64": np.int64}[tensor.dtype]
    return words.view(numbers).astype(np.float32)


def changed(tensor: StoredTensor, change: Change | None) -> Floats:
    if change is None:
        return plain_values(tensor)
    values = plain_values(change.in_rows(tensor))
    values = values if change.columns is None else values[:, change.columns]
    values = values - np.float32(change.subtracted)
    return np.log(change.log_of * values) if change.log_of else values


def by_key_head(config: dict[str, Any]) -> Order:
    """The places of Qwen3-Next's queries, keys, values and gates of the first key head, then of the second, ..."""
    groups, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
    each = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    starts = groups * np.cumsum([0, keys, keys, each])
    parts = zip(starts, (keys, keys, each, each), strict=True)
    places = [(start + np.arange(groups * size)).reshape(groups, size) for start, size in parts]
    return np.concatenate(places, axis=1).reshape(-1)


def values_of_trunk(found: ModelFiles) -> dict[str, Floats]:
    """What the tensors of the trunk stand for; two tensors of a projection are one, as in checkpoints."""
    values = {name: changed(tensor, found.changes.get(name)) for name, tensor in found.trunk()}
    for name in [name for name in values if name.endswith(".k_b_proj.weight")]:
        keys, others = values.pop(name), values.pop(name.replace("k_b", "v_b"))
        joined = np.concatenate([keys.swapaxes(1, 2), others], axis=1)
        values[name.replace("k_b", "kv_b")] = joined.reshape(-1, joined.shape[-1])
    for name in [name for name in values if name.endswith(".qkv.weight")]:
        joined = np.concatenate([values.pop(name), values.pop(name.replace(".qkv.", ".z."))])
        values[name.replace(".qkv.", ".")] = joined[by_key_head(found.config)]
    for name in [name for name in values if name.endswith(".input_linear.gate.weight")]:
        values[name.replace(".gate.", ".")] = np.concatenate([values.pop(name), values.pop(name.replace("gate", "up"))])
    for name in [name for name in values if name.endswith(".index_qk_proj.q.weight")]:
        values[name.replace(".q.", ".")] = np.concatenate([values.pop(name), values.pop(name.replace(".q.", ".k."))])
    return values


def values_of_tables(found: ModelFiles) -> Floats:
    """The rows of a table of n-grams, whatever parts it is in; none without one."""
    parts = [plain_values(tensor) for _, tensor in found.tables()]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def assert_the_same_model(found: ModelFiles, wanted: ModelFiles) -> None:
    """Every tensor stands for the same values, queries and keys in transformers' order of rows."""
    there = values_of_trunk(found)
    # Most whole numbers follow from the settings.
    expected = {name: tensor for name, tensor in wanted.trunk() if tensor.dtype != "I64" or name in there}
    assert np.array_equal(values_of_tables(found), values_of_tables(wanted))
    assert there.keys() == expected.keys()
    for name, tensor in expected.items():
        values = there[name]
        assert values.shape == tensor.shape
        # What is made of other numbers is rounded on the way.
        close = ("norm" in name or name.endswith("A_log")) and name in found.changes
        assert np.allclose(values, plain_values(tensor), rtol=0, atol=1e-6 if close else 0), name
    assert (found.experts is None) == (wanted.experts is None)
    if found.experts is None or wanted.experts is None:
        return
    assert (found.experts.layers, found.experts.count) == (wanted.experts.layers, wanted.experts.count)
    for layer in found.experts.layers:
        for expert in range(found.experts.count):
            one, other = found.experts.expert(layer, expert), wanted.experts.expert(layer, expert)
            for part in ("gate", "up", "down"):
                assert np.array_equal(plain_values(getattr(one, part)), plain_values(getattr(other, part)))


FORMATS = ("F32", "F16", "BF16", *WRITTEN)
USUAL = ("F32", "Q8_0", "Q4_K", "MXFP4")
"""Formats that every architecture is opened in; the others are opened in one."""
LAYOUTS: tuple[Layout, ...] = ("stacked", "fused", "separate")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "kind", "layout", "merged", "parts"),
    [
        *(
            pytest.param(*row, marks=pytest.mark.soak if number % 2 else ())
            for number, row in enumerate(pairwise(tuple(ARCHITECTURES), USUAL, LAYOUTS, (False, True), (1, 3)))
        ),
        *pairwise(("qwen3_moe",), tuple(kind for kind in FORMATS if kind not in USUAL), LAYOUTS[:2], (False,), (1,)),
    ],
)
def test_the_opened_file_is_the_model_it_was_made_from(
    tmp_path: Path, sources: Callable[[str], Path], family: str, kind: str, layout: Layout, merged: bool, parts: int
) -> None:
    source = sources(family)
    extra = {"attention.sliding_window": 16} if family == "mistral" else {}
    path = write_tiny_gguf(
        tmp_path / f"{family}.gguf",
        source,
        ARCHITECTURES[family],
        quantised=GGMLQuantizationType[kind],
        extra=extra,
        layout=layout,
        merged=merged,
        parts=parts,
        truth=tmp_path / "truth",
    )
    opened = open_model(open_gguf(path, quiet))
    assert_the_same_model(opened, open_model(tmp_path / "truth"))
    theirs = renamed(json.loads((source / "config.json").read_text()))
    same = set(opened.config) & set(theirs) - {
        "dtype",
        "architectures",
        "rope_parameters",
        "pad_token_id",
        "model_type",
        "block_auto_adjust_ff_dim",  # a file has the width after the adjustment
        "ngram_vocab_size_base",  # and the prime that follows
        "make_ngram_vocab_size_divisible_by",
        "split_ngram_parts",
    }
    assert {key: opened.config[key] for key in same} == {key: theirs[key] for key in same}
    assert opened.config["model_type"] == family_of(READ_AS.get(family, family))
    if opened.experts is not None:
        assert opened.experts.dtype == kind
        assert opened.experts.nbytes == whole_bytes(opened.experts)


def test_every_tensor_may_have_a_format_of_its_own(tmp_path: Path) -> None:
    kinds = {"token_embd": "Q6_K", "attn_v": "Q6_K", "attn_k": "Q8_0", "ffn_down": "Q5_0", "ffn_up": "IQ4_XS"}

    def kind_of(name: str) -> GGMLQuantizationType:
        found = next((kind for part, kind in kinds.items() if part in name), "Q4_K")
        return GGMLQuantizationType["Q5_K" if "blk.1." in name else found]

    source = write_tiny_model(tmp_path / "source", "qwen3_moe", **whole_blocks("qwen3_moe"))
    path = write_tiny_gguf(tmp_path / "m.gguf", source, "qwen3moe", quantised=kind_of, truth=tmp_path / "truth")
    opened = open_model(open_gguf(path, quiet))
    assert_the_same_model(opened, open_model(tmp_path / "truth"))
    assert opened.experts is not None
    formats = {name: matrix.format for name, matrix in opened.experts.place(0, 3).matrices.items()}
    assert formats == {"gate": "Q4_K", "up": "IQ4_XS", "down": "Q5_0"}
    assert {matrix.format for matrix in opened.experts.place(1, 3).matrices.values()} == {"Q5_K"}


@pytest.mark.sampled
@pytest.mark.parametrize(("family", "dimensions"), pairwise(tuple(ARCHITECTURES), (0, 4)))
def test_dimensions_of_one_may_be_there_or_not(
    tmp_path: Path, sources: Callable[[str], Path], family: str, dimensions: int
) -> None:
    """ggml's tensors all have four, and writers differ in how many of them they name."""
    source = sources(family)
    extra = {"attention.sliding_window": 16} if family == "mistral" else {}
    written = {"extra": extra, "dimensions": dimensions}
    path = write_tiny_gguf(tmp_path / "m.gguf", source, ARCHITECTURES[family], **written)
    if dimensions:
        with GgufFile(path) as gguf:
            assert {len(tensor.shape) for tensor in gguf.tensors.values()} == {dimensions}
    assert_the_same_model(open_model(open_gguf(path, quiet)), open_model(source))


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_5_moe_text", "qwen3_next"])
def test_the_gate_of_a_shared_expert_is_a_row_or_a_vector(
    tmp_path: Path, sources: Callable[[str], Path], family: str
) -> None:
    """A row as llama.cpp's converter writes it, a vector as its quantiser does."""
    for dimensions, shape in ((None, (1, 256)), (0, (256,))):
        name = f"{family}-{dimensions}.gguf"
        path = write_tiny_gguf(tmp_path / name, sources(family), ARCHITECTURES[family], dimensions=dimensions)
        with GgufFile(path) as gguf:
            assert gguf.tensors["blk.0.ffn_gate_inp_shexp.weight"].shape == shape
        assert_the_same_model(open_model(open_gguf(path, quiet)), open_model(sources(family)))


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite", "hy_v3"])
def test_blocks_that_predict_ahead_are_left_out(tmp_path: Path, sources: Callable[[str], Path], family: str) -> None:
    source = sources(family)
    path = write_tiny_gguf(
        tmp_path / "m.gguf",
        source,
        ARCHITECTURES[family],
        extra={"nextn_predict_layers": 1, "block_count": 3},
        extra_tensors={
            "blk.2.nextn.eh_proj.weight": np.zeros((256, 512), np.float32),
            "blk.2.attn_norm.weight": np.zeros(256, np.float32),
        },
    )
    opened = open_model(open_gguf(path, quiet))
    assert opened.config["num_hidden_layers"] == 2
    assert_the_same_model(opened, open_model(source))


def test_nothing_of_the_weights_is_copied(tiny_llama: Path) -> None:
    folder = open_gguf(tiny_llama, quiet)
    assert (folder / tiny_llama.name).readlink() == tiny_llama
    assert sum(path.lstat().st_size for path in folder.iterdir()) < 60_000
    for _, tensor in open_model(folder).trunk():
        assert not tensor.words.flags.owndata


def test_a_file_that_was_moved_is_found_at_its_new_place(tiny_llama: Path) -> None:
    folder = open_gguf(tiny_llama, quiet)
    moved = tiny_llama.parent / "elsewhere" / tiny_llama.name
    moved.parent.mkdir()
    tiny_llama.rename(moved)
    with pytest.raises(ModelError, match=r"cannot be read: .*No such file"):
        open_model(folder)
    assert open_gguf(moved, quiet) == folder
    assert (folder / moved.name).readlink() == moved
    assert open_model(folder).trunk_bytes > 0


def test_a_part_that_is_missing_or_of_another_model_is_named(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "qwen3")
    first = write_tiny_gguf(tmp_path / "m.gguf", source, "qwen3", parts=3)
    second = first.with_name("m-00002-of-00003.gguf")
    assert local_models.resolve(str(second)).plain_folder == local_models.resolve(str(first)).plain_folder
    assert open_model(open_gguf(second, quiet)).trunk_bytes > 0
    kept = second.read_bytes()
    second.write_bytes(first.with_name("m-00003-of-00003.gguf").read_bytes())
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf is part 2 of its model, not 1"):
        open_gguf(first, quiet)
    second.unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf"):
        open_gguf(first, quiet)
    second.write_bytes(kept)
    alone = tmp_path / "alone.gguf"
    first.rename(alone)
    with pytest.raises(ModelError, match="one of 3 parts of a split model"):
        open_gguf(alone, quiet)


def test_a_link_to_any_part_opens_the_whole(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "qwen3")
    (parts := tmp_path / "parts").mkdir()
    first = write_tiny_gguf(parts / "m.gguf", source, "qwen3", parts=3)
    whole = local_models.resolve(str(first))
    (links := tmp_path / "links").mkdir()
    for name in ("mine.gguf", "m-00002-of-00003.gguf"):
        link = links / name
        link.symlink_to(parts / "m-00002-of-00003.gguf")
        assert local_models.resolve(str(link)) == whole
        assert_the_same_model(open_model(open_gguf(link, quiet)), open_model(source))
    # As the Hugging Face cache has them: the parts are links, and what they lead to has other names.
    (cache := tmp_path / "cache").mkdir()
    (blobs := tmp_path / "blobs").mkdir()
    for number, part in enumerate(sorted(parts.iterdir())):
        (blobs / str(number)).write_bytes(part.read_bytes())
        (cache / part.name).symlink_to(blobs / str(number))
    found = local_models.resolve(str(cache / "m-00003-of-00003.gguf"))
    assert found.source == cache / first.name
    assert found.plain_folder == whole.plain_folder


def test_a_folder_of_parts_is_the_model(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "qwen3")
    (folder := tmp_path / "folder").mkdir()
    first = write_tiny_gguf(folder / "m.gguf", source, "qwen3", parts=3)
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    (folder / "README.md").touch()
    session = load_session(Load(id=1, model=str(folder), runtime="torch"), quiet)
    assert session.facts.name == first.name
    plan_model(Plan(id=1, load=Load(id=1, model=str(folder), partitioning="cpu")))
    assert pull(str(folder), quiet) == local_models.resolve(str(first)).plain_folder
    write_tiny_gguf(folder / "other model.gguf", source, "qwen3")
    with pytest.raises(
        ModelError, match=r"several models: m-00001-of-00003\.gguf, other model\.gguf; name one"
    ) as error:
        load_session(Load(id=1, model=str(folder)), quiet)
    assert error.value.kind == "bad-input"


@pytest.mark.parametrize("missing", [1, 2, 3])
@pytest.mark.parametrize("named", ["a part", "the folder"])
def test_a_missing_part_is_named_by_whatever_opens_the_model(tmp_path: Path, missing: int, named: str) -> None:
    source = write_tiny_model(tmp_path / "source", "qwen3")
    (folder := tmp_path / "folder").mkdir()
    write_tiny_gguf(folder / "m.gguf", source, "qwen3", parts=3)
    (folder / f"m-{missing:05}-of-00003.gguf").unlink()
    model = folder if named == "the folder" else min(folder.iterdir())
    for opened in (
        lambda: load_session(Load(id=1, model=str(model)), quiet),
        lambda: plan_model(Plan(id=1, load=Load(id=1, model=str(model)))),
        lambda: pull(str(model), quiet),
    ):
        with pytest.raises(ModelError, match=rf"m-{missing:05}-of-00003\.gguf is missing: .* split into 3 files; put"):
            opened()


@pytest.mark.parametrize("where", [b"general.architecture", b"tokenizer.ggml.tokens", b"blk.0.attn_q.weight", b"gpt2"])
def test_text_that_is_no_utf_8_is_shown(tiny_llama: Path, where: bytes) -> None:
    """A key, the name of a tensor, a value."""
    data = tiny_llama.read_bytes()
    tiny_llama.write_bytes(data.replace(where, b"\xff" + where[1:], 1))
    shown = "xff" + where[1:].decode()
    with pytest.raises(ModelError, match=rf"tiny\.gguf is not a usable GGUF file: .*{shown}.* is no UTF-8; download"):
        load_session(Load(id=1, model=str(tiny_llama)), quiet)


def test_tensors_that_overlap_are_refused(tiny_llama: Path) -> None:
    data = bytearray(tiny_llama.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name)
    offset = at + 4 + 8 * 2 + 4
    (before,) = struct.unpack_from("<Q", data, offset)
    struct.pack_into("<Q", data, offset, before - 32)
    tiny_llama.write_bytes(data)
    with pytest.raises(ModelError, match=r"the tensors '.*' and '.*' overlap"):
        GgufFile(tiny_llama)


def test_sampling_that_the_makers_advise_comes_along(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "qwen3")
    extra = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    folder = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", source, "qwen3", extra=extra), quiet)
    found = json.loads((folder / "generation_config.json").read_text())
    assert {key: found[key] for key in ("temperature", "top_k", "top_p", "do_sample")} == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "do_sample": True,
    }


def test_the_tokenizer_comes_along(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(open_gguf(tiny_llama, quiet))
    assert tokenizer is not None
    assert tokenizer.end_of_turn_ids == {0, 2}
    assert tokenizer.decode(tokenizer.encode("bade Hi!\nfine?")) == "bade Hi!\nfine?"
    assert not tokenizer.has_chat_template


def test_the_folder_is_made_once_and_found_by_name(tmp_path: Path, tiny_llama: Path) -> None:
    (tmp_path / "other").mkdir()
    folder = pull(str(tiny_llama), quiet)
    written = (folder / "tokenizer.json").stat().st_mtime_ns
    assert open_gguf(tiny_llama, quiet) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written
    resolved = local_models.resolve(str(tiny_llama))
    assert (resolved.kind, resolved.folder, resolved.name) == ("gguf", folder, "tiny.gguf")
    (model,) = local_models.installed()
    assert model.name == "tiny" and local_models.resolve("tiny").folder == folder
    assert tiny_llama.stat().st_size < model.nbytes < tiny_llama.stat().st_size + 100_000
    assert local_models.resolve(folder.name).folder == folder
    other = write_tiny_gguf(tmp_path / "other" / "tiny.gguf", write_tiny_model(tmp_path / "s", "qwen3"), "qwen3")
    second = open_gguf(other, quiet)
    assert {each.name for each in local_models.installed()} == {folder.name, second.name}
    assert local_models.remove(str(other)) > 0
    assert local_models.remove(str(tiny_llama)) > 0
    assert tiny_llama.exists() and not folder.exists()


def test_a_changed_file_is_another_model(tiny_llama: Path, tmp_path: Path) -> None:
    first = local_models.resolve(str(tiny_llama)).plain_folder
    source = write_tiny_model(tmp_path / "other", "llama", seed=1)
    write_tiny_gguf(tiny_llama, source, "llama")
    assert local_models.resolve(str(tiny_llama)).plain_folder != first


@pytest.mark.parametrize(
    ("architecture", "extra", "message"),
    [
        ("qwen2moe", {}, "architecture qwen2moe without experts, which is not supported"),
        ("qwen2", {"expert_count": 8}, "architecture qwen2 with experts, which is not supported"),
        (
            "gemma",
            {},
            "architecture gemma, which is not supported; supported GGUF architectures are afmoe",
        ),
        ("llama", {"rope.dimension_count": 4}, "rotates 4 of 8"),
        ("llama", {"rope.scaling.type": "longrope"}, "'longrope'"),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": "four"}, "scaling.factor is four"),
        ("evil\x1b[2J\n", {}, r"architecture 'evil.x1b.2J"),
    ],
)
def test_other_models_are_refused_by_name(
    tmp_path: Path, architecture: str, extra: dict[str, Any], message: str
) -> None:
    source = write_tiny_model(tmp_path / "source", "llama")
    path = write_tiny_gguf(tmp_path / "other.gguf", source, architecture, extra=extra)
    with pytest.raises(ModelError, match=message):
        open_gguf(path, quiet)
    assert local_models.installed() == []


def test_a_missing_or_unknown_tensor_is_named(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "llama")
    path = write_tiny_gguf(tmp_path / "less.gguf", source, "llama", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"no tensor blk\.1\.ffn_up\.weight"):
        open_gguf(path, quiet)
    more = {"blk.0.attn_q.bias": np.zeros(48, np.float32)}
    path = write_tiny_gguf(tmp_path / "more.gguf", source, "llama", extra_tensors=more)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias"):
        open_gguf(path, quiet)
    path = write_tiny_gguf(tmp_path / "wide.gguf", source, "llama", extra={"feed_forward_length": 999})
    with pytest.raises(ModelError, match=r"ffn_gate\.weight has the shape"):
        open_gguf(path, quiet)


def test_a_truncated_file_is_refused(tiny_llama: Path) -> None:
    data = tiny_llama.read_bytes()
    for length in (0, 3, 20, 100, 3000, len(data) // 2, len(data) - 100):
        tiny_llama.write_bytes(data[:length])
        with pytest.raises(ModelError):
            open_gguf(tiny_llama, quiet)
    assert local_models.installed() == []


def test_claims_of_enormous_sizes_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "claims.gguf"
    key = struct.pack("<Q", 1) + b"a"
    for kind in (4, 8):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, kind, 1 << 62))
        with pytest.raises(ModelError, match="middle of its header"):
            GgufFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60))
    with pytest.raises(ModelError, match="claims"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"block_count": 2**31 - 1}, r"block_count is 2147483647, not a whole number from 1 to 10000"),
        ({"block_count": 9_999}, r"no tensor blk\.3\.attn_norm\.weight"),
        ({"context_length": 2**31}, r"context_length is 2147483648, not a whole number"),
        ({"attention.head_count": 2**32 - 1}, r"head_count is 4294967295, not a whole number"),
        ({"rope.freq_base": 0.5}, r"gives 0\.5 for rope_theta, which must be a number over 1"),
    ],
)
def test_numbers_beyond_any_model_are_refused_before_anything_is_counted(
    tmp_path: Path, extra: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_model(tmp_path / "source", "llama")
    path = write_tiny_gguf(tmp_path / "claims.gguf", source, "llama", extra=extra)
    looked: list[str] = []
    look = gguf_tensors.tensor_of
    monkeypatch.setattr(gguf_tensors, "tensor_of", lambda gguf, name: looked.append(name) or look(gguf, name))
    with pytest.raises(ModelError, match=message):
        open_gguf(path, quiet)
    assert len(looked) < 100, "it ends at the first tensor that is missing"


def test_a_plan_refuses_a_gguf_that_does_not_run_and_opens_one_that_does(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "llama")
    experts = write_tiny_gguf(tmp_path / "moe.gguf", source, "qwen2", extra={"expert_count": 8})
    future = write_tiny_gguf(tmp_path / "future.gguf", source, "llama", split="from-the-future")
    for path, said in ((experts, "qwen2 with experts"), (future, "splits text by the rule 'from-the-future'")):
        with pytest.raises(ModelError, match=said):
            plan_model(Plan(id=1, load=Load(id=1, model=str(path), partitioning="cpu")))
        with pytest.raises(ModelError, match=said):
            open_gguf(path, quiet)
    sound = write_tiny_gguf(tmp_path / "sound.gguf", source, "llama")
    planned = plan_model(Plan(id=1, load=Load(id=1, model=str(sound), partitioning="cpu")))
    assert planned.fits and planned.family == "llama"


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_never_crashes(tmp_path: Path, tiny_llama: Path, data: st.DataObject) -> None:
    original = tiny_llama.read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 4500))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        with GgufFile(path) as gguf:
            config = config_of(gguf)
            entries_of(gguf, architecture_of(gguf), config)
    except ModelError as error:
        assert "\n" not in str(error)


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_rounding_to_bfloat16_is_torchs(values: list[float]) -> None:
    import torch

    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).to(torch.bfloat16).float().numpy()
    found = (to_bfloat16(array).astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(found, expected, equal_nan=True)


def test_stopping_leaves_nothing(tiny_llama: Path) -> None:
    with pytest.raises(Cancelled):
        open_gguf(tiny_llama, quiet, lambda: True)
    assert local_models.installed() == [] and local_models.partial_downloads() == []


def test_a_folder_that_was_killed_while_it_was_made_is_made_again(tiny_llama: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom engine.models.store.gguf_folder import open_gguf\n"
        "open_gguf(Path(sys.argv[1]), print, lambda: print(flush=True) or sys.stdin.read())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, "-c", program, str(tiny_llama)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert local_models.installed() == []
    assert model_folder.is_complete(open_gguf(tiny_llama, quiet))
    assert local_models.partial_downloads() == []


def test_reading_a_header_does_not_wait_for_the_package(tiny_llama: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom engine.models.formats.gguf_file import GgufFile\n"
        "print(len(GgufFile(Path(sys.argv[1])).tensors) > 5, 'gguf' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, "-c", program, str(tiny_llama)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_the_types_are_the_package_s(tmp_path: Path) -> None:
    columns = 512
    path = tmp_path / "one.gguf"
    known = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    known[42] = ("Q2_0", 64, 18)  # which its release does not have
    for number in range(64):
        header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"a", 1, columns, number, 0)
        path.write_bytes(header.ljust(8192, b"\0"))
        if number not in known:
            with pytest.raises(ModelError, match=f"tensor a is stored as the unknown type {number}"):
                GgufFile(path)
            continue
        name, block, nbytes = known[number]
        with GgufFile(path) as gguf:
            tensor = gguf.tensors["a"]
        assert (tensor.format, tensor.row_bytes) == (name, columns // block * nbytes)


def test_a_file_that_is_not_gguf_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("this is no model at all, only a text of some length")
    with pytest.raises(ModelError, match="does not begin with GGUF"):
        open_gguf(path, quiet)
    with pytest.raises(ModelError, match="no file or folder"):
        open_gguf(tmp_path / "absent.gguf", quiet)


def test_a_file_that_gets_shorter_while_it_is_opened_is_said(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    source = write_tiny_model(tmp_path / "source", "llama", head_dim=8, rope_parameters=rope)
    divisors = {"rope_freqs.weight": np.ones(4, np.float32)}
    path = write_tiny_gguf(tmp_path / "m.gguf", source, "llama", extra_tensors=divisors)
    with GgufFile(path) as gguf:
        os.truncate(path, 100)
        with pytest.raises(ModelError, match=r"m\.gguf was shortened while it was read; download it again"):
            config_of(gguf)


def test_a_header_larger_than_any_is_refused_before_it_is_in_memory(tmp_path: Path) -> None:
    """The file has room for what it claims, as one with holes may have."""
    path = tmp_path / "claims.gguf"
    key = struct.pack("<Q", 1) + b"a"
    for value, said in (
        (struct.pack("<IQ", 8, 1 << 33), "claims over 268435456 bytes"),
        (struct.pack("<IIQ", 9, 0, 1 << 33), "lists of 8589934592 items"),
        (struct.pack("<IIQ", 9, 8, 1 << 24), "lists of 16777216 items"),
    ):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + value)
        os.truncate(path, 1 << 34)
        with pytest.raises(ModelError, match=said):
            GgufFile(path)
