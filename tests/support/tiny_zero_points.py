"""Tiny models quantised as vLLM's tools write them: compressed-tensors' integers, AutoAWQ, GPTQModel, and NVFP4.

Each packing is written from the description of its format, number by number, apart from the reader's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.models.architectures.families import match_tensor
from tests.support.tiny_experts import Tensors, experts_apart, experts_together, stored_by_columns
from tests.support.tiny_fp8 import KEPT, family_of, save_in_files


@dataclass(frozen=True)
class Form:
    """``kind``: a format of compressed-tensors, ``awq``, ``gptq`` or ``modelopt`` (NVFP4). ``group`` -1: a scale for
    each row. ``version`` is GPTQ's."""

    kind: str
    bits: int = 4
    group: int = 32
    zeros: bool = False
    scales: torch.dtype = torch.bfloat16
    version: str = "gptq"
    per_tensor: bool = False

    @property
    def in_nvfp4(self) -> bool:
        return self.kind in ("nvfp4-pack-quantized", "modelopt")

    def settings(self, kept: list[str]) -> dict[str, Any]:
        """What ``quantization_config`` says."""
        if self.kind == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group, "version": "gemm", "zero_point": True,
                    "modules_to_not_convert": kept}  # fmt: skip
        if self.kind == "gptq":
            return {"quant_method": "gptq", "bits": self.bits, "group_size": self.group, "desc_act": False,
                    "sym": not self.zeros, "checkpoint_format": self.version, "lm_head": False}  # fmt: skip
        if self.in_nvfp4:
            numbers = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "dynamic": False}
            of_all = {"group_0": {"targets": ["Linear"], "weights": numbers, "input_activations": numbers}}
            if self.kind == "modelopt":
                return {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": of_all, "ignore": kept}
            return {"quant_method": "compressed-tensors", "format": self.kind, "config_groups": of_all, "ignore": kept}
        strategy = "tensor" if self.per_tensor else "channel" if self.group == -1 else "group"
        weights = {"num_bits": self.bits, "type": "int", "symmetric": not self.zeros, "dynamic": False,
                   "strategy": strategy, "group_size": self.group if strategy == "group" else None}  # fmt: skip
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
        group = {"targets": ["Linear"], "weights": weights, "output_activations": None,
                 "input_activations": inputs if self.kind == "int-quantized" else None}  # fmt: skip
        return {"quant_method": "compressed-tensors", "format": self.kind, "quantization_status": "compressed",
                "config_groups": {"group_0": group}, "ignore": kept, "kv_cache_scheme": None}  # fmt: skip


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def in_nvfp4(module: str, values: torch.Tensor, kind: str) -> tuple[Tensors, torch.Tensor]:
    """The tensors of ``module``, and what they stand for. compressed-tensors stores a scale by which scales are
    divided, ModelOpt one with which they are multiplied."""
    each = values.reshape(len(values), -1, 16)
    most = values.abs().max()
    factor = 448.0 * 6.0 / most if kind != "modelopt" else most / (448.0 * 6.0)
    whole = 1 / factor if kind != "modelopt" else factor
    scales = (each.abs().amax(-1) / 6.0 / whole).to(torch.float8_e4m3fn)
    own = scales.float() / factor if kind != "modelopt" else scales.float() * factor
    sizes = (each.abs() / own[..., None]).nan_to_num()
    codes = (sizes[..., None] - FP4).abs().argmin(-1)
    signs = (each < 0).int()
    flat = (codes + 8 * signs).reshape(len(values), -1)
    packed = (flat[:, 0::2] | flat[:, 1::2] << 4).to(torch.uint8)
    stands_for = (own[..., None] * torch.where(signs == 1, -FP4[codes], FP4[codes])).reshape(values.shape)
    if kind == "modelopt":
        return {f"{module}.weight": packed, f"{module}.weight_scale": scales,
                f"{module}.weight_scale_2": factor, f"{module}.input_scale": torch.tensor(0.5)}, stands_for  # fmt: skip
    return {f"{module}.weight_packed": packed, f"{module}.weight_scale": scales,
            f"{module}.weight_global_scale": factor.reshape(1),
            f"{module}.input_global_scale": torch.ones(1)}, stands_for  # fmt: skip


def quantised(values: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes from 0 on [rows, columns], zero points and scales [rows, groups] of ``values``."""
    rows, columns = values.shape
    group, most = (columns if form.group == -1 else form.group), (1 << form.bits) - 1
    each = values.reshape(rows, -1, group)
    if form.per_tensor:
        each = values.reshape(1, 1, -1)
    low, high = each.amin(-1, keepdim=True), each.amax(-1, keepdim=True)
    if form.zeros:
        scales = ((high - low) / most + 1e-9).to(form.scales)
        zeros = (-low / scales.float()).round().clamp(0 if form.version == "gptq_v2" else 1, most)
    else:
        scales = (torch.maximum(-low, high) / (most // 2) + 1e-9).to(form.scales)
        zeros = torch.full_like(low, (most + 1) // 2)
    codes = (each / scales.float() + zeros).round().clamp(0, most)
    scaled = 1 if form.per_tensor else rows
    return codes.reshape(rows, -1), zeros.reshape(scaled, -1), scales.reshape(scaled, -1)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes packed along the last axis, the first in the lowest bits of an int32."""
    per = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % per)).reshape(*codes.shape[:-1], -1, per)
    packed = sum(padded[..., place] << bits * place for place in range(per))
    return torch.as_tensor(packed).to(torch.int32) if not isinstance(packed, int) else torch.zeros(0)


