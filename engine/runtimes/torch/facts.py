"""The facts of a loaded torch model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.ipc.messages import Load, ModelFacts
from engine.models.folders.sizes import WITHOUT_KEYS, state_bytes
from engine.models.folders.weights_name import weights_name
from engine.models.formats.model_files import Experts, ModelFiles, whole_weights
from engine.moe.executor import Executor
from engine.runtimes.torch.gpu_memory_plan import SharedRoom
from engine.runtimes.torch.offload.torch_tensors import NAMES
from engine.runtimes.torch.packed_modules import numbers_kept_packed


def describe(
    module: nn.Module,
    config: Any,
    files: ModelFiles,
    request: Load,
    device: torch.device,
    dtype: torch.dtype,
    executor: Executor[torch.Tensor] | None,
    shared: SharedRoom | None,
    held: Experts | None,
    top_k: int,
    load_s: float,
    notices: list[str],
) -> ModelFacts:
    """The facts of ``module``, filled from ``files``; ``top_k`` is how many experts each token is sent to, ``held`` the
    experts that are run here, ``shared`` tells of the GPU that shares them."""
    experts = files.experts
    stored = {tensor.data_ptr(): tensor for tensor in module.state_dict().values()}.values()
    expert_parameters = 0 if experts is None else whole_weights(experts)
    return ModelFacts(
        name=request.model,
        family=str(files.config["model_type"]),
        runtime="torch",
        executor="none (dense)" if executor is None else executor.description,
        device=device.type,
        dtype=NAMES[dtype],
        layers=config.num_hidden_layers,
        experts=0 if experts is None else experts.count,
        experts_per_token=top_k,
        moe_layers=[] if experts is None else list(experts.layers),
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        context_limit=context_limit(config, request.context_limit),
        trunk_bytes=sum(tensor.nbytes for tensor in stored),
        expert_bytes=0 if held is None else held.nbytes,
        key_value_bytes_per_token=key_value_numbers(config) * dtype.itemsize,
        state_bytes=state_bytes(files.config),
        parameters=sum(p.numel() for p in module.parameters()) + numbers_kept_packed(module) + expert_parameters,
        load_s=load_s,
        weights=weights_name(files),
        trunk=f"transformers (torch, {device.type})",
        policy=request.policy if shared is not None else None,
        gpu_expert_bytes=shared.backend.gpu_expert_bytes if shared is not None else 0,
        notices=notices,
    )


def context_limit(config: Any, wanted: int | None) -> int:
    """Tokens the model was made for, or ``wanted`` if that is fewer."""
    limit = int(config.max_position_embeddings)
    return limit if wanted is None else min(limit, wanted)


def key_value_numbers(config: Any) -> int:
    """Numbers one token adds to the cache: keys and values of every layer that keeps them.

    Latent attention (deepseek) caches the latents and the rotated part. Recurrent layers keep a state of fixed size.
    """
    if getattr(config, "kv_lora_rank", None):
        per_layer = int(config.kv_lora_rank + config.qk_rope_head_dim)
        return per_layer * int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum(
        _width(layer) for layer, kind in zip(config.per_layer_config, kinds, strict=True) if kind not in WITHOUT_KEYS
    )


def _width(layer: Any) -> int:
    """Numbers of a token's keys and values in ``layer``, the configuration of one layer."""
    heads = getattr(layer, "num_key_value_heads", None)
    if heads is None:
        # dbrx keeps it one level further down.
        heads = layer.attn_config.kv_n_heads
    return 2 * int(heads) * int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
