"""The experts of a model that one node of a ring runs, of all those on its disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.errors import ModelError
from engine.models.formats.byte_map import ExpertPlace
from engine.models.formats.model_files import Experts, ExpertWeights
from engine.moe.expert_parallel import RankContext
from engine.planning.placement import Placement


class HeldExperts:
    """See :class:`engine.models.formats.model_files.Experts`: of ``experts`` only those of ``held``, by layer,
    ascending."""

    def __init__(self, experts: Experts, held: Mapping[int, tuple[int, ...]]) -> None:
        self._experts = experts
        self._held = dict(held)
        self._numbers = {layer: frozenset(numbers) for layer, numbers in held.items()}

    @property
    def layers(self) -> tuple[int, ...]:
        return self._experts.layers

    @property
    def count(self) -> int:
        return self._experts.count

    @property
    def dtype(self) -> str:
        return self._experts.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the held experts."""
        return sum(
            self.place(layer, numbers[0]).weight_bytes * len(numbers)
            for layer, numbers in self._held.items()
            if numbers
        )

    @property
    def mapped_files(self) -> Sequence[Any]:
        """The files that contain them, as far as ``experts`` knows."""
        found: Sequence[Any] = getattr(self._experts, "mapped_files", ())
        return found

    def held(self, layer: int) -> Sequence[int]:
        return self._held[layer]

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """Raises IndexError for an expert that is not held."""
        if expert not in self._numbers[layer]:
            raise IndexError(f"expert {expert} of layer {layer} is not held by this node")
        return self._experts.expert(layer, expert)

    def place(self, layer: int, expert: int) -> ExpertPlace:
        """See :meth:`engine.models.formats.model_files.Experts.place`."""
        return self._experts.place(layer, expert)

    def check_unchanged(self, layer: int | None = None) -> None:
        self._experts.check_unchanged(layer)


def held_by(experts: Experts, placement: Placement, rank: int) -> HeldExperts:
    """The experts of ``rank``. Raises ModelError if ``placement`` is not for this model, or the files lack one."""
    return HeldExperts(experts, check_held(placement, rank, experts.layers, experts.count, experts.held))


def held_in(experts: Experts | None, context: RankContext | None) -> dict[int, tuple[int, ...]] | None:
    """The experts of a node of a ring by layer; None for all of them, if there are any, outside of one. Raises
    ModelError as :func:`held_by` does."""
    if experts is None or context is None:
        return None
    return check_held(context.placement, context.rank, experts.layers, experts.count, experts.held)


def check_held(
    placement: Placement,
    rank: int,
    layers: Sequence[int],
    count: int,
    here: Callable[[int], Sequence[int]] | None,
) -> dict[int, tuple[int, ...]]:
    """The experts of ``rank`` by layer, for a model with ``count`` experts in each of ``layers``.

    ``here(layer)`` are those in this machine's files (None: all). Raises ModelError if ``placement`` is not for this
    model, or an expert is not here.
    """
    if placement.layers != tuple(layers) or placement.experts != count:
        raise ModelError(
            f"The ring's plan is for {placement.experts} experts in layers {list(placement.layers)}, and the model "
            f"here has {count} in layers {list(layers)}: the machines have different models; form the ring again.",
            kind="model",
        )
    held = {layer: placement.held(rank, layer) for layer in placement.layers}
    for layer, wanted in held.items():
        missing = sorted(set(wanted) - set(here(layer))) if here is not None else []
        if missing:
            raise ModelError(
                f"Experts {missing} of layer {layer} are this node's in the ring and not on its disk; form the ring "
                "again, so that they are sent.",
                kind="model",
            )
    return held
