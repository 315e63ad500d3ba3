"""Blocks of encoder-decoder models beside their experts, small and with random weights, and a plain reference.

Switch Transformers normalise by the root of the mean square and do not scale their scores; NLLB normalises to mean and
deviation and scales them. A decoder's block attends to its own earlier tokens, then to the encoder's states, here
random. Position encodings are left out. :class:`Blocks` is written with torch's attention, :func:`reference` in numpy,
in double precision, one head and one token after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from benchmarks.papers.near_workflows import Stack

HEADS = 4
ENCODED = 8
"""States of the encoder to which a decoder attends."""
Numbers = npt.NDArray[np.float64]
Experts = Callable[[int, int, Numbers], Numbers]
"""From pass, layer and the experts' input [rows, width] to their weighted sum."""


class Blocks:
    """``layers`` blocks of ``stack`` with ``width`` numbers per token."""

    def __init__(self, stack: Stack, layers: int, width: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.decoder = stack.cross_attention
        self.switch = stack.name.startswith("Switch")
        kinds = 2 if self.decoder else 1
        self.weights = generator.normal(0.0, width**-0.5, (layers, kinds, 4, width, width)).astype(np.float32)
        """[layer][self or cross][query, key, value, output]."""
        self.encoded = generator.normal(0.0, 1.0, (ENCODED, width)).astype(np.float32)
        self._earlier: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        """Of a decoder, the normalised inputs of earlier passes by layer, [rows, width] each."""

    def attend(self, layer: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``states`` [rows, width] after the layer's attention, and normalised for its experts.

        The rows are one sequence of an encoder, or the next token of each sequence of a decoder."""
        normed = self._normalised(states)
        if self.decoder:
            self._earlier[layer].append(normed)
            seen = torch.stack(self._earlier[layer], dim=1)
            states = states + self._attention(layer, 0, normed[:, None], seen)[:, 0]
            encoded = torch.from_numpy(self.encoded).expand(len(states), -1, -1)
            states = states + self._attention(layer, 1, self._normalised(states)[:, None], encoded)[:, 0]
        else:
            states = states + self._attention(layer, 0, normed[None], normed[None])[0]
        return states, self._normalised(states)

    def _normalised(self, states: torch.Tensor) -> torch.Tensor:
        width = states.shape[-1:]
        return functional.rms_norm(states, width, eps=1e-6) if self.switch else functional.layer_norm(states, width)

    def _attention(self, layer: int, kind: int, asking: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        query, key, value, output = torch.from_numpy(self.weights[layer, kind])
        queries, keys, values = (
            functional.linear(given, weight).unflatten(-1, (HEADS, -1)).transpose(-2, -3)
            for given, weight in ((asking, query), (seen, key), (seen, value))
        )
        found = functional.scaled_dot_product_attention(queries, keys, values, scale=1.0 if self.switch else None)
        return functional.linear(found.transpose(-2, -3).flatten(-2), output)


def reference(blocks: Blocks, inputs: Sequence[Numbers], experts: Experts) -> list[Numbers]:
    """What ``blocks`` make of the ``inputs`` [rows, width] of each pass, with the sums of ``experts``."""
    layers = len(blocks.weights)
    earlier: list[list[Numbers]] = [[] for _ in range(layers)]
    found = []
    for number, given in enumerate(inputs):
        states = given
        for layer in range(layers):
            normed = _normalised(states, blocks.switch)
            earlier[layer].append(normed)
            attended = np.zeros_like(states)
            for row, asking in enumerate(normed):
                seen = np.stack([each[row] for each in earlier[layer]]) if blocks.decoder else normed
                attended[row] = _attention(blocks, layer, 0, asking, seen)
            states = states + attended
            if blocks.decoder:
                encoded = blocks.encoded.astype(np.float64)
                asking_rows = _normalised(states, blocks.switch)
                states = states + np.stack([_attention(blocks, layer, 1, each, encoded) for each in asking_rows])
            states = states + experts(number, layer, _normalised(states, blocks.switch))
        found.append(states)
    return found


def _normalised(states: Numbers, switch: bool) -> Numbers:
    centred = states if switch else states - states.mean(axis=-1, keepdims=True)
    scaled: Numbers = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + (1e-6 if switch else 1e-5))
    return scaled


def _attention(blocks: Blocks, layer: int, kind: int, asking: Numbers, seen: Numbers) -> Numbers:
    query, key, value, output = blocks.weights[layer, kind].astype(np.float64)
    size = len(asking) // HEADS
    parts = []
    for head in range(HEADS):
        of_head = slice(head * size, (head + 1) * size)
        scores = (seen @ key[of_head].T) @ (query[of_head] @ asking)
        scores = np.exp(scores * (1.0 if blocks.switch else size**-0.5))
        parts.append((scores / scores.sum()) @ (seen @ value[of_head].T))
    result: Numbers = output @ np.concatenate(parts)
    return result
