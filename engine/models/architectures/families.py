"""The supported families of models, and the names and layouts of their routed experts on disk.

A table and pure functions over names, shapes and ``config.json``; nothing heavy is imported. To add a family, add an
entry here and the tiny model of it to the tests: the runtimes take everything else from transformers or mlx-lm.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from numpy.typing import NDArray

from engine.errors import ModelError, damaged, shown
from engine.models.architectures.config_values import whole_number

Part = Literal["gate", "up", "down", "gate_bias", "up_bias", "down_bias"]
PARTS: tuple[Part, ...] = get_args(Part)
"""All parts, in the order in which an expert's bytes are listed."""
Stacking = Literal["separate", "stacked", "rows"]
"""``separate``: one tensor per expert. ``stacked``: [experts, ...]. ``rows``: [experts * rows, columns]."""

ActivationKind = Literal["gated", "clamped"]
"""``gated``: act(gate) * up with the configuration's act. ``clamped``: gpt-oss's, with limits, (up + 1) * glu(gate)."""


@dataclass(frozen=True)
class ExpertTensor:
    """The layout of one kind of checkpoint tensor with routed experts.

    ``template`` is its name with ``{layer}`` and, if there is one tensor per expert, ``{expert}``. ``parts`` are its
    contents, one below the other, or alternating by row if ``interleaved``. ``transposed``: stored [in, out].
    """

    template: str
    parts: tuple[Part, ...]
    stacking: Stacking = "separate"
    transposed: bool = False
    interleaved: bool = False

    @property
    def strided(self) -> bool:
        """Whether an expert's matrices are not contiguous rows in the file."""
        return self.transposed or self.interleaved


Layout = tuple[ExpertTensor, ...]


@dataclass(frozen=True)
class ExpertLayers:
    """Sizes of the routed experts: ``gate`` and ``up`` are [ffn, hidden], ``down`` is [hidden, ffn]."""

    hidden: int
    ffn: int
    count: int
    """Experts per layer."""
    layers: tuple[int, ...]
    """Decoder layers with routed experts, ascending."""


@dataclass(frozen=True)
class Family:
    """One architecture, by its name in transformers. ``layouts`` is empty for a dense family."""

    model_type: str
    layers_prefix: str = "model.layers."
    layouts: tuple[Layout, ...] = ()
    activation: ActivationKind = "gated"
    config_section: str | None = None
    """Section of ``config.json`` that describes the language model; empty for the top level."""
    moe_layers: Callable[[Mapping[str, Any], int], list[int]] | None = None
    """Layers with experts, from the configuration and the number of layers; None: all."""
    expert_count_key: str = "num_local_experts"
    ffn_key: str = "intermediate_size"
    extra_layers: bool = False
    """Whether checkpoints may have further layers for multi-token prediction, which are not used."""
    unused: tuple[str, ...] = ()
    """Beginnings of the names of other tensors that checkpoints may have and that are not used."""
    full_attention_interval: int = 0
    """Default of the setting of this name: every so many layers one has full attention, the others have delta-nets.
    0: all have full attention."""
    alternating: bool = False
    """Whether every second layer, from the second one on, has linear attention if ``layer_types`` does not say."""

    @property
    def is_dense(self) -> bool:
        return not self.layouts


@dataclass(frozen=True)
class Match:
    """A checkpoint tensor recognised as holding routed experts; ``expert`` is None if it holds all of a layer."""

    tensor: ExpertTensor
    layer: int
    expert: int | None


# --- layouts ------------------------------------------------------------------------------------------------------


def _per_expert(prefix: str, gate: str, up: str, down: str) -> Layout:
    names: tuple[tuple[Part, str], ...] = (("gate", gate), ("up", up), ("down", down))
    return tuple(ExpertTensor(f"{prefix}.{{expert}}.{name}.weight", (part,)) for part, name in names)


def _fused(prefix: str, gate_up: str = "gate_up_proj", down: str = "down_proj", transposed: bool = False) -> Layout:
    return (
        ExpertTensor(f"{prefix}{gate_up}", ("gate", "up"), "stacked", transposed),
        ExpertTensor(f"{prefix}{down}", ("down",), "stacked", transposed),
    )


