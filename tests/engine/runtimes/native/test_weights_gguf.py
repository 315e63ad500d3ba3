"""GGUF files in the native runtime: transformers' logits on their weights; packed: test_runtimes_gguf_packed.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from engine.models.store.gguf_folder import open_gguf
from tests.engine.runtimes.native_oracle import GGUF_FAMILIES, after_alike_branches, load_native, needs_kernels
from tests.engine.runtimes.subjects import prompt_of
from tests.engine.runtimes.torch_oracle import library_run, our_run, typical, worst
from tests.support.pairwise import in_turn
from tests.support.progress import quiet
from tests.support.tiny_gguf import ARCHITECTURES, whole_blocks, write_tiny_gguf
from tests.support.tiny_gguf_metadata import Layout

pytestmark = [needs_kernels, pytest.mark.usefixtures("home")]

EXACT = 2e-5
"""Both compute in float32; the order of the sums differs. Where a step of a delta-net is badly conditioned, each is up
to 1e-5 from a run in double precision, whichever the instruction set."""
ROUNDED = 0.05
"""Largest usual error where inputs are rounded to eight bits, as a share of the logits' spread: these models, of random
weights, make small errors larger than real ones do."""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "layout", "merged"),
    in_turn(GGUF_FAMILIES, ("stacked", "fused", "separate"), (False, True)),
)
def test_plain_weights_give_the_librarys_logits(
    tmp_path: Path, sources: Callable[[str], Path], family: str, layout: Layout, merged: bool
) -> None:
    source = sources(family)
    extra = {"attention.sliding_window": 16} if family == "mistral" else {}
    architecture = ARCHITECTURES[family]
    path = write_tiny_gguf(tmp_path / "m.gguf", source, architecture, layout=layout, merged=merged, extra=extra)
    model, tokens = load_native(open_gguf(path, quiet), dtype="float32"), prompt_of(21)
    answer, theirs = library_run(source, tokens, chunks=1)
    assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT


@pytest.mark.parametrize("biased", [True, False])
def test_convolutions_of_mamba_layers_have_biases_if_the_file_has_them(
    tmp_path: Path, tiny_model: Callable[..., Path], biased: bool
) -> None:
    kinds = ["full_attention", "linear_attention", "full_attention", "linear_attention"]
    source = tiny_model(
        "granitemoehybrid", **whole_blocks("granitemoehybrid"), layer_types=kinds, mamba_conv_bias=biased
    )
    path = write_tiny_gguf(tmp_path / "m.gguf", source, "granitehybrid")
    model, tokens = load_native(open_gguf(path, quiet), dtype="float32"), prompt_of(21)
    answer, theirs = library_run(source, tokens, chunks=1)
    assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT


@pytest.mark.sampled
@pytest.mark.parametrize("attention", ["Q8_0", "F16", "BF16"])
def test_gpt_oss_as_it_is_published(tmp_path: Path, sources: Callable[[str], Path], attention: str) -> None:
    """Experts in MXFP4, biases in float32; a prompt over many windows, and more branches than are taken together."""

    def kind_of(name: str) -> GGMLQuantizationType:
        return GGMLQuantizationType["MXFP4" if "_exps" in name else attention]

    path = write_tiny_gguf(
        tmp_path / "m.gguf", sources("gpt_oss"), "gpt-oss", quantised=kind_of, truth=tmp_path / "truth"
    )
    model = load_native(open_gguf(path, quiet), dtype="float32")
    tokens = prompt_of(300)
    answer, theirs = library_run(tmp_path / "truth", tokens, chunks=1)
    for chunks in (1, 3):
        assert typical(our_run(model, tokens, chunks, answer), theirs) < ROUNDED
    assert typical([after_alike_branches(model, tokens, answer[:3])], theirs[3:4]) < ROUNDED


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_biases_of_experts_may_be_of_another_type_than_their_weights(
    tmp_path: Path, sources: Callable[[str], Path], kind: str
) -> None:
    path = write_tiny_gguf(
        tmp_path / "m.gguf",
        sources("gpt_oss"),
        "gpt-oss",
        quantised=GGMLQuantizationType[kind],
        truth=tmp_path / "truth",
    )
    model, tokens = load_native(open_gguf(path, quiet), dtype="float32"), prompt_of(40)
    answer, theirs = library_run(tmp_path / "truth", tokens, chunks=1)
    assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT
