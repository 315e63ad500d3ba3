"""The supported families of models, and what their records say of a configuration and of names and layouts on disk.

Pure functions over names, shapes and ``config.json``; nothing heavy is imported. To add a family, add a file with its
record to :mod:`engine.models.architectures.records`, and the tiny model of it to the tests.
"""

from __future__ import annotations

import functools
import importlib.util
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from engine.errors import ModelError, damaged, shown
from engine.models.architectures import records
from engine.models.architectures.config_values import MOST_LAYERS, own_settings, whole_number
from engine.models.architectures.record import ExpertTensor, Family, Layout, MoeRecord, Part, switched


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
class Match:
    """A checkpoint tensor recognised as holding routed experts; ``expert`` is None if it holds all of a layer."""

    tensor: ExpertTensor
    layer: int
    expert: int | None


def _recorded() -> dict[str, Family]:
    """The families of all files of records, in the order of the files' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(records.__path__))
    modules = (importlib.import_module(f"{records.__name__}.{name}") for name in names)
    return {family.model_type: family for module in modules for family in module.FAMILIES}


FAMILIES: dict[str, Family] = _recorded()
SUPPORTED: tuple[str, ...] = tuple(FAMILIES)
"""Names (transformers' ``model_type``) of the families with a record."""

COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts; transformers has several, depending on its version."""

_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
"""Settings of a family without a record that its sizes are counted by."""
_OTHER_NAMES = {
    "n_layer": "num_hidden_layers", "n_layers": "num_hidden_layers", "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_heads": "num_attention_heads", "num_heads": "num_attention_heads",
    "n_embd": "hidden_size", "d_model": "hidden_size", "n_positions": "max_position_embeddings",
}  # fmt: skip
"""Names that older families have for these settings, and the usual ones."""
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
"""Endings of the names of transformers' classes that predict the next token."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,60}")
_MOST_EXPERTS = 100_000
_EXPERTS_PER_TOKEN_KEYS = (
    "num_experts_per_tok",
    "experts_per_token",
    "num_selected_experts",
    "moe_top_k",
    "moe_k",
    "moe_topk",
    "top_k_experts",
)
_MOST_PAIRS = 1_000_000
"""Maximum (layer, expert) pairs, far above any model. A file with more is damaged, and would cost memory just to
count."""


def family_named(model_type: str) -> Family | None:
    """The family of this ``model_type``, or of the language model of a whole of this ``model_type``."""
    return FAMILIES.get(model_type) or next(
        (family for family in FAMILIES.values() if family.whole == model_type), None
    )


# --- questions ----------------------------------------------------------------------------------------------------


def check_supported(config: Mapping[str, Any]) -> Family:
    """The family of ``config.json``. One without a record, which transformers defines, has no parts that this program
    knows: the torch runtime alone may run it. Raises ModelError naming the family if it is not supported.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or not name:
        raise damaged("config.json names no model_type, so the model's family is unknown")
    family = FAMILIES.get(name)
    if family is not None:
        return family
    stated = config.get("architectures")
    written = any(str(each).endswith(_LANGUAGE_MODELS) for each in stated) if isinstance(stated, list) else False
    if "text_config" in config or not written or not _is_defined(name):
        raise ModelError(
            f"Models of the family {shown(ascii(name))} are not supported; supported are {', '.join(SUPPORTED)}, and "
            "others that transformers defines."
        )
    missing = next((key for key in _NEEDED if completed(config).get(key) is None), None)
    if missing is not None:
        raise ModelError(
            f"Models of the family {shown(ascii(name))} are not supported: config.json has no {missing}, by which "
            "their memory would be counted."
        )
    return Family(name, native=False)


@functools.cache
def _is_defined(model_type: str) -> bool:
    """Whether the installed transformers defines a language model of this name. Imports nothing, as that takes
    seconds."""
    library = importlib.util.find_spec("transformers")
    if library is None or not library.submodule_search_locations or not _NAME.fullmatch(model_type):
        return False
    models = Path(library.submodule_search_locations[0]) / "models"
    try:
        text = (models / model_type / f"modeling_{model_type}.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(f"{ending}(" in text for ending in _LANGUAGE_MODELS)


def renamed(config: dict[str, Any]) -> dict[str, Any]:
    """``config``, of a language model, with settings of older files as transformers names them now."""
    family = FAMILIES.get(str(config.get("model_type")))
    return config if family is None else {**config, **family.renamed(config)}


_MAY_BE_NULL = frozenset(
    [
        *("sliding_window", "num_key_value_heads", "head_dim", "hidden_size_per_layer_input"),
        *("attn_logit_softcapping", "final_logit_softcapping", "attention_value_scale"),
    ]
)
"""Settings of which a null does not stand for the family's default: no window, as many as heads, hidden / heads, no
embeddings of layers, no limits, no factor."""


def completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``config``, of a language model, with what the record of its family says of settings that it leaves out."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        others = {usual: config[own] for own, usual in _OTHER_NAMES.items() if own in config}
        return {**others, **config} if others else config
    missing = {
        key: value
        for key, value in family.defaults.items()
        if key not in config or (config[key] is None and key not in _MAY_BE_NULL)
    }
    return {**config, **missing} if missing else config


def layer_count(config: Mapping[str, Any], family: Family) -> int:
    """The number of decoder layers. Raises ModelError if ``config.json`` does not contain it."""
    return whole_number(completed(config), "num_hidden_layers", "n_layers", maximum=MOST_LAYERS)


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
    if family is None:
        return ["full_attention"] * layers
    config = completed(config)
    return [family.decoder.layer_kind(config, layer) for layer in range(layers)]


def layer_config(config: Mapping[str, Any], layer: int, kind: str) -> Mapping[str, Any]:
    """``config`` with what differs in ``layer``, whose kind is ``kind``: transformers names it by layer, the published
    files by kind."""
    own = own_settings(config)
    if own is not None:
        return {**config, **own.get(layer, {})}
    family = FAMILIES.get(str(config.get("model_type")))
    return config if family is None else {**config, **family.decoder.kind_settings(config, kind)}


def expert_shape(config: Mapping[str, Any], family: Family) -> ExpertLayers | None:
    """Sizes of the routed experts as ``config.json`` gives them; None for a dense model.

    Raises ModelError naming the setting that is missing or is not a positive whole number, or if a token is sent to
    more experts than there are, or than their groups hold.
    """
    section = completed(config)
    if family.moe is None or not switched(family.moe.setting or True, section):
        return None
    layers = layer_count(config, family)
    moe_layers = family.moe.layers(section, layers)
    if any(not 0 <= layer < layers for layer in moe_layers):
        raise damaged(f"config.json puts experts into the layers {shown(moe_layers)} of {layers}")
    count = whole_number(section, family.moe.count_key, *COUNT_KEYS, maximum=_MOST_EXPERTS)
    if count * len(moe_layers) > _MOST_PAIRS:
        raise damaged(
            f"config.json asks for {count} experts in each of {len(moe_layers)} layers, over {_MOST_PAIRS} in all"
        )
    per_token = stated_experts_per_token(section)
    if per_token is None:
        raise damaged(f"config.json does not say {family.moe.per_token_key}")
    if per_token > count:
        raise damaged(f"config.json sends every token to {per_token} experts, but there are {count}")
    _check_groups(section, count, per_token)
    latent = family.moe.latent_key
    return ExpertLayers(
        hidden=whole_number(section, *([latent] if latent else ()), "hidden_size", "d_model"),
        ffn=whole_number(section, family.moe.ffn_key),
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


def shared_width(config: Mapping[str, Any], moe: MoeRecord) -> int:
    """Width of the shared expert; 0 without one, or where it is the layer's network.

    Raises ModelError naming the setting that is missing.
    """
    if moe.shared in ("none", "network"):
        return 0
    return whole_number(config, "shared_expert_intermediate_size") if moe.shared == "gated" else moe.shared_ffn(config)


def stated_experts_per_token(config: Mapping[str, Any]) -> int | None:
    """How many experts each token is sent to; None where ``config.json`` does not say it."""
    for section in (config, config.get("ffn_config")):
        if isinstance(section, Mapping):
            for key in _EXPERTS_PER_TOKEN_KEYS:
                value = section.get(key)
                if isinstance(value, list) and value == value[:1] * len(value):
                    value = value[0] if value else None  # for each layer
                if isinstance(value, int) and value > 0:
                    return value
    return None


def match_tensor(family: Family, name: str) -> Match | None:
    """The routed experts in the checkpoint tensor ``name``; None if it belongs to the trunk."""
    for pattern, tensor in _patterns(family.model_type) if family.layouts else ():
        found = pattern.fullmatch(name)
        if found:
            groups = found.groupdict()
            expert = groups.get("expert")
            return Match(tensor, int(groups["layer"]), None if expert is None else int(expert))
    return None


def as_shaped(family: Family, tensor: ExpertTensor, shape: ExpertLayers, stored: tuple[int, ...]) -> ExpertTensor:
    """The tensor named as ``tensor`` in the layouts of ``family`` whose shape in checkpoints is ``stored``; ``tensor``
    if there is none. Under the same names some families are saved transposed or not (qwen3_vl_moe)."""
    alike = [each for layout in family.layouts for each in layout if each.template == tensor.template]
    return next((each for each in alike if stored_shape(each, shape) == stored), tensor)


def key_layers(config: Mapping[str, Any]) -> list[int]:
    """For each layer of the language model that ``config`` describes the one whose keys and values it attends to.

    Raises ModelError if a setting that this needs is missing or impossible.
    """
    layers = whole_number(config, "num_hidden_layers", "n_layers", maximum=MOST_LAYERS)
    family = FAMILIES.get(str(config.get("model_type")))
    return list(range(layers)) if family is None else family.decoder.keys_of(completed(config), layers)


def unused_tensors(config: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Beginnings of the names of tensors that checkpoints of the model may have and that are not used."""
    section = completed(config)
    sources = family.decoder.keys_of(section, layer_count(config, family))
    return family.unused + tuple(
        f"{family.layers_prefix}{layer}.self_attn.{name}"
        for layer, source in enumerate(sources)
        if layer != source
        for name in ("k_proj.", "v_proj.", "k_norm.")
    )


def is_table(family: Family | None, name: str) -> bool:
    """Whether few rows of the checkpoint tensor ``name`` are read, each where it lies."""
    return family is not None and any(part in name for part in family.tables)


def prepared_layout(family: Family, has_bias: bool) -> Layout:
    """The layout in which prepared folders hold the experts of ``family``: every tensor has those of a whole layer,
    ``gate`` and ``up`` are one, and no matrix is transposed or interleaved."""
    first = ("gate",) if family.activation == "squared" else ("gate", "up")
    for layout in family.layouts:
        fused = layout[0].parts == first and all(tensor.stacking == "stacked" for tensor in layout)
        if fused and not any(tensor.strided for tensor in layout) and (len(layout) > 2) == has_bias:
            return layout
    raise damaged(f"The experts of a {family.model_type} model have parts that its family has not")


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
    single = (rows * len(tensor.parts), *columns)
    if tensor.transposed:
        single = single[::-1]
    if tensor.stacking == "stacked":
        return (shape.count, *single)
    if tensor.stacking == "rows":
        return (shape.count * single[0], *single[1:])
    return single


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