_LAYER = "model.layers.{layer}."
_MLP_EXPERTS = _LAYER + "mlp.experts"
_FUSED_MLP = _fused(_MLP_EXPERTS + ".")
"""Layouts as transformers holds most families in memory, and as some tools write them."""
_BY_NAME = _per_expert(_MLP_EXPERTS, "gate_proj", "up_proj", "down_proj")
_GGUF_MATRICES = tuple(ExpertTensor(f"{_LAYER}ffn_{part}_exps.weight", (part,), "stacked") for part in PARTS[:3])
_GGUF_BIASES = tuple(
    ExpertTensor(f"{_LAYER}ffn_{part.removesuffix('_bias')}_exps.bias", (part,), "stacked") for part in PARTS[3:]
)
_MLX_BIASES = tuple(
    ExpertTensor(f"{_MLP_EXPERTS}.{part.removesuffix('_bias')}_proj.bias", (part,), "stacked") for part in PARTS[3:]
)
_GGUF = (
    _GGUF_MATRICES,
    _fused(_LAYER, "ffn_gate_up_exps.weight", "ffn_down_exps.weight"),
)
"""Layouts of GGUF files (:mod:`engine.models.architectures.gguf_tensors`); old ones have the experts by name."""


def _mlx(prefix: str) -> Layout:
    return tuple(ExpertTensor(f"{prefix}.{part}_proj.weight", (part,), "stacked") for part in PARTS[:3])


_QWEN = (_BY_NAME, _FUSED_MLP, _mlx(_LAYER + "mlp.switch_mlp"), *_GGUF)
_MIXTRAL = (
    _per_expert(_LAYER + "block_sparse_moe.experts", "w1", "w3", "w2"),
    _per_expert(_MLP_EXPERTS, "w1", "w3", "w2"),
    _FUSED_MLP,
    _BY_NAME,
    _mlx(_LAYER + "block_sparse_moe.switch_mlp"),
    *_GGUF,
)
_GRANITE = (
    _fused(_LAYER + "block_sparse_moe.", "input_linear.weight", "output_linear.weight"),
    _fused(_LAYER + "block_sparse_moe.experts."),
    _mlx(_LAYER + "block_sparse_moe.switch_mlp"),
    *_GGUF,
)
_GPT_OSS = (
    (
        ExpertTensor(f"{_MLP_EXPERTS}.gate_up_proj", ("gate", "up"), "stacked", transposed=True, interleaved=True),
        ExpertTensor(f"{_MLP_EXPERTS}.down_proj", ("down",), "stacked", transposed=True),
        ExpertTensor(f"{_MLP_EXPERTS}.gate_up_proj_bias", ("gate_bias", "up_bias"), "stacked", interleaved=True),
        ExpertTensor(f"{_MLP_EXPERTS}.down_proj_bias", ("down_bias",), "stacked"),
    ),
    (
        ExpertTensor(f"{_MLP_EXPERTS}.gate_up_proj_blocks", ("gate", "up"), "stacked", interleaved=True),
        ExpertTensor(f"{_MLP_EXPERTS}.down_proj_blocks", ("down",), "stacked"),
        ExpertTensor(f"{_MLP_EXPERTS}.gate_up_proj_bias", ("gate_bias", "up_bias"), "stacked", interleaved=True),
        ExpertTensor(f"{_MLP_EXPERTS}.down_proj_bias", ("down_bias",), "stacked"),
    ),
    (*_mlx(_MLP_EXPERTS), *_MLX_BIASES),
    (*_GGUF_MATRICES, *_GGUF_BIASES),
)
_DBRX_EXPERTS = "transformer.blocks.{layer}.ffn.experts.mlp."
_DBRX = (
    (
        ExpertTensor(f"{_DBRX_EXPERTS}w1", ("gate",), "rows"),
        ExpertTensor(f"{_DBRX_EXPERTS}v1", ("up",), "rows"),
        ExpertTensor(f"{_DBRX_EXPERTS}w2", ("down",), "rows", transposed=True),
    ),
)
_LFM2 = (
    _per_expert(_LAYER + "feed_forward.experts", "w1", "w3", "w2"),
    _fused(_LAYER + "feed_forward.experts."),
    _mlx(_LAYER + "feed_forward.switch_mlp"),
    *_GGUF,
)
_LLAMA4_EXPERTS = _LAYER + "feed_forward.experts."
_AHEAD = ("mtp.",)
"""Beginning of the names of what predicts several tokens at once."""


# --- which layers have experts ------------------------------------------------------------------------------------


