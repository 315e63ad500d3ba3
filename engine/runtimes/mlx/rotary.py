"""The one rotary setting that mlx-lm drops: yarn with ``truncate: false``, as gpt-oss is published.

Yarn blends two sets of frequencies between two dimensions. mlx-lm always rounds those outwards to whole numbers; the
model was trained without rounding, and for the dimensions in between the difference is up to a quarter of the
frequency.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.rope_utils import YarnRoPE
from numpy.typing import NDArray

from engine.runtimes.protocol import Config


def correct_rotary(layers: list[Any], rope: Config) -> str | None:
    """Gives the attention of ``layers`` the frequencies that ``rope`` (``rope_parameters``) asks for.

    Returns a notice if it had to change what mlx-lm computed.
    """
    if rope.get("rope_type") != "yarn" or rope.get("truncate", True):
        return None
    for layer in layers:
        module = layer.self_attn.rope if "self_attn" in layer else None
        if isinstance(module, YarnRoPE):
            module._freqs = mx.array(yarn_wavelengths(module.dims, rope))
    return "rotary frequencies as the model defines them (yarn without truncation), where mlx-lm rounds"


def yarn_wavelengths(dims: int, rope: Config) -> NDArray[np.float32]:
    """The inverse frequencies [dims / 2] of yarn without rounding, as ``mx.fast.rope`` takes them."""
    base, factor = float(rope["rope_theta"]), float(rope["factor"])
    original = float(rope["original_max_position_embeddings"])

    def dimension_of(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(dimension_of(float(rope.get("beta_fast") or 32.0)), 0.0)
    high = min(dimension_of(float(rope.get("beta_slow") or 1.0)), dims - 1.0)
    width = high - low if high != low else 0.001
    interpolated = np.clip((np.arange(dims // 2) - low) / width, 0.0, 1.0)
    wavelengths = base ** (np.arange(0, dims, 2) / dims)
    frequencies = (1.0 - interpolated) / wavelengths + interpolated / (factor * wavelengths)
    return np.asarray(1.0 / frequencies, dtype=np.float32)
