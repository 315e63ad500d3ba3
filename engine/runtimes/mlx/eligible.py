"""Whether the mlx runtime can run a model on this machine, decided from its headers before anything is loaded or freed.

Importable without mlx, which is asked only how much memory the GPU may have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from engine.errors import ModelError, shown
from engine.ipc.messages import Load
from engine.models.folders.opening import open_model, read_config
from engine.models.folders.sizes import sizes_of
from engine.models.folders.weight_layout import layout_of
from engine.runtimes.mlx import gguf_files
from engine.runtimes.mlx.families import unsupported_config

LARGE_CHUNK = 2048
_USUAL_CHUNK = Load(id=0, model="").prefill_chunk
_LEFT_TO_MACOS = 4_000_000_000
"""Bytes that a raised limit of the GPU's memory must leave to everything else."""


def unsupported_reason(folder: Path, request: Load) -> str | None:
    """Why mlx does not run the model in ``folder`` as ``request`` asks, in a few words; None if its headers show no
    reason. Raises ModelError if the model cannot be opened."""
    config = read_config(folder)
    problem = unsupported_config(config) or unsupported_quantisation(config)
    if problem is None and gguf_files.in_gguf(folder):
        problem = gguf_files.unsupported_reason(folder, request.partitioning == "ring")
    if problem is not None:
        return problem
    if request.partitioning == "hybrid":
        return "partitioning 'hybrid' is not for mlx, where GPU and CPU share one memory"
    # In a ring the experts are shared, and the plan says whether they fit.
    budget = None if request.partitioning == "ring" else working_set_bytes()
    return None if budget is None else too_large(weight_bytes(folder, request.dtype), budget)


def unsupported_quantisation(config: Mapping[str, Any]) -> str | None:
    """Why mlx cannot read a checkpoint's quantisation; None if it is not quantised, or as mlx-lm quantises."""
    settings = quantisation_of(config)
    method = settings.get("quant_method") if settings else None
    if method in (None, "mxfp4"):
        return None
    return f"the mlx runtime does not read checkpoints quantised with '{shown(method)}'"


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantisation that config.json names; None if there is none."""
    found = config.get("quantization") or config.get("quantization_config")
    return found if isinstance(found, Mapping) and found else None


def working_set_bytes() -> int | None:
    """The recommended maximum bytes of GPU memory on a Mac, which GPU and CPU share; None on a CPU.

    Raises ModelError if mlx is installed and does not work.
    """
    try:
        import mlx.core as mx

        on_gpu = mx.default_device() == mx.gpu
        limit = mx.device_info().get("max_recommended_working_set_size") if on_gpu else None
    except Exception as error:  # native libraries fail in more ways than ImportError
        raise ModelError(f"mlx is installed and cannot be used here ({error}): choose the torch runtime") from error
    return int(limit) if limit else None


def prefill_chunk(chosen: int, architecture: str) -> int:
    """Tokens of a prefill chunk where ``chosen`` was asked for. ``architecture`` is what mlx calls the GPU.

    The largest chips (their names end with s for Max, d for Ultra) are kept busy only by longer chunks than the usual
    one. On smaller chips a longer chunk would make whoever stops an answer wait for seconds.
    """
    return LARGE_CHUNK if chosen == _USUAL_CHUNK and architecture[-1:] in ("s", "d") else chosen


def architecture() -> str:
    """What mlx calls the GPU, such as ``applegpu_g16s``; empty on a CPU."""
    import mlx.core as mx

    return str(mx.device_info().get("architecture", "")) if mx.default_device() == mx.gpu else ""


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of all weights of the model in ``folder`` on a GPU, computed with ``dtype``. Raises ModelError."""
    if gguf_files.in_gguf(folder):
        files = open_model(folder, as_whole=True)
        width = 4 if gguf_files.dtype_of(files, dtype) == "float32" else 2
        return gguf_files.laid_out_in_mlx(files, width).nbytes
    layout = layout_of(folder)
    stored = layout.trunk_bytes + layout.expert_bytes * len(layout.experts)
    if dtype == "auto" or layout.opened is None:
        return stored
    return stored * sizes_of(layout.opened, dtype).width // sizes_of(layout.opened).width


def too_large(needed: int, budget: int) -> str | None:
    """Why ``needed`` bytes of weights do not fit in the GPU's ``budget``; None if they do."""
    if needed <= budget:
        return None
    return (
        f"the weights need {needed / 1e9:.1f} GB and the GPU may take {budget / 1e9:.1f} GB of this Mac's memory, "
        f"{(needed - budget) / 1e9:.1f} GB too little"
    )


def memory_advice(needed: int, only_here: bool, total: int) -> str:
    """What to do about weights of ``needed`` bytes that are too large for a Mac's GPU. ``only_here``: they are
    quantised in a way that no other runtime reads. ``total``: bytes of memory in this machine."""
    ways = ["choose a smaller model" if only_here else "choose a smaller or a 4-bit model"]
    if not only_here:
        ways.append("`--runtime native`, which reads experts from the disk as they are needed")
    raised = math.ceil(needed * 1.1 / 2**20)
    if raised * 2**20 <= total - _LEFT_TO_MACOS:
        ways.append(f"a higher limit (`sudo sysctl iogpu.wired_limit_mb={raised}`, until the Mac restarts)")
    return ", or ".join(ways)


def refuse_too_large(needed: int, budget: int | None, only_here: bool) -> None:
    """Raises ModelError (memory) if ``needed`` bytes are more than a Mac's GPU may take (None: there is none)."""
    problem = None if budget is None else too_large(needed, budget)
    if problem is not None:
        advice = memory_advice(needed, only_here, int(psutil.virtual_memory().total))
        raise ModelError(f"{problem}: {advice}", kind="memory")
