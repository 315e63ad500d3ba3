"""Rows of tokens, on every runtime: whatever is cut, copied and moved, the logits are those of a fresh start."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.runtimes.native import model as native_model
from engine.runtimes.protocol import Interrupted, LoadedModel, Logits
from tests.engine.runtimes.subjects import (
    SUBJECTS,
    StoredModel,
    Subject,
    assert_close,
    case,
    each_runtime,
    fresh,
    logits_after,
    prompt_of,
    together,
)

Loaded = Callable[..., LoadedModel]

KINDS_OF_CACHES = {
    "native": ("mistral", "qwen2_moe", "granitemoe", "gpt_oss", "qwen3_5_moe_text", "qwen4_exp_text"),
    "torch": ("llama", "mistral", "mixtral", "gpt_oss", "deepseek_v3", "minimax", "dbrx", "llama4_text"),
    "mlx": ("mistral", "mixtral", "gpt_oss", "deepseek_v3", "dbrx", "qwen3_next", "lfm2_moe", "gemma4_text"),
}
"""Full attention, windows in all layers and in some, sinks, compressed keys and values, linear and chunked attention,
delta-nets, short convolutions, two kinds of heads, chosen blocks, attention in a block of its own."""


WITH_STATES = (
    *("minimax", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text", "lfm2", "lfm2_moe"),
    *("granitemoehybrid", "nemotron_h", "kimi_linear", "bailing_hybrid", "glm5_next_text", "deepseek_v4"),
)
"""Families with layers that keep a state instead of keys and values."""


@pytest.fixture(
    scope="module",
    params=together(
        [
            case(subject, family, soak=family not in KINDS_OF_CACHES[subject.name])
            for subject in SUBJECTS
            for family in subject.families
        ]
    ),
)
def model(request: pytest.FixtureRequest, loaded: Loaded) -> LoadedModel:
    return loaded(*request.param)


@pytest.mark.sampled
def test_cut_back_and_extended_again_equals_fresh(model: LoadedModel) -> None:
    tokens = prompt_of(40)
    rows = model.start()
    rows.extend(tokens)
    for token in (5, 6, 7):
        rows.step([token])
    if not rows.can_truncate:
        assert model.facts.family in WITH_STATES
        with pytest.raises(ModelError, match="cannot be cut back"):
            rows.truncate(10)
        rows.truncate(43)
        assert rows.length == 43
        return
    for keep in (30, 9, 0):
        rows.truncate(keep)
        assert rows.length == keep
        other = prompt_of(28, seed=keep)
        assert_close(rows.extend(other), fresh(model, tokens[:keep] + other))
        assert_close(rows.step([8])[0], fresh(model, [*tokens[:keep], *other, 8]))
        rows.truncate(keep)
        rows.extend(tokens[keep:])


@pytest.mark.sampled
def test_beams_equal_rows_computed_apart(model: LoadedModel) -> None:
    choose, tokens, width = random.Random(1), prompt_of(30), 4
    single = model.start()
    single.extend(tokens)
    beams = single.fan_out(width)
    assert (beams.rows, beams.length, single.rows, single.length) == (width, 30, 1, 30)
    linear = model.facts.family in WITH_STATES
    assert linear or beams.reorder([2, 1, 0, 3]) == 0, "they have only the prompt, which they share"
    histories: list[list[int]] = [[] for _ in range(width)]
    for parents in ([0, 0, 2, 1], [0, 1, 2, 3], [3, 1, 0, 3]):
        chosen = [choose.randrange(3, 160) for _ in range(width)]
        logits = beams.step(chosen)
        histories = [[*history, token] for history, token in zip(histories, chosen, strict=True)]
        for row, history in enumerate(histories):
            assert_close(logits[row], fresh(model, tokens + history))
        changed = sum(row != parent for row, parent in enumerate(parents))
        most = changed * len(histories[0]) * model.facts.key_value_bytes_per_token
        moved = beams.reorder(parents)
        assert (moved > 0) == (changed > 0)
        # The native cache moves what rows do not have in common only; linear attention has a state besides.
        assert moved == most or linear or (moved < most and model.facts.runtime == "native")
        histories = [histories[parent] for parent in parents]
    # What the beams did never touches the row they came from, nor the reverse.
    assert_close(single.step([7])[0], fresh(model, [*tokens, 7]))
    assert_close(beams.step([9] * width)[2], fresh(model, [*tokens, *histories[2], 9]))
    assert_close(single.fan_out(2).step([11, 12])[1], fresh(model, [*tokens, 7, 12]))


@pytest.mark.sampled
def test_past_the_first_block_of_the_cache(model: LoadedModel) -> None:
    """Rows that are made at the edge of a block grow on their own."""
    tokens = prompt_of(255, seed=3)
    rows = model.start()
    for token in tokens[:3]:
        rows.step([token])
    for start in range(3, 255, 84):
        assert rows.extend(tokens[start : start + 84], want_logits=False) is None
    beams = rows.fan_out(2)
    for token in (4, 5, 6):
        rows.step([token])
        beams.step([token, token + 10])
    assert_close(rows.step([7])[0], fresh(model, [*tokens, 4, 5, 6, 7]))
    assert_close(beams.step([7, 17])[1], fresh(model, [*tokens, 14, 15, 16, 17]))


def test_a_pass_that_is_interrupted_leaves_the_rows_as_they_were(model: LoadedModel) -> None:
    """Alone, mlx does not stop within a chunk: it asks nobody, and the pass is a pass."""
    tokens = prompt_of(12)
    rows = model.start()
    rows.extend(tokens)
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) == model.facts.layers:
            raise Interrupted

    try:
        for chunk in ([9, 10, 11], [9] * 40, [9]):
            asked.clear()
            model.between_layers = check
            if model.facts.runtime == "mlx":
                rows.fan_out(1).extend(chunk)
                assert not asked
            else:
                with pytest.raises(Interrupted):
                    rows.extend(chunk)
                assert len(asked) == model.facts.layers
            assert rows.length == 12
    finally:
        model.between_layers = None
    assert_close(rows.step([8])[0], fresh(model, [*tokens, 8]))


def test_the_native_trunk_stops_within_a_layer(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    if model.facts.runtime != "native":
        pytest.skip("torch and mlx stop between layers at best")
    monkeypatch.setattr(native_model, "STOP_INTERVAL_S", 0.0)
    tokens = prompt_of(40)
    rows = model.start()
    rows.extend(tokens)
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) == limit:
            raise Interrupted

    limit = 0
    model.between_layers = check
    try:
        expected = fresh(model, [*tokens, *[9] * 40])
        assert len(asked) > 2 * model.facts.layers
        for limit in (2, len(asked) // 2, len(asked) // 2 + 1):  # within the first layer, and in the middle
            asked.clear()
            with pytest.raises(Interrupted):
                rows.extend([9] * 40)
            assert len(asked) == limit and rows.length == 40
    finally:
        model.between_layers = None
    assert_close(rows.extend([9] * 40), expected)


def test_layers_one_by_one_equal_one_pass(model: LoadedModel) -> None:
    asked: list[int] = []
    for length in (1, 17, 40):
        tokens = prompt_of(length)
        expected = fresh(model, tokens)
        asked.clear()
        model.between_layers = lambda: asked.append(1)
        try:
            assert_close(fresh(model, tokens), expected)
        finally:
            model.between_layers = None
        assert not asked if model.facts.runtime == "mlx" else len(asked) >= model.facts.layers


# --- the same code whatever the family is --------------------------------------------------------------------------


@each_runtime
def test_a_prompt_that_beams_share_is_not_overwritten_when_it_is_cut_back(subject: Subject, loaded: Loaded) -> None:
    model, tokens = loaded(subject, "mixtral"), prompt_of(37)
    single = model.start()
    single.extend(tokens)
    beams = single.fan_out(2)
    single.truncate(20)
    single.extend([4] * 30)
    assert_close(beams.step([5, 6])[1], fresh(model, [*tokens, 6]))
    assert_close(single.step([7])[0], fresh(model, [*tokens[:20], *[4] * 30, 7]))
    single.truncate(10)
    assert_close(single.step([8])[0], fresh(model, [*tokens[:10], 8]))
    assert_close(beams.step([5, 6])[0], fresh(model, [*tokens, 5, 5]))


@each_runtime
@settings(max_examples=8)
@given(data=st.data())
def test_any_sequence_of_reorders(subject: Subject, loaded: Loaded, data: st.DataObject) -> None:
    model, tokens = loaded(subject, "mixtral"), prompt_of(5)
    width = data.draw(st.integers(1, 5))
    single = model.start()
    single.extend(tokens)
    rows = single.fan_out(width)
    histories: list[list[int]] = [[] for _ in range(width)]
    for _ in range(data.draw(st.integers(1, 4))):
        chosen = data.draw(st.lists(st.integers(3, 159), min_size=width, max_size=width))
        rows.step(chosen)
        parents = data.draw(st.lists(st.integers(0, width - 1), min_size=width, max_size=width))
        rows.reorder(parents)
        histories = [[*histories[parent], chosen[parent]] for parent in parents]
    last = rows.step([11] * width)
    assert last.shape == (width, 160)
    for row, history in enumerate(histories):
        assert_close(last[row], fresh(model, [*tokens, *history, 11]))


@each_runtime
def test_rows_without_a_prompt(subject: Subject, loaded: Loaded) -> None:
    model = loaded(subject, "mixtral")
    rows = model.start().fan_out(2)
    rows.step([5, 6])
    assert rows.reorder([1, 1]) == model.facts.key_value_bytes_per_token
    assert_close(rows.step([7, 8])[0], fresh(model, [6, 7]))


@each_runtime
def test_logits_are_left_out_when_nobody_wants_them(subject: Subject, loaded: Loaded) -> None:
    model, tokens = loaded(subject, "mixtral"), prompt_of(30)
    rows = model.start()
    for start, stop in ((0, 1), (1, 10), (10, 29)):
        assert rows.extend(tokens[start:stop], want_logits=False) is None
    assert_close(rows.extend(tokens[29:]), fresh(model, tokens))


@each_runtime
def test_misuse_is_an_error(subject: Subject, loaded: Loaded) -> None:
    model = loaded(subject, "mixtral")
    single = model.start()
    single.extend([3, 4, 5])
    beams = single.fan_out(2)
    misuses: list[Callable[[], Any]] = [
        lambda: beams.extend([3]),
        lambda: beams.truncate(1),
        lambda: beams.fan_out(2),
        lambda: beams.step([3]),
        lambda: beams.reorder([0]),
        lambda: beams.reorder([0, 2]),
        lambda: single.truncate(4),
        lambda: single.extend([]),
        lambda: single.step([1, 2]),
        lambda: single.fan_out(0),
    ]
    for misuse in misuses:
        with pytest.raises(ValueError):
            misuse()
    for token in (-1, 160, 10**9):
        with pytest.raises(ModelError, match=f"Token id {token} is outside the model's vocabulary of 160"):
            single.extend([5, token])
    assert single.length == 3
    assert_close(single.step([6])[0], fresh(model, [3, 4, 5, 6]))


@each_runtime
def test_rows_may_be_run_from_another_thread(subject: Subject, loaded: Loaded) -> None:
    """The engine loads and runs in threads of its choosing; mlx has a default stream per thread."""
    model, tokens = loaded(subject, "mixtral"), prompt_of(30)
    rows = model.start()
    rows.extend(tokens[:10])
    found: list[Logits | None] = []
    thread = threading.Thread(target=lambda: found.append(rows.extend(tokens[10:])))
    thread.start()
    thread.join()
    assert_close(found[0], fresh(model, tokens))


@each_runtime
def test_a_closed_model_says_so(subject: Subject, stored_model: StoredModel) -> None:
    model = subject.load(stored_model(subject, "mixtral"))
    rows = model.start()
    assert np.isfinite(logits_after(rows, [3])).all()
    model.close()
    with pytest.raises(ModelError, match=r"is closed; load it again"):
        rows.extend([3])
    with pytest.raises(ModelError, match=r"is closed; load it again"):
        model.start()
