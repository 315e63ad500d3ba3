"""GGUF files of models with delta-nets whose keys decay each by itself, beside attention over latents (kimi-linear).

llama.cpp stores decays as they are used. A layer with a delta-net has no heads of keys and values, as the files say it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.models.architectures import gguf_latent
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor, projections
from engine.models.architectures.record import Config, DeltaSizes, MixerTensors
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.model_files import Change


def settings(metadata: Metadata) -> dict[str, Any]:
    """The part of ``config.json`` that these families have in common. Raises ModelError for a number that is missing or
    impossible."""
    found = gguf_latent.settings(metadata)
    layers, heads = found["num_hidden_layers"], metadata.each_layer("attention.head_count_kv")
    return found | {
        "num_experts": found.pop("n_routed_experts"),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads[:layers]],
        "linear_conv_kernel_dim": metadata.number("ssm.conv_kernel"),
    }


def tensors(sizes_of: Callable[[Config], DeltaSizes], wide_logarithms: bool = False) -> MixerTensors:
    """The tensors of a layer's delta-net, norms of the layer left out. ``wide_logarithms``: transformers has those of
    decays in a tensor of four dimensions."""

    def named(gguf: GgufFile, config: Mapping[str, Any], here: str, there: str) -> Iterator[NamedTensor]:
        sizes, hidden, prefix = sizes_of(config), config["hidden_size"], there + "self_attn."
        keys, values = sizes.key_heads * sizes.key_width, sizes.value_heads * sizes.value_width
        heads = sizes.value_heads
        rows = {"q": keys, "k": keys, "v": values}
        each = ((f"{here}attn_{short}.weight", f"{prefix}{short}_proj.weight", rows[short]) for short in rows)
        yield from projections(gguf, f"{here}attn_qkv.weight", each, (hidden,))
        for short, count in rows.items():
            source, name = f"{here}ssm_conv1d_{short}.weight", f"{prefix}{short}_conv1d.weight"
            yield NamedTensor.whole(source, name, (count, 1, sizes.taps))
        for stored, name, shape in (
            *_decays_and_gates(sizes, hidden, keys, values),
            ("ssm_beta.weight", "b_proj.weight", (heads, hidden)),
            ("ssm_dt.bias", "dt_bias", (keys,)),
            ("ssm_norm.weight", "o_norm.weight", (sizes.value_width,)),
            ("attn_output.weight", "o_proj.weight", (hidden, values)),
        ):
            yield NamedTensor.whole(here + stored, prefix + name, shape)
        logarithms = (1, 1, heads, 1) if wide_logarithms else (heads,)
        found = gguf.tensors.get(here + "ssm_a")
        flat = found is not None and found.shape[-1] != 1
        yield NamedTensor(here + "ssm_a", prefix + "A_log", logarithms, (heads,) if flat else (heads, 1))

    return named


def _decays_and_gates(
    sizes: DeltaSizes, hidden: int, keys: int, values: int
) -> Iterator[tuple[str, str, tuple[int, int]]]:
    for short, rows in (("f", keys), ("g", values)):
        if not sizes.rank:
            yield f"ssm_{short}_a.weight", f"{short}_proj.weight", (rows, hidden)
            continue
        yield f"ssm_{short}_a.weight", f"{short}_a_proj.weight", (sizes.rank, hidden)
        yield f"ssm_{short}_b.weight", f"{short}_b_proj.weight", (rows, sizes.rank)


def changes(config: Mapping[str, Any]) -> dict[str, Change]:
    """What undoes llama.cpp's storage, by the checkpoint's name of the tensor."""
    kinds = enumerate(config["layer_types"])
    logarithm = Change(log_of=1 if config.get("kda_safe_gate") else -1)
    return {f"model.layers.{layer}.self_attn.A_log": logarithm for layer, kind in kinds if kind == "linear_attention"}
