"""mlx chooses tokens where the logits are, one step ahead of the host: the same tokens, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from engine.errors import ModelError  # noqa: E402
from engine.generation.sampling import Sampler, SamplingRule  # noqa: E402
from engine.ipc.messages import AnyEvent, Finished, Generate, Load, Sampling  # noqa: E402
from engine.runtimes.mlx import eligible  # noqa: E402
from engine.runtimes.mlx.model import MlxModel, MlxRows, draw_token, surviving  # noqa: E402
from engine.runtimes.protocol import LoadedModel  # noqa: E402
from engine.session.loading import load_session  # noqa: E402
from engine.session.session import Session  # noqa: E402
from tests.engine.runtimes.mlx_oracle import load, prompt_of, write_comparable, write_quantised  # noqa: E402
from tests.engine.runtimes.subjects import MLX, assert_close, fresh  # noqa: E402
from tests.support.survivors import surviving_tokens  # noqa: E402

PROMPT, LONGER = prompt_of(21), prompt_of(30)
COUNT = 16


GREEDY = Sampler(SamplingRule())


def greedy(rows: MlxRows, prompt: list[int], count: int) -> list[int]:
    """By the host, one step after the other."""
    logits = rows.extend(prompt)
    tokens = []
    for _ in range(count):
        assert logits is not None
        tokens.append(int(logits.argmax()))
        logits = rows.step([tokens[-1]])[0]
    return tokens


@pytest.mark.sampled
@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "mixtral", "gpt_oss", "granitemoe", "deepseek_v3", "qwen3_next", "lfm2_moe", "gemma4_text"],
)
def test_greedy_tokens_are_the_hosts(family: str, tmp_path: Path) -> None:
    folder = write_comparable(tmp_path, family)
    model = load(folder)
    expected = greedy(model.start(), PROMPT, COUNT)
    assert len(set(expected)) > 3
    rows = model.start()
    logits = rows.extend(PROMPT)
    assert logits is not None
    found = [int(logits.argmax())]
    while len(found) < COUNT:
        found.append(rows.step_choosing(found[-1], GREEDY))
    assert found == expected
    assert rows.length == len(PROMPT) + COUNT - 1


def test_in_four_bits_too(tmp_path: Path) -> None:
    model = load(write_quantised(tmp_path, "qwen3_moe"))
    expected = greedy(model.start(), PROMPT, 8)
    rows = model.start()
    rows.extend(PROMPT)
    assert [rows.step_choosing(token, GREEDY) for token in expected[:-1]] == expected[1:]


AFTER = ("step", "other step", "other draw", "extend", "truncate", "fan_out", "reorder", "settle")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "after"),
    [
        *(("mixtral", after) for after in AFTER),
        *((family, after) for family in ("qwen3_next", "lfm2_moe") for after in AFTER if after != "truncate"),
    ],
)
def test_a_step_that_nobody_asks_for_leaves_nothing(family: str, after: str, tmp_path: Path) -> None:
    model = load(write_comparable(tmp_path, family))

    def began(ahead: bool) -> tuple[MlxRows, int]:
        rows = model.start()
        rows.extend(PROMPT)
        if ahead:
            return rows, rows.step_choosing(7, GREEDY)
        return rows, int(rows.step([7])[0].argmax())

    (rows, token), (plain, same) = began(True), began(False)
    assert token == same and rows.length == plain.length
    other = token + 1
    match after:
        case "step":
            pass
        case "other step":
            token = other
        case "other draw":
            assert rows.step_choosing(token, Sampler(SamplingRule())) == int(plain.step([token])[0].argmax())
        case "extend":
            assert np.array_equal(rows.extend([other, 9, 11]), plain.extend([other, 9, 11]))
        case "truncate":
            rows.truncate(len(PROMPT))
            plain.truncate(len(PROMPT))
        case "fan_out":
            assert np.array_equal(rows.fan_out(2).step([3, 4]), plain.fan_out(2).step([3, 4]))
        case "reorder":
            assert rows.reorder([0]) == plain.reorder([0]) == 0
        case "settle":
            rows.settle()
            rows.settle()
    assert np.array_equal(rows.step([token]), plain.step([token]))
    assert rows.length == plain.length


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["mixtral", "qwen3_next", "lfm2_moe"])
@pytest.mark.parametrize("ahead", [False, True], ids=["alone", "ahead"])
def test_a_pass_that_fails_half_way_leaves_the_rows_as_they_were(
    family: str, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(write_comparable(tmp_path, family))
    rows, plain = model.start(), model.start()
    for each in (rows, plain):
        each.extend(PROMPT)
    token = rows.step_choosing(7, GREEDY) if ahead else int(rows.step([7])[0].argmax())
    plain.step([7])
    for failing in (lambda: rows.extend([3, 4, 5]), lambda: rows.step([3]), lambda: rows.step_choosing(token, GREEDY)):
        with monkeypatch.context() as patch, pytest.raises(ModelError):
            patch.setattr(MlxModel, "scores", _fails)
            failing()
        assert rows.length == plain.length
    assert np.array_equal(rows.step([token]), plain.step([token]))


def _fails(model: MlxModel, hidden: Any) -> Any:
    raise MemoryError("no memory")


def test_a_wrong_guess_is_begun_anew(tmp_path: Path) -> None:
    model = load(write_comparable(tmp_path, "mixtral"))
    rows, plain = model.start(), model.start()
    for each in (rows, plain):
        each.extend(PROMPT)
    token = rows.step_choosing(7, GREEDY)
    plain.step([7])
    assert rows.step_choosing(token + 1, GREEDY) == int(plain.step([token + 1])[0].argmax())


def test_the_step_after_is_begun_before_a_token_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(write_comparable(tmp_path, "mixtral"))
    rows = model.start()
    rows.extend(PROMPT)
    begun, evaluated = [], []
    ahead, evaluate = mx.async_eval, mx.eval
    monkeypatch.setattr(mx, "async_eval", lambda *given: (begun.append(rows.length), ahead(*given))[1])
    monkeypatch.setattr(mx, "eval", lambda *given: (evaluated.append(given), evaluate(*given))[1])
    token, length = 7, rows.length
    for _ in range(5):
        token = rows.step_choosing(token, GREEDY)
    assert begun == list(range(length, length + 5)), "once a token, before its length counts it"
    assert evaluated == []


@pytest.mark.soak
@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_buffers_are_given_back_while_an_answer_grows_and_at_its_end(
    on_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = load(write_comparable(tmp_path, "mixtral", max_position_embeddings=2048)).start()
    rows.extend(PROMPT)
    cleared: list[int] = []
    clear = mx.clear_cache
    monkeypatch.setattr(mx, "clear_cache", lambda: (cleared.append(rows.length), clear())[1])
    token = 7
    while rows.length < 600:
        token = rows.step_choosing(token, GREEDY) if on_device else int(rows.step([token])[0].argmax())
    assert cleared == [257, 513]
    rows.settle()
    assert cleared == ([257, 513, 600] if on_device else [257, 513])


def test_logits_that_are_no_numbers_are_refused_as_by_the_host(tmp_path: Path) -> None:
    model = load(write_comparable(tmp_path, "mixtral"))
    rows = model.start()
    rows.extend(PROMPT)
    model._model.model.norm.weight = model._model.model.norm.weight * float("nan")
    with pytest.raises(ModelError, match="where a score was expected"):
        rows.step_choosing(7, GREEDY)
    assert rows.length == len(PROMPT)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_failed_pass_leaves_the_rows_as_they_were(
    loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixtral = loaded(MLX, "mixtral")
    assert isinstance(mixtral, MlxModel)
    rows = mixtral.start()
    rows.extend(LONGER)
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
    assert_close(rows.extend([8, 9]), fresh(mixtral, [*LONGER, 8, 9]))


def test_a_state_keeps_no_memory_of_the_chunk_that_it_comes_from(loaded: Callable[..., LoadedModel]) -> None:
    model = loaded(MLX, "lfm2_moe")
    model.start().extend(LONGER)
    before = mx.get_active_memory()
    rows = model.start()
    rows.extend(prompt_of(500))
    checkpoint = rows.checkpoint()
    rows.step([5])
    assert checkpoint is not None and checkpoint.length == 500
    keys = 2 * 512 * model.facts.key_value_bytes_per_token
    assert mx.get_active_memory() - before < keys + 6 * model.facts.state_bytes + 40_000


def test_beams_whose_copies_do_not_fit_are_refused_before_they_are_made(
    loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixtral = loaded(MLX, "mixtral")
    rows = mixtral.start()
    rows.extend(LONGER)
    used = mx.get_active_memory()
    one = 30 * rows.bytes_per_position()
    monkeypatch.setattr(mx, "get_active_memory", lambda: used)
    monkeypatch.setattr(eligible, "working_set_bytes", lambda: used + 3 * one)
    assert rows.fan_out(3).rows == 3
    with pytest.raises(ModelError, match=r"4 beams need .* for copies of the conversation's 30 tokens") as caught:
        rows.fan_out(4)
    assert caught.value.kind == "memory" and rows.length == 30
    monkeypatch.setattr(eligible, "working_set_bytes", lambda: used)
    assert rows.fan_out(1).rows == 1


# --- the rule -----------------------------------------------------------------------------------------------------

RULES = st.builds(
    SamplingRule,
    temperature=st.sampled_from([0.01, 0.3, 1.0, 5.0]),
    top_k=st.integers(0, 60),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)


@given(RULES, st.integers(0, 2**32 - 1))
def test_what_survives_is_what_survives_on_the_host(rule: SamplingRule, seed: int) -> None:
    # Whole numbers of sixteenths, no two the same: neither rounding nor order decides.
    logits = np.random.default_rng(seed).permutation(50).astype(np.float32) / 16
    weights = np.exp(np.array(surviving(mx.array(logits)[None], rule)[0], np.float64))
    tokens, probabilities = surviving_tokens(logits, rule)
    expected = np.zeros(len(logits))
    expected[tokens] = probabilities
    assert np.allclose(weights / weights.sum(), expected, atol=1e-5)


@given(st.integers(1, 60), st.sampled_from([0.1, 0.5, 0.999]))
def test_only_what_top_k_leaves_is_sorted(top_k: int, top_p: float) -> None:
    sorted_sizes: list[int] = []
    sort = mx.sort
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "sort", lambda array, axis: (sorted_sizes.append(array.shape[-1]), sort(array, axis=axis))[1])
        patch.setattr(mx, "argsort", lambda *given, **named: pytest.fail("the vocabulary is sorted"))
        surviving(mx.arange(50, dtype=mx.float32)[None], SamplingRule(temperature=1.0, top_k=top_k, top_p=top_p))
    assert sorted_sizes == [min(top_k, 50)]


def test_equal_weights_at_the_end_of_a_nucleus_stay_together() -> None:
    logits = mx.array([[1.0, 2.0, 1.0, 1.0, -9.0]])
    for top_k in (0, 2):
        rule = SamplingRule(temperature=1.0, top_k=top_k, top_p=0.6)
        assert np.isfinite(np.array(surviving(logits, rule))).tolist() == [[True, True, True, True, False]]


def test_greedy_steps_make_no_random_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = load(write_comparable(tmp_path, "mixtral")).start()
    rows.extend(PROMPT)
    split = mx.random.split
    splits: list[Any] = []
    monkeypatch.setattr(mx.random, "split", lambda key: (splits.append(key), split(key))[1])
    rows.step_choosing(7, GREEDY)
    assert splits == []
    rows.step_choosing(7, Sampler(SamplingRule(temperature=1.0)))
    assert len(splits) == 2


def test_draws_are_as_likely_as_they_should_be() -> None:
    logits = mx.array([[0.0, 1.0, 2.0, 3.0, -4.0]])
    rule = SamplingRule(temperature=1.0, top_k=3)
    keys = [mx.random.key(number) for number in range(800)]
    found = np.bincount([int(draw_token(logits, rule, key).item()) for key in keys], minlength=5) / len(keys)
    expected = np.exp([0.0, 1.0, 2.0]) / np.exp([0.0, 1.0, 2.0]).sum()
    assert found[0] == found[4] == 0
    assert np.allclose(found[1:4], expected, atol=0.06)


# --- the session --------------------------------------------------------------------------------------------------


class Control:
    owner = "somebody"

    def __init__(self, most: int = 10**9, watched: bool = False) -> None:
        self._left = most
        self._watched = watched

    def cancelled(self) -> bool:
        self._left -= 1
        return self._left < 0

    def watching(self) -> bool:
        return self._watched


def answer(session: Session, control: Control | None = None, prompt: list[int] = PROMPT, **options: Any) -> Finished:
    events: list[AnyEvent] = []
    found = session.generate(Generate(id=2, prompt_ids=prompt, **options), events.append, control or Control())
    rows = session._cache.rows
    assert isinstance(rows, MlxRows) and rows._ahead is None
    assert rows.length == len(session.cached_tokens) and all(cache.offset == rows.length for cache in rows._caches)
    return found


@pytest.fixture
def open_session(tmp_path: Path) -> Callable[[], Session]:
    folder = write_comparable(tmp_path / "m", "mixtral")

    def made() -> Session:
        session = load_session(Load(id=1, model=str(folder), runtime="mlx", keep_resident=False), lambda *_: None)
        session._ends = frozenset()
        return session

    return made


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens with which a step was chosen on the device."""
    asked: list[int] = []
    real = MlxRows.step_choosing

    def choosing(rows: MlxRows, token: int, sampler: Sampler) -> int | None:
        found = real(rows, token, sampler)
        if found is not None:
            asked.append(token)
        return found

    monkeypatch.setattr(MlxRows, "step_choosing", choosing)
    return asked


