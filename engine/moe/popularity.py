"""Popularity: how often each expert is used. It seeds placements and is shown by the heat map."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from engine.models.formats.model_files import Experts, ModelFiles, whole_bytes
from engine.models.store.local_models import profile_key
from engine.system.durable_files import new_file
from engine.system.locations import ensure, profile_paths


class Popularity:
    """Counts of routes per (layer, expert). ``layers`` are the decoder layers that have routed experts.

    ``model``: identity of the whole model, if it is known.
    """

    def __init__(self, layers: Iterable[int], experts: int, model: ProfileModel | None = None) -> None:
        self.model = model
        self._counts = {layer: array("q", bytes(8 * experts)) for layer in layers}

    def add(self, layer: int, expert: int, routes: int) -> None:
        """Add ``routes`` tokens that were sent to ``expert`` of ``layer``."""
        self._counts[layer][expert] += routes

    def counts(self, layer: int) -> Sequence[int]:
        """Routes per expert of ``layer``."""
        return tuple(self._counts[layer])

    def address(self, layer: int) -> int:
        """Address of the counts of ``layer``, which are 64-bit integers, so that the kernels can add to them."""
        return self._counts[layer].buffer_info()[0]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._counts)

    def hottest(self, count: int) -> list[tuple[int, int]]:
        """The ``count`` most used (layer, expert) pairs, most used first; ties go to the lower layer and expert."""
        pairs = [(-routes, layer, expert) for layer, row in self._counts.items() for expert, routes in enumerate(row)]
        return [(layer, expert) for _, layer, expert in sorted(pairs)[:count]]

    def share(self, pairs: Iterable[tuple[int, int]]) -> float:
        """The fraction of all routes that went to ``pairs``, 0.0 to 1.0; 0.0 if nothing was counted."""
        total = sum(map(sum, self._counts.values()))
        return sum(self._counts[layer][expert] for layer, expert in pairs) / total if total else 0.0


# --- the popularity learned on this machine --------------------------------------------------------------------------


PROFILE_VERSION = 1
HALF_LIFE_TOKENS = 50_000
"""Number of tokens through a layer after which earlier counts weigh half."""
CALIBRATION_TOKENS = 5_000
"""Number of tokens of own use whose weight the calibration prompts have."""
SAVE_INTERVAL_S = 60.0

_FILE_LIMIT = 50_000_000

Counts = Mapping[int, Sequence[float]]
"""Routes per expert for each decoder layer that has routed experts. Faded numbers need not be whole."""


class ProfileModel(msgspec.Struct, frozen=True):
    """The model of a profile. If another model takes its name, a new profile begins."""

    layers: tuple[int, ...]
    experts: int
    expert_bytes: int
    """Bytes of all routed experts."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A file's contents. ``routes[i][e]``: routes to expert e of ``model.layers[i]``."""

    version: int
    model: ProfileModel
    routes: list[list[float]]


def model_of(experts: Experts) -> ProfileModel:
    """Identity of the whole model, of which a share of a ring has only some experts: all are of one size."""
    return ProfileModel(tuple(experts.layers), experts.count, whole_bytes(experts))


def load_profile(path: Path, model: ProfileModel, notice: Callable[[str], None] = lambda text: None) -> Counts | None:
    """The counts in ``path`` if they are of ``model``; None, with a sentence to ``notice``, if they cannot be used."""
    try:
        if path.stat().st_size > _FILE_LIMIT:
            raise ValueError(f"it has over {_FILE_LIMIT} bytes")
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
        if profile.version != PROFILE_VERSION:
            raise ValueError(f"it is of version {profile.version}, not {PROFILE_VERSION}")
        if profile.model != model:
            raise ValueError("it is of another model")
        if [len(row) for row in profile.routes] != [model.experts] * len(model.layers):
            raise ValueError("it has not one number for each expert")
        if not all(math.isfinite(routes) and routes >= 0 for row in profile.routes for routes in row):
            raise ValueError("it holds something that is no count")
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        notice(f"The popularity profile {path} is not used ({why}); it is learned anew.")
        return None
    return dict(zip(model.layers, profile.routes, strict=True))


def save_profile(path: Path, model: ProfileModel, counts: Counts) -> None:
    """Write ``counts`` in one piece, readable by their owner only. Raises OSError."""
    ensure("data")
    path.parent.mkdir(exist_ok=True, mode=0o700)
    routes = [[round(float(number), 3) for number in counts[layer]] for layer in model.layers]
    with new_file(path) as file:
        file.write(msgspec.json.encode(Profile(version=PROFILE_VERSION, model=model, routes=routes)))


