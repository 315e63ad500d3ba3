"""Tiny random models of every family, written by transformers' own ``save_pretrained``: the oracles of the tests.

Routers and heads are scaled so that tokens go to different experts and the logits are far from uniform.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from tests.support.shared_folders import written_once
from tests.support.tiny_families import tiny_config

_PUBLISHED = {
    "kimi_linear": (r"\.block_sparse_moe\.(gate|up|down)_proj", r".mlp.\1_proj"),
    "bailing_hybrid": (r"(layers\.[02])\.attention\.dense", r"\1.attention.o_proj"),
}
"""Names of tensors, as transformers saves them, that are others in published files, and those."""

ENDLESS = 1_000_000
"""A context in which an answer does not end before it is stopped."""

kept_in: Path | None = None
"""Folder in which a run of the tests keeps every tiny model that it has made. None: each call makes one."""


def write_tiny_model(folder: Path, family: str, **options: Any) -> Path:
    """Write a random model of ``family`` (one of TINY_FAMILIES) into ``folder`` and return ``folder``.

    ``options``: ``dtype``, torch's name of the stored type; ``shards``, whether the weights are split over several
    files with an index; ``seed``; and settings of the configuration. The same arguments give the same weights. There is
    no tokenizer.
    """
    if kept_in is None:
        _make(folder, family, **options)
    else:
        shutil.copytree(
            tiny_model_kept(kept_in, family, **options), folder, dirs_exist_ok=True, copy_function=shutil.copyfile
        )
    return folder


def tiny_model_kept(root: Path, family: str, **options: Any) -> Path:
    """The folder of that tiny model in ``root``, made by the process that needs it first. Not to be changed."""
    key = zlib.crc32(repr(sorted(options.items())).encode())
    return written_once(root / f"{family}-{key:08x}", lambda folder: _make(folder, family, **options))


def _make(
    folder: Path, family: str, *, dtype: str = "float32", seed: int = 0, shards: bool = False, **config_overrides: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from engine.runtimes.torch.language_models import register_language_model

    torch.manual_seed(seed)
    config = tiny_config(family, **config_overrides)
    register_language_model(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    fill_randomly(model, family, seed)
    model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=max(1024, total // 4) if shards else "5GB")
    if family in _PUBLISHED:
        _rename_tensors(folder, *_PUBLISHED[family])


def _rename_tensors(folder: Path, pattern: str, instead: str) -> None:
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.safetensors"):
        tensors = {re.sub(pattern, instead, name): tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        whole = json.loads(index.read_text())
        whole["weight_map"] = {re.sub(pattern, instead, name): file for name, file in whole["weight_map"].items()}
        index.write_text(json.dumps(whole))


def fill_randomly(model: Any, family: str, seed: int = 0) -> None:
    """Give every weight of ``model`` a random value, always the same."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(family.encode()) + seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, generator, family, tied=model.config.tie_word_embeddings)
        for name, buffer in model.named_buffers():
            if name.endswith("act_fn.beta"):
                buffer.fill_(0.4)
            elif name.endswith("tid2eid"):
                scores = torch.rand(len(buffer), model.config.n_routed_experts, generator=generator)
                buffer.copy_(scores.topk(buffer.shape[1]).indices)
            elif name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar", "std_scale")):
                buffer.normal_(float(name.endswith(("layer_scalar", "std_scale"))), 0.1, generator=generator)
            elif name.endswith("std_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)


def _fill(name: str, parameter: Any, generator: Any, family: str, *, tied: bool) -> None:
    """Random values of a scale that keeps signals of every layer near one."""
    gemma = family.startswith("gemma")
    if "act_fn.alpha_" in name:
        parameter.normal_(0.1, 0.5, generator=generator)
    elif name.endswith(("bias", "sinks")):
        parameter.normal_(0.0, 0.3, generator=generator)
    elif family.startswith(("gemma4", "gemma3n")) and name.endswith(
        ("q_norm.weight", "k_norm.weight")
    ):  # their products are not divided by anything
        parameter.normal_(0.7, 0.1, generator=generator)
    elif "norm" in name.rsplit(".", 2)[-2] or name.endswith("scale"):
        # gemma2's and gemma3's norms multiply by one more.
        parameter.normal_(0.0 if family in ("gemma2", "gemma3_text") else 1.0, 0.2, generator=generator)
    elif "embed" in name or name.endswith("wte.weight"):
        # gemma's embeddings are multiplied by the root of their width.
        usual = 0.02 if family == "gemma2" else 0.1 if gemma else 0.4
        parameter.normal_(0.0, usual if tied else 1.0, generator=generator)
    elif name.endswith("_coefs.weight"):
        parameter.normal_(0.0, 0.2, generator=generator)
    elif name.endswith("modality_router.weight"):  # what comes in is divided by its width
        parameter.normal_(0.0, 5.0, generator=generator)
    elif gemma and name.endswith("router.proj.weight"):  # what comes in is divided by the root of its width
        parameter.normal_(0.0, 2.0, generator=generator)
    else:
        is_router = name.endswith(("gate.weight", "gate.wg.weight", "router.weight", "router.layer.weight"))
        is_head = name.endswith("lm_head.weight")
        gain = 3.0 if is_router or is_head else 1.3
        inputs = parameter.shape[-1] if parameter.dim() < 3 else min(parameter.shape[-2:])
        parameter.normal_(0.0, gain / inputs**0.5, generator=generator)
