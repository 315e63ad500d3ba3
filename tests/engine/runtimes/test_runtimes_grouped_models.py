"""Safetensors models as mlx-lm and gpt-oss's authors quantise them, and in FP8, in the native and the torch runtime:
transformers' logits on what the weights stand for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from engine.ipc.messages import ExpertPolicy
from engine.models.architectures.quantisation import FAMILIES_OF_MLX
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of
from engine.models.formats.number_formats import is_packed
from engine.runtimes.protocol import LoadedModel
from tests.engine.runtimes.native_oracle import after_alike_branches, load_native, needs_kernels
from tests.engine.runtimes.subjects import (
    FP8,
    FP8_CHANNEL,
    FP8_TENSOR,
    GROUPED_MODELS,
    PUBLISHED,
    logits_along,
    needs_mlx,
    prompt_of,
)
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
from tests.support.tiny_gguf import whole_blocks
from tests.support.tiny_grouped import write_grouped
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("home")


ROUNDED = 0.06
"""Largest usual error where inputs are rounded to eight bits, as a share of the logits' spread: these models, of random
weights, make small errors larger than real ones do."""
MARGIN = 0.2
"""Share of the logits' spread that the library's choice must be ahead by for ours to be the same."""
MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss")

Grouped = Callable[[str, str], tuple[Path, Path]]


def loaded_by(runtime: str, folder: Path, **options: str) -> LoadedModel:
    return load_native(folder, **options) if runtime == "native" else load(folder, **options)


def assert_like_the_library(model: LoadedModel, truth: Path) -> None:
    """With one of some prompts: experts that are nearly as good as others may be others where inputs are rounded, which
    processors do differently."""

    def same(seed: int) -> bool:
        tokens = prompt_of(40, seed)
        answer, theirs = library_run(truth, tokens, chunks=1)
        ours = our_run(model, tokens, 2, answer)
        return typical(ours, theirs) < ROUNDED and other_choices(ours, theirs, MARGIN) <= 1

    assert any(same(seed) for seed in range(4))


BY_MLX_LM = (
    *("deepseek_v3", "glm4_moe_lite", "lfm2_moe", "gemma4_text"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
"""Families of whose trunk mlx-lm stores some tensors otherwise; it writes them itself in mlx/test_model_oracle.py."""
QUANTISABLE = tuple(family for family in FAMILIES_OF_MLX if family not in BY_MLX_LM)
"""Families that are written here as mlx-lm writes them."""
ON_EACH = in_turn(tuple(product(QUANTISABLE, ("native", "torch"))), tuple(GROUPED_MODELS))
FORMS = [*((family, stored, runtime) for (family, runtime), stored in ON_EACH), ("gpt_oss", PUBLISHED, "native")]
"""Each family on each runtime in one of the forms."""
MORE_FORMS = [row for row in product(QUANTISABLE, GROUPED_MODELS, ("native", "torch")) if row not in FORMS]


IN_FP8 = [
    ("qwen3_moe", FP8, "native"), ("qwen3_moe", FP8, "torch"), ("qwen3", FP8, "native"), ("qwen2_moe", FP8, "native"),
    ("mixtral", FP8, "torch"), ("qwen3_5_moe_text", FP8, "native"), ("granitemoe", FP8, "native"),
    ("glm4_moe_lite", FP8, "native"), ("qwen3_moe", FP8_CHANNEL, "native"), ("qwen3_moe", FP8_TENSOR, "torch"),
    ("llama", FP8_TENSOR, "native"), ("mixtral", FP8_CHANNEL, "torch"), ("qwen3_5_moe_text", FP8_CHANNEL, "native"),
    ("llama4_text", FP8_CHANNEL, "native"), ("llama4_text", FP8, "torch"), ("gemma4_text", FP8_CHANNEL, "native"),
    ("nemotron_h", FP8, "native"), ("nemotron_h", FP8, "torch"), ("kimi_linear", FP8, "native"),
    ("kimi_linear", FP8, "torch"), ("bailing_hybrid", FP8, "native"), ("bailing_hybrid", FP8, "torch"),
]  # fmt: skip


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize(
    ("family", "stored", "runtime"),
    [
        *(*FORMS, ("gpt_oss", PUBLISHED, "torch"), *IN_FP8),
        *(pytest.param(*row, marks=pytest.mark.soak) for row in MORE_FORMS),
    ],
)
def test_quantised_models_give_the_logits_of_what_they_stand_for(
    grouped: Grouped, family: str, stored: str, runtime: str
) -> None:
    folder, truth = grouped(family, stored)
    model = loaded_by(runtime, folder)
    assert (model.facts.dtype, model.facts.runtime) == ("bfloat16", runtime)
    assert_like_the_library(model, truth)
    # native counts what corrects routers' scores, which the library does not learn.
    learnt = sum(each.numel() for each in library_model(truth).parameters())
    assert learnt <= model.facts.parameters <= learnt * 1.0001


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "stored"),
    [
        *pairwise(QUANTISABLE, tuple(GROUPED_MODELS))[::3],
        ("gpt_oss", PUBLISHED),
        ("qwen3_moe", FP8),
        ("deepseek_v3", FP8),
        ("llama", FP8),
        ("qwen3_moe", FP8_CHANNEL),
        ("mixtral", FP8_TENSOR),
    ],
)
def test_unpacked_weights_give_the_librarys_logits(
    grouped: Grouped, monkeypatch: pytest.MonkeyPatch, family: str, stored: str
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    folder, truth = grouped(family, stored)
    model, tokens = load(folder, dtype="float32"), prompt_of(40)
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT


@needs_kernels
@pytest.mark.parametrize(
    ("family", "stored"),
    [
        *product(("qwen3_moe", "nemotron_h"), (FP8, FP8_CHANNEL, FP8_TENSOR)),
        *product(("glm4",), (FP8_CHANNEL, FP8_TENSOR)),
    ],
)
def test_fp8_is_exact_in_float32(grouped: Grouped, family: str, stored: str) -> None:
    """Its inputs are not rounded. Some families have several matrices in one."""
    folder, truth = grouped(family, stored)
    tokens = prompt_of(40)
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert worst(our_run(load_native(folder, dtype="float32"), tokens, 2, answer), theirs) < EXACT


@needs_kernels
@pytest.mark.parametrize(("family", "runtime"), [("mixtral", "native"), ("qwen3_moe", "torch")])
def test_one_tensor_for_each_expert_as_mlx_lm_wrote_it_once(tmp_path: Path, family: str, runtime: str) -> None:
    source = write_tiny_model(tmp_path / "source", family, **whole_blocks(family))
    folder, truth = write_grouped(tmp_path / "model", source, form="separate", files=3)
    assert_like_the_library(loaded_by(runtime, folder), truth)


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize(("family", "runtime"), in_turn(QUANTISABLE, ("native", "torch")))
def test_mxfp4_as_mlx_lm_writes_it(tmp_path: Path, tiny_model: Callable[..., Path], family: str, runtime: str) -> None:
    source = tiny_model(family, **whole_blocks(family))
    folder, truth = write_grouped(tmp_path / "model", source, mode="mxfp4", group=32)
    assert_like_the_library(loaded_by(runtime, folder), truth)


@needs_kernels
@pytest.mark.parametrize(("family", "runtime"), [("qwen3_moe", "native"), ("llama", "torch")])
def test_nvfp4_as_mlx_lm_writes_it(tmp_path: Path, tiny_model: Callable[..., Path], family: str, runtime: str) -> None:
    source = tiny_model(family, **whole_blocks(family))
    folder, truth = write_grouped(tmp_path / "model", source, mode="nvfp4", group=16)
    assert_like_the_library(loaded_by(runtime, folder), truth)


@needs_kernels
@pytest.mark.parametrize(("family", "stored"), [("gpt_oss", "mlx-4-bit"), ("gpt_oss", PUBLISHED), ("qwen3_moe", FP8)])
def test_branches_are_alike_and_long_prompts_run_in_panels(grouped: Grouped, family: str, stored: str) -> None:
    folder, truth = grouped(family, stored)
    model, tokens = load_native(folder), prompt_of(300)
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert typical([after_alike_branches(model, tokens, answer[:3])], theirs[3:4]) < ROUNDED


@needs_kernels
@pytest.mark.parametrize(
    ("family", "stored"),
    [("qwen2_moe", "mlx-4-bit"), ("gpt_oss", PUBLISHED), ("llama", "mlx-8-bit"), ("qwen3_moe", FP8), ("qwen3", FP8)],
)
def test_predicted_memory_is_what_the_runtimes_take(grouped: Grouped, family: str, stored: str) -> None:
    folder, _ = grouped(family, stored)
    files = open_model(folder)
    sizes = sizes_of(files)
    assert sizes.dtype == "bfloat16"
    tensors = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    native = sizes.for_runtime("native")
    assert native.trunk_bytes + native.expert_bytes == pytest.approx(tensors, rel=0.02)
    for runtime in ("native", "torch"):
        facts, predicted = loaded_by(runtime, folder, partitioning="cpu").facts, sizes.for_runtime(runtime)
        assert predicted.trunk_bytes == pytest.approx(facts.trunk_bytes, rel=0.02)
        assert predicted.expert_bytes == facts.expert_bytes
    if files.experts is not None:
        assert is_packed(files.experts.dtype) and sizes.experts_are_packed


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "stored", "policy"),
    [
        *pairwise(MOE, tuple(GROUPED_MODELS), ("balanced", "lru-offload", "stream", "layers", "twiddler", "monde"))[
            ::6
        ],
        ("gpt_oss", PUBLISHED, "balanced"),
        ("gpt_oss", PUBLISHED, "monde"),
        ("qwen3_moe", FP8, "lru-offload"),
        ("mixtral", FP8, "balanced"),
        ("qwen3_moe", FP8_CHANNEL, "balanced"),
        ("mixtral", FP8_TENSOR, "lru-offload"),
    ],
)
def test_a_device_shares_quantised_experts(
    grouped: Grouped, monkeypatch: pytest.MonkeyPatch, family: str, stored: str, policy: ExpertPolicy
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    assert_shared_on_a_device(*grouped(family, stored), policy)


@pytest.mark.sampled
@needs_mlx
@needs_kernels
@pytest.mark.parametrize(
    ("family", "mode", "bits"),
    [("llama", "affine", 4), ("mixtral", "affine", 6), ("qwen2_moe", "affine", 4), ("qwen3_moe", "affine", 5),
     ("olmoe", "affine", 4), ("granitemoe", "affine", 3), ("gpt_oss", "affine", 4), ("gpt_oss", "mxfp4", 4),
     ("qwen3", "mxfp4", 4), ("qwen3", "affine", 6), ("llama", "affine", 2)],
)  # fmt: skip
def test_what_mlx_lm_itself_writes_gives_mlx_lms_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, mode: str, bits: int
) -> None:
    """Computed by mlx on the quantised weights, and by us where they lie."""
    import mlx.core as mx

    from tests.engine.runtimes.mlx_oracle import library_model as mlx_model
    from tests.engine.runtimes.mlx_oracle import write_quantised

    folder = write_quantised(tmp_path, family, mode=mode, bits=bits)
    tokens = prompt_of(32)
    theirs = list(np.array(mlx_model(folder)(mx.array([tokens]))[0, 19:].astype(mx.float32)))
    with monkeypatch.context() as patch:
        patch.setenv("PRIVATELLM_KERNELS", "off")
        exact = load(folder, dtype="float32")
    assert worst(logits_along(exact, tokens, 20), theirs) < 10 * EXACT
    for runtime in ("native", "torch"):
        # Routers of models as small as these choose other experts where inputs are rounded.
        assert typical(logits_along(loaded_by(runtime, folder), tokens, 20), theirs) < 0.2
