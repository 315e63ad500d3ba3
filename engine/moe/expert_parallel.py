"""One node's part in every MoE layer of a pass: who runs what, the exchange, and what comes together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.moe.timing import Recorder

Indices = NDArray[np.int32]
Words = NDArray[Any]
"""Numbers as they travel: float32, or bfloat16 and float16 as uint16 words."""


class Local(Protocol):
    """What a runtime's own experts make of a layer's routes. Called once per layer; twice where routes were mended."""

    def __call__(self, indices: Indices, weights: NDArray[np.float32], extra: tuple[int, ...]) -> Words:
        """``indices`` [tokens, k] of the routes this node runs, -1 elsewhere; ``weights`` [tokens, k]. ``extra`` are
        experts to be run on any one token, the results thrown away (they keep memory from being unwired).

        Exact mode: the un-weighted results [tokens * k, width] in the order of the routes (rows of -1 are ignored).
        Fast mode: their weighted sum [tokens, width], zeros where a token has none here.
        The array is given away: the rows of other nodes may be written into it. Not called where there is nothing to
        run.
        """
        ...


@dataclass(frozen=True)
class Gathered:
    """What came together. Exact mode: ``outputs`` [tokens * k, width], every route's un-weighted result. Fast mode:
    ``sums``, one [tokens, width] per rank that ran any route, to be added in this order. ``indices`` and ``weights``
    are the routes that were run: the head's, where nodes disagreed."""

    indices: Indices
    weights: NDArray[np.float32]
    outputs: Words | None = None
    sums: tuple[Words, ...] = ()


class LayerExchange(Protocol):
    """What a runtime needs of the ring; :class:`engine.cluster.all_gather.RingLayers` is the implementation.

    A pass calls :meth:`run` for every MoE layer, in order, on every node: with no tokens where none is wanted, so that
    all nodes know from any point of a pass whether there is a next exchange.
    """

    def run(
        self,
        layer: int,
        indices: Indices,
        weights: NDArray[np.float32],
        local: Local,
        width: int,
        word: np.dtype[Any],
        meanwhile: Callable[[], None] | None = None,
    ) -> Gathered:
        """Run a layer's routes together with the other nodes.

        ``meanwhile`` is called while the wire is busy (shared experts). Raises PeerLost, RingProtocolError, and
        :class:`engine.runtimes.protocol.Interrupted` on every node if the head gave the pass up.
        """
        ...


@runtime_checkable
class Recorded(Protocol):
    """A layer exchange that tells times and notices; the runtime that uses it sets its own recorder."""

    recorder: Recorder | None


@runtime_checkable
class NeedsHidden(Protocol):
    """A layer exchange that sends hidden states to other nodes (central mode); its results travel as float32."""

    def hidden(self, rows: NDArray[np.float32], scale_input: bool) -> None:
        """To be called before each :meth:`LayerExchange.run`: what the experts get, [tokens, hidden]; ``scale_input``:
        each route's input is multiplied by its weight (llama4)."""
        ...