def _sparse_step(config: Mapping[str, Any], layers: int) -> list[int]:
    step = whole_number(config, "decoder_sparse_step", default=1)
    dense = frozenset(_layer_list(config, "mlp_only_layers") or ())
    return [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]


def _after_dense(config: Mapping[str, Any], layers: int) -> list[int]:
    return list(range(whole_number(config, "first_k_dense_replace", minimum=0), layers))


def _sparse_types(config: Mapping[str, Any], layers: int) -> list[int]:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return list(range(1, layers))
    return [layer for layer, kind in enumerate(kinds) if kind == "sparse"]


def _after_leading(config: Mapping[str, Any], layers: int) -> list[int]:
    return list(range(whole_number(config, "num_dense_layers", default=2, minimum=0), layers))


def _gemma_layers(config: Mapping[str, Any], layers: int) -> list[int]:
    if not config.get("enable_moe_block"):
        raise ModelError(
            "config.json describes a Gemma 4 model without experts, which is not supported; take Gemma-4-26B-A4B."
        )
    return list(range(layers))


def _llama4_layers(config: Mapping[str, Any], layers: int) -> list[int]:
    listed = _layer_list(config, "moe_layers")
    if listed is not None:
        return sorted(set(listed))
    step = whole_number(config, "interleave_moe_layer_step", default=1)
    return list(range(step - 1, layers, step))


_TABLE: tuple[Family, ...] = (
    Family("llama"),
    Family("mistral"),
    Family("qwen2"),
    Family("qwen3"),
    Family("mixtral", layouts=_MIXTRAL),
    Family(
        "qwen2_moe",
        layouts=_QWEN,
        moe_layers=_sparse_step,
        expert_count_key="num_experts",
        ffn_key="moe_intermediate_size",
    ),
    Family(
        "qwen3_moe",
        layouts=_QWEN,
        moe_layers=_sparse_step,
        expert_count_key="num_experts",
        ffn_key="moe_intermediate_size",
    ),
    Family("olmoe", layouts=_QWEN, expert_count_key="num_experts"),
    Family("gpt_oss", layouts=_GPT_OSS, activation="clamped"),
    Family(
        "deepseek_v3",
        layouts=_QWEN,
        moe_layers=_after_dense,
        expert_count_key="n_routed_experts",
        ffn_key="moe_intermediate_size",
        extra_layers=True,
    ),
    Family(
        "deepseek_v2",
        layouts=_QWEN,
        moe_layers=_after_dense,
        expert_count_key="n_routed_experts",
        ffn_key="moe_intermediate_size",
    ),
    Family(
        "glm4_moe_lite",
        layouts=_QWEN,
        moe_layers=_sparse_types,
        expert_count_key="n_routed_experts",
        ffn_key="moe_intermediate_size",
        extra_layers=True,
    ),
    Family("granitemoe", layouts=_GRANITE),
    Family("qwen3_5_text", unused=_AHEAD, full_attention_interval=4),
    Family(
        "qwen3_5_moe_text",
        layouts=_QWEN,
        expert_count_key="num_experts",
        ffn_key="moe_intermediate_size",
        unused=_AHEAD,
        full_attention_interval=4,
    ),
    Family(
        "qwen3_next",
        layouts=_QWEN,
        moe_layers=_sparse_step,
        expert_count_key="num_experts",
        ffn_key="moe_intermediate_size",
        unused=_AHEAD,
        full_attention_interval=4,
    ),
    Family(
        "lfm2_moe",
        layouts=_LFM2,
        moe_layers=_after_leading,
        expert_count_key="num_experts",
        ffn_key="moe_intermediate_size",
    ),
    Family(
        "gemma4_text",
        layouts=(_fused(_LAYER + "experts."), _mlx(_LAYER + "experts.switch_glu"), *_GGUF),
        moe_layers=_gemma_layers,
        expert_count_key="num_experts",
        ffn_key="moe_intermediate_size",
    ),
    Family("phimoe", layouts=_MIXTRAL),
    Family(
        "glm4_moe",
        layouts=_QWEN,
        moe_layers=_after_dense,
        expert_count_key="n_routed_experts",
        ffn_key="moe_intermediate_size",
        extra_layers=True,
    ),
    Family("minimax", layouts=_MIXTRAL, alternating=True),
    Family(
        "dbrx",
        layers_prefix="transformer.blocks.",
        layouts=_DBRX,
        expert_count_key="ffn_config.moe_num_experts",
        ffn_key="ffn_config.ffn_hidden_size",
    ),
    Family("llama4_text", layouts=(_fused(_LLAMA4_EXPERTS, transposed=True),), moe_layers=_llama4_layers),
    Family(
        "llama4",
        layers_prefix="language_model.model.layers.",
        layouts=(_fused("language_model." + _LLAMA4_EXPERTS, transposed=True),),
        config_section="text_config",
        moe_layers=_llama4_layers,
    ),
)

