"""What the host's sampler may draw, with probabilities: for tests that compare it with others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.generation.sampling import SamplingRule, weighed
from engine.runtimes.protocol import Logits


def surviving_tokens(logits: Logits, rule: SamplingRule) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids that may be drawn, ascending, and their probabilities, which sum to 1."""
    tokens, weights = weighed(logits, rule)
    if tokens is None:
        tokens = np.flatnonzero(weights)
        weights = weights[tokens]
    probabilities = weights.astype(np.float64)
    return tokens, probabilities / probabilities.sum()
