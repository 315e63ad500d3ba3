"""The pages of the native cache: what they take, what they share, and what each row has in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtimes.native.cache import KEY_BLOCK, SMALLEST_PAGE, AlikeLayers, Page, PageShape, Segments
from engine.runtimes.native.model import NativeModel, NativeTokenRows, PassPart
from engine.runtimes.protocol import Logits
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import NATIVE, StoredModel, assert_close, fresh, prompt_of
from tests.support.random_examples import examples
from tests.support.resident_memory import needs_smaps, resident_bytes

pytestmark = needs_kernels


@pytest.fixture
def mixtral(tiny_model: Callable[..., Path]) -> NativeModel:
    return load_native(tiny_model("mixtral"), cpu_threads=1)


@needs_smaps
def test_a_page_takes_memory_for_the_positions_that_are_written() -> None:
    """Also where the system would give huge pages: a page of many heads has a position of each in its first block."""
    page = Page(PageShape((AlikeLayers(layers=16, heads=8, width=64, value_width=64),), "F32"), rows=8, capacity=1024)
    assert page.nbytes == 512 << 20
    for array in page.arrays:
        assert not array[-1, -1, -1].any()
        before = resident_bytes((array.ctypes.data, array.nbytes))
        array[:, :, :, 0] = 1
        written = array[:, :, :, 0].nbytes
        assert resident_bytes((array.ctypes.data, array.nbytes)) - before <= 2 * written


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "length", "width"),
    [
        ("mistral", 150, 3),
        ("mixtral", 30, 18),
        ("gpt_oss", 400, 18),
        ("glm4_moe_lite", 300, 18),
        ("deepseek_v2", 40, 4),
        ("gemma4_text", 200, 18),
        ("mimo_v2_flash", 200, 18),
    ],
)
def test_beams_over_several_pages_and_of_many_rows(
    family: str, length: int, width: int, stored_model: StoredModel
) -> None:
    model = load_native(stored_model(NATIVE, family), cpu_threads=2)
    choose, tokens = random.Random(1), prompt_of(length)
    single = model.start()
    single.extend(tokens)
    beams = single.fan_out(width)
    histories: list[list[int]] = [[] for _ in range(width)]
    for _ in range(5):
        chosen = [choose.randrange(3, 160) for _ in range(width)]
        logits = beams.step(chosen)
        histories = [[*history, token] for history, token in zip(histories, chosen, strict=True)]
        for row in (0, 1, width - 1):
            assert_close(logits[row], fresh(model, tokens + histories[row]))
        parents = [choose.randrange(width) for _ in range(width)]
        beams.reorder(parents)
        histories = [histories[parent] for parent in parents]


def test_fanning_out_copies_nothing_of_the_prompt(mixtral: NativeModel) -> None:
    single = mixtral.start()
    single.extend(prompt_of(500))
    before = single._cache._segments[0].page
    beams = single.fan_out(8)
    assert beams._cache.nbytes == single._cache.nbytes
    beams.step([5] * 8)
    assert beams._cache._segments[0].page is before
    assert len(beams._cache._segments) == len(single._cache._segments) + 1


def test_reordering_moves_what_rows_do_not_have_in_common(mixtral: NativeModel) -> None:
    single = mixtral.start()
    single.extend(prompt_of(30))
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
    tokens = prompt_of(3)
    rows = mixtral.start()
    rows.extend(tokens)
    cache = rows._cache
    for length in range(4, 4000):
        cache.room_for(1)
        cache.commit(1)
        assert sum(s.page.capacity for s in cache._segments) <= length * 1.125 + SMALLEST_PAGE + KEY_BLOCK
    assert len(cache._segments) < 40


# --- the pages alone, against a list of what each row holds ------------------------------------------------------


class Writer:
    """Stands for the model: writes a token's number into every place of its keys and values, and reads them back."""

    def __init__(self, shape: PageShape) -> None:
        self.shape = shape

    pictures = None

    def run(self, phase: str, parts: list[PassPart], want_logits: bool, as_steps: bool = False) -> Logits:
        ((tokens, cache),) = ((part.tokens, part.cache) for part in parts)
        count = len(tokens[0])
        cache.room_for(count)
        for row, ids in enumerate(tokens):
            for step, token in enumerate(ids):
                for place in self.places(cache, row, cache.length + step):
                    place[...] = token
        cache.commit(count)
        return np.zeros((len(tokens), 1), np.float32)

    def places(self, cache: Segments, row: int, position: int) -> list[np.ndarray]:
        segment = next(s for s in reversed(cache._segments) if s.start <= position)
        assert position < segment.end
        at = segment.offset + position - segment.start
        row = row if segment.page.rows > 1 else 0
        block, lane = divmod(at, KEY_BLOCK)
        return [array[row, :, :, block, lane] for array in segment.page.arrays]

    def held(self, rows: NativeTokenRows, row: int) -> list[int]:
        found = []
        for position in range(rows.length):
            (number,) = {int(number) for array in self.places(rows._cache, row, position) for number in array.flat}
            found.append(number)
        return found


SHAPES = ((AlikeLayers(2, 1, 4, 4),), (AlikeLayers(2, 2, 4, 4), AlikeLayers(1, 1, 8, 6)))


@settings(max_examples=examples(8))
@given(st.data())
def test_pages_hold_what_each_row_was_given(data: st.DataObject) -> None:
    shape = PageShape(data.draw(st.sampled_from(SHAPES)), "BF16", has_values=data.draw(st.booleans()))
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
