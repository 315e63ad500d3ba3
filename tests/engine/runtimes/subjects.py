"""The three runtimes, as the tests of what each of them must do see them: the subjects of those tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from engine.ipc.messages import Load
from engine.ipc.progress import ProgressCallback
from engine.runtimes import runtime_named
from engine.runtimes.protocol import LoadedModel, Logits, RingPlace, TokenRows
from engine.runtimes.torch.runtime import TorchRuntime
from tests.engine.runtimes.native_oracle import FAMILIES as NATIVE_FAMILIES
from tests.engine.runtimes.native_oracle import PREPARED_ONLY, needs_kernels
from tests.support.progress import quiet
from tests.support.tiny_families import TINY_FAMILIES, TINY_MOE_FAMILIES
from tests.support.tiny_zero_points import Form

needs_mlx = pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="mlx is not installed")


@dataclass(frozen=True, eq=False)
class Subject:
    """A runtime: the families it runs, the forms its tests have weights in, and what of a tiny model it does not know.

    ``unlike``: settings of the shared tiny models that the runtime refuses, by family, and what stands in their place.
    ``prepared_only``: families of which it runs prepared models only.
    """

    name: str
    families: tuple[str, ...]
    stored: tuple[str, str]
    marks: tuple[pytest.MarkDecorator, ...] = ()
    unlike: dict[str, dict[str, Any]] = field(default_factory=dict)
    prepared_only: tuple[str, ...] = ()

    @property
    def moe_families(self) -> tuple[str, ...]:
        return tuple(family for family in self.families if family in TINY_MOE_FAMILIES)

    def load(
        self,
        folder: Path,
        place: RingPlace | None = None,
        progress: ProgressCallback = quiet,
        **options: Any,
    ) -> LoadedModel:
        """``folder`` on one thread of the CPU (mlx: where it runs), in a ring with ``place``."""
        usual = {} if self.name == "mlx" else {"cpu_threads": 1}
        if self.name == "native":
            usual["partitioning"] = "cpu" if place is None else "ring"
        request = Load(id=1, model=folder.name, **(usual | options))
        runtime = TorchRuntime(find_gpu=lambda: None) if self.name == "torch" else runtime_named(self.name)  # type: ignore[arg-type]
        return runtime.load(folder, request, progress, place)

    def __str__(self) -> str:
        return self.name


REGULAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
"""The kinds of layers that mlx-lm assumes of models with delta-nets."""
NOT_ON_MLX = (
    *("minimax", "llama4_text", "deepseek_v2", "hunyuan_v1_moe", "ernie4_5_moe"),
    *("hy_v3", "flex_olmo", "granitemoeshared", "granite_swa", "granitemoe_swa", "laguna", "cohere2_moe"),
    *("nemotron_h", "nemotron_h_dense", "nemotron_h_latents", "qwen4_exp_text", "bailing_hybrid"),
    "gemma3n_text",
    *("deepseek_v32", "glm_moe_dsa", "glm5_next_text", "deepseek_v4"),
)

NATIVE = Subject("native", NATIVE_FAMILIES, ("float32", "bfloat16"), (needs_kernels,), prepared_only=PREPARED_ONLY)
TORCH = Subject("torch", TINY_FAMILIES, ("float32", "bfloat16"))
MLX = Subject(
    "mlx",
    tuple(f for f in TINY_FAMILIES if f not in NOT_ON_MLX),
    ("float32", "4-bit"),
    (needs_mlx,),
    {
        "olmoe": {"clip_qkv": None},
        "qwen2_moe": {"mlp_only_layers": []},
        "glm4_moe": {"n_group": 1},
        "dots1": {"n_group": 1},
        "gemma2": {"sliding_window": 512},
        "solar_open": {"n_group": 1},
        "exaone_moe": {"n_group": 1},
        "qwen3_next": {"layer_types": REGULAR},
        "granitemoehybrid": {"mamba_n_groups": 1},
        "granitemoehybrid_dense": {"mamba_n_groups": 1},
    },
)
SUBJECTS = (NATIVE, TORCH, MLX)

PACKED_FAMILIES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "qwen3_5_moe_text"),
    *("deepseek_v2", "glm4_moe_lite", "glm4_moe", "qwen3_next", "lfm2_moe", "gemma4_text"),
)


def _mixed(name: str) -> GGMLQuantizationType:
    """As files called Q4_K_M mix: some layers' down projections in more bits, and so the values and the head."""
    more = "attn_v" in name or name.startswith(("output", "blk.0.ffn_down"))
    return GGMLQuantizationType.Q6_K if more else GGMLQuantizationType.Q4_K


