"""Layers with a sliding window on mlx: what no window reaches is dropped, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of
from engine.runtimes.mlx import eligible
from engine.runtimes.mlx.cache import RowCache
from engine.runtimes.mlx.model import MlxModel, MlxRows
from tests.engine.runtimes.mlx_oracle import (
    library_model,
    load,
    log_softmax,
    prompt_of,
    relative_error,
    write_comparable,
)
from tests.engine.runtimes.subjects import logits_after

WINDOW = 16
LONG = {"max_position_embeddings": 4096}
TOKENS = prompt_of(700)
CHUNKS = (300, 299, 100, 1)
pytestmark = pytest.mark.parametrize("family", ["gpt_oss", "gemma4_text"])


def written(folder: Path, family: str) -> tuple[Path, MlxModel]:
    folder = write_comparable(folder / family, family, **LONG)
    return folder, load(folder, dtype="float32")


def prefilled(model: MlxModel, tokens: list[int], back: int | None) -> tuple[MlxRows, NDArray[np.float32]]:
    """A row of ``tokens`` and the logits after them; what cannot be seen from ``back`` tokens before each chunk on is
    forgotten."""
    rows, begun, logits = model.start(), 0, None
    for count in CHUNKS:
        logits = rows.extend(tokens[begun : begun + count])
        if back is not None:
            rows.forget_unseen(begun - back)
        begun += count
    assert begun == len(tokens) and logits is not None
    return rows, logits


def starts(rows: MlxRows) -> dict[int | None, set[int]]:
    """The first positions that layers keep, by their windows."""
    found: dict[int | None, set[int]] = {}
    for cache in rows._caches:
        assert isinstance(cache, RowCache)
        found.setdefault(cache.window, set()).add(cache.start)
    return found


def library_logits(model: Any, prompt: list[int], answer: list[int]) -> NDArray[np.float32]:
    """Log-probabilities after ``prompt`` and each token of ``answer``, by mlx-lm with its rotating caches."""
    cache = make_prompt_cache(model)
    found = [model(mx.array([prompt]), cache=cache)[0, -1]]
    found += [model(mx.array([[token]]), cache=cache)[0, -1] for token in answer]
    return np.stack([log_softmax(np.array(logits.astype(mx.float32))) for logits in found])


@pytest.mark.soak
def test_what_is_forgotten_changes_no_bit_and_equals_mlx_lm(family: str, tmp_path: Path) -> None:
    folder, model = written(tmp_path, family)
    whole, expected = prefilled(model, TOKENS, None)
    short, logits = prefilled(model, TOKENS, 64)
    assert starts(whole) == {None: {0}, WINDOW: {0}}
    assert starts(short) == {None: {0}, WINDOW: {599 - 64 + 1 - WINDOW}}
    assert sum(c.row_bytes() for c in short._caches) < 0.7 * sum(c.row_bytes() for c in whole._caches)
    assert (logits == expected).all()
    answer = prompt_of(40, seed=1)
    found = [logits]
    for token in answer:
        found.append(short.step([token])[0])
        assert (found[-1] == whole.step([token])[0]).all()
    library = library_logits(library_model(folder), TOKENS, answer)
    assert relative_error(np.stack([log_softmax(each) for each in found]), library) < 1e-4


@pytest.mark.soak
def test_a_row_is_cut_back_as_far_as_its_windows_reach_and_no_further(family: str, tmp_path: Path) -> None:
    _, model = written(tmp_path, family)
    short, _ = prefilled(model, TOKENS, 64)
    whole, _ = prefilled(model, TOKENS, None)
    assert (whole.shortest_cut, short.shortest_cut) == (0, 599 - 64)
    for token in prompt_of(300, seed=2):
        short.step([token])  # an answer is kept whole
    assert short.shortest_cut == 599 - 64
    with pytest.raises(ValueError, match="cannot keep 534 tokens"):
        short.truncate(534)
    other = prompt_of(20, seed=3)
    for rows in (short, whole):
        rows.truncate(535)
    assert (logits_after(short, other) == logits_after(whole, other)).all()
    assert short.length == whole.length == 555


@pytest.mark.soak
def test_beams_and_copies_of_a_shortened_row_go_on_alike(family: str, tmp_path: Path) -> None:
    _, model = written(tmp_path, family)
    found = []
    for back in (64, None):
        rows, _ = prefilled(model, TOKENS, back)
        wide = rows.fan_out(3)
        stepped = [wide.step([5, 6, 7])]
        moved = wide.reorder([1, 1, 0])
        stepped += [wide.step([8, 9, 10]), wide.step([11, 12, 13])]
        alone = rows.fan_out(1)
        alone.truncate(690)
        stepped.append(alone.step([14]))
        found.append((moved, np.concatenate(stepped)))
        assert starts(wide) == starts(rows) == starts(alone)
    assert found[0][0] == found[1][0] and (found[0][1] == found[1][1]).all()


@pytest.mark.sampled
def test_a_shortened_row_is_restored_from_its_contents(family: str, tmp_path: Path) -> None:
    _, model = written(tmp_path, family)
    rows, _ = prefilled(model, TOKENS, 64)
    contents = rows.contents()
    assert contents is not None
    given, parts = iter(contents), [array.part for array in contents]

    def fill(place: NDArray[np.uint8]) -> None:
        place[:] = next(given).read()

    again, saved = model.restored(700, 0, parts, fill)
    assert saved is None and starts(again) == starts(rows) and again.shortest_cut == rows.shortest_cut
    for each in (again, rows):
        each.truncate(600)
    assert (logits_after(again, [5, 6, 7]) == logits_after(rows, [5, 6, 7])).all()
    with pytest.raises(ValueError, match="are not those of 900 tokens"):
        model.restored(900, 0, parts, fill)


@pytest.mark.soak
def test_copies_are_refused_by_what_a_shortened_row_takes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = written(tmp_path, family)
    short, _ = prefilled(model, TOKENS, 64)
    whole, _ = prefilled(model, TOKENS, None)
    room = 2 * sum(cache.row_bytes() for cache in short._caches)
    used = mx.get_active_memory()
    monkeypatch.setattr(mx, "get_active_memory", lambda: used)
    monkeypatch.setattr(eligible, "working_set_bytes", lambda: used + room)
    assert short.fan_out(2).rows == 2
    with pytest.raises(ModelError, match="2 beams need"):
        whole.fan_out(2)


@pytest.mark.sampled
def test_the_plan_and_the_loaded_model_count_the_same(family: str, tmp_path: Path) -> None:
    folder, model = written(tmp_path, family)
    facts, sizes = model.facts, sizes_of(open_model(folder), "float32")
    short, _ = prefilled(model, TOKENS, 64)
    assert (facts.window, sizes.window) == (WINDOW, WINDOW)
    assert 0 < facts.windowed_bytes_per_token == sizes.windowed_bytes_per_token < facts.key_value_bytes_per_token
    assert short.forgotten_bytes == (599 - 64 + 1 - WINDOW) * facts.windowed_bytes_per_token