def stored_as(module: str, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, form: Form) -> Tensors:
    """The tensors of ``module``."""
    half = 1 << form.bits - 1
    if form.kind == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def interleaved(of: torch.Tensor) -> torch.Tensor:
            return words(of.reshape(len(of), -1, 8)[:, :, order].reshape(len(of), -1), 4)

        tensors = {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": scales.T}
    elif form.kind == "gptq":
        less = int(form.version == "gptq")
        columns = codes.shape[1]
        tensors = {"qweight": words(codes, form.bits).T, "qzeros": words(zeros.T - less, form.bits), "scales": scales.T,
                   "g_idx": (torch.arange(columns) // (columns // scales.shape[1])).int()}  # fmt: skip
    elif form.kind == "pack-quantized":
        tensors = {"weight_packed": words(codes, form.bits), "weight_scale": scales,
                   "weight_shape": torch.tensor(codes.shape)}  # fmt: skip
        if form.zeros:
            tensors["weight_zero_point"] = words(zeros.T, form.bits).T
    else:
        tensors = {"weight": (codes - half).to(torch.int8), "weight_scale": scales}
        if form.zeros:
            tensors["weight_zero_point"] = (zeros - half).to(torch.int8)
        if form.per_tensor:
            tensors["weight_scale"] = scales.reshape(1)
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


def write_zero_points(
    folder: Path, source: Path, form: Form, *, kept: Callable[[str], bool] = lambda module: False, files: int = 1
) -> tuple[Path, Path]:
    """The model in ``source`` in ``form``, in ``folder``, and the folder of what its weights stand for, in float32.

    Modules that ``kept`` names stay bfloat16, as norms, routers, embedding and head do. With ``files`` the tensors are
    spread over several.
    """
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    family = family_of(config)
    turned = stored_by_columns(family)
    tensors, merged = experts_apart(load_file(source / "model.safetensors"), turned)
    stored: Tensors = {}
    converted: set[str] = set()
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        routed = match_tensor(family, name) is not None
        linear = tensor.dim() == 2 and module != name and (routed or not module.endswith((*KEPT, ".gate")))
        linear = linear and tensor.shape[0] % 8 == 0  # as those of which AutoAWQ packs rows into words
        if not linear or kept(module):
            stored[name] = tensor.bfloat16()
            tensor.copy_(stored[name])
            continue
        converted.add(module)
        if form.in_nvfp4:
            parts, values = in_nvfp4(module, tensor.float(), form.kind)
            stored |= parts
            tensor.copy_(values)
            continue
        codes, zeros, scales = quantised(tensor.float(), form)
        stored |= stored_as(module, codes, zeros, scales, form)
        spread = tensor.shape[1] // scales.shape[1]
        wide = (part.float().repeat_interleave(spread, 1) for part in (zeros, scales))
        zero, scale = wide
        tensor.copy_((codes - zero) * scale)
    folder.mkdir(parents=True)
    truth = folder.with_name(folder.name + "-truth")
    truth.mkdir()
    whole = experts_together(tensors, merged, turned)
    save_file(whole, truth / "model.safetensors", metadata={"format": "pt"})
    (truth / "config.json").write_text(json.dumps(config))
    left_out = sorted({name.removesuffix(".weight") for name in tensors} - converted)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form.settings(left_out)}))
    save_in_files(folder, {name: tensor.contiguous() for name, tensor in stored.items()}, files)
    return folder, truth
