"""Inputs of a language model for tokens of pictures, without a whole model beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.pictures.places import PicturePlace, seen_ends, spread_positions
from engine.pictures.shown import PicturePass
from engine.pictures.sight import Grid, Sight
from engine.runtimes.torch.cache import empty_cache
from engine.runtimes.torch.model import base_of
from engine.runtimes.torch.picture_inputs import picture_inputs
from tests.engine.runtimes.torch_oracle import library_model
from tests.support.tiny_models import write_tiny_model

PLACES = [PicturePlace(1, Grid(1, 3, 1, 1)), PicturePlace(4, Grid(2, 1, 1, 1))]


@pytest.mark.parametrize(
    ("family", "together", "in_full"),
    [("gemma4_dense", True, False), ("gemma4_dense", False, False), ("gemma3_text", True, True)],
)
def test_pictures_see_themselves_in_layers_that_say_so(
    tmp_path: Path, family: str, together: bool, in_full: bool
) -> None:
    module = library_model(write_tiny_model(tmp_path / "model", family))
    given = np.random.default_rng(0).normal(size=(5, module.config.hidden_size)).astype(np.float32)
    pictures = PicturePass(given, [7, -1, -2, -3, -4, -5, 8], None, seen_ends(PLACES, 0, 7) if together else None)
    inputs = {
        "input_ids": torch.zeros(1, 7, dtype=torch.long),
        "position_ids": torch.arange(7)[None],
        "past_key_values": empty_cache(module.config),
    }
    sight = Sight("gemma4", 150, 4, 3, most=70, together=together, together_in_full=in_full)
    found = picture_inputs(
        base_of(module), inputs | {"input_ids": torch.tensor([[7, 0, 0, 0, 0, 0, 8]])}, pictures, sight
    )
    embeddings = found["inputs_embeds"][0].detach()
    np.testing.assert_array_equal(embeddings[1:6], given)
    expected = base_of(module).get_input_embeddings()(torch.tensor([7, 8]))
    assert torch.equal(embeddings[[0, 6]], expected) and found["input_ids"] is None
    if not together:
        assert "attention_mask" not in found and "position_ids" not in found
        return
    seen = found["attention_mask"]["sliding_attention"][0, 0]
    seen = seen if seen.dtype == torch.bool else seen == 0
    groups = [0, 1, 1, 1, 2, 2, 3]
    wanted = [[key <= query or groups[key] == groups[query] for key in range(7)] for query in range(7)]
    assert seen.tolist() == wanted
    full = found["attention_mask"]["full_attention"]
    assert full is not None or not in_full
    if full is not None:
        full = full[0, 0] if full.dtype == torch.bool else full[0, 0] == 0
        assert full.tolist() == (wanted if in_full else torch.ones(7, 7).tril().bool().tolist())


def test_steps_after_a_picture_have_other_positions_only() -> None:
    pictures = PicturePass(
        np.empty((0, 48), np.float32), [0], spread_positions([PicturePlace(1, Grid(2, 2, 1, 1))], 6, 1), None
    )
    inputs = {"input_ids": torch.tensor([[3], [4]]), "position_ids": torch.tensor([[6]])}
    found = picture_inputs(None, inputs, pictures, Sight("qwen3_5", 150, 4, 2, most=70, spread=True))
    assert list(found) == ["position_ids"]
    assert found["position_ids"].tolist() == [[[6]], [[4]], [[4]], [[4]]]
