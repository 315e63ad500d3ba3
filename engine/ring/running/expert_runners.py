"""Who is what in a ring, by its mode: the head's layers, and a follower's experts in central mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from engine.exchange.exchange import Exchange
from engine.exchange.seat import Seat
from engine.experts.kernels.bindings import choose
from engine.messages import Load
from engine.progress import ProgressCallback
from engine.ring.running.central import CentralHead, ExpertRunner
from engine.ring.running.formation import AbortableLayers
from engine.ring.running.sharing import RingLayers


class LoadedExperts(ExpertRunner, Protocol):
    """Experts that were loaded."""

    @property
    def description(self) -> str: ...

    @property
    def notices(self) -> Sequence[str]:
        """What the person should know of how they were loaded, a line each."""
        ...

    def close(self) -> None: ...


def layers_for(seat: Seat, exchange: Exchange, one_by_one: bool = False) -> AbortableLayers:
    """What the model of the node at ``seat`` is loaded with. In central mode only the head has one; ``one_by_one``:
    it calls its experts one after the other, the paper's naive version."""
    if seat.mode == "central":
        return CentralHead(seat, exchange, one_by_one=one_by_one)
    return RingLayers(seat, exchange)


def load_experts(runtime: str, folder: Path, load: Load, seat: Seat, progress: ProgressCallback) -> LoadedExperts:
    """The experts of ``seat`` without a trunk, in ``folder``, by ``runtime``; by torch where native kernels are wanted
    and cannot be used.

    Raises ModelError if they are not here, cannot be run, or do not fit.
    """
    progress("loading experts", 0, 0, "")
    if runtime == "mlx":
        from engine.runtimes.mlx.loading import load_experts as load_for_mlx

        return load_for_mlx(folder, load, progress, seat)
    if runtime == "native" and choose("float32").native:
        from engine.runtimes.native.experts_only import load_experts as load_for_native

        return load_for_native(folder, load, seat)
    from engine.runtimes.torch.experts_only import load_experts as load_for_torch

    return load_for_torch(folder, load, seat)
