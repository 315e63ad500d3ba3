"""One conversation with everything that can happen to rows of tokens, on one machine or on all nodes of a ring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.runtimes.protocol import LoadedModel, Logits
from tests.engine.cluster.memory_exchange import must_succeed, on_all_ranks


def conversation(model: LoadedModel, length: int = 45) -> list[Logits]:
    """A prompt of ``length`` tokens (6 or more) in two chunks, steps, beams that are reordered, and the row they came
    from, then cut back: all logits."""
    tokens = np.random.default_rng(0).integers(3, model.facts.vocabulary, max(length, 12)).tolist()
    rows = model.start()
    assert rows.extend(tokens[: length * 2 // 3], want_logits=False) is None
    found = [rows.extend(tokens[length * 2 // 3 : length])]
    for token in (5, 9, 17):
        found.append(rows.step([token]))
    beams = rows.fan_out(3)
    found.append(beams.step([4, 5, 6]))
    beams.reorder([1, 1, 0])
    found.append(beams.step([7, 8, 9]))
    found.append(rows.step([10]))
    if rows.can_truncate:
        rows.truncate(length * 4 // 9)
        found.append(rows.extend(tokens[5:12]))
    return [each for each in found if each is not None]


def all_conversations(models: Sequence[LoadedModel]) -> list[list[Logits]]:
    """The conversation on all nodes at once."""
    return must_succeed(on_all_ranks(lambda rank: conversation(models[rank]), len(models)))


def assert_same(ring: list[list[Logits]], alone: list[Logits]) -> None:
    """Every node of the ring had the logits of one machine, to the bit."""
    for found in ring:
        assert len(found) == len(alone)
        for ours, expected in zip(found, alone, strict=True):
            assert np.array_equal(ours, expected)
