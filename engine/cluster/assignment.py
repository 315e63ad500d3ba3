"""The assignment of a layer's routes to nodes. It depends only on the routes, so that all nodes agree."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from engine.moe.expert_parallel import Call, Indices, RankContext
from engine.planning.routing_load import Assigner, LoadingRules

FEW_ROUTES = 64
"""Maximum number of routes that are sorted in Python, which is faster than numpy for few of them."""


@dataclass(frozen=True, slots=True)
class SharedRoutes:
    """The assignment of a layer's routes.

    ``mine`` [tokens, k] are this node's routes, -1 elsewhere. ``rows[r]`` are the routes of rank r, counted token by
    token, ascending. ``extra`` are the experts to run in addition.
    """

    mine: Indices
    rows: tuple[Any, ...]
    extra: tuple[int, ...]
    hash: bytes
    runs_any: bool
    """Whether this node has anything to run."""

    def calls(self, one_by_one: bool = False) -> list[Call]:
        """The calls to this node's experts: one, or as an unstacked model does, ``one_by_one``, one per expert."""
        if not self.runs_any:
            return []
        if not one_by_one:
            return [(self.mine, self.extra)]
        active = [int(expert) for expert in np.unique(self.mine) if expert >= 0]
        nothing = np.full_like(self.mine, -1)
        found: list[Call] = [(np.where(self.mine == expert, self.mine, nothing), ()) for expert in active]
        return found + [(nothing, (expert,)) for expert in self.extra]


class Router:
    """Assigns the routes of each layer to the nodes of ``context``'s epoch."""

    def __init__(self, context: RankContext) -> None:
        self._rank = context.rank
        self._nodes = context.nodes
        self._experts = context.placement.experts
        self._assigner = Assigner(context.placement, context.weights)
        self._rules = LoadingRules(context.placement, context.rank, context.loading, context.weights)

    def share(self, layer: int, indices: Indices, with_extra: bool) -> SharedRoutes:
        """The assignment of ``indices`` [tokens, k]. ``with_extra``: with the experts that the loading rule adds."""
        with_extra = with_extra and indices.size > 0  # there must be a token to run them on
        hashed = blake2b(indices.tobytes(), digest_size=8).digest()
        if indices.size <= FEW_ROUTES:
            return self._share_few(layer, indices, hashed, with_extra)
        flat = indices.reshape(-1)
        counts = np.bincount(flat, minlength=self._experts)
        active = np.flatnonzero(counts)
        owners = self._assigner.owners(layer, active.tolist(), counts[active].tolist())
        table = np.zeros(self._experts, np.int32)
        table[active] = owners
        ranks = table[flat]
        rows = tuple(np.flatnonzero(ranks == rank) for rank in range(self._nodes))
        mine = np.where(ranks == self._rank, flat, np.int32(-1)).astype(np.int32, copy=False).reshape(indices.shape)
        extra = self._rules.extra(layer, active.tolist(), owners) if with_extra else ()
        return SharedRoutes(mine, rows, extra, hashed, bool(len(rows[self._rank]) or extra))

    def _share_few(self, layer: int, indices: Indices, hashed: bytes, with_extra: bool) -> SharedRoutes:
        chosen: list[int] = indices.reshape(-1).tolist()
        counts: dict[int, int] = {}
        for expert in chosen:
            counts[expert] = counts.get(expert, 0) + 1
        active = sorted(counts)
        owners = self._assigner.owners(layer, active, [counts[expert] for expert in active])
        owner_of = dict(zip(active, owners, strict=True))
        rows: list[list[int]] = [[] for _ in range(self._nodes)]
        for route, expert in enumerate(chosen):
            rows[owner_of[expert]].append(route)
        me = self._rank
        mine = np.array([e if owner_of[e] == me else -1 for e in chosen], np.int32).reshape(indices.shape)
        extra = self._rules.extra(layer, active, owners) if with_extra else ()
        return SharedRoutes(mine, tuple(rows), extra, hashed, bool(rows[me] or extra))
