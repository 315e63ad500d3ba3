"""The interface of a backend that runs experts on this machine, from mapped files, a device's memory, or mlx arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from engine.moe.expert_parallel import Floats, HostRows, Indices, Routes, Words
from engine.moe.popularity import Popularity
from engine.moe.timing import Part

Array = TypeVar("Array")
"""Arrays of the runtime: numpy arrays, torch tensors or mlx arrays."""


@dataclass(slots=True)
class LayerCall(Generic[Array]):
    """The input of one layer's experts.

    ``hidden`` [tokens, width]; ``weights`` [..., k] from the router, whose dtype is that of the weighting. ``routes``:
    the same routes on the host. ``scale_input``: weights multiply the experts' inputs (llama4). ``word``: numbers in
    which an unweighted result travels without loss. ``rows``: the hidden states on the host, float32 [tokens, width],
    if :meth:`ExpertBackend.begin` was asked for them. ``reads``: see :class:`engine.moe.expert_parallel.HostRows`.
    """

    layer: int
    hidden: Array
    weights: Array
    routes: Routes
    width: int
    word: np.dtype[Any]
    scale_input: bool = False
    rows: Floats | None = None
    reads: bool = False


class ExpertBackend(ABC, Generic[Array]):
    """Runs routed experts. One thread at a time.

    :meth:`run` is for a machine that has all experts. In a ring, :meth:`begin` brings a layer's routes to the host;
    :meth:`results` or :meth:`sums` run the routes of this machine; :meth:`joined` or :meth:`added` make the layer's sum
    of what all machines contributed. :meth:`joined` gives the bits that :meth:`run` gives on one machine.
    """

    popularity: Popularity | None
    """Routes that :meth:`run` ran since the model was loaded; None where nobody counts them."""

    wait_part: Part = "experts"
    """The part of a layer's time as which :meth:`wait` is counted."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Description of the implementation, in a few words: ``local (torch, cpu)``."""

    @property
    @abstractmethod
    def held(self) -> int:
        """(layer, expert) pairs that can be run here."""

    @abstractmethod
    def run(self, layer: int, hidden: Array, indices: Array, weights: Array, scale_input: bool = False) -> Array:
        """The weighted sum of all routes, in the shape and dtype of ``hidden`` [..., width].

        ``indices`` [..., k] are distinct within a token; ``weights`` [..., k] are in the model's dtype or float32.
        """

    @abstractmethod
    def begin(
        self,
        layer: int,
        hidden: Array,
        indices: Array,
        weights: Array,
        scale_input: bool = False,
        rows_too: bool = False,
    ) -> LayerCall[Array]:
        """A layer of which only some routes run here. ``hidden`` [tokens, width]; ``rows_too``: they are wanted on the
        host, with the routes."""

    @abstractmethod
    def begin_on_host(self, layer: int, hidden: HostRows, routes: Routes) -> LayerCall[Array]:
        """The same for hidden states and routes that another machine sent."""

    @abstractmethod
    def results(
        self, call: LayerCall[Array], mine: Indices, weights: Floats, extra: Sequence[int], word: np.dtype[Any]
    ) -> Words:
        """The un-weighted results [tokens * k, width] of the routes ``mine`` [tokens, k] that are not -1.

        Numbers are of ``word``: the call's, or float32. What the rows of -1 hold does not matter. The experts
        ``extra`` are run on the first token, for nothing. The array may be written to; the next call may overwrite it.
        Raises ModelError if an expert is not held here.
        """

    @abstractmethod
    def sums(self, call: LayerCall[Array], mine: Indices, weights: Floats, extra: Sequence[int]) -> Words:
        """The weighted sums [tokens, width] of the same routes, float32: zeros where a token has none."""

    @abstractmethod
    def joined(self, call: LayerCall[Array], outputs: Words, weights: Floats, word: np.dtype[Any]) -> Array:
        """The layer's sum [tokens, width] of all routes' results [tokens * k, width] in numbers of ``word``.

        Raises ModelError if the shapes do not fit the call.
        """

    @abstractmethod
    def added(self, call: LayerCall[Array], sums: Sequence[Words]) -> Array:
        """The layer's sum [tokens, width] of the machines' weighted sums, in their order; zeros without any."""

    def wait(self, result: Array | None = None) -> None:
        """Return when all that was begun is done, ``result`` included: for measuring."""
        return

    def close(self) -> None:
        """Give memory back. Nothing runs afterwards."""
        return
