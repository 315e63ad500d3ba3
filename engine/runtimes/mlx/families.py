"""The families that the mlx runtime runs, and the settings of each that mlx-lm does not honour.

mlx-lm ignores settings that its classes do not know, and the answers are then silently wrong. The ignored settings are
listed here, so that such a model is refused by name. Pure data and functions, without mlx.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import ModelError
from engine.models.folders.sizes import own_settings
from engine.runtimes.protocol import Config

Check = Callable[[Config], str | None]
"""Function that returns what is wrong with a configuration, or None."""


@dataclass(frozen=True)
class MlxFamily:
    """One family: ``module`` of mlx_lm.models defines it in ``classes`` (the model and its arguments), ``backbone`` is
    the decoder without the head.

    ``rope_types`` are the rotary position types that the definition honours; ``checks`` find settings it ignores.
    ``windowed``: it honours sliding windows (otherwise the context is limited to the window). ``partial_rotary``: it
    honours ``partial_rotary_factor``. ``nested_rotary``: it reads ``rope_parameters`` as transformers 5 writes them.
    """

    module: str
    classes: tuple[str, str] = ("Model", "ModelArgs")
    backbone: str = "model"
    rope_types: frozenset[str] = frozenset({"default"})
    checks: tuple[Check, ...] = ()
    windowed: bool = False
    partial_rotary: bool = False
    nested_rotary: bool = False


def _must_be(key: str, *allowed: object) -> Check:
    def check(config: Config) -> str | None:
        value = config.get(key, allowed[0])
        return None if value in allowed else f"{key} {value!r}"

    return check


def _dbrx_feed_forward(config: Config) -> str | None:
    feed_forward = config.get("ffn_config") or {}
    activation = (feed_forward.get("ffn_act_fn") or {"name": "silu"}).get("name")
    if activation != "silu":
        return f"ffn_act_fn {activation!r}"
    norm = feed_forward.get("moe_normalize_expert_weights", 1.0)
    return None if norm == 1 else f"moe_normalize_expert_weights {norm!r}"


def _gpt_oss_activation(config: Config) -> str | None:
    return _must_be("swiglu_limit", 7.0)(config) or _must_be("swiglu_alpha", 1.702)(config)


def _regular_delta_nets(config: Config) -> str | None:
    """mlx-lm looks at the interval only."""
    kinds, interval = config.get("layer_types") or (), config.get("full_attention_interval") or 4
    expected = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(len(kinds))]
    return None if list(kinds) == expected else f"layer_types {kinds!r}"


def _dense_layers_first(config: Config) -> str | None:
    kinds = config.get("mlp_layer_types")
    regular = kinds is None or sorted(kinds) == list(kinds)  # "dense" comes before "sparse"
    return None if regular else f"mlp_layer_types {kinds!r}"


def _gemma_kinds(config: Config) -> str | None:
    """mlx-lm knows settings of its own for all layers with full attention, not for each of them."""
    own, known = own_settings(config) or {}, {"head_dim", "num_key_value_heads"}
    of_kind: dict[str, Config] = {"sliding_attention": {}}
    for layer, kind in enumerate(config.get("layer_types") or ()):
        settings = dict(own.get(layer, {}))
        if of_kind.setdefault(kind, settings) != settings or not known.issuperset(settings):
            return f"per_layer_config {settings!r} of layer {layer}"
    return None


def _gemma_rotary(config: Config) -> str | None:
    rope = config.get("rope_parameters") or {}
    for kind, known in (("full_attention", "proportional"), ("sliding_attention", "default")):
        found = rope.get(kind, {}).get("rope_type", known)
        if found != known:
            return f"rope_type {found!r} of {kind}"
    return None


_SILU = _must_be("hidden_act", "silu")
_SCALED = frozenset({"default", "linear", "llama3", "yarn"})
_QWEN3_5 = MlxFamily(
    "qwen3_5",
    classes=("TextModel", "TextModelArgs"),
    rope_types=_SCALED,
    checks=(_SILU, _regular_delta_nets),
    partial_rotary=True,
    nested_rotary=True,
)

FAMILIES: dict[str, MlxFamily] = {
    "llama": MlxFamily("llama", rope_types=_SCALED, checks=(_SILU,)),
    "mistral": MlxFamily("llama", rope_types=_SCALED, checks=(_SILU,)),
    "qwen2": MlxFamily("qwen2", rope_types=_SCALED, checks=(_SILU,)),
    "qwen3": MlxFamily("qwen3", rope_types=_SCALED, checks=(_SILU, _must_be("attention_bias", False))),
    "mixtral": MlxFamily("mixtral", checks=(_SILU,)),
    "qwen2_moe": MlxFamily(
        "qwen2_moe",
        checks=(
            _SILU,
            _must_be("norm_topk_prob", False),
            _must_be("decoder_sparse_step", 1),
            _must_be("mlp_only_layers", [], None),
            _must_be("qkv_bias", True),
            _must_be("tie_word_embeddings", False),
        ),
    ),
    "qwen3_moe": MlxFamily("qwen3_moe", checks=(_SILU, _must_be("attention_bias", False))),
    "olmoe": MlxFamily("olmoe", rope_types=_SCALED, checks=(_SILU, _must_be("clip_qkv", None))),
    "gpt_oss": MlxFamily(
        "gpt_oss",
        rope_types=_SCALED,
        checks=(_gpt_oss_activation, _must_be("attention_bias", True), _must_be("tie_word_embeddings", False)),
        windowed=True,
    ),
    "deepseek_v3": MlxFamily(
        "deepseek_v3",
        rope_types=_SCALED,
        checks=(
            _SILU,
            _must_be("rope_interleave", True),
            _must_be("tie_word_embeddings", False),
            _must_be("topk_method", "noaux_tc"),
            _must_be("scoring_func", "sigmoid"),
            _must_be("moe_layer_freq", 1),
        ),
    ),
    "granitemoe": MlxFamily("granitemoe", rope_types=_SCALED, checks=(_SILU,)),
    "phimoe": MlxFamily(
        "phimoe",
        checks=(
            _SILU,
            _must_be("attention_bias", True),
            _must_be("lm_head_bias", True),
            _must_be("tie_word_embeddings", False),
        ),
    ),
    # Of several groups of experts mlx-lm gives those left out the score 0, which may be higher than a chosen one's.
    "glm4_moe": MlxFamily("glm4_moe", checks=(_SILU, _must_be("n_group", 1)), partial_rotary=True),
    "glm4_moe_lite": MlxFamily(
        "glm4_moe_lite",
        rope_types=_SCALED,
        checks=(
            _SILU,
            _must_be("n_group", 1),
            _must_be("rope_interleave", True),
            _must_be("tie_word_embeddings", False),
            _must_be("topk_method", "noaux_tc"),
            _dense_layers_first,
        ),
    ),
    "qwen3_next": MlxFamily("qwen3_next", rope_types=_SCALED, checks=(_SILU, _regular_delta_nets), partial_rotary=True),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "lfm2_moe": MlxFamily("lfm2_moe", checks=(_must_be("tie_word_embeddings", True),), nested_rotary=True),
    "gemma4_text": MlxFamily(
        "gemma4_text",
        checks=(
            _must_be("hidden_activation", "gelu_pytorch_tanh"),
            _must_be("enable_moe_block", True),
            _must_be("num_kv_shared_layers", 0),
            _must_be("hidden_size_per_layer_input", 0),
            _must_be("attention_bias", False),
            _must_be("use_bidirectional_attention", None, "vision", False),
            _gemma_kinds,
            _gemma_rotary,
        ),
        windowed=True,
        nested_rotary=True,
    ),
    "dbrx": MlxFamily(
        "dbrx", backbone="transformer", checks=(_dbrx_feed_forward, _must_be("tie_word_embeddings", False))
    ),
}
"""The families that this runtime runs, by their name in transformers (``model_type``)."""

SUPPORTED: tuple[str, ...] = tuple(sorted(FAMILIES))


def family_of(config: Config) -> MlxFamily:
    """The family of ``config``. Raises ModelError if it is not one that mlx runs, naming it and those that are."""
    problem = _unsupported_family(config)
    if problem is not None:
        raise ModelError(f"{problem}; it runs {', '.join(SUPPORTED)} (the torch runtime may run it: --runtime torch)")
    return FAMILIES[config["model_type"]]


def check_settings(config: Config, family: MlxFamily) -> None:
    """Refuses a configuration with a setting that mlx-lm would ignore. Raises ModelError.

    ``config`` is complete: what transformers reads from config.json, defaults filled in.
    """
    problem = _ignored_setting(config, family)
    if problem is not None:
        raise ModelError(f"{problem}: choose the torch runtime (--runtime torch)")


def unsupported_config(config: Config) -> str | None:
    """Why mlx does not run a model with this config.json, in a few words; None if it shows no reason.

    ``config`` is the file's contents. A missing setting counts as the value that mlx-lm honours.
    """
    problem = _unsupported_family(config)
    return _ignored_setting(config, FAMILIES[config["model_type"]]) if problem is None else problem


def _unsupported_family(config: Config) -> str | None:
    name = config.get("model_type")
    known = isinstance(name, str) and name in FAMILIES
    return None if known else f"the mlx runtime does not run the family {name!r}"


def _ignored_setting(config: Config, family: MlxFamily) -> str | None:
    problems = [problem for check in family.checks if (problem := check(config))]
    # Files of transformers 4 have the older key, and the partial factor beside it.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in family.rope_types:
        problems.append(f"rope_type {rope_type!r}")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0 and not family.partial_rotary:
        problems.append(f"partial_rotary_factor {partial!r}")
    return f"mlx-lm does not honour this {config['model_type']} model's setting {problems[0]}" if problems else None
