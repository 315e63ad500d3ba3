"""Sizes of pictures are those of transformers' own image processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.pictures.sight import MOST_TOKENS, Grid, Sight, longest_side, sight_of

QWEN: dict[str, Any] = {"model_type": "qwen3_5", "image_token_id": 7, "vision_config": {"patch_size": 16}}
DEEP = QWEN | {"model_type": "qwen3_vl"}
GEMMA_3: dict[str, Any] = {"model_type": "gemma3", "vision_config": {}}
MISTRAL: dict[str, Any] = {"model_type": "mistral3", "vision_config": {"image_size": 1540}}
GEMMA: dict[str, Any] = {
    "model_type": "gemma4",
    "image_token_id": 9,
    "vision_config": {},
    "text_config": {"pad_token_id": 3, "use_bidirectional_attention": "vision"},
}


def sight(config: dict[str, Any], processor: dict[str, Any] | None = None) -> Sight:
    found = sight_of(config, processor or {})
    assert found is not None
    return found


def test_what_is_read_of_a_qwen() -> None:
    found = sight(QWEN, {"size": {"shortest_edge": 4096, "longest_edge": 102_400}, "image_mean": [0.1, 0.2, 0.3]})
    assert found == Sight("qwen3_5", 7, 16, 2, most=100, least=4, spread=True, mean=(0.1, 0.2, 0.3))
    assert sight(QWEN).most == MOST_TOKENS
    assert sight(QWEN | {"text_config": {"rope_parameters": {"mrope_section": [3, 2, 1]}}}).sections == (3, 2, 1)


def test_what_is_read_of_a_qwen_with_deepstack() -> None:
    found = sight(DEEP | {"text_config": {"rope_scaling": {"mrope_section": [3, 2, 1]}}})
    assert (found.sections, found.deep, found.spread) == ((3, 2, 1), 3, True)
    assert sight(DEEP).sections == (24, 20, 20)
    shallow = {"depth": 4, "deepstack_visual_indexes": [0, 3]}
    assert sight(DEEP | {"vision_config": shallow}).deep == 2
    assert sight(QWEN | {"vision_config": shallow}).deep == 0


def test_what_is_read_of_a_gemma() -> None:
    found = sight(GEMMA, {"max_soft_tokens": 70})
    assert (found.placeholder, found.given, found.together, found.spread) == (9, 3, True, False)
    assert (found.side, found.most, found.mean, found.deviation) == (48, 70, (0.0,) * 3, (1.0,) * 3)
    assert (found.before, found.after) == ((255_999,), (258_882,))
    assert sight(GEMMA | {"boi_token_id": 4, "eoi_token_id": 5}).after == (5,)
    causal = GEMMA | {"text_config": {"use_bidirectional_attention": None}}
    assert not sight(causal).together


def test_what_is_read_of_a_gemma_3() -> None:
    found = sight(GEMMA_3, {"size": {"height": 896, "width": 896}, "image_mean": [0.5] * 3})
    assert (found.placeholder, found.before, found.after, found.beside) == (255_999, (255_999,), (256_000,), "\n\n")
    assert (found.patch, found.merge, found.together, found.together_in_full) == (14, 4, True, True)
    for height, width in ((896, 896), (1, 150), (3000, 20)):
        assert found.grid(height, width) == Grid(16, 16, 896, 896)
    small = GEMMA_3 | {"mm_tokens_per_image": 16, "vision_config": {"image_size": 32, "patch_size": 4}}
    assert sight(small | {"boi_token_index": 7}).before == (7,)
    assert sight(small).grid(7, 9) == Grid(4, 4, 32, 32)


def test_what_is_read_of_a_mistral() -> None:
    found = sight(MISTRAL, {"size": {"longest_edge": 1400}})
    assert (found.placeholder, found.between, found.after, found.before) == (10, (12,), (13,), ())
    assert (found.patch, found.merge, found.longest, found.most) == (14, 2, 1400, MOST_TOKENS)
    assert sight(MISTRAL).longest == 1540
    other = MISTRAL | {"image_token_index": 5, "image_break_token_id": 6, "image_end_token_id": 0}
    assert (sight(other).placeholder, sight(other).between, sight(other).after) == (5, (6,), (0,))
    grid = found.grid(60, 84)
    assert grid == Grid(3, 3, 84, 84, breaks=1) and (grid.seen, grid.tokens) == (9, 11)
    assert [grid.place(number) for number in range(9)] == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    with pytest.raises(ModelError, match="image_break_token_id"):
        sight(MISTRAL | {"image_token_index": 5})


@pytest.mark.parametrize(
    ("config", "processor", "value"),
    [
        (QWEN | {"vision_config": {"patch_size": 0}}, {}, "0"),
        (QWEN, {"patch_size": 14}, "14"),
        (QWEN, {"size": {"longest_edge": "many"}}, "many"),
        (QWEN, {"image_std": [0.5, 0.0, 0.5]}, "0.0"),
        (QWEN, {"image_mean": "grey"}, "grey"),
        (QWEN | {"image_token_id": -1}, {}, "-1"),
        (QWEN | {"text_config": {"rope_parameters": {"mrope_section": [1, 2]}}}, {}, "mrope_section"),
        (DEEP | {"vision_config": {"depth": 4, "deepstack_visual_indexes": [4]}}, {}, "deepstack_visual_indexes"),
        (DEEP | {"vision_config": {"deepstack_visual_indexes": [1, 1]}}, {}, "deepstack_visual_indexes"),
        (DEEP | {"vision_config": {"deepstack_visual_indexes": 3}}, {}, "deepstack_visual_indexes"),
        (GEMMA_3 | {"mm_tokens_per_image": 255}, {}, "255 tokens"),
        (GEMMA_3 | {"vision_config": {"image_size": 900}}, {}, "900 x 900"),
        (GEMMA_3 | {"mm_tokens_per_image": 10_000}, {}, "10000 tokens"),
        (GEMMA_3, {"size": {"height": 448, "width": 448}}, "448"),
        (MISTRAL | {"vision_feature_layer": [-1, 3]}, {}, "vision_feature_layer"),
        (MISTRAL | {"image_end_token_id": -2}, {}, "-2"),
        (MISTRAL, {"size": {"longest_edge": 199}}, "199"),
        (GEMMA, {"max_soft_tokens": 71}, "71"),
        (GEMMA, {"pooling_kernel_size": 2}, "2"),
    ],
)
def test_damaged_settings_are_a_sentence(config: dict[str, Any], processor: dict[str, Any], value: str) -> None:
    with pytest.raises(ModelError, match=value):
        sight_of(config, processor)


@pytest.mark.parametrize("config", [{}, {"model_type": "llama", "vision_config": {}}, {"model_type": "gemma4"}])
def test_other_models_see_nothing(config: dict[str, Any]) -> None:
    assert sight_of(config, {}) is None


def test_a_picture_too_narrow_is_refused() -> None:
    for config in (QWEN, GEMMA):
        with pytest.raises(ModelError, match="2010 x 10 pixels") as caught:
            sight(config).grid(10, 2010)
        assert caught.value.kind == "bad-input"


SIDES = st.integers(1, 3000)


@given(SIDES, SIDES)
def test_sizes_of_qwen_are_the_librarys(height: int, width: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    found = sight(QWEN)
    if max(height, width) > 200 * min(height, width):
        return
    grid = found.grid(height, width)
    assert (grid.height, grid.width) == smart_resize(height, width, 32, 65_536, MOST_TOKENS * 32 * 32)
    assert grid.tokens == grid.height * grid.width // 32**2


@given(SIDES, SIDES, st.sampled_from([70, 140, 280, 1120]))
def test_sizes_of_gemma_are_the_librarys(height: int, width: int, most: int) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    if max(height, width) > 200 * min(height, width):
        return
    grid = sight(GEMMA, {"max_soft_tokens": most}).grid(height, width)
    assert (grid.height, grid.width) == get_aspect_ratio_preserving_size(height, width, 16, most * 9, 3)
    assert grid.tokens <= most


@given(SIDES, SIDES, st.sampled_from([200, 700, 1540]))
def test_sizes_of_mistral_are_the_librarys(height: int, width: int, longest: int) -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    if max(height, width) > 200 * min(height, width):
        return
    found = sight(MISTRAL, {"size": {"longest_edge": longest}})
    grid, allowed = found.grid(height, width), longest_side(found, height, width)
    picture = np.zeros((3, height, width), np.uint8)
    assert (grid.height, grid.width) == get_resize_output_image_size(picture, allowed, 28, "channels_first")
    assert grid.seen <= MOST_TOKENS
    if allowed < min(longest, max(height, width)):
        larger = get_resize_output_image_size(picture, allowed + 28, 28, "channels_first")
        assert larger[0] * larger[1] > MOST_TOKENS * 28**2, "it is scaled down further than it has to be"


@settings(max_examples=10)
@given(st.integers(8, 300), st.integers(8, 300))
def test_the_library_makes_as_many_patches_of_a_picture(height: int, width: int) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if max(height, width) > 100 * min(height, width):
        return
    picture = np.zeros((height, width, 3), np.uint8)
    size = {"shortest_edge": 65_536, "longest_edge": 1_000_000}
    qwen = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=size)(picture, return_tensors="np")
    grid = sight(QWEN, {"size": size}).grid(height, width)
    assert qwen["image_grid_thw"].tolist() == [[1, 2 * grid.rows, 2 * grid.columns]]
    gemma = Gemma4ImageProcessorPil(max_soft_tokens=70)(picture, return_tensors="np")
    assert [*gemma["num_soft_tokens_per_image"]] == [sight(GEMMA, {"max_soft_tokens": 70}).grid(height, width).tokens]