PACKED_MODELS: dict[str, tuple[Callable[[str], GGMLQuantizationType], int]] = {
    "Q4_K_M": (_mixed, 2),
    "Q8_0": (lambda name: GGMLQuantizationType.Q8_0, 1),
    "MXFP4": (lambda name: GGMLQuantizationType.MXFP4 if "_exps" in name else GGMLQuantizationType.Q5_0, 1),
}
"""Formats of tiny GGUF files, by a name: of each matrix by its name, and in how many files they are."""

GROUPED_MODELS: dict[str, dict[str, Any]] = {
    "mlx-4-bit": {"bits": 4, "group": 64, "files": 2},
    "mlx-8-bit": {"bits": 8, "group": 32, "scales": torch.float16},
    "mlx-mixed": {
        "bits": 4,
        "group": 128,
        "own": lambda module: (8, 64) if module.endswith(("down_proj", "v_proj", ".gate", "lm_head")) else None,
    },
    "mlx-6-bit": {"bits": 6, "group": 64},
    "mlx-few-bits": {
        "bits": 3,
        "group": 64,
        "own": lambda module: (2, 32) if "gate_proj" in module else (5, 128) if "down_proj" in module else None,
    },
}
"""Forms of safetensors models as mlx-lm quantises them, by a name."""
PUBLISHED = "as published"
"""The form in which gpt-oss is published."""
FP8 = "FP8"
"""The form of safetensors models in FP8 with a scale for each block of 128 by 128 numbers."""

FP8_CHANNEL, FP8_TENSOR = "FP8-channel", "FP8-tensor"
"""The same with a scale for each row, and for each matrix, as compressed-tensors writes it."""

ZERO_POINTS: dict[str, Form] = {
    "AWQ": Form("awq", group=64, zeros=True, scales=torch.float16),
    "GPTQ": Form("gptq", group=128, zeros=True, scales=torch.float16),
    "GPTQ-8-bit": Form("gptq", bits=8, group=-1, scales=torch.float16),
    "packed-4-bit": Form("pack-quantized", group=32),
    "packed-zero-points": Form("pack-quantized", group=128, zeros=True),
    "packed-8-bit": Form("pack-quantized", bits=8, group=-1),
    "integers": Form("int-quantized", bits=8, group=-1),
    "NVFP4": Form("nvfp4-pack-quantized"),
    "NVFP4-ModelOpt": Form("modelopt"),
}
"""Forms of safetensors models as vLLM's tools quantise them, by a name."""

each_runtime = pytest.mark.parametrize("subject", [pytest.param(one, marks=one.marks, id=one.name) for one in SUBJECTS])
"""A test of all three runtimes, as its ``subject``."""


def case(subject: Subject, *values: Any, soak: bool = False) -> Any:
    """A row of parameters of a test whose first one is ``subject``; ``soak`` leaves it to ``make test-soak``."""
    marks = (*subject.marks, *((pytest.mark.soak,) if soak else ()))
    return pytest.param(subject, *values, marks=marks, id="-".join(str(value) for value in (subject, *values)))


def together(rows: list[Any]) -> list[Any]:
    """Rows of :func:`case` as the parameters of a fixture, whose value is the whole row."""
    return [pytest.param(row.values, marks=row.marks, id=row.id) for row in rows]


StoredModel = Callable[..., Path]
"""``stored_model(subject, family, stored="float32", as_saved=False, **options)``: the folder of a tiny model that
``subject`` runs, or with ``as_saved`` of the same one as transformers saved it."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids of the tiny models' vocabulary."""
    return np.random.default_rng(seed).integers(3, 160, length).tolist()


def fresh(model: LoadedModel, tokens: list[int]) -> Logits:
    """The logits after ``tokens``, with nothing in the cache before."""
    logits = model.start().extend(tokens)
    assert logits is not None
    return logits


def logits_after(rows: TokenRows, tokens: Sequence[int]) -> Logits:
    """The logits after ``tokens`` that are read now."""
    logits = rows.extend(tokens)
    assert logits is not None
    return logits


def logits_along(model: LoadedModel, tokens: list[int], first: int) -> list[Logits]:
    """The logits after the first ``first`` tokens, and after each of the others."""
    rows = model.start()
    logits = [rows.extend(tokens[:first]), *(rows.step([token])[0] for token in tokens[first:])]
    return [each for each in logits if each is not None]


def assert_close(found: Logits | None, expected: Logits, limit: float = 1e-4) -> None:
    """To a part of the largest logit."""
    assert found is not None and found.dtype == np.float32 and found.shape == expected.shape
    assert np.abs(found - expected).max() / np.abs(expected).max() < limit
