"""Rules by which settings say how the layers of a model differ: in experts, kinds, windows, rotations and keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import ModelError, damaged, shown
from engine.models.architectures.config_values import positive_number, setting, whole_number
from engine.models.architectures.record import Config, Limit, QueryGrowth

# --- which layers have experts ----------------------------------------------------------------------------------------


def every_sparse_step(config: Config, layers: int) -> list[int]:
    """Every ``decoder_sparse_step``-th layer but those of ``mlp_only_layers``."""
    step = whole_number(config, "decoder_sparse_step")
    dense = frozenset(layer_list(config, "mlp_only_layers") or ())
    return [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]


def after_dense(setting: str) -> Callable[[Config, int], list[int]]:
    """The layers after the first ones, whose number ``setting`` is."""

    def rule(config: Config, layers: int) -> list[int]:
        return list(range(whole_number(config, setting, minimum=0), layers))

    return rule


def sparse_layers(first: Callable[[Config], int]) -> Callable[[Config, int], list[int]]:
    """The layers that ``mlp_layer_types`` says are sparse, or else those after the ``first`` ones (exaone_moe)."""

    def rule(config: Config, layers: int) -> list[int]:
        named = config.get("mlp_layer_types")
        if named is None:
            return list(range(first(config), layers))
        kinds = check_kinds(named, layers, ("dense", "sparse"), "mlp_layer_types")
        return [layer for layer, kind in enumerate(kinds) if kind == "sparse"]

    return rule


def layer_list(config: Config, key: str) -> list[int] | None:
    """The list of layers at ``key``, or None. Dots lead into sections. Raises ModelError if it is something else."""
    value = setting(config, key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise damaged(f"config.json gives {shown(value)} for {key}, which must be a list of layers")
    return value


# --- the kind of each layer -------------------------------------------------------------------------------------------


KINDS = ("sliding_attention", "full_attention")
"""Kinds of layers with attention."""
NETWORKS = ("mlp", "moe")
"""Kinds of layers that are a feed-forward network, or experts, alone (nemotron_h)."""


def full_at_intervals(config: Config, layer: int) -> str:
    """Every ``full_attention_interval``-th layer has full attention, the others are linear (qwen3_5)."""
    interval = whole_number(config, "full_attention_interval")
    return "linear_attention" if (layer + 1) % interval else "full_attention"


def full_every(setting: str, interval: int) -> Callable[[Config, int], str]:
    """Every so-many-th layer sees everything, as ``setting`` or else ``interval`` says, the others a window."""

    def rule(config: Config, layer: int) -> str:
        every = whole_number(config, setting, default=interval) if setting else interval
        return "sliding_attention" if (layer + 1) % every else "full_attention"

    return rule


def kinds_by(rule: Callable[[Config, int], str]) -> Callable[[Config, int], list[str]]:
    """The kinds of attention that ``layer_types`` gives, or else ``rule``."""

    def kinds(config: Config, layers: int) -> list[str]:
        named = config.get("layer_types")
        return check_kinds([rule(config, i) for i in range(layers)] if named is None else named, layers, KINDS)

    return kinds


def named_kinds(config: Config, layers: int) -> list[str]:
    """The kinds of attention that ``layer_types`` gives (gemma4). Raises ModelError if it gives none."""
    return check_kinds(config.get("layer_types"), layers, KINDS)


def check_kinds(kinds: Any, layers: int, allowed: tuple[str, ...], setting: str = "layer_types") -> list[str]:
    """``kinds``, as ``setting`` gives them. Raises ModelError if that is no list of so many ``allowed`` kinds of
    layers."""
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise damaged(
            f"config.json gives {shown(kinds)} for {setting}, which must name one kind for each of the {layers} layers"
        )
    unknown = next((kind for kind in kinds if kind not in allowed), None)
    if unknown is not None:
        raise damaged(f"config.json names the unknown kind of layer {shown(unknown)}")
    return kinds


# --- windows ----------------------------------------------------------------------------------------------------------


def one_window(config: Config, layers: int) -> list[int]:
    """Every layer has the window of the configuration (mistral, mixtral)."""
    return [_window(config.get("sliding_window"))] * layers


def switched_window(config: Config, layers: int) -> list[int]:
    """Every layer, if ``use_sliding_window`` (qwen3_moe)."""
    return [_window(config.get("sliding_window")) if config.get("use_sliding_window") else 0] * layers


def late_windows(switch: str = "") -> Callable[[Config, int], list[int]]:
    """Layers from ``max_window_layers`` on, or as ``layer_types`` says, if there is a size and the setting ``switch``,
    where it is named, is true."""

    def rule(config: Config, layers: int) -> list[int]:
        used = config.get("sliding_window") is not None and (not switch or bool(config.get(switch)))
        first = config["max_window_layers"]
        return by_type(config, [used and layer >= first for layer in range(layers)], used)

    return rule


def early_even_windows(config: Config, layers: int) -> list[int]:
    """Even layers before ``max_window_layers``, if ``use_sliding_window`` (qwen2_moe)."""
    used, last = bool(config.get("use_sliding_window")), config["max_window_layers"]
    return by_type(config, [used and layer % 2 == 0 and layer < last for layer in range(layers)], used)


def even_windows(config: Config, layers: int) -> list[int]:
    """Even layers, or as ``layer_types`` says (gpt_oss)."""
    used = config.get("sliding_window") is not None
    return by_type(config, [layer % 2 == 0 for layer in range(layers)], used)


def named_windows(config: Config, layers: int) -> list[int]:
    """Layers with a sliding window by ``layer_types`` (gemma4)."""
    return by_type(config, [False] * layers, True)


def kind_windows(kinds: Callable[[Config, int], list[str]]) -> Callable[[Config, int], list[int]]:
    """Layers that are of the kind with a sliding window by the rule ``kinds``, if there is a size for it."""

    def rule(config: Config, layers: int) -> list[int]:
        window = _window(config.get("sliding_window"))
        return [window if kind == "sliding_attention" else 0 for kind in kinds(config, layers)]

    return rule


def by_type(config: Config, default: list[bool], used: bool) -> list[int]:
    """The window of the layers that ``layer_types``, or else ``default``, says slide. ``used``: there may be any."""
    kinds = config.get("layer_types")
    if kinds is not None:
        check_kinds(kinds, len(default), ("full_attention", "sliding_attention"))
        default = [kind == "sliding_attention" for kind in kinds]
    if any(default) and not used:
        raise damaged("config.json asks for sliding windows and gives no size for them")
    return [_window(config.get("sliding_window")) if slides else 0 for slides in default]


def _window(value: Any) -> int:
    if value is None or value == 0:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelError(f"config.json gives {shown(value)} for sliding_window, which must be a number of tokens.")
    return value


UNROTATED = "unrotated"
"""The kind of heads that are not rotated."""


def rotated_kinds(config: Config, layers: int) -> list[str]:
    """Kinds of heads by ``no_rope_layers``, which is 1 for layers that rotate them, or all but every
    ``no_rope_layer_interval``-th. Raises ModelError if it is not of so many layers."""
    rotated = config.get("no_rope_layers")
    if rotated is None or rotated == []:
        every = whole_number(config, "no_rope_layer_interval")
        rotated = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers:
        raise damaged(f"config.json gives {shown(rotated)} for no_rope_layers, which must be one for each of {layers}")
    return ["full_attention" if one else UNROTATED for one in rotated]


# --- rotary settings of each kind -------------------------------------------------------------------------------------


def rope_by_kind(
    full: Config, sliding: Config, older: Mapping[str, str] | None = None
) -> Callable[[Config, str], dict[str, Any]]:
    """Rotary settings of layers of a kind, which ``rope_parameters`` has by kind. transformers assumes ``full`` and
    ``sliding``. ``older``: the names of the bases at the top level of files of transformers 4, where only layers with
    full attention are scaled; None: there are no such files.

    Raises ModelError if they are no table.
    """

    def rule(config: Config, kind: str) -> dict[str, Any]:
        usual = full if kind == "full_attention" else sliding
        own = (config.get("rope_parameters") or {}).get(kind)
        if own is None:
            own = {**usual, "rope_theta": None}
        if not isinstance(own, Mapping):
            raise damaged(f"config.json gives {shown(own)} for the rotary embeddings of layers with {kind}")
        rope = dict(own)
        if older and kind == "full_attention":
            rope |= config.get("rope_scaling") or {}
        if rope.get("rope_theta") is None:
            rope["rope_theta"] = (older and config.get(older[kind])) or usual["rope_theta"]
        return rope

    return rule


def growing_queries(default: Config) -> Callable[[Config], QueryGrowth | None]:
    """How queries grow with their positions, by the rotary settings, which are ``default`` if there are none
    (ministral3)."""

    def rule(config: Config) -> QueryGrowth | None:
        rope = config.get("rope_parameters") or default
        by = rope.get("llama_4_scaling_beta")
        return QueryGrowth(by, positive_number(rope, "original_max_position_embeddings")) if by else None

    return rule


# --- limits within networks -------------------------------------------------------------------------------------------


def listed_limits(key: str) -> Limit:
    """The limit that the list at ``key`` has for a layer; none where it is null or 0, or there is no list (step3p5).

    Raises ModelError if it ends before the layer, or has something else.
    """

    def rule(config: Config, layer: int) -> float:
        limits = config.get(key)
        if limits is None:
            return 0.0
        limit = limits[layer] if isinstance(limits, list) and layer < len(limits) else math.nan
        if limit is not None and not (type(limit) in (int, float) and 0 <= limit < math.inf):
            raise damaged(f"config.json gives {shown(limits)} for {key}, which must be a limit for each layer")
        return float(limit or 0)

    return rule


# --- layers that attend to another one's keys -------------------------------------------------------------------------


def shared_keys(config: Config, layers: int) -> list[int]:
    """Each of the last ``num_kv_shared_layers`` layers has the keys of the last layer of its kind before them (gemma4).

    Raises ModelError if there is none.
    """
    shared = whole_number(config, "num_kv_shared_layers", minimum=0)
    if not shared:
        return list(range(layers))
    kinds, first = named_kinds(config, layers), layers - shared
    last = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    if any(kind not in last for kind in kinds):
        raise damaged(
            f"config.json lets {shared} of {layers} layers share keys of those before them, which are not of all kinds"
        )
    return [*range(first), *(last[kind] for kind in kinds[first:])]
