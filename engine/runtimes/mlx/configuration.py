"""Translation of a model's config.json to the form that mlx-lm's classes read.

transformers 5 writes ``rope_theta`` and the rotary scaling inside ``rope_parameters`` and renames some keys. mlx-lm
reads the older names at the top level and falls back to its own defaults if they are missing. The defaults of the two
differ (``tie_word_embeddings`` of llama). The configuration is therefore completed by transformers first, and then
translated.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError
from engine.models.architectures.config_values import without_implementations
from engine.models.architectures.record import MlxRecord
from engine.runtimes.mlx.families import FAMILIES, rope_of_kinds
from engine.runtimes.protocol import Config


def complete_config(folder: Path, config: Config) -> Config:
    """``config`` with transformers' defaults for what it leaves out, rotary settings under ``rope_parameters``.

    Raises ModelError if transformers finds a value of the wrong type.
    """
    from transformers import CONFIG_MAPPING

    try:
        library = CONFIG_MAPPING[config["model_type"]]
        # JSON has no infinity, which transformers therefore writes as {"__float__": "Infinity"}.
        given = library._decode_special_floats(without_implementations(config))
        standard = library.from_dict(given).to_dict()
    except Exception as error:
        raise ModelError(f"{folder / 'config.json'} has a setting that cannot be used: {_first_line(error)}") from error
    return {**without_implementations(config), **standard}


def translate_config(config: Config) -> Config:
    """The configuration as mlx-lm's ``ModelArgs`` of the family read it; ``config`` is complete.

    Pure. Unknown keys are kept: mlx-lm ignores them.
    """
    # A copy of all of it: mlx-lm changes the rotary settings that it is given.
    translated = copy.deepcopy(config)
    family = FAMILIES[config["model_type"]]
    rope = dict(next(iter(rope_of_kinds(config).values())))
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    rope_type = rope.get("rope_type", "default")
    if theta is not None:
        translated["rope_theta"] = theta
    if "partial_rotary_factor" in rope:
        translated["partial_rotary_factor"] = rope["partial_rotary_factor"]
    translated["rope_scaling"] = None if rope_type == "default" else {**rope, "type": rope_type}
    # qwen3 reads rope_parameters by itself, and would take its type from there.
    if not family.nested_rotary:
        translated.pop("rope_parameters", None)
    if "num_local_experts" in config:
        translated.setdefault("num_experts", config["num_local_experts"])
    if config.get("head_dim") is None and config.get("hidden_size"):
        translated["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    translated |= copy.deepcopy(family.translate(config))
    return translated


@dataclass(frozen=True)
class Context:
    """How far back a model sees: ``limit`` tokens in all; ``window`` of them in every layer that the definition takes
    for full attention (None: all). ``notice`` says if the limit had to be lowered."""

    limit: int
    window: int | None = None
    notice: str | None = None


def context_of(config: Config, family: MlxRecord) -> Context:
    """The context of a model; ``config`` is complete.

    mlx-lm's definitions of most families attend to everything. A window that is the same in all layers is kept by our
    cache; where only some layers slide, the context ends with the window, within which both are the same.
    """
    limit = int(config.get("max_position_embeddings") or config.get("max_seq_len") or 2048)
    window = int(config.get("sliding_window") or 0)
    layer_types = set(config.get("layer_types") or ["sliding_attention"])
    slides = window > 0 and config.get("use_sliding_window", True) and "sliding_attention" in layer_types
    if family.windowed or not slides or window >= limit:
        return Context(limit)
    if layer_types == {"sliding_attention"}:
        return Context(limit, window)
    notice = f"context limited to {window} of {limit} tokens: mlx-lm has no sliding window for {config['model_type']}"
    return Context(window, notice=notice)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
