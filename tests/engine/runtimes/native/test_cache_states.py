"""The states of rows with delta-nets: what a pass reads and writes, and what is kept when it fails."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.models.folders.sizes import sizes_of, state_bytes
from engine.runtimes.native import model as native_model
from engine.runtimes.native.cache import States
from engine.runtimes.native.model import NativeModel
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import assert_close, fresh, prompt_of

NUMBERS = 8


def read(address: int | None) -> float:
    return 0.0 if address is None else ctypes.c_float.from_address(address).value


def run_pass(states: States, tokens: list[int], in_place: bool, fails: bool = False) -> None:
    """A row's state is the number of its tokens' digits, written one after the other, modulo a prime."""
    before, after = states.begin(in_place)
    rows = [index for index in range(len(tokens)) if before[index] != after[index]]
    for row in [*rows, *(index for index in range(len(tokens)) if index not in rows)]:
        ctypes.c_float.from_address(after[row]).value = (read(before[row]) * 10 + tokens[row]) % 99991
    if fails:
        states.give_up()
    else:
        states.commit()


def state_of(tokens: list[int]) -> float:
    found = 0
    for token in tokens:
        found = (found * 10 + token) % 99991
    return float(found)


def found(states: States, rows: int) -> list[float]:
    before, _ = states.begin(in_place=False)
    states.give_up()
    return [read(before[row]) for row in range(rows)]


@given(data=st.data())
def test_rows_that_are_reordered_fail_and_go_on(data: st.DataObject) -> None:
    single = States.of_one_row(NUMBERS)
    prompt = data.draw(st.lists(st.integers(1, 9), max_size=3))
    for token in prompt:
        run_pass(single, [token], in_place=False)
    width = data.draw(st.integers(1, 5))
    rows, told = single.shared(width), [list(prompt) for _ in range(width)]
    for _ in range(data.draw(st.integers(1, 8))):
        tokens = data.draw(st.lists(st.integers(1, 9), min_size=width, max_size=width))
        in_place, fails = data.draw(st.booleans()), data.draw(st.booleans())
        if not (in_place and fails):  # what is written in place is not given up
            run_pass(rows, tokens, in_place, fails)
            if not fails:
                told = [[*row, token] for row, token in zip(told, tokens, strict=True)]
        if data.draw(st.booleans()):
            parents = data.draw(st.lists(st.integers(0, width - 1), min_size=width, max_size=width))
            rows.reorder(parents)
            told = [list(told[parent]) for parent in parents]
        assert found(rows, width) == [state_of(row) for row in told]
        if data.draw(st.booleans()):
            run_pass(single, [3], in_place=True)
            prompt.append(3)
        assert found(single, 1) == [state_of(prompt)]
    # One for each row, for each of before and after, and the prompt's.
    assert rows.nbytes <= (2 * width + 1) * 4 * NUMBERS


def test_states_that_no_machine_holds_are_refused() -> None:
    states = States.of_one_row(1 << 60)
    with pytest.raises(ModelError, match=r"states of one row take .* fewer beams") as refused:
        states.begin(in_place=True)
    assert refused.value.kind == "memory"


@pytest.fixture
def qwen(tiny_model: Callable[..., Path]) -> NativeModel:
    # Values of whole blocks of columns, as real models have them.
    return load_native(tiny_model("qwen3_5_moe_text", linear_value_head_dim=32), cpu_threads=2)


@needs_kernels
def test_a_state_takes_what_is_planned_for_it(qwen: NativeModel, tiny_model: Callable[..., Path]) -> None:
    rows = qwen.start()
    rows.step([5])
    assert rows._cache.states is not None
    assert rows._cache.states.nbytes == qwen.facts.state_bytes > 0
    assert qwen.facts.state_bytes == state_bytes(qwen._files.config)  # type: ignore[union-attr]


@needs_kernels
def test_a_state_takes_what_is_told_of_it_if_its_columns_are_padded(tiny_model: Callable[..., Path]) -> None:
    model = load_native(tiny_model("qwen3_5_text"))
    rows = model.start()
    rows.step([5])
    assert rows._cache.states is not None
    assert rows._cache.states.nbytes == model.facts.state_bytes > state_bytes(model._files.config)  # type: ignore[union-attr]
    assert sizes_of(model._files).for_runtime("native").state_bytes == model.facts.state_bytes


@needs_kernels
@pytest.mark.parametrize(
    "wrong",
    [
        {"delta_taps": 0},
        {"delta_taps": 100},
        {"delta_key_heads": 0},
        {"delta_value_heads": 0},
        {"delta_key_heads": 2, "delta_value_heads": 3},
    ],
)
def test_delta_nets_that_cannot_be_are_not_run(tiny_model: Callable[..., Path], wrong: dict[str, int]) -> None:
    model = load_native(tiny_model("qwen3_5_text"))
    rows = model.start()
    rows.step([5])
    assert model._weights is not None
    for field, value in wrong.items():
        setattr(model._weights.trunk, field, value)
    with pytest.raises(ModelError, match="could not run: its numbers do not fit together"):
        rows.step([5])


@needs_kernels
def test_a_pass_that_fails_leaves_the_states(qwen: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt_of(20)
    rows = qwen.start()
    rows.extend(tokens)

    class Broken:
        def pllm_trunk_bytes(self, *arguments: object) -> int:
            raise ModelError("broken", kind="internal")

    with monkeypatch.context() as patch:
        patch.setattr(native_model, "native", Broken)
        for work in (lambda: rows.extend([7, 8, 9]), lambda: rows.step([7])):
            with pytest.raises(ModelError, match="broken"):
                work()
    assert rows.length == 20
    assert_close(rows.step([11])[0], fresh(qwen, [*tokens, 11]))


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_beams_of_one_parent_step_as_rows_of_their_own(threads: int, tiny_model: Callable[..., Path]) -> None:
    """Rows that read a state which another one replaces in place."""
    model = load_native(tiny_model("qwen3_5_text"), cpu_threads=threads)
    tokens = prompt_of(9)
    single = model.start()
    single.extend(tokens)
    rows, told = single.fan_out(3), [list(tokens) for _ in range(3)]
    for step, parents in enumerate(([2, 2, 2], [1, 1, 0], [0, 0, 1], [2, 1, 0])):
        chosen = [3 + step, 40 + step, 90 + step]
        logits = rows.step(chosen)
        told = [[*row, token] for row, token in zip(told, chosen, strict=True)]
        for row in range(3):
            assert_close(logits[row], fresh(model, told[row]))
        rows.reorder(parents)
        told = [told[parent] for parent in parents]
    assert np.isfinite(single.step([4])).all()
