"""Tiny quantised safetensors models as mlx-lm and gpt-oss's authors lay them out, and what their weights stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from engine.models.architectures.families import Match, check_supported, expert_shape, match_tensor, part_views
from tests.support.tiny_gguf import fp4_codes, fp4_exponents

Floats = NDArray[np.float32]
Form = Literal["stacked", "separate", "published"]
"""mlx-lm's layout of today, its former one with a tensor for each expert, and gpt-oss as it is published."""

HALVES_OF_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice what the codes of MXFP4 stand for."""


@dataclass(frozen=True)
class Quantised:
    """Codes as uint32 words, scales, biases (None for MXFP4), and the values that they stand for, float32."""

    words: NDArray[np.uint32]
    scales: torch.Tensor
    biases: torch.Tensor | None
    values: Floats

    def named(self, name: str) -> dict[str, torch.Tensor]:
        found = {f"{name}.weight": torch.from_numpy(self.words.copy()), f"{name}.scales": self.scales}
        return found if self.biases is None else found | {f"{name}.biases": self.biases}


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes [rows, columns] as mlx packs them: one after the other, the first in the lowest bits."""
    each = np.unpackbits(codes[:, :, None], axis=2, count=bits, bitorder="little")
    return np.packbits(each.reshape(len(codes), -1), axis=1, bitorder="little").view("<u4")


