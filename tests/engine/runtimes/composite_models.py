"""Tiny models that also see pictures, as their authors publish them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_PICTURES = {"glm5_next": "model.visual", "gemma4": "model.vision_tower", "llama4": "vision_model"}
"""Beginnings of the names of tensors of pictures; others are those of Qwen."""


def write_composite(folder: Path, alone: Path, family: str) -> Path:
    """The whole of the ``family`` in ``folder`` whose language model is the one in ``alone``."""
    tensors: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(alone / "model.safetensors").items():
        inside = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        whole = f"language_model.{name}" if family == "llama4" else inside
        stem, found, rest = whole.partition(".experts.")
        number, _, matrix = rest.partition(".")
        if found and number.isdigit():
            experts.setdefault(f"{stem}.experts.{matrix.removesuffix('.weight')}", {})[int(number)] = tensor
        else:
            tensors[whole] = tensor
    stacked = {name: torch.stack([each[i] for i in sorted(each)]) for name, each in experts.items()}
    for name, gate in stacked.items():
        if name.endswith("gate_proj"):
            joined = name.removesuffix("gate_proj")
            tensors[joined + "gate_up_proj"] = torch.cat((gate, stacked[joined + "up_proj"]), dim=1)
            tensors[joined + "down_proj"] = stacked[joined + "down_proj"]
    if family == "qwen3_vl_moe":
        tensors = {name: each.mT.contiguous() if ".experts." in name else each for name, each in tensors.items()}
    pictures = _PICTURES.get(family, "model.visual")
    tensors[f"{pictures}.patch_embed.proj.weight"] = torch.ones(4, 4)
    if family.startswith("qwen3_5"):
        tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.ones(4, 4)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((alone / "config.json").read_text())
    if own := config.pop("per_layer_config", None):
        # transformers 5 writes for each layer what is published once.
        wide = next(iter(own.values()))
        config |= {"global_head_dim": wide["head_dim"], "num_global_key_value_heads": wide["num_key_value_heads"]}
    if family.startswith("qwen3_vl"):
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    if family == "qwen3_vl_moe":
        config |= {"num_experts": config.pop("num_local_experts"), "norm_topk_prob": True}
    whole_config = {"model_type": family, "text_config": config, "vision_config": {"depth": 1}}
    outside = {key: config[key] for key in ("tie_word_embeddings", "vocab_size")}
    (folder / "config.json").write_text(json.dumps(whole_config | outside))
    return folder
