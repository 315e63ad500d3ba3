"""What an executor is: it turns hidden states and routes into the experts' weighted sum."""

from __future__ import annotations

from typing import Any, Protocol

from engine.moe.popularity import Popularity


class Executor(Protocol):
    """Runs the routed experts of a model; local today, hybrid and ring are other implementations of the same call.

    Arrays are those of the runtime that asks (torch tensors here).
    """

    @property
    def description(self) -> str:
        """How the experts run, in a few words: ``local (torch, cpu)``."""
        ...

    @property
    def popularity(self) -> Popularity:
        """How often each expert was used since the model was loaded."""
        ...

    def run(self, layer: int, hidden: Any, indices: Any, weights: Any) -> Any:
        """The weighted sum of the experts of ``layer``.

        ``hidden`` [tokens, hidden]; ``indices`` [tokens, k], the experts each token is sent to (distinct within a
        token); ``weights`` [tokens, k], in the model's dtype or float32. Returns [tokens, hidden] in hidden's dtype.
        """
        ...

    def run_scaled_input(self, layer: int, hidden: Any, indices: Any, weights: Any) -> Any:
        """As :meth:`run`, for families that scale what goes into an expert instead of what comes out (llama4)."""
        ...