def faded(old: Counts | None, new: Counts, experts_per_token: int) -> dict[int, list[float]]:
    """``new`` added to ``old``, which is halved for every HALF_LIFE_TOKENS tokens of ``new``."""
    merged = {}
    for layer, row in new.items():
        tokens = sum(row) / max(1, experts_per_token)
        left = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        before = old[layer] if old is not None else [0.0] * len(row)
        merged[layer] = [was * left + now for was, now in zip(before, row, strict=True)]
    return merged


def combined(own: Counts | None, calibration: Counts | None, experts_per_token: int) -> dict[int, list[float]] | None:
    """The person's own counts and those of the calibration prompts, these scaled to CALIBRATION_TOKENS tokens."""
    if calibration is None:
        return None if own is None else {layer: list(row) for layer, row in own.items()}
    merged = {}
    for layer, row in calibration.items():
        total = sum(row)
        scale = CALIBRATION_TOKENS * max(1, experts_per_token) / total if total else 0.0
        before = own[layer] if own is not None else [0.0] * len(row)
        merged[layer] = [was + scale * now for was, now in zip(before, row, strict=True)]
    return merged


def seed_counts(
    files: ModelFiles, experts_per_token: int = 1, notice: Callable[[str], None] = lambda text: None
) -> dict[int, list[float]] | None:
    """The known use of the model's experts, from both files; None without any, and for a dense model."""
    if files.experts is None:
        return None
    return known_counts(files.folder, model_of(files.experts), experts_per_token, notice)


def known_counts(
    folder: Path, model: ProfileModel, experts_per_token: int, notice: Callable[[str], None] = lambda text: None
) -> dict[int, list[float]] | None:
    """The known use of the experts of ``model`` in ``folder``, as :func:`seed_counts` gives it."""
    own, calibration = (load_profile(path, model, notice) for path in profile_paths(profile_key(folder)))
    return combined(own, calibration, experts_per_token)


def seed_order(
    files: ModelFiles, experts_per_token: int = 1, notice: Callable[[str], None] = lambda text: None
) -> list[tuple[int, int]]:
    """All (layer, expert) pairs, the likeliest to be used first.

    Without any profile the layers take turns, so that a cache holds about as many experts of each.
    """
    if files.experts is None:
        return []
    counts = seed_counts(files, experts_per_token, notice) or {}
    layers, count = files.experts.layers, files.experts.count
    pairs = [(layer, expert) for expert in range(count) for layer in layers]
    return sorted(pairs, key=lambda pair: -counts[pair[0]][pair[1]] if counts else 0.0)


class PopularityWriter:
    """Adds a loaded model's counts to its profile in ``path``, now and then and at the end.

    ``popularity`` counts from the model's loading on. Thread-safe. A disk error is reported once.
    """

    def __init__(
        self,
        path: Path,
        model: ProfileModel,
        popularity: Popularity,
        experts_per_token: int,
        notice: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._path = path
        self._popularity = popularity
        self._per_token = experts_per_token
        self._notice = notice
        self._clock = clock
        self._due = clock() + SAVE_INTERVAL_S
        self._lock = threading.Lock()
        self._saved = self._now()
        self._refused = False

    def save_if_due(self) -> None:
        """:meth:`save` if the last time is at least SAVE_INTERVAL_S ago."""
        if self._clock() >= self._due:
            self.save()

    def save(self) -> None:
        """Add the counts since the last time to the file, which may have been deleted meanwhile."""
        with self._lock:
            self._due = self._clock() + SAVE_INTERVAL_S
            now = self._now()
            new = {
                layer: [count - before for count, before in zip(row, self._saved[layer], strict=True)]
                for layer, row in now.items()
            }
            if not any(map(any, new.values())):
                return
            old = load_profile(self._path, self._model)
            try:
                save_profile(self._path, self._model, faded(old, new, self._per_token))
            except OSError as error:
                if not self._refused:
                    self._notice(
                        f"Which experts are popular cannot be kept in {self._path}: {error.strerror or error}; "
                        "answers are not affected."
                    )
                self._refused = True
                return
            self._saved = now

    def leave_out(self) -> None:
        """Discard the counts so far, which are a benchmark's and not the person's own use."""
        with self._lock:
            self._saved = self._now()

    def _now(self) -> dict[int, Sequence[int]]:
        return {layer: self._popularity.counts(layer) for layer in self._popularity.layers}
