"""Rows of tokens on mlx: whatever is cut, copied and moved in the cache, the logits are those of a fresh start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("mlx.core", reason="mlx is not installed")

from mlx_oracle import load, prompt_of, relative_error, write_model
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.runtimes.mlx.model import MlxModel, MlxRows

FAMILIES = ("mixtral", "gpt_oss", "deepseek_v3", "mistral", "dbrx")
"""Full attention, windows in some layers, compressed keys and values, windows in all layers, another block."""

PROMPT = prompt_of(30)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MlxModel:
    return load(write_model(tmp_path_factory.mktemp("rows") / request.param, request.param))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> MlxModel:
    return load(write_model(tmp_path_factory.mktemp("rows") / "mixtral", "mixtral"))


def fresh(model: MlxModel, tokens: Sequence[int]) -> NDArray[np.float32]:
    logits = model.start().extend(tokens)
    assert logits is not None
    return logits


def assert_equal(found: Any, expected: NDArray[np.float32]) -> None:
    assert found is not None
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert relative_error(found, expected) < 1e-5


def test_truncate_and_go_on(model: MlxModel) -> None:
    rows = model.start()
    assert rows.can_truncate
    rows.extend(PROMPT)
    rows.step([7])
    rows.truncate(9)
    assert rows.length == 9
    other = prompt_of(28, seed=5)
    assert_equal(rows.extend(other), fresh(model, PROMPT[:9] + other))
    rows.truncate(0)
    assert_equal(rows.extend(other), fresh(model, other))


def test_fan_out_step_reorder(model: MlxModel) -> None:
    single = model.start()
    single.extend(PROMPT)
    rows = single.fan_out(4)
    assert (rows.rows, rows.length, single.rows, single.length) == (4, 30, 1, 30)
    per_token = single.bytes_per_position()
    assert per_token == model.facts.key_value_bytes_per_token > 0

    histories = [[5], [6], [7], [8]]
    check(model, rows, histories, rows.step([5, 6, 7, 8]))
    assert rows.reorder([0, 1, 2, 3]) == 0
    assert rows.reorder([0, 0, 2, 1]) == 2 * 1 * per_token
    histories = [[5], [5], [7], [6]]
    for number, parents in enumerate(([0, 1, 2, 3], [3, 1, 0, 3], [1, 0, 2, 2])):
        tokens = [10 + number, 20 + number, 30 + number, 40 + number]
        histories = [[*history, token] for history, token in zip(histories, tokens, strict=True)]
        check(model, rows, histories, rows.step(tokens))
        changed = sum(row != parent for row, parent in enumerate(parents))
        assert rows.reorder(parents) == changed * len(histories[0]) * per_token
        histories = [histories[parent] for parent in parents]

    assert_equal(single.step([9])[0], fresh(model, [*PROMPT, 9]))


def check(model: MlxModel, rows: MlxRows, histories: list[list[int]], logits: NDArray[np.float32]) -> None:
    assert logits.shape[0] == len(histories) == rows.rows
    for row, history in enumerate(histories):
        assert_equal(logits[row], fresh(model, PROMPT + history))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sequence_of_reorders(mixtral: MlxModel, data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 5))
    single = mixtral.start()
    single.extend(PROMPT[:5])
    rows = single.fan_out(width)
    histories: list[list[int]] = [[] for _ in range(width)]
    for _ in range(data.draw(st.integers(1, 4))):
        tokens = data.draw(st.lists(st.integers(3, 159), min_size=width, max_size=width))
        logits = rows.step(tokens)
        histories = [[*history, token] for history, token in zip(histories, tokens, strict=True)]
        parents = data.draw(st.lists(st.integers(0, width - 1), min_size=width, max_size=width))
        rows.reorder(parents)
        histories = [histories[parent] for parent in parents]
    assert logits.shape == (width, 160)
    last = rows.step([11] * width)
    for row, history in enumerate(histories):
        assert_equal(last[row], fresh(mixtral, [*PROMPT[:5], *history, 11]))


def test_rows_without_a_prompt(mixtral: MlxModel) -> None:
    rows = mixtral.start().fan_out(2)
    rows.step([5, 6])
    assert rows.reorder([1, 1]) == mixtral.facts.key_value_bytes_per_token
    assert_equal(rows.step([7, 8])[0], fresh(mixtral, [6, 7]))


def test_growing_past_the_first_block(model: MlxModel) -> None:
    """The cache grows in blocks of 256 positions; rows made at the edge of one grow on their own."""
    tokens = prompt_of(255, seed=3)
    rows = model.start()
    for start in range(0, 255, 50):
        rows.extend(tokens[start : start + 50], want_logits=False)
    beams = rows.fan_out(2)
    for token in (4, 5, 6):
        rows.step([token])
        beams.step([token, token + 10])
    logits = beams.step([7, 17])
    assert_equal(rows.step([7])[0], fresh(model, [*tokens, 4, 5, 6, 7]))
    assert_equal(logits[1], fresh(model, [*tokens, 14, 15, 16, 17]))


def test_a_failed_pass_leaves_the_rows_as_they_were(mixtral: MlxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mixtral.start()
    rows.extend(PROMPT)
    executor = mixtral._model.model.layers[2].block_sparse_moe._executor
    with monkeypatch.context() as patch:
        patch.setattr(executor, "run", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(ModelError, match=r"not enough memory for this step \(no room\)") as caught:
            rows.extend([5, 6, 7])
        assert caught.value.kind == "memory"
        patch.setattr(executor, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("[malloc] Unable to allocate 9")))
        with pytest.raises(ModelError, match="Unable to allocate 9"):
            rows.step([5])
        patch.setattr(executor, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("another fault")))
        with pytest.raises(RuntimeError, match="another fault"):
            rows.step([5])
    assert rows.length == 30
    assert_equal(rows.extend([8, 9]), fresh(mixtral, [*PROMPT, 8, 9]))


def test_wrong_calls_are_refused(mixtral: MlxModel) -> None:
    rows = mixtral.start()
    rows.extend([3, 4, 5])
    two = rows.fan_out(2)
    for call in (
        lambda: rows.extend([]),
        lambda: rows.step([1, 2]),
        lambda: rows.truncate(4),
        lambda: two.extend([1]),
        lambda: two.truncate(1),
        lambda: two.fan_out(2),
        lambda: two.reorder([0]),
        lambda: two.reorder([0, 2]),
    ):
        with pytest.raises(ValueError):
            call()
    for token in (160, -1):
        with pytest.raises(ModelError, match=f"token id {token} is outside the vocabulary of 160"):
            rows.extend([5, token])
    assert rows.length == 3
    assert_equal(rows.step([6])[0], fresh(mixtral, [3, 4, 5, 6]))


def test_rows_may_be_run_from_another_thread(mixtral: MlxModel) -> None:
    """The engine loads and runs in threads of its choosing; mlx has a default stream per thread."""
    import threading

    rows = mixtral.start()
    rows.extend(PROMPT[:10])
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(rows.extend(PROMPT[10:])))
    thread.start()
    thread.join()
    assert_equal(found[0], fresh(mixtral, PROMPT))
