"""What pictures change in passes of mlx-lm's models. Whole models are in ``test_runtimes_pictures.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
from mlx import nn  # noqa: E402
from mlx_lm.models.base import create_causal_mask  # noqa: E402
from mlx_lm.models.rope_utils import initialize_rope  # noqa: E402

from engine.moe.timing import Recorder  # noqa: E402
from engine.runtimes.mlx.cache import RowCache, StateCache  # noqa: E402
from engine.runtimes.mlx.picture_inputs import SpreadRope, Turning, seeing_ahead, spread_ropes  # noqa: E402
from engine.runtimes.mlx.spans import Spans, install, remove  # noqa: E402

SECTIONS = (2, 1, 1)
SCALINGS: list[dict[str, Any]] = [
    {"type": "default"},
    {"type": "linear", "factor": 2.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["type"])
def test_each_pair_turns_by_its_own_position(scaling: dict[str, Any]) -> None:
    rope = initialize_rope(8, 100.0, False, scaling, 256)
    turning = Turning()
    spread = SpreadRope(rope, turning, SECTIONS)
    numbers = mx.array(np.random.default_rng(0).normal(size=(1, 3, 5, 12)).astype(np.float32))
    assert mx.array_equal(spread(numbers, offset=7), rope(numbers, offset=7))
    turning.shift = -4
    assert mx.array_equal(spread(numbers, offset=7), rope(numbers, offset=3))
    turning.spread = np.array([[7, 7, 7, 7, 9], [7, 7, 8, 8, 9], [7, 8, 7, 8, 9]])
    found = np.array(spread(numbers, offset=7))
    axes = [0, 1, 2, 0]  # of the four pairs
    for token in range(5):
        for pair, axis in enumerate(axes):
            turned = np.array(rope(numbers[:, :, token : token + 1], offset=int(turning.spread[axis, token])))
            for place in (pair, pair + 4):
                np.testing.assert_allclose(found[..., token, place], turned[..., 0, place], rtol=0, atol=1e-6)
    assert (found[..., 8:] == np.array(numbers)[..., 8:]).all(), "what is not turned stays"


def test_a_layer_that_is_measured_meanwhile_turns_too() -> None:
    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.rope = nn.RoPE(8)

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = Attention()

    layers: list[Any] = [Layer()]
    spans = Spans(Recorder(1, (), 0))
    install(layers, ["self_attn"], spans)
    turning = spread_ropes([*layers, SimpleNamespace(linear_attn=None)], SECTIONS)
    remove(layers, ["self_attn"])
    rope = layers[0].self_attn.rope
    assert isinstance(rope, SpreadRope)
    turning.shift = 2
    numbers = mx.ones((1, 1, 1, 8))
    assert mx.array_equal(rope(numbers, offset=1), nn.RoPE(8)(numbers, offset=3))


def test_tokens_of_a_picture_see_its_end_while_a_pass_is_built() -> None:
    caches: list[Any] = [RowCache(4), RowCache(), StateCache(1)]
    for cache in caches[:2]:
        cache.offset = 6
    ends = np.array([7, 10, 10, 10, 11])
    with seeing_ahead(caches, ends, in_full=True):
        full = np.array(caches[1].make_mask(5))
    assert [row.nonzero()[0].tolist() for row in full] == [[*range(end)] for end in ends]
    with seeing_ahead(caches, ends, in_full=False):
        mask = np.array(caches[0].make_mask(5))
        assert caches[1].make_mask(5) == "causal"
    seen = [[key for key, shown in zip(range(3, 11), row, strict=True) if shown] for row in mask.tolist()]
    assert seen == [[3, 4, 5, 6], [4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [6, 7, 8, 9], [7, 8, 9, 10]]
    assert mx.array_equal(caches[0].make_mask(5), create_causal_mask(5, 3, window_size=4))
