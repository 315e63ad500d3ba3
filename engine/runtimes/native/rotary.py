"""Rotary position embeddings: the inverse frequencies of the scalings that run here, as transformers computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import damaged, shown
from engine.models.architectures.config_values import positive_number

TYPES = ("default", "linear", "llama3", "yarn")
STRETCHED = "dynamic"
"""The type of a base that is stretched, where its settings have an ``alpha``."""

_WITH_ORIGINAL_LENGTH = ("llama3", "yarn")


@dataclass(frozen=True)
class Rotary:
    """Inverse frequencies [width / 2], float32, by which positions are multiplied to get angles. Cosine and sine are
    scaled by ``factor``."""

    inverse_frequencies: NDArray[np.float32]
    factor: float


def rope_settings(config: Mapping[str, Any], default_base: float, default: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of ``config.json`` in one table, whichever of transformers' forms it uses; ``default`` if it
    has none.

    ``rope_type`` and ``rope_theta`` are always present.
    """
    settings = dict(config.get("rope_scaling") or config.get("rope_parameters") or default)
    base = config.get("rope_theta")
    settings.setdefault("rope_theta", default_base if base is None else base)
    settings.setdefault("rope_type", settings.get("type", "default"))
    partial = config.get("partial_rotary_factor")
    if partial is None and config.get("rotary_dim") and config.get("head_dim"):
        partial = config["rotary_dim"] / config["head_dim"]
    if partial is not None:
        settings.setdefault("partial_rotary_factor", partial)
    if settings["rope_type"] in _WITH_ORIGINAL_LENGTH:
        original = config.get("original_max_position_embeddings")
        if original is not None:
            settings["original_max_position_embeddings"] = original
        else:
            settings.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return settings


def unsupported_reason(settings: Mapping[str, Any], partial: bool = False, stretched: bool = False) -> str | None:
    """Why these rotary settings are not supported, in a few words; None if they are.

    ``partial``: a part of each head may be rotated. ``stretched``: the base may be stretched.
    """
    kind = settings["rope_type"]
    if kind not in TYPES and not (stretched and kind == STRETCHED and settings.get("alpha")):
        return f"its rotary scaling {shown(kind)} is not one of {', '.join(TYPES)}"
    if not partial and settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        return "it rotates a part of each head only"
    return None


def rotary(settings: Mapping[str, Any], width: int, longest: int) -> Rotary:
    """The frequencies for heads of which ``width`` numbers are rotated, all 0 without ``settings``. ``longest``: the
    model's largest position.

    Raises ModelError naming the setting that is missing or not a number, or if they give no frequencies.
    """
    if not settings or not width:
        return Rotary(np.zeros(width // 2, np.float32), 1.0)
    try:
        with np.errstate(all="ignore"):
            result = _rotary(settings, width, longest)
    except (ValueError, ArithmeticError):
        result = None
    if result is None or not (np.isfinite(result.inverse_frequencies).all() and math.isfinite(result.factor)):
        raise damaged(
            f"config.json's rotary embeddings ({shown(dict(settings), 200)}) give frequencies that are no numbers"
        )
    return result


def _rotary(settings: Mapping[str, Any], width: int, longest: int) -> Rotary:
    base, kind = positive_number(settings, "rope_theta"), settings["rope_type"]
    if kind == STRETCHED:
        base *= positive_number(settings, "alpha") ** (width / (width - 2))
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    powers = np.float32(base) ** exponents
    plain = (np.float32(1.0) / powers).astype(np.float32)
    if kind == "linear":
        return Rotary(plain / np.float32(positive_number(settings, "factor")), 1.0)
    if kind == "llama3":
        return Rotary(_llama3(settings, plain), 1.0)
    if kind == "proportional":
        # Numbers that are not rotated have a frequency of 0.
        turned = int(float(settings.get("partial_rotary_factor") or 1.0) * width // 2)
        factor = np.float32(positive_number(settings, "factor") if settings.get("factor") is not None else 1.0)
        return Rotary(np.where(np.arange(width // 2) < turned, plain / factor, np.float32(0)), 1.0)
    if kind == "yarn":
        return _yarn(settings, powers, width, base, longest)
    return Rotary(plain, 1.0)


def _llama3(settings: Mapping[str, Any], plain: NDArray[np.float32]) -> NDArray[np.float32]:
    """Inverse frequencies in which long waves are stretched by ``factor``, short ones kept, and those between
    blended."""
    factor = np.float32(positive_number(settings, "factor"))
    low, high = positive_number(settings, "low_freq_factor"), positive_number(settings, "high_freq_factor")
    original = positive_number(settings, "original_max_position_embeddings")
    waves = np.float32(2 * math.pi) / plain
    stretched = np.where(waves > np.float32(original / low), plain / factor, plain)
    blend = (np.float32(original) / waves - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - blend) * stretched / factor + blend * stretched
    between = ~(waves < np.float32(original / high)) & ~(waves > np.float32(original / low))
    found: NDArray[np.float32] = np.where(between, blended, stretched).astype(np.float32)
    return found


def _yarn(settings: Mapping[str, Any], powers: NDArray[np.float32], width: int, base: float, longest: int) -> Rotary:
    """Dimensions that turn seldom are interpolated, those that turn often are kept, with a ramp between."""
    original = positive_number(settings, "original_max_position_embeddings")
    factor = longest / original if settings.get("factor") is None else positive_number(settings, "factor")
    ramp = _ramp(settings, width, base, original)
    kept = np.float32(1) - ramp
    scaled = np.float32(1.0) / (np.float32(factor) * powers)
    frequencies = scaled * (np.float32(1) - kept) + (np.float32(1.0) / powers) * kept
    return Rotary(frequencies.astype(np.float32), _attention_factor(settings, factor))


def _ramp(settings: Mapping[str, Any], width: int, base: float, original: float) -> NDArray[np.float32]:
    def dimension(rotations: float) -> float:
        return (width * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(base))

    first = dimension(settings.get("beta_fast") or 32)
    last = dimension(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    steps = (np.arange(width // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    clipped: NDArray[np.float32] = np.clip(steps, 0, 1).astype(np.float32)
    return clipped


def _attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    given = settings.get("attention_factor")
    if given is not None:
        return float(given)

    one, all_dimensions = settings.get("mscale"), settings.get("mscale_all_dim")
    if one and all_dimensions:
        return attention_scale(factor, one) / attention_scale(factor, all_dimensions)
    return attention_scale(factor, 1)


def attention_scale(factor: float, weight: float) -> float:
    """Factor of yarn on queries and keys whose positions are stretched by ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