def test_answers_at_temperature_0_are_the_hosts(open_session: Callable[[], Session], counted: list[int]) -> None:
    session = open_session()
    watched = answer(session, Control(watched=True), max_tokens=COUNT)
    assert counted == [], "measured steps run alone"
    session = open_session()
    found = answer(session, max_tokens=COUNT)
    assert found.token_ids == watched.token_ids and counted == found.token_ids[:-1]
    again = answer(session, prompt=[*PROMPT, *found.token_ids, 9], max_tokens=6)
    fresh = answer(open_session(), prompt=[*PROMPT, *found.token_ids, 9], max_tokens=6)
    assert again.token_ids == fresh.token_ids


def test_cancelling_and_ends_drop_the_step_ahead(open_session: Callable[[], Session]) -> None:
    session = open_session()
    whole = answer(session, max_tokens=COUNT).token_ids
    cancelled = answer(open_session(), Control(most=9), max_tokens=COUNT)
    assert cancelled.finish_reason == "cancelled" and whole[: len(cancelled.token_ids)] == cancelled.token_ids
    session = open_session()
    session._ends = frozenset({whole[6]})
    ended = answer(session, max_tokens=COUNT)
    assert ended.finish_reason == "stop" and ended.token_ids == whole[: whole.index(whole[6]) + 1]
    session._ends = frozenset()
    assert answer(session, max_tokens=COUNT).token_ids == whole


def test_a_seed_is_the_hosts(open_session: Callable[[], Session], counted: list[int]) -> None:
    seeded = Sampling(temperature=1.0, seed=5)
    first = answer(open_session(), max_tokens=COUNT, sampling=seeded)
    assert counted == []
    assert answer(open_session(), max_tokens=COUNT, sampling=seeded).token_ids == first.token_ids
    answer(open_session(), max_tokens=COUNT, sampling=Sampling(temperature=1.0))
    assert len(counted) == COUNT - 1
