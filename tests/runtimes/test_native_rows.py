"""Rows in the native cache: cutting back, fanning out, reordering, taking one; each equals computing afresh."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_oracle import FAMILIES, load_native, needs_kernels
from resident_memory import needs_smaps, resident_bytes
from tiny_models import write_tiny_model
from torch_oracle import prompt

from engine.errors import ModelError
from engine.runtimes.native.cache import KEY_BLOCK, SMALLEST_PAGE, Page, PageShape, Segments
from engine.runtimes.native.model import NativeModel
from engine.runtimes.native.rows import NativeTokenRows
from engine.runtimes.protocol import Interrupted, Logits

pytestmark = needs_kernels

LIMIT = 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeModel]:
    loaded = load_native(write_tiny_model(tmp_path_factory.mktemp(request.param), request.param))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> NativeModel:
    return load_native(write_tiny_model(tmp_path_factory.mktemp("mixtral"), "mixtral"))


def fresh(model: NativeModel, tokens: list[int]) -> Logits:
    return model.start().extend(tokens)


def assert_close(ours: Logits, expected: Logits) -> None:
    assert np.abs(ours - expected).max() / np.abs(expected).max() < LIMIT


@needs_smaps
def test_a_page_takes_memory_for_the_positions_that_are_written() -> None:
    """Also where the system would give huge pages: a page of many heads has a position of each in its first block."""
    page = Page(PageShape(layers=16, heads=8, width=64, dtype=np.dtype(np.float32)), rows=8, capacity=1024)
    assert page.nbytes == 512 << 20
    for array in (page.keys, page.values):
        assert not array[-1, -1, -1].any()
        before = resident_bytes(array.ctypes.data, array.nbytes)
        array[:, :, :, 0] = 1.0
        written = array[:, :, :, 0].nbytes
        assert resident_bytes(array.ctypes.data, array.nbytes) - before <= 2 * written


def test_cut_back_and_extended_again_equals_fresh(model: NativeModel) -> None:
    tokens = prompt(model, 40)
    rows = model.start()
    rows.extend(tokens)
    for token in (5, 6, 7):
        rows.step([token])
    assert rows.can_truncate
    for keep in (30, 9, 0):
        rows.truncate(keep)
        assert rows.length == keep
        other = [token + 1 for token in tokens[: 40 - keep]]
        assert_close(rows.extend(other), fresh(model, tokens[:keep] + other))
        assert_close(rows.step([8])[0], fresh(model, [*tokens[:keep], *other, 8]))
        rows.truncate(keep)
        rows.extend(tokens[keep:])


@pytest.mark.parametrize(("prompt_length", "width"), [(21, 4), (150, 3), (30, 18)])
def test_beams_equal_rows_computed_apart(model: NativeModel, prompt_length: int, width: int) -> None:
    choose = random.Random(1)
    tokens = prompt(model, prompt_length)
    single = model.start()
    single.extend(tokens)
    beams = single.fan_out(width)
    assert (beams.rows, beams.length) == (width, prompt_length)
    histories: list[list[int]] = [[] for _ in range(width)]
    for _ in range(5):
        chosen = [choose.randrange(3, model.facts.vocabulary) for _ in range(width)]
        logits = beams.step(chosen)
        histories = [[*history, token] for history, token in zip(histories, chosen, strict=True)]
        for row in (0, 1, width - 1):
            assert_close(logits[row], fresh(model, tokens + histories[row]))
        parents = [choose.randrange(width) for _ in range(width)]
        beams.reorder(parents)
        histories = [histories[parent] for parent in parents]
    # What the beams did never touches the row they came from, nor the reverse.
    assert_close(single.step([7])[0], fresh(model, [*tokens, 7]))
    assert_close(beams.step([9] * width)[2], fresh(model, [*tokens, *histories[2], 9]))
    again = single.fan_out(2)
    assert_close(again.step([11, 12])[1], fresh(model, [*tokens, 7, 12]))


def test_a_prompt_that_beams_share_is_not_overwritten_when_it_is_cut_back(mixtral: NativeModel) -> None:
    tokens = prompt(mixtral, 37)
    single = mixtral.start()
    single.extend(tokens)
    beams = single.fan_out(2)
    single.truncate(20)
    single.extend([4] * 30)
    assert_close(beams.step([5, 6])[1], fresh(mixtral, [*tokens, 6]))
    assert_close(single.step([7])[0], fresh(mixtral, [*tokens[:20], *[4] * 30, 7]))
    single.truncate(10)
    assert_close(single.step([8])[0], fresh(mixtral, [*tokens[:10], 8]))
    assert_close(beams.step([5, 6])[0], fresh(mixtral, [*tokens, 5, 5]))


def test_fanning_out_copies_nothing_of_the_prompt(mixtral: NativeModel) -> None:
    single = mixtral.start()
    single.extend(prompt(mixtral, 500))
    before = single._cache._segments[0].page
    beams = single.fan_out(8)
    assert beams._cache.nbytes == single._cache.nbytes
    beams.step([5] * 8)
    assert beams._cache._segments[0].page is before
    assert len(beams._cache._segments) == len(single._cache._segments) + 1


def test_reordering_moves_what_rows_do_not_have_in_common(mixtral: NativeModel) -> None:
    single = mixtral.start()
    single.extend(prompt(mixtral, 30))
    beams = single.fan_out(3)
    per_token = mixtral.facts.key_value_bytes_per_token
    assert beams.reorder([2, 1, 0]) == 0
    beams.step([4, 5, 6])
    assert beams.reorder([0, 1, 2]) == 0
    assert beams.reorder([0, 0, 2]) == per_token
    beams.step([4, 5, 6])
    assert beams.reorder([1, 0, 2]) == 2 * per_token, "the first two differ in the last token alone"
    assert beams.reorder([0, 2, 2]) == 2 * per_token, "the second is two tokens away from the third"
    assert beams.reorder([0, 2, 1]) == 0, "the last two are the same"


def test_pages_are_few_and_hardly_larger_than_what_they_hold(mixtral: NativeModel) -> None:
    tokens = prompt(mixtral, 3)
    rows = mixtral.start()
    rows.extend(tokens)
    cache = rows._cache
    for length in range(4, 4000):
        cache.room_for(1)
        cache.commit(1)
        assert sum(s.page.capacity for s in cache._segments) <= length * 1.125 + SMALLEST_PAGE + KEY_BLOCK
    assert len(cache._segments) < 40


def test_a_pass_that_is_interrupted_leaves_the_cache_as_it_was(model: NativeModel) -> None:
    tokens = prompt(model, 12)
    rows = model.start()
    rows.extend(tokens)
    seen: list[int] = []

    def check() -> None:
        seen.append(len(seen))
        if len(seen) == model.facts.layers:
            raise Interrupted

    for chunk in ([9, 10, 11], [9] * 40, [9]):
        seen.clear()
        model.between_layers = check
        with pytest.raises(Interrupted):
            rows.extend(chunk)
        model.between_layers = None
        assert len(seen) == model.facts.layers
        assert rows.length == 12
    assert_close(rows.step([8])[0], fresh(model, [*tokens, 8]))


@pytest.mark.parametrize("length", [1, 7, 16, 17, 40])
def test_layers_one_by_one_equal_one_pass(model: NativeModel, length: int) -> None:
    tokens = prompt(model, length)
    expected = fresh(model, tokens)
    calls: list[int] = []
    model.between_layers = lambda: calls.append(1)
    try:
        assert_close(fresh(model, tokens), expected)
    finally:
        model.between_layers = None
    assert len(calls) == model.facts.layers


def test_logits_are_left_out_when_nobody_wants_them(model: NativeModel) -> None:
    tokens = prompt(model, 30)
    rows = model.start()
    for start, stop in ((0, 1), (1, 10), (10, 29)):
        assert rows.extend(tokens[start:stop], want_logits=False) is None
    assert_close(rows.extend(tokens[29:]), fresh(model, tokens))


def test_misuse_is_an_error(mixtral: NativeModel) -> None:
    single = mixtral.start()
    single.extend([3, 4, 5])
    beams = single.fan_out(2)
    for misuse in (
        lambda: beams.extend([3]),
        lambda: beams.truncate(1),
        lambda: beams.fan_out(2),
        lambda: beams.step([3]),
        lambda: beams.reorder([0]),
        lambda: beams.reorder([0, 2]),
        lambda: single.truncate(4),
        lambda: single.extend([]),
        lambda: single.fan_out(0),
    ):
        with pytest.raises(ValueError):
            misuse()


@pytest.mark.parametrize("token", [-1, 160, 10**9])
def test_a_token_outside_the_vocabulary_is_named(mixtral: NativeModel, token: int) -> None:
    rows = mixtral.start()
    with pytest.raises(ModelError, match=rf"Token id {token} is outside the model's vocabulary of 160"):
        rows.extend([3, token])
    assert rows.length == 0


def test_a_closed_model_says_so(tmp_path: Path) -> None:
    model = load_native(write_tiny_model(tmp_path / "model", "llama"))
    rows = model.start()
    model.close()
    with pytest.raises(ModelError, match="closed; load it again"):
        rows.extend([3])
    with pytest.raises(ModelError, match="closed; load it again"):
        model.start()


# --- the pages alone, against a list of what each row holds ------------------------------------------------------


class Writer:
    """Stands for the model: writes a token's number into every place of its keys and values, and reads them back."""

    def __init__(self, shape: PageShape) -> None:
        self.shape = shape

    def run(self, phase: str, tokens: list[list[int]], cache: Segments, want_logits: bool) -> Logits:
        count = len(tokens[0])
        cache.room_for(count)
        for row, ids in enumerate(tokens):
            for step, token in enumerate(ids):
                keys, values = self.places(cache, row, cache.length + step)
                keys[...] = token
                values[...] = token
        cache.commit(count)
        return np.zeros((len(tokens), 1), np.float32)

    def places(self, cache: Segments, row: int, position: int) -> tuple[np.ndarray, np.ndarray]:
        segment = next(s for s in reversed(cache._segments) if s.start <= position)
        assert position < segment.end
        at = segment.offset + position - segment.start
        row = row if segment.page.keys.shape[0] > 1 else 0
        block, lane = divmod(at, KEY_BLOCK)
        return segment.page.keys[row, :, :, block, lane], segment.page.values[row, :, :, block, lane]

    def held(self, rows: NativeTokenRows, row: int) -> list[int]:
        found = []
        for position in range(rows.length):
            keys, values = self.places(rows._cache, row, position)
            assert len({*keys.ravel().tolist(), *values.ravel().tolist()}) == 1
            found.append(int(keys.flat[0]))
        return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pages_hold_what_each_row_was_given(data: st.DataObject) -> None:
    shape = PageShape(2, 1, 4, np.dtype(np.uint16))
    writer = Writer(shape)
    rows = NativeTokenRows(writer, Segments(shape))  # type: ignore[arg-type]
    held: list[list[int]] = [[]]
    parked: list[tuple[NativeTokenRows, list[list[int]]]] = []
    number = 0
    for _ in range(data.draw(st.integers(1, 25))):
        single = rows.rows == 1
        action = data.draw(st.sampled_from(["step", "extend", "truncate", "fan", "reorder", "swap"]))
        if action == "step" or (action == "extend" and not single):
            rows.step([number + row + 1 for row in range(rows.rows)])
            for row in range(rows.rows):
                held[row].append(number + row + 1)
            number += rows.rows
        elif action == "extend":
            count = data.draw(st.integers(1, 90))
            rows.extend(list(range(number, number + count)))
            held[0] += range(number, number + count)
            number += count
        elif action == "truncate" and single:
            keep = data.draw(st.integers(0, rows.length))
            rows.truncate(keep)
            del held[0][keep:]
        elif action == "fan" and single:
            parked.append((rows, held))
            width = data.draw(st.integers(1, 4))
            rows, held = rows.fan_out(width), [list(held[0]) for _ in range(width)]
        elif action == "reorder":
            parents = data.draw(st.lists(st.integers(0, rows.rows - 1), min_size=rows.rows, max_size=rows.rows))
            rows.reorder(parents)
            held = [list(held[parent]) for parent in parents]
        elif action == "swap" and parked:
            other = parked.pop(data.draw(st.integers(0, len(parked) - 1)))
            parked.append((rows, held))
            rows, held = other
    for seen, expected in [*parked, (rows, held)]:
        assert [writer.held(seen, row) for row in range(seen.rows)] == expected
        if seen.rows == 1:
            # Where pages begin and what they have room for is the same for every row of that length.
            alike = Segments(shape)
            alike.room_for(seen.length)
            borders = [(part.offset, part.start, part.page.capacity) for part in seen._cache._segments]
            wanted = [(part.offset, part.start, part.page.capacity) for part in alike._segments]
            assert borders[: len(wanted)] == wanted
