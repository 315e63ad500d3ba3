"""What no window reaches is given back by the native cache, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of
from engine.runtimes.native.cache import KEY_BLOCK
from engine.runtimes.native.model import NativeModel, NativeTokenRows
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import NATIVE, StoredModel, logits_after, prompt_of
from tests.support.resident_memory import needs_smaps, resident_bytes

pytestmark = [needs_kernels, pytest.mark.parametrize("family", ["gpt_oss", "gemma4_text", "mistral", "llama4_text"])]

TOKENS = prompt_of(700)
CHUNKS = (300, 299, 100, 1)
LAST = 699
"""Tokens before the last chunk."""
BACK = 64
"""Tokens before a chunk to which a row can be cut back."""


SIZES = {"head_dim": 32, "max_position_embeddings": 4096}
Loaded = Callable[..., NativeModel]


@pytest.fixture
def loaded(stored_model: StoredModel) -> Loaded:
    def load(family: str, stored: str = "float32", **how: Any) -> NativeModel:
        return load_native(stored_model(NATIVE, family, stored, **SIZES), **how)

    return load


def prefilled(model: NativeModel, back: int | None) -> tuple[NativeTokenRows, NDArray[np.float32]]:
    """A row of TOKENS and the logits after them; what is unseen from ``back`` tokens before each chunk on is
    forgotten."""
    rows, begun, logits = model.start(), 0, None
    for count in CHUNKS:
        logits = rows.extend(TOKENS[begun : begun + count])
        if back is not None:
            rows.forget_unseen(begun - back)
        begun += count
    assert logits is not None
    return rows, logits


def restored(model: NativeModel, rows: NativeTokenRows) -> NativeTokenRows:
    contents = rows.contents()
    assert contents is not None
    given = iter(contents)

    def fill(place: NDArray[np.uint8]) -> None:
        place[:] = next(given).read()

    return model.restored(rows.length, 0, [array.part for array in contents], fill)[0]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "how",
    [{}, {"stored": "bfloat16"}, {"key_values": "q8_0"}, {"key_values": "q4_0"}],
    ids=["float32", "bfloat16", "8 bits", "4 bits"],
)
def test_what_is_forgotten_changes_no_bit(family: str, how: dict[str, Any], loaded: Loaded) -> None:
    model = loaded(family, **how)
    whole, expected = prefilled(model, None)
    short, logits = prefilled(model, BACK)
    assert (logits == expected).all()
    assert whole.forgotten_bytes == 0 < short.forgotten_bytes
    assert (short.shortest_cut, whole.shortest_cut) == (LAST - BACK, 0)
    for token in prompt_of(40, seed=1):
        assert (short.step([token]) == whole.step([token])).all()
    with pytest.raises(ValueError, match="cannot keep 634 tokens"):
        short.truncate(634)
    for rows in (short, whole):
        rows.truncate(635)
    other = prompt_of(20, seed=3)
    assert (logits_after(short, other) == logits_after(whole, other)).all()


def test_bytes_are_those_of_the_plan(family: str, stored_model: StoredModel) -> None:
    folder = stored_model(NATIVE, family, **SIZES)
    model = load_native(folder)
    short, _ = prefilled(model, BACK)
    facts, window = model.facts, model.facts.window
    sizes = sizes_of(open_model(folder), "float32")
    assert window == sizes.window > 0
    # Of a family whose layers all have windows the configuration does not name kinds.
    assert facts.windowed_bytes_per_token == (sizes.windowed_bytes_per_token or facts.key_value_bytes_per_token)
    unseen = LAST - BACK + 1 - window
    assert short.forgotten_bytes <= unseen * facts.windowed_bytes_per_token
    # At most a block stays in each of the pages that begin before the window.
    assert (
        unseen * facts.windowed_bytes_per_token - short.forgotten_bytes < 8 * KEY_BLOCK * facts.windowed_bytes_per_token
    )


@needs_smaps
def test_memory_is_given_back(family: str, loaded: Loaded) -> None:
    model = loaded(family)

    def resident(rows: NativeTokenRows) -> int:
        pages = [segment.page for segment in rows._cache._segments]
        return resident_bytes(*((array.ctypes.data, array.nbytes) for page in pages for array in page.arrays))

    rows, _ = prefilled(model, None)
    before = resident(rows)
    rows.forget_unseen(LAST - BACK)
    # Half of what is forgotten: small heads leave parts of the system's pages in use.
    assert before - resident(rows) > rows.forgotten_bytes // 2 > 0


@pytest.mark.sampled
def test_a_copy_that_is_shorter_keeps_what_it_sees(family: str, loaded: Loaded) -> None:
    model = loaded(family)
    first, _ = prefilled(model, None)
    second = first.fan_out(1)
    first.truncate(400)
    for count in (300, 300):
        second.extend(prompt_of(count, seed=count))
    second.forget_unseen(second.length - BACK)
    assert first.shortest_cut <= 400 and second.forgotten_bytes > 0
    expected = model.start()
    expected.extend(TOKENS[:300])
    expected.extend(TOKENS[300:400])
    for token in prompt_of(20, seed=4):
        assert np.allclose(first.step([token]), expected.step([token]), atol=1e-4)
    # Once it is gone, nothing holds the other one back.
    del first
    forgotten = second.forgotten_bytes
    second.forget_unseen(second.length - BACK)
    assert second.forgotten_bytes > forgotten


@pytest.mark.sampled
def test_beams_and_copies_go_on_alike(family: str, loaded: Loaded) -> None:
    model = loaded(family)
    found = []
    for back in (BACK, None):
        rows, _ = prefilled(model, back)
        wide = rows.fan_out(3)
        stepped = [wide.step([5, 6, 7])]
        moved = wide.reorder([1, 1, 0])
        stepped += [wide.step([8, 9, 10]), wide.step([11, 12, 13])]
        alone = rows.fan_out(1)
        alone.truncate(690)
        stepped.append(alone.step([14]))
        found.append((moved, np.concatenate(stepped)))
    assert found[0][0] == found[1][0] and (found[0][1] == found[1][1]).all()


@pytest.mark.sampled
def test_a_shortened_row_is_restored_from_fewer_bytes(family: str, loaded: Loaded) -> None:
    model = loaded(family)
    (short, _), (whole, _) = prefilled(model, BACK), prefilled(model, None)
    contents, all_of_it = short.contents(), whole.contents()
    assert contents is not None and all_of_it is not None
    saved = [sum(int(np.prod(array.part.shape)) for array in parts) for parts in (all_of_it, contents)]
    assert saved[0] - saved[1] == short.forgotten_bytes
    again = restored(model, short)
    assert 0 < again.shortest_cut <= short.shortest_cut and again.forgotten_bytes == short.forgotten_bytes
    for each in (again, short):
        each.truncate(650)
    assert (logits_after(again, [5, 6, 7]) == logits_after(short, [5, 6, 7])).all()
    parts = [array.part for array in contents]
    for length in (620, 720, 900):
        with pytest.raises(ValueError, match=r"other parts|lacks positions"):
            model.restored(length, 0, parts, lambda place: None)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_any_course_gives_what_rows_that_keep_everything_give(family: str, seed: int, loaded: Loaded) -> None:
    """Rows grow, are cut back, copied, forgotten and restored; in every second course their numbers have 4 bits."""
    model, choose = loaded(family, **({"key_values": "q4_0"} if seed % 2 else {})), random.Random(seed)
    pairs = [(model.start(), model.start())]
    for _ in range(40):
        short, whole = choose.choice(pairs)
        match choose.choice(("extend", "extend", "step", "forget", "cut", "copy", "restore", "drop")):
            case "extend" if short.length < 3000:
                tokens = prompt_of(choose.randrange(1, 300), seed=choose.randrange(1000))
                assert (logits_after(short, tokens) == logits_after(whole, tokens)).all()
            case "step":
                token = choose.randrange(3, 100)
                assert (short.step([token]) == whole.step([token])).all()
            case "forget":
                short.forget_unseen(choose.randrange(short.length + 1))
            case "cut" if short.length:
                length = choose.randrange(short.shortest_cut, short.length + 1)
                short.truncate(length)
                whole.truncate(length)
            case "copy":
                pairs.append((short.fan_out(1), whole.fan_out(1)))
            case "restore" if short.length:
                pairs.append((restored(model, short), whole.fan_out(1)))
            case "drop" if len(pairs) > 1:
                pairs.remove((short, whole))
