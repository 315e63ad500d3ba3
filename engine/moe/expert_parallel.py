"""Expert parallelism: the interface of an executor to a ring, for the assignment of routes and all nodes' results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.moe.timing import Recorder
from engine.planning.placement import Placement

Indices = NDArray[np.int32]
Floats = NDArray[np.float32]
Words = NDArray[Any]
"""Numbers in the form in which they are exchanged: float32, or two-byte floats as uint16 words."""
Call = tuple[Indices, tuple[int, ...]]
"""Routes [tokens, k] to run in one call, -1 for those of other nodes, and further experts to run on any one token."""

FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of a layer on the host: ``indices`` int32 [tokens, k] and ``weights`` float32 [tokens, k]."""

    indices: Indices
    weights: Floats


@dataclass(frozen=True, slots=True)
class HostRows:
    """Hidden states on the host, float32 [tokens, width]; ``scale_input``: each route's weight multiplies its input.

    ``reads``: the tokens are read, not written; see :meth:`engine.moe.kernels.layers.LayerExperts.run`.
    """

    rows: Floats
    scale_input: bool
    reads: bool = False


@dataclass(frozen=True)
class Gathered:
    """The gathered results of a layer.

    ``outputs`` [tokens * k, width] are the unweighted results of all routes (exact and central mode). In fast mode
    ``sums`` has one weighted sum [tokens, width] per rank that ran any route, to be added in this order. ``indices``
    and ``weights`` are the routes that were run; if nodes disagreed, they are the head's.
    """

    indices: Indices
    weights: Floats
    outputs: Words | None = None
    sums: tuple[Words, ...] = ()


class LayerExchange(Protocol):
    """This node's side of a ring, for one layer after the other: :meth:`assign`, :meth:`send`, :meth:`receive`.

    A pass goes through every MoE layer, in order, on every node: with no tokens where none is wanted, so that all nodes
    know from any point of a pass whether there is a next exchange. All methods raise PeerLost and RingProtocolError.
    """

    recorder: Recorder | None
    """Receives times and notices. The runtime that uses the exchange sets it."""

    needs_hidden: bool
    """Whether :meth:`assign` needs the hidden states, which are sent to other nodes in central mode."""

    def assign(
        self, layer: int, routes: Routes, hidden: HostRows | None = None, mended: bool = False
    ) -> Sequence[Call]:
        """The calls to the experts of this node; none if it runs nothing of the layer.

        ``mended``: ``routes`` are what :meth:`receive` returned. Raises
        :class:`engine.runtimes.protocol.Interrupted` if the head gave the pass up.
        """
        ...

    def send(self, mine: Words | None, width: int, word: np.dtype[Any]) -> None:
        """Begin the exchange with the results of the calls, which may be written to afterwards; None without a call.

        Results are [tokens * k, width] in numbers of ``word``; in fast mode weighted sums [tokens, width].
        """
        ...

    def receive(self) -> Gathered | Routes:
        """The gathered results, or the head's routes if the nodes' routes differ; the layer must then be run again.

        Raises NodeFailed if another node cannot go on, and :class:`engine.runtimes.protocol.Interrupted` on every node
        if the head gave the pass up.
        """
        ...

    def leave(self, error: BaseException) -> None:
        """Replace :meth:`send` after the calls raised ``error``: notify the other nodes that the pass ends here."""
        ...


def run_calls(calls: Sequence[Call], run: Callable[[Indices, tuple[int, ...]], Words]) -> Words | None:
    """The results of ``calls`` joined, each made by ``run(indices, extra)``; None if there are none."""
    if len(calls) == 1:
        return run(*calls[0])
    joined: Words | None = None
    for indices, extra in calls:
        words = run(indices, extra)
        if joined is None:
            joined = np.array(words)
        else:
            rows = np.flatnonzero(indices >= 0)
            joined[rows] = words[rows]
    return joined


# --- a node's knowledge of its epoch ---------------------------------------------------------------------------------


Mode = Literal["exact", "fast", "central"]
Loading = Literal["selected", "router-aided", "busy-full"]

HEAD = 0
"""The head's rank."""


@dataclass(frozen=True)
class RankContext:
    """One node's place in an epoch.

    ``weights`` are the relative seconds per expert of each rank. They decide which holder of a replicated expert runs
    it, in the same way on every node.
    """

    epoch: str
    rank: int
    placement: Placement
    mode: Mode = "exact"
    loading: Loading = "selected"
    weights: tuple[float, ...] = ()

    @property
    def nodes(self) -> int:
        return self.placement.nodes

    @property
    def is_head(self) -> bool:
        return self.rank == HEAD
