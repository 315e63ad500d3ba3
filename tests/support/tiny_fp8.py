"""Tiny models in FP8 with a scale for each block of 128 by 128 numbers, as DeepSeek and Qwen publish theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.models.architectures.families import check_supported, expert_shape, match_tensor, renamed
from engine.models.architectures.record import Family
from tests.support.tiny_experts import experts_apart, experts_together, stored_by_columns

LARGEST = 448.0
"""Largest number of E4M3."""
KEPT = (
    "lm_head",
    "model.embed_tokens",
    ".embeddings",
    ".mlp.gate",
    ".mixer.gate",
    "shared_expert_gate",
    "router",
    "router.proj",
)
"""Ends of the names of modules whose weights stay as they are."""


def in_blocks(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales in ``dtype``, and what they stand for, float32, of ``values`` [..., rows, columns]."""
    rows, columns = values.shape[-2:]
    across = [-(-size // 128) for size in (rows, columns)]
    padded = torch.zeros(*values.shape[:-2], across[0] * 128, across[1] * 128)
    padded[..., :rows, :columns] = values
    blocks = padded.reshape(*values.shape[:-2], across[0], 128, across[1], 128)
    scales = (blocks.abs().amax((-3, -1)) / LARGEST + 1e-12).to(dtype)
    spread = scales.float().repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]
    numbers = (values / spread).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * spread


def in_rows(values: torch.Tensor, dtype: torch.dtype, whole: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`in_blocks`, of ``values`` [rows, columns] with a scale for each row, [rows, 1], or for the ``whole``,
    [1]."""
    scales = (values.abs().amax() if whole else values.abs().amax(1, keepdim=True)) / LARGEST + 1e-12
    scales = scales.to(dtype)
    numbers = (values / scales.float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return numbers, scales.reshape(1) if whole else scales, numbers.float() * scales.float()


def write_fp8(
    folder: Path,
    source: Path,
    *,
    scales: torch.dtype = torch.float32,
    kept: Callable[[str], bool] = lambda module: False,
    files: int = 1,
    strategy: str = "block",
) -> tuple[Path, Path]:
    """The model in ``source`` in FP8, in ``folder``, and the folder of what its weights stand for, in float32.

    With the ``strategy`` ``channel`` or ``tensor``, a scale belongs to a row or a matrix, as compressed-tensors writes
    it.

    Modules that ``kept`` names stay bfloat16, as norms, routers, embedding and head do. With ``files`` the tensors are
    spread over several, so that scales may lie in another than their numbers.
    """
    config = renamed(json.loads((source / "config.json").read_text()))
    family = family_of(config)
    tensors, merged = load_file(source / "model.safetensors"), list[str]()
    turned = stored_by_columns(family)
    if turned or strategy != "block":
        tensors, merged = experts_apart(tensors, turned)
    stored: dict[str, torch.Tensor] = {}
    converted: set[str] = set()
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        routed = match_tensor(family, name) is not None
        linear = tensor.dim() >= 2 and (routed or (module != name and tensor.dim() == 2 and not module.endswith(KEPT)))
        if not linear or kept(module):
            stored[name] = tensor.bfloat16()
            tensor.copy_(stored[name])
            continue
        converted.add(module)
        if strategy == "block":
            numbers, own, values = in_blocks(tensor.float(), scales)
        else:
            numbers, own, values = in_rows(tensor.float(), scales, strategy == "tensor")
        tensor.copy_(values)
        stored |= {name: numbers, name + ("_scale_inv" if strategy == "block" else "_scale"): own}
    folder.mkdir(parents=True)
    truth = folder.with_name(folder.name + "-truth")
    truth.mkdir()
    whole = experts_together(tensors, merged, turned)
    save_file(whole, truth / "model.safetensors", metadata={"format": "pt"})
    (truth / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": sorted({name.removesuffix(".weight") for name in tensors} - converted),
    }  # fmt: skip
    if strategy != "block":
        settings = of_compressed_tensors(strategy) | {"ignore": settings["modules_to_not_convert"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_in_files(folder, stored, files)
    return folder, truth


def family_of(config: dict[str, Any]) -> Family:
    """The family of ``config``, which has such models."""
    family = check_supported(config)
    assert family.has_models(with_experts=expert_shape(config, family) is not None)
    return family


def of_compressed_tensors(strategy: str) -> dict[str, Any]:
    """The settings that llm-compressor writes."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "kv_cache_scheme": None,
    }  # fmt: skip


def save_in_files(folder: Path, tensors: dict[str, torch.Tensor], files: int) -> None:
    """``tensors`` in ``folder``, one after the other in each of several files."""
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
    where = {name: names[number % files] for number, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
