"""Packed GGUF files in the torch and the native runtime: transformers' logits on what the weights stand for.

Each file is written, and run by transformers, once for all of these tests.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType

from benchmarks.packed_blocks import WRITTEN, random_blocks
from engine.errors import ModelError
from engine.ipc.messages import ExpertPolicy
from engine.models.architectures.families import FAMILIES as FAMILIES_BY_NAME
from engine.models.architectures.record import renamed
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of
from engine.models.formats.model_files import ModelFiles, StoredTensor
from engine.models.formats.number_formats import is_packed
from engine.models.store.gguf_folder import open_gguf
from engine.moe.kernels.bindings import choose
from engine.runtimes.torch.packed_modules import PackedLinear
from tests.engine.runtimes.native_oracle import GGUF_FAMILIES, load_native, needs_kernels
from tests.engine.runtimes.subjects import prompt_of
from tests.engine.runtimes.torch_oracle import (
    EXACT,
    assert_shared_on_a_device,
    library_model,
    library_run,
    load,
    other_choices,
    our_run,
    typical,
    worst,
)
from tests.support.pairwise import in_turn, pairwise
from tests.support.progress import quiet
from tests.support.tiny_gguf import ARCHITECTURES, whole_blocks, write_tiny_gguf
from tests.support.tiny_gguf_metadata import Layout

pytestmark = pytest.mark.usefixtures("home")


ROUNDED = 0.12
"""Largest usual error where the native kernels round the experts' inputs to eight bits, as a share of the logits'
spread: these models, of random weights, make small errors larger than real ones do."""
MARGIN = 0.32
"""Share of the logits' spread that the library's choice must be ahead by for ours to be the same."""
KINDS = dict(in_turn(tuple(ARCHITECTURES), WRITTEN))
"""The format of each family, in which most of the tests have it: all families and all formats."""
ON_A_DEVICE = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss"),
    *("glm4_moe_lite", "gemma4_text", "deepseek_v2", "deepseek_v3", "qwen3_5_moe_text"),
    *("glm5_next_text", "deepseek_v4"),
)
"""Families of which a device holds some experts: with Mixtral in another format, in all formats."""


OWN_LAYERS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm4_moe", "qwen3_next", "lfm2_moe", "gemma4_text")
"""Families for whose layers torch has code of its own."""


Packed = Callable[[str, str], tuple[Path, Path]]


def mostly(files: ModelFiles) -> str:
    """The format of most of the experts, or of the embedding."""
    if files.experts is not None:
        return files.experts.dtype
    names = FAMILIES_BY_NAME[files.config["model_type"]].decoder.names
    return dict(files.trunk())[renamed("model.embed_tokens.weight", names)].dtype


@pytest.mark.sampled
@pytest.mark.parametrize(("family", "kind"), KINDS.items())
def test_unpacked_weights_give_the_librarys_logits(
    packed_model: Packed, monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    folder, truth = packed_model(family, kind)
    assert mostly(open_model(folder)) == kind
    model, tokens = load(folder, dtype="float32"), prompt_of(40)
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT
    if model.facts.experts:
        assert any(f"stored as {kind} and unpacked" in line for line in model.facts.notices)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "kind", "layout"),
    in_turn(
        (*OWN_LAYERS, "llama", "qwen3_moe"),
        ("F32", "F16", "BF16"),
        ("separate", "stacked", "fused"),
    ),
)
def test_plain_weights_give_the_librarys_logits_in_torch(
    tmp_path: Path, tiny_model: Callable[..., Path], family: str, kind: str, layout: Layout
) -> None:
    """test_weights_gguf.py has all families in native."""
    path = write_tiny_gguf(
        tmp_path / "m.gguf",
        tiny_model(family, **whole_blocks(family)),
        ARCHITECTURES[family],
        quantised=GGMLQuantizationType[kind],
        layout=layout,
        truth=tmp_path / "truth",
    )
    model, tokens = load(open_gguf(path, quiet), dtype="float32"), prompt_of(40)
    answer, theirs = library_run(tmp_path / "truth", tokens, chunks=1)
    assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize(
    ("family", "kind"), [(family, KINDS[family]) for family in ("mixtral", "qwen3_moe", "olmoe", "llama")]
)
def test_packed_experts_run_in_the_native_kernels(packed_model: Packed, family: str, kind: str) -> None:
    folder, truth = packed_model(family, kind)
    model, tokens = load(folder), prompt_of(40)
    assert model.facts.dtype == "bfloat16"
    assert ("native" in model.facts.executor) == (family != "llama")
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert typical(our_run(model, tokens, 2, answer), theirs) < ROUNDED


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, KINDS[family]) for family in GGUF_FAMILIES),
        *(
            pytest.param(family, kind, marks=pytest.mark.soak)
            for family, kind in pairwise(GGUF_FAMILIES, WRITTEN)[::6]
            if kind != KINDS[family]
        ),
    ],
)
def test_the_native_runtime_gives_the_librarys_logits(packed_model: Packed, family: str, kind: str) -> None:
    folder, truth = packed_model(family, kind)
    model, tokens = load_native(folder), prompt_of(40)
    assert model.facts.dtype == "bfloat16"
    answer, theirs = library_run(truth, tokens, chunks=1)
    ours = our_run(model, tokens, 2, answer)
    assert typical(ours, theirs) < ROUNDED
    # Where two experts are about equally good, a rounding sends a token to the other one.
    assert other_choices(ours, theirs, MARGIN) <= 1


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(
            (family, KINDS[family])
            for family in (
                *("llama", "qwen2", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v2", "glm4_moe_lite"),
                *("glm4_moe", "qwen3_next", "lfm2_moe"),
            )
        ),
        ("gemma4_text", "Q8_0"),  # its random weights make errors of rounding largest
    ],
)
def test_a_packed_trunk_stays_where_it_lies(packed_model: Packed, family: str, kind: str) -> None:
    folder, truth = packed_model(family, kind)
    model, tokens = load(folder), prompt_of(40)
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert typical(our_run(model, tokens, 2, answer), theirs) < ROUNDED
    stored = open_model(folder)
    assert model.facts.trunk_bytes == pytest.approx(sizes_of(stored).for_runtime("torch").trunk_bytes, rel=0.01)
    kept = sum(tensor.nbytes for _, tensor in stored.trunk() if is_packed(tensor.dtype) and len(tensor.shape) == 2)
    assert model.facts.trunk_bytes >= kept > stored.trunk_bytes / 2
    library = library_model(truth)
    assert model.facts.parameters == sum(parameter.numel() for parameter in library.parameters())


@needs_kernels
def test_memory_that_runs_out_in_a_product_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose("bfloat16")
    layer = PackedLinear(StoredTensor("Q8_0", random_blocks("Q8_0", 4, 32)), None, None, choice)
    monkeypatch.setattr(layer, "_native", SimpleNamespace(pllm_linear=lambda *arguments: -2))
    with pytest.raises(ModelError, match="could not be multiplied: out of memory") as refused:
        layer(torch.ones(1, 32, dtype=torch.bfloat16))
    assert refused.value.kind == "memory"


@needs_kernels
def test_a_packed_trunk_whose_file_changes_is_not_believed(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    source, file = tiny_model("llama", **whole_blocks("llama")), tmp_path / "m.gguf"
    write_tiny_gguf(file, source, "llama", quantised=GGMLQuantizationType.Q8_0)
    model = load(open_gguf(file, quiet))
    rows = model.start()
    rows.extend(prompt_of(5))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ModelError, match=r"m\.gguf was changed while the model was open"):
        rows.step([7])
    with pytest.raises(ModelError, match=r"m\.gguf was changed"):
        model.start()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "kind", "policy"),
    [
        (*each, policy)
        for each, policy in zip(
            [("mixtral", "Q4_0"), *((family, KINDS[family]) for family in ON_A_DEVICE)],
            cycle(("balanced", "lru-offload", "stream", "layers", "twiddler", "monde")),
            strict=False,
        )
    ],
)
def test_a_device_shares_packed_experts(
    packed_model: Packed, monkeypatch: pytest.MonkeyPatch, family: str, kind: str, policy: ExpertPolicy
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    assert_shared_on_a_device(*packed_model(family, kind), policy)