def affine(values: Floats, bits: int, group: int, dtype: torch.dtype) -> Quantised:
    """``values`` [rows, columns] in mlx's affine quantisation, with scales and biases in ``dtype``."""
    rows, columns = values.shape
    grouped = values.reshape(rows, columns // group, group)
    low, high = grouped.min(axis=2), grouped.max(axis=2)
    scales = torch.from_numpy((high - low) / (2**bits - 1) + 1e-8).to(dtype)
    biases = torch.from_numpy(low.copy()).to(dtype)
    scale, bias = scales.float().numpy()[:, :, None], biases.float().numpy()[:, :, None]
    codes = np.clip(np.rint((grouped - bias) / scale), 0, 2**bits - 1).astype(np.uint8)
    stands_for = scale * codes.astype(np.float32) + bias
    return Quantised(pack(codes.reshape(rows, columns), bits), scales, biases, stands_for.reshape(rows, columns))


def mxfp4(values: Floats) -> Quantised:
    rows, columns = values.shape
    grouped = values.reshape(rows, columns // 32, 32)
    exponents = fp4_exponents(grouped)
    scale = np.ldexp(np.float32(0.5), exponents.astype(np.int32) - 127).astype(np.float32)[:, :, None]
    codes = fp4_codes(grouped / scale)
    stands_for = (scale * HALVES_OF_FP4[codes]).reshape(rows, columns)
    return Quantised(pack(codes.reshape(rows, columns), 4), torch.from_numpy(exponents), None, stands_for)


def nvfp4(values: Floats) -> Quantised:
    """mlx's NVFP4, which has no scale for all scales."""
    rows, columns = values.shape
    grouped = values.reshape(rows, columns // 16, 16)
    scales = torch.from_numpy(np.abs(grouped).max(axis=2) / 6).to(torch.float8_e4m3fn)
    scale = 0.5 * scales.float().numpy()[:, :, None]
    codes = fp4_codes(np.divide(grouped, scale, out=np.zeros_like(grouped), where=scale > 0))
    stands_for = (scale * HALVES_OF_FP4[codes]).astype(np.float32).reshape(rows, columns)
    return Quantised(pack(codes.reshape(rows, columns), 4), scales.view(torch.uint8), None, stands_for)


def write_grouped(
    folder: Path,
    source: Path,
    *,
    bits: int = 4,
    group: int = 64,
    scales: torch.dtype = torch.bfloat16,
    mode: str = "affine",
    form: Form = "stacked",
    own: Callable[[str], tuple[int, int] | None] = lambda module: None,
    files: int = 1,
) -> tuple[Path, Path]:
    """The model in ``source`` quantised, in ``folder``, and the folder of what its weights stand for.

    ``own`` gives the bits and group of a module that has others than the rest. With ``files`` the weights are spread
    over several, so that scales may lie in another than their codes.
    """
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    family = check_supported(config)
    shape = expert_shape(config, family)
    tensors = load_file(source / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    experts: dict[tuple[int, str], dict[int, Floats]] = {}
    settings: dict[str, Any] = {"group_size": group, "bits": bits, "mode": mode}

    def quantise(module: str, values: Floats) -> Quantised:
        if mode == "mxfp4" or form == "published":
            return mxfp4(values)
        if mode == "nvfp4":
            return nvfp4(values)
        mine = own(module)
        if mine is not None:
            settings[module] = {"bits": mine[0], "group_size": mine[1]}
        return affine(values, *(mine or (bits, group)), scales)

    for name, tensor in tensors.items():
        match = match_tensor(family, name)
        if match is not None:
            assert shape is not None
            _take_apart(match, tensor.numpy(), shape, experts, quantise)
            continue
        module = name.removesuffix(".weight")
        if form == "published" or tensor.dim() != 2 or module == name:
            stored[name] = tensor.to(scales)
            tensor.copy_(stored[name])
            continue
        found = quantise(module, tensor.numpy())
        tensor.copy_(torch.from_numpy(found.values))
        stored |= found.named(module)
    stored |= _put_together(family.model_type, experts, form, quantise, scales)
    folder.mkdir(parents=True)
    truth = folder.with_name(folder.name + "-truth")
    truth.mkdir()
    save_file(tensors, truth / "model.safetensors", metadata={"format": "pt"})
    (truth / "config.json").write_text(json.dumps(config))
    quantisation: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    if form != "published":
        quantisation = {"quantization": settings, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config | quantisation))
    _save(folder, stored, files)
    return folder, truth


def module_of(family: str, layer: int, part: str, form: Form, expert: int | None = None) -> str:
    """The name of a matrix of experts, without its ending."""
    block = "block_sparse_moe" if family in ("mixtral", "minimax_m2", "granitemoe", "granitemoehybrid") else "mlp"
    if form == "separate":
        short = (
            {"gate": "w1", "up": "w3", "down": "w2"}[part] if family in ("mixtral", "minimax_m2") else f"{part}_proj"
        )
        return f"model.layers.{layer}.{block}.experts.{expert}.{short}"
    return f"model.layers.{layer}.{block}.{'experts' if family == 'gpt_oss' else 'switch_mlp'}.{part}_proj"


def _take_apart(
    match: Match,
    array: NDArray[Any],
    shape: Any,
    experts: dict[tuple[int, str], dict[int, Floats]],
    quantise: Callable[[str, Floats], Quantised],
) -> None:
    """Note the parts of every expert in ``array``, views of it: what they are set to is set in it."""
    numbers = range(shape.count) if match.expert is None else [match.expert]
    for expert in numbers:
        for part, view in part_views(match.tensor, array, 0 if match.expert is not None else expert, shape):
            experts.setdefault((match.layer, part), {})[expert] = view


def _put_together(
    family: str,
    experts: Mapping[tuple[int, str], dict[int, Floats]],
    form: Form,
    quantise: Callable[[str, Floats], Quantised],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = {}
    interleaved: dict[str, dict[str, torch.Tensor]] = {}
    for (layer, part), views in sorted(experts.items()):
        kind = part.removesuffix("_bias")
        if part.endswith("_bias"):
            rounded = torch.stack([torch.from_numpy(views[expert].copy()) for expert in sorted(views)]).to(dtype)
            for expert, view in views.items():
                view[...] = rounded[expert].float().numpy()
            parts = {module_of(family, layer, kind, form) + ".bias": rounded}
        else:
            each: list[dict[str, torch.Tensor]] = []
            for expert, view in sorted(views.items()):
                module = module_of(family, layer, kind, form, expert)
                found = quantise(module, np.ascontiguousarray(view))
                view[...] = found.values
                each.append(found.named(module))
            if form == "separate":
                parts = {name: tensor for one in each for name, tensor in one.items()}
            else:
                parts = {name: torch.stack([one[name] for one in each]) for name in each[0]}
        if form == "published":
            interleaved.setdefault(f"{layer}", {}).update(parts)
        else:
            stored |= parts
    for layer_name, parts in interleaved.items():
        stored |= _published(f"model.layers.{layer_name}.mlp.experts.", parts)
    return stored


def _published(prefix: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gate and up with alternating rows, and blocks of 16 bytes, as gpt-oss's authors store them."""

    def of(matrix: str, ending: str) -> torch.Tensor:
        return parts[f"{prefix}{matrix}_proj.{ending}"]

    def blocks(words: torch.Tensor) -> torch.Tensor:
        return words.contiguous().view(torch.uint8).reshape(*words.shape[:-1], -1, 16)

    def both(ending: str) -> torch.Tensor:
        gate, up = of("gate", ending), of("up", ending)
        return torch.stack((gate, up), dim=2).reshape(gate.shape[0], -1, *gate.shape[2:])

    return {
        prefix + "gate_up_proj_blocks": blocks(both("weight")),
        prefix + "gate_up_proj_scales": both("scales"),
        prefix + "gate_up_proj_bias": both("bias"),
        prefix + "down_proj_blocks": blocks(of("down", "weight")),
        prefix + "down_proj_scales": of("down", "scales"),
        prefix + "down_proj_bias": of("down", "bias"),
    }


def _save(folder: Path, tensors: dict[str, torch.Tensor], files: int) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
        return
    names = [f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
    where = {name: names[number % files] for number, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