_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts; transformers has several, depending on its version."""

MOST_LAYERS = 10_000
_MOST_EXPERTS = 100_000
_EXPERTS_PER_TOKEN_KEYS = (
    "num_experts_per_tok",
    "experts_per_token",
    "num_selected_experts",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
_MOST_PAIRS = 1_000_000
"""Maximum (layer, expert) pairs, far above any model. A file with more is damaged, and would cost memory just to
count."""

FAMILIES: dict[str, Family] = {family.model_type: family for family in _TABLE}
SUPPORTED: tuple[str, ...] = tuple(FAMILIES)
"""Names (transformers' ``model_type``) of the families that run."""


# --- questions ----------------------------------------------------------------------------------------------------


def check_supported(config: Mapping[str, Any]) -> Family:
    """The family of ``config.json``. Raises ModelError naming the family if it is not supported."""
    name = config.get("model_type")
    if not isinstance(name, str) or not name:
        raise damaged("config.json names no model_type, so the model's family is unknown")
    family = FAMILIES.get(name)
    if family is None:
        raise ModelError(
            f"Models of the family {shown(ascii(name))} are not supported; supported are {', '.join(SUPPORTED)}."
        )
    return family


def language_config(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The part of ``config.json`` that describes the language model."""
    if family.config_section is None:
        return config
    section = config.get(family.config_section)
    if not isinstance(section, Mapping):
        raise damaged(f"config.json has no {family.config_section}, which a {family.model_type} model needs")
    return section


def layer_count(config: Mapping[str, Any], family: Family) -> int:
    """The number of decoder layers. Raises ModelError if ``config.json`` does not contain it."""
    section = language_config(config, family)
    return whole_number(section, "num_hidden_layers", "n_layers", maximum=MOST_LAYERS)


def layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of every layer of the language model that ``config`` describes: as ``layer_types`` says, or as
    transformers assumes without it.

    Raises ModelError if a setting that this needs is missing or impossible.
    """
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return kinds
    if kinds is not None:
        raise damaged(f"config.json gives {shown(kinds)} for layer_types, which must name the kind of each layer")
    layers = whole_number(config, "num_hidden_layers", "n_layers", maximum=MOST_LAYERS)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and family.alternating:
        return ["linear_attention" if layer % 2 else "full_attention" for layer in range(layers)]
    if family is None or not family.full_attention_interval:
        return ["full_attention"] * layers
    interval = whole_number(config, "full_attention_interval", default=family.full_attention_interval)
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]


def expert_shape(config: Mapping[str, Any], family: Family) -> ExpertLayers | None:
    """Sizes of the routed experts as ``config.json`` gives them; None for a dense family.

    Raises ModelError naming the setting that is missing or is not a positive whole number, or if a token is sent to
    more experts than there are, or than their groups hold.
    """
    if family.is_dense:
        return None
    section = language_config(config, family)
    layers = layer_count(config, family)
    moe_layers = family.moe_layers(section, layers) if family.moe_layers else list(range(layers))
    if any(not 0 <= layer < layers for layer in moe_layers):
        raise damaged(f"config.json puts experts into the layers {shown(moe_layers)} of {layers}")
    count = whole_number(section, family.expert_count_key, *_COUNT_KEYS, maximum=_MOST_EXPERTS)
    if count * len(moe_layers) > _MOST_PAIRS:
        raise damaged(
            f"config.json asks for {count} experts in each of {len(moe_layers)} layers, over {_MOST_PAIRS} in all"
        )
    per_token = stated_experts_per_token(section)
    if per_token is not None and per_token > count:
        raise damaged(f"config.json sends every token to {per_token} experts, but there are {count}")
    _check_groups(section, count, per_token or 1)
    return ExpertLayers(
        hidden=whole_number(section, "hidden_size", "d_model"),
        ffn=whole_number(section, family.ffn_key),
        count=count,
        layers=tuple(moe_layers),
    )


def _check_groups(section: Mapping[str, Any], count: int, per_token: int) -> None:
    """Raises ModelError if the groups out of which experts are chosen, by the best two of each, do not hold them."""
    groups, used = section.get("n_group"), section.get("topk_group")
    if type(groups) is not int or type(used) is not int:
        return
    if not 1 <= used <= groups or count % groups or count < 2 * groups or used * (count // groups) < per_token:
        raise damaged(
            f"config.json chooses {per_token} experts out of {used} of {groups} groups of {count} experts, which "
            "do not fit together"
        )


def stated_experts_per_token(config: Mapping[str, Any]) -> int | None:
    """How many experts each token is sent to; None where ``config.json`` does not say it."""
    for section in (config, config.get("ffn_config")):
        if isinstance(section, Mapping):
            for key in _EXPERTS_PER_TOKEN_KEYS:
                value = section.get(key)
                if isinstance(value, int) and value > 0:
                    return value
    return None


def match_tensor(family: Family, name: str) -> Match | None:
    """The routed experts in the checkpoint tensor ``name``; None if it belongs to the trunk."""
    for pattern, tensor in _patterns(family.model_type):
        found = pattern.fullmatch(name)
        if found:
            groups = found.groupdict()
            expert = groups.get("expert")
            return Match(tensor, int(groups["layer"]), None if expert is None else int(expert))
    return None


def layer_of(family: Family, name: str) -> int | None:
    """The decoder layer a checkpoint tensor belongs to; None if it is outside the layers."""
    if not name.startswith(family.layers_prefix):
        return None
    digits = name[len(family.layers_prefix) :].partition(".")[0]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 7 else None


def part_shape(part: Part, shape: ExpertLayers) -> tuple[int, ...]:
    """Shape of one expert's ``part``: matrices [out, in], biases [out]."""
    if part in ("gate", "up"):
        return (shape.ffn, shape.hidden)
    if part == "down":
        return (shape.hidden, shape.ffn)
    return (shape.hidden,) if part == "down_bias" else (shape.ffn,)


def stored_shape(tensor: ExpertTensor, shape: ExpertLayers) -> tuple[int, ...]:
    """Shape the checkpoint tensor must have."""
    rows, *columns = part_shape(tensor.parts[0], shape)
    one = (rows * len(tensor.parts), *columns)
    if tensor.transposed:
        one = one[::-1]
    if tensor.stacking == "stacked":
        return (shape.count, *one)
    if tensor.stacking == "rows":
        return (shape.count * one[0], *one[1:])
    return one


def part_views(
    tensor: ExpertTensor, words: NDArray[Any], expert: int, shape: ExpertLayers
) -> list[tuple[Part, NDArray[Any]]]:
    """The parts of ``expert`` in ``words`` (of ``stored_shape``), as views in the orientation of :func:`part_shape`."""
    if tensor.stacking == "stacked":
        words = words[expert]
    elif tensor.stacking == "rows":
        rows = words.shape[0] // shape.count
        words = words[expert * rows : (expert + 1) * rows]
    if tensor.transposed:
        words = words.T
    count = len(tensor.parts)
    if tensor.interleaved:
        return [(part, words[index::count]) for index, part in enumerate(tensor.parts)]
    rows = words.shape[0] // count
    return [(part, words[index * rows : (index + 1) * rows]) for index, part in enumerate(tensor.parts)]


@functools.cache
def _patterns(model_type: str) -> tuple[tuple[re.Pattern[str], ExpertTensor], ...]:
    """A regular expression for every tensor of every layout of a family."""
    patterns = []
    for tensor in (tensor for layout in FAMILIES[model_type].layouts for tensor in layout):
        text = re.escape(tensor.template)
        text = text.replace(r"\{layer\}", r"(?P<layer>0|[1-9]\d{0,5})")
        patterns.append((re.compile(text.replace(r"\{expert\}", r"(?P<expert>0|[1-9]\d{0,5})"), re.ASCII), tensor))
    return tuple(patterns)


def _layer_list(config: Mapping[str, Any], key: str) -> list[int] | None:
    """The list of layers at ``key``, or None. Raises ModelError if it is something else."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise damaged(f"config.json gives {shown(value)} for {key}, which must be a list of layers")
    return value
