"""Made-up routes with the statistics that the papers print, for simulations where no recorded ones are at hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.papers.replay import Step

Floats = npt.NDArray[np.float64]


def mixtral_popularity(generator: np.random.Generator, layers: int = 32, experts: int = 8) -> Floats:
    """[layers, experts], the most popular expert 1.0: appendix C of the Twiddler paper (mean 0.71, deviation 0.08,
    least 0.22)."""
    shares = generator.normal(0.71, 0.08, size=(layers, experts)).clip(0.22, 0.97)
    shares.flat[int(shares.argmax())] = 1.0
    return shares


def chosen(generator: np.random.Generator, weights: Floats, rows: int, per_token: int) -> npt.NDArray[np.intp]:
    """[rows, per_token]: different experts for each row, drawn by ``weights`` [experts]."""
    scores = np.log(weights)[None, :] + generator.gumbel(size=(rows, weights.size))
    return np.argpartition(-scores, per_token - 1, axis=1)[:, :per_token]


def routed_steps(
    generator: np.random.Generator, popularity: Floats, rows: Sequence[int], per_token: int, repeat: float = 0.0
) -> list[list[npt.NDArray[np.intp]]]:
    """For each of ``rows`` a step of so many tokens: per layer, the experts of each token, [tokens, per_token]. With
    probability ``repeat`` a layer's tokens go where they went before (if there were as many)."""
    before: dict[int, npt.NDArray[np.intp]] = {}
    made = []
    for count in rows:
        layers = []
        for layer, weights in enumerate(popularity):
            again = layer in before and len(before[layer]) == count and generator.random() < repeat
            routes = before[layer] if again else chosen(generator, weights, count, per_token)
            before[layer] = routes
            layers.append(routes)
        made.append(layers)
    return made


def counted(routed: Sequence[npt.NDArray[np.intp]], experts: int) -> Step:
    """A step of :func:`routed_steps` with its tokens counted."""
    layers = []
    for routes in routed:
        tokens = np.bincount(routes.ravel(), minlength=experts)
        layers.append(tuple((int(expert), int(tokens[expert])) for expert in np.flatnonzero(tokens)))
    return Step(len(routed[0]) if routed else 0, tuple(layers))


def steps(
    generator: np.random.Generator, popularity: Floats, rows: Sequence[int], per_token: int, repeat: float = 0.0
) -> list[Step]:
    """As :func:`routed_steps`, counted."""
    routed = routed_steps(generator, popularity, rows, per_token, repeat)
    return [counted(step, popularity.shape[1]) for step in routed]


def popular_order(popularity: Floats) -> list[tuple[int, int]]:
    """(layer, expert), most popular first."""
    flat = np.argsort(-popularity, axis=None, kind="stable")
    return [(int(place // popularity.shape[1]), int(place % popularity.shape[1])) for place in flat]


def skewed_layers(
    generator: np.random.Generator, experts: int, rows: int, per_token: int, layers: int, exponent: float
) -> list[list[int]]:
    """Tokens of each active expert of every layer, where the n-th most popular expert has weight n ** -exponent."""
    weights = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    made = []
    for _ in range(layers):
        tokens = np.bincount(chosen(generator, weights, rows, per_token).ravel(), minlength=experts)
        made.append([int(count) for count in tokens if count])
    return made
