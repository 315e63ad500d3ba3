"""DeepSeek V4 in the numbers in which it is published: FP8 in blocks whose scales are powers of two, and experts in
MXFP4, under names without transformers' beginnings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.moe.kernels import bindings
from tests.engine.runtimes.subjects import TORCH, fresh, prompt_of
from tests.engine.runtimes.torch_oracle import library_model
from tests.support.tiny_fp8 import LARGEST, in_blocks

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_KEPT = ("norm", "embed", "head", "compressor", "indexer.weights_proj", "ffn.gate")
_STARTS = (("model.embed_tokens.", "embed."), ("model.hc_head.hc_", "hc_head_"), ("model.", ""))
_EXPONENT = 127


def _powers(sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The powers of two that are not smaller, and their bytes."""
    exponents = torch.ceil(torch.log2(sizes))
    return torch.exp2(exponents), (exponents + _EXPONENT).to(torch.uint8)


def in_fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, columns / 2], scales, and what they stand for, of ``values`` [rows, columns]."""
    groups = values.unflatten(1, (-1, 32))
    scales, exponents = _powers(groups.abs().amax(2) / 6.0 + 1e-12)
    scaled = groups / scales[..., None]
    codes = (scaled.abs()[..., None] - _FP4).abs().argmin(-1)
    stands_for = _FP4[codes] * scaled.sign() * scales[..., None]
    codes = (codes + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8), exponents, stands_for.flatten(1)


def in_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales, and what they stand for, of ``values`` [rows, columns]."""
    _, sizes, _ = in_blocks(values, torch.float32)
    scales, exponents = _powers(sizes)
    spread = scales.repeat_interleave(128, 0)[: len(values)].repeat_interleave(128, 1)[:, : values.shape[1]]
    numbers = (values / spread).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return numbers, exponents, numbers.float() * spread


def published(folder: Path, source: Path) -> Path:
    """The model in ``source`` as it would be published, in ``folder``; ``source`` becomes what that stands for."""
    tensors, stored = load_file(source / "model.safetensors"), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        here = next((name.replace(start, instead, 1) for start, instead in _STARTS if name.startswith(start)), name)
        if tensor.dim() != 2 or not name.endswith(".weight") or any(part in here for part in _KEPT):
            stored[here] = tensor
            continue
        numbers, exponents, stands_for = (in_fp4 if ".experts." in name else in_fp8)(tensor)
        stored[here] = numbers
        stored[here.removesuffix(".weight") + ".scale"] = exponents.view(torch.float8_e8m0fnu)
        tensor.copy_(stands_for)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    config["expert_dtype"] = "fp4"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def both(tmp_path: Path, tiny_model: Callable[..., Path]) -> tuple[Path, Path]:
    """A model as published, and in float32."""
    source = tmp_path / "truth"
    source.mkdir()
    wide = {"hidden_size": 160, "intermediate_size": 96, "q_lora_rank": 160}
    for path in tiny_model("deepseek_v4", **wide).iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    return published(tmp_path / "published", source), source


def test_a_model_as_published_equals_what_its_numbers_stand_for(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels round inputs of MXFP4, torch does not."""
    monkeypatch.setenv(bindings.VARIABLE, "off")
    folder, truth = both
    tokens = prompt_of(40)
    with torch.inference_mode():
        wanted = library_model(truth)(torch.tensor([tokens])).logits[0, -1].numpy()
    found = fresh(TORCH.load(folder, dtype="float32"), tokens)
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_a_scale_that_is_no_number_is_a_sentence(both: tuple[Path, Path]) -> None:
    folder, _ = both
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if re.fullmatch(r"layers\.2\.attn\.wq_a\.scale", name))
    tensors[name].view(torch.uint8)[0, 0] = 255
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"Scales of layers\.2\.attn\.wq_a\.weight are no numbers"):
        TORCH.load(folder, dtype="float32")


def test_codes_that_do_not_fit_their_scales_are_a_sentence(both: tuple[Path, Path]) -> None:
    folder, _ = both
    tensors = load_file(folder / "model.safetensors")
    name = "layers.1.ffn.experts.0.w1.scale"
    tensors[name] = tensors[name].view(torch.uint8)[:, 1:].contiguous().view(torch.float8_e8m0fnu)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"in groups of 32 does not fit to its scales"):
        TORCH.load(folder, dtype="float32")


@pytest.mark.parametrize("expert", [-1, 8])
def test_a_table_that_names_an_expert_that_there_is_not_is_a_sentence(both: tuple[Path, Path], expert: int) -> None:
    folder, _ = both
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.1.ffn.gate.tid2eid"][5, 1] = expert
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"gate\.tid2eid names the expert {expert} of 8"):
        TORCH.load(folder, dtype="float32")
