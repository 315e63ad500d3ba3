"""The inputs of transformers' language models for tokens of pictures, as its whole models pass them."""

from __future__ import annotations

from typing import Any

import torch

from engine.pictures.shown import PicturePass
from engine.pictures.sight import Sight


def picture_inputs(base: Any, inputs: dict[str, Any], pictures: PicturePass, sight: Sight) -> dict[str, Any]:
    """What replaces ``inputs`` (``input_ids``, ``position_ids`` and ``past_key_values``) of a pass over tokens of one
    row with ``pictures``, or of one token of several rows. ``base``: the model without its head."""
    changed: dict[str, Any] = {}
    positions = inputs["position_ids"]
    if pictures.positions is not None:
        # The first of four says what a token sees.
        spread = torch.from_numpy(pictures.positions).to(positions.device)[:, None]
        changed["position_ids"] = torch.cat((positions[None], spread.expand(-1, len(positions), -1)))
    if not len(pictures.given):
        return changed
    ids = inputs["input_ids"].clone()
    seen = torch.tensor([pictures.ids], device=ids.device) < 0
    ids[seen] = sight.given
    embeddings = base.get_input_embeddings()(ids)
    instead, *deeper = torch.from_numpy(pictures.given).to(embeddings).split(embeddings.shape[-1], dim=1)
    embeddings[seen] = instead
    changed |= {"input_ids": None, "inputs_embeds": embeddings}
    if deeper:
        changed |= {"visual_pos_masks": seen, "deepstack_visual_embeds": deeper}
    if getattr(base.config, "hidden_size_per_layer_input", 0):
        changed["per_layer_inputs"] = base.get_per_layer_inputs(ids, None)
    if pictures.ends is not None:
        changed["attention_mask"] = _seeing_masks(base.config, embeddings, inputs, pictures.ends.tolist(), sight)
    return changed


def _seeing_masks(
    config: Any, embeddings: torch.Tensor, inputs: dict[str, Any], ends: list[int], sight: Sight
) -> dict[str, Any]:
    """The masks of a model in which tokens of a picture see each other, by their ``ends``."""
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.gemma4 import modeling_gemma4

    start = int(inputs["position_ids"][0, 0])
    blocks = torch.full((1, start + len(ends)), -1, device=embeddings.device)
    for index, end in enumerate(ends):
        if end > start + index + 1 or (index and ends[index - 1] == end):
            blocks[0, start + index] = end
    library = modeling_gemma3 if sight.together_in_full else modeling_gemma4
    masks: dict[str, Any] = library.create_masks_for_vision_model(
        config, embeddings, None, inputs["past_key_values"], inputs["position_ids"], blocks
    )
    return masks
