"""A layer's routes sorted by expert, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FEW_ROUTES = 96
"""Up to here routes are sorted in Python, above by torch: Python wins while there are few of them."""


@dataclass(frozen=True)
class SortedRoutes:
    """``order`` [n]: the n routes that run here, counted token by token, in the order of their experts.

    ``back`` [routes]: the place of each route in that order, -1 where somebody else runs it. ``segments``: where each
    active expert's routes begin and end in it, ascending.
    """

    tokens: int
    k: int
    """Routes per token."""
    indices: torch.Tensor
    """[tokens, k] on the host, -1 where somebody else runs the route."""
    order: torch.Tensor
    back: torch.Tensor
    segments: dict[int, tuple[int, int]]
    numbers: tuple[list[int], list[int]] | None
    """Indices and order once more, as numbers, where there are few."""


def sort_routes(indices: torch.Tensor, experts: int) -> SortedRoutes:
    """Sort ``indices`` [tokens, k], which are on the host; routes to one expert keep their order, -1 is left out."""
    tokens, k = indices.shape
    sizes: dict[int, int] = {}
    numbers = None
    if tokens * k > FEW_ROUTES:
        flat = indices.reshape(-1).long()
        order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
        back = torch.full_like(flat, -1)
        back[order] = torch.arange(len(order))
        counts = flat[flat >= 0].bincount(minlength=experts).tolist()
        sizes = {expert: count for expert, count in enumerate(counts) if count}
    else:
        chosen: list[int] = indices.reshape(-1).tolist()
        ordered = sorted((route for route in range(tokens * k) if chosen[route] >= 0), key=chosen.__getitem__)
        places = [-1] * len(chosen)
        for place, route in enumerate(ordered):
            places[route] = place
            sizes[chosen[route]] = sizes.get(chosen[route], 0) + 1
        order, back = torch.tensor(ordered, dtype=torch.int64), torch.tensor(places)
        numbers = (chosen, ordered)
    segments: dict[int, tuple[int, int]] = {}
    position = 0
    for expert, size in sizes.items():
        segments[expert] = (position, position + size)
        position += size
    return SortedRoutes(tokens, k, indices, order, back, segments, numbers)


@dataclass(frozen=True)
class HostShare:
    """The routes that the CPU runs, as its :class:`engine.runtimes.torch.offload.tensor_backend.TensorBackend` takes
    them."""

    tokens: torch.Tensor | None
    """The tokens that are needed, ascending; None: all."""
    indices: torch.Tensor
    """[needed tokens, k], -1 where another device runs the route."""
    rows: torch.Tensor
    """Which of the results [needed tokens * k] are the CPU's, in the order of ``places``."""
    places: torch.Tensor
    """Where these belong among the sorted routes."""


def host_share(routes: SortedRoutes, experts: set[int], count: int, whole: bool) -> HostShare:
    """The share of ``experts`` (not none of them) of ``count``; ``whole``: with all tokens, needed or not."""
    if routes.numbers is not None and whole:
        chosen, ordered = routes.numbers
        mine = [place for expert in sorted(experts) for place in range(*routes.segments[expert])]
        masked = torch.tensor([expert if expert in experts else -1 for expert in chosen], dtype=torch.int32)
        rows = torch.tensor([ordered[place] for place in mine])
        return HostShare(None, masked.view(routes.tokens, routes.k), rows, torch.tensor(mine))
    wanted = torch.zeros(count, dtype=torch.bool)
    wanted[sorted(experts)] = True
    masked = torch.where((routes.indices >= 0) & wanted[routes.indices.long().clamp(min=0)], routes.indices, -1)
    places = torch.cat([torch.arange(*routes.segments[expert]) for expert in sorted(experts)])
    rows = routes.order[places]
    if whole:
        return HostShare(None, masked, rows, places)
    tokens = (masked >= 0).any(dim=1).nonzero()[:, 0]
    local = torch.full((routes.tokens,), -1, dtype=torch.int64)
    local[tokens] = torch.arange(tokens.shape[0])
    rows = local[rows // routes.k] * routes.k + rows % routes.k
    return HostShare(tokens, masked.index_select(0, tokens), rows, places)
