"""Every instruction set this CPU has, against float64."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.moe.kernels.bindings import KernelChoice, available, load
from engine.moe.kernels.layers import Gate, LayerExperts, linear
from engine.moe.kernels.pool import Pool
from tests.engine.moe.kernels import kernel_oracle as oracle
from tests.support.random_examples import examples

SETS = available()
DTYPES = ["BF16", "F32", "F16"]
GATES = [
    *(Gate("silu"), Gate("gelu"), Gate("gelu_tanh"), Gate("relu"), Gate("clamped", alpha=1.702, limit=1.1, beta=1.0)),
    *(
        Gate("clamped_silu", limit=0.4),
        Gate("clamped", alpha=1.0, limit=0.4),
        Gate("xielu", alpha=0.8, limit=1.1, beta=0.4, epsilon=-1e-6),
    ),
]

pytestmark = pytest.mark.skipif(
    not SETS, reason="the native kernels are not built (test_kernels_choice says whether they should be)"
)


def choice(name: str) -> KernelChoice:
    return KernelChoice(name, "test")


def rounds(name: str, dtype: str) -> bool:
    return name == "avx512_bf16" and dtype == "BF16"


def tolerance(name: str, dtype: str) -> float:
    """Of the largest value. A float32 sum before a rounding to bfloat16 may land on the other side of a border."""
    return 1e-2 if rounds(name, dtype) else 1e-5


def routes(generator: np.random.Generator, tokens: int, k: int, experts: int, absent: float = 0.0) -> NDArray[np.int32]:
    made = np.array([generator.permutation(experts)[:k] for _ in range(tokens)], dtype=np.int32).reshape(tokens, k)
    made[generator.random(made.shape) < absent] = -1
    return made


class Case:
    """One layer and what goes through it."""

    def __init__(self, seed: int, hidden: int, ffn: int, dtype: str, gate: Gate, **options: Any) -> None:
        generator = np.random.default_rng(seed)
        experts = options.pop("experts", 5)
        tokens, k = options.pop("tokens", 4), options.pop("k", 2)
        absent = options.pop("absent", 0.0)
        biases = options.pop("biases", False)
        self.weights = {n: oracle.expert(generator, hidden, ffn, dtype, biases, **options) for n in range(experts)}
        self.count, self.gate, self.dtype = experts, gate, dtype
        self.hidden = generator.standard_normal((tokens, hidden)).astype(np.float32)
        self.indices = routes(generator, tokens, k, experts, absent)
        self.scales = generator.random((tokens, k)).astype(np.float32)

    def run(self, pool: Pool, name: str, scale_input: bool = False) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """The sum, each route's output, and the counts."""
        layer = LayerExperts(self.weights, self.count, self.gate, choice(name))
        tokens, k = self.indices.shape
        total = np.full_like(self.hidden, np.nan)
        outputs = np.full((tokens, k, self.hidden.shape[1]), np.nan, dtype=np.float32)
        counts = np.zeros(self.count, dtype=np.int64)
        addresses = [array.ctypes.data for array in (self.hidden, self.indices, self.scales)]
        layer.run(
            pool,
            *addresses,
            tokens,
            k,
            total.ctypes.data,
            outputs.ctypes.data,
            counts.ctypes.data,
            scale_input=scale_input,
        )
        return total, outputs, counts

    def check(self, pool: Pool, name: str, scale_input: bool = False) -> None:
        total, outputs, counts = self.run(pool, name, scale_input)
        want = oracle.outputs(
            self.weights,
            self.gate,
            self.hidden,
            self.indices,
            self.scales if scale_input else None,
            rounds(name, self.dtype),
        )
        weighted = want if scale_input else want * self.scales[:, :, None]
        close(outputs, want, tolerance(name, self.dtype))
        close(total, weighted.sum(axis=1), tolerance(name, self.dtype))
        assert (counts == np.bincount(self.indices[self.indices >= 0], minlength=self.count)).all()
        assert (outputs[self.indices < 0] == 0).all()


def close(got: NDArray[Any], want: NDArray[Any], part: float) -> None:
    """To a part of the largest value; of 0.1 where cancellation (up + 1) left less of values about 1."""
    if want.size:
        assert np.isfinite(got).all()
        assert np.abs(got - want).max() <= part * max(np.abs(want).max(), 0.1)


# ---- One matrix ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_of_any_size_times_any_number_of_rows(name: str, dtype: str, pool: Pool) -> None:
    generator = np.random.default_rng(0)
    for rows, columns in [(1, 1), (3, 2), (33, 47), (64, 31), (35, 1057), (100, 2111)]:
        weight = oracle.stored(generator.standard_normal((rows, columns)), dtype)
        wide = oracle.wide(weight).T
        for tokens in [0, 1, 2, 3, 5, 6, 7, 12, 13, 16, 17, 23, 24, 25, 36, 70]:
            x = generator.standard_normal((tokens, columns)).astype(np.float32)
            given = oracle.rounded(x) if rounds(name, dtype) else x.astype(np.float64)
            got = linear(pool, choice(name), weight, None, x)
            bound = 1e-5 * math.sqrt(columns) * 4
            assert got.shape == (tokens, rows)
            assert np.abs(got - given @ wide).max(initial=0.0) <= bound, (rows, columns, tokens)


@pytest.mark.sampled
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_matrices_anywhere_in_memory(name: str, dtype: str, pool: Pool, data: st.DataObject) -> None:
    """Unaligned by single elements, with gaps between the rows, strided inputs, a bias; what lies between is NaN."""
    rows, columns, tokens = (data.draw(st.integers(1, limit)) for limit in (90, 160, 40))
    skew, gap, more = data.draw(st.integers(0, 33)), data.draw(st.integers(0, 5)), data.draw(st.integers(0, 3))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    weight = oracle.stored(generator.standard_normal((rows, columns)), dtype, skew, gap)
    bias = oracle.stored(generator.standard_normal(rows), dtype, skew)
    x = np.full((tokens, columns + more), np.nan, dtype=np.float32)[:, :columns]
    x[:] = generator.standard_normal((tokens, columns))
    given = oracle.rounded(x) if rounds(name, dtype) else x.astype(np.float64)
    got = linear(pool, choice(name), weight, bias, x)
    assert np.abs(got - (given @ oracle.wide(weight).T + oracle.wide(bias))).max() <= 1e-4


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(name: str, dtype: str, pool: Pool) -> None:
    """To the bit, among few rows and among many; nor on the number of threads."""
    generator = np.random.default_rng(3)
    weight = oracle.stored(generator.standard_normal((75, 4500)), dtype)
    x = generator.standard_normal((70, 4500)).astype(np.float32)
    few, many = linear(pool, choice(name), weight, None, x[:16]), linear(pool, choice(name), weight, None, x)
    for tokens in (1, 2, 5, 6, 7, 12, 15):
        assert (linear(pool, choice(name), weight, None, x[:tokens]) == few[:tokens]).all()
    for tokens in (17, 24, 33):
        assert (linear(pool, choice(name), weight, None, x[:tokens]) == many[:tokens]).all()
    for threads in (1, 2, 5):
        other = Pool(threads)
        assert (linear(other, choice(name), weight, None, x) == many).all()
        other.close()


@pytest.mark.parametrize("name", SETS)
def test_every_half_is_what_numpy_reads(name: str, pool: Pool) -> None:
    """Subnormal, infinite and no number included, in whole vectors and beside them, with few rows and with many."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    want = halves.view(np.float16).astype(np.float32)
    weight = oracle.StoredTensor("F16", halves[:, None])
    row = oracle.StoredTensor("F16", np.ascontiguousarray(halves.reshape(-1, 64)))
    for tokens in (1, 17):
        assert np.array_equal(linear(pool, choice(name), weight, None, np.ones((tokens, 1), np.float32))[0], want, True)
    finite = np.nan_to_num(want, nan=0, posinf=0, neginf=0).reshape(-1, 64)
    row.words[~np.isfinite(want).reshape(-1, 64)] = 0
    one_each = np.eye(64, dtype=np.float32)
    for first in range(0, 64, 16):
        assert (
            linear(pool, choice(name), row, None, one_each[first : first + 16]) == finite[:, first : first + 16].T
        ).all()
    assert (linear(pool, choice(name), row, None, one_each) == finite.T).all()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_read_past_the_last_value(name: str, dtype: str, pool: Pool) -> None:
    """The matrix ends where the memory does: the page after it cannot be read."""
    generator = np.random.default_rng(6)
    for rows, columns in ((5, 33), (67, 97), (4, 64)):
        weight = oracle.stored(generator.standard_normal((rows, columns)), dtype)
        at_the_end = oracle.StoredTensor(dtype, oracle.before_a_hole(np.ascontiguousarray(weight.words)))
        for tokens in (1, 4, 20):
            x = generator.standard_normal((tokens, columns)).astype(np.float32)
            found = linear(pool, choice(name), at_the_end, None, x)
            assert (found == linear(pool, choice(name), weight, None, x)).all()


# ---- Experts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: f"{gate.kind}-{gate.beta}")
def test_experts_with_every_activation(name: str, dtype: str, gate: Gate, pool: Pool) -> None:
    for tokens in (1, 4, 40):
        Case(tokens, 70, 51, dtype, gate, tokens=tokens, biases=gate.kind == "clamped").check(pool, name)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_without_gates(name: str, dtype: str, pool: Pool) -> None:
    """The matrix before the activation is both: of relu that makes the square."""
    for tokens in (1, 4, 40):
        case = Case(tokens, 70, 51, dtype, Gate("relu"), tokens=tokens)
        case.weights = {number: replace(one, gate=one.up) for number, one in case.weights.items()}
        case.check(pool, name)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_with_any_number_of_tokens(name: str, dtype: str, pool: Pool) -> None:
    """Some experts get none, some few and some many; some routes are somebody else's."""
    for tokens in (0, 1, 2, 7, 12, 16, 17, 33, 70):
        Case(tokens, 96, 64, dtype, GATES[0], tokens=tokens, absent=0.3).check(pool, name)
    Case(1, 33, 47, dtype, GATES[0], tokens=50, experts=3, k=1, biases=True).check(pool, name)
    Case(2, 64, 1100, dtype, GATES[0], tokens=40, experts=2, k=2).check(pool, name)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_scale_the_input(name: str, dtype: str, pool: Pool) -> None:
    for tokens in (1, 5, 40, 60):
        Case(tokens, 80, 48, dtype, GATES[0], tokens=tokens, absent=0.1).check(pool, name, scale_input=True)


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_experts_of_any_shape(name: str, pool: Pool, data: st.DataObject) -> None:
    hidden, ffn, tokens = (data.draw(st.integers(1, limit)) for limit in (90, 90, 70))
    experts = data.draw(st.integers(1, 9))
    Case(
        data.draw(st.integers(0, 1000)),
        hidden,
        ffn,
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.sampled_from(GATES)),
        tokens=tokens,
        experts=experts,
        k=data.draw(st.integers(1, experts)),
        absent=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        biases=data.draw(st.booleans()),
        skew=data.draw(st.integers(0, 33)),
        gap=data.draw(st.integers(0, 4)),
    ).check(pool, name, data.draw(st.booleans()))


@pytest.mark.parametrize("name", SETS)
def test_more_tokens_than_one_chunk(name: str, pool: Pool) -> None:
    Case(8, 32, 32, "BF16", GATES[0], tokens=1100, experts=4, absent=0.2).check(pool, name)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 3, 2), (1, 34, 33), (5, 40, 20)])
def test_rows_that_are_read_in_one_piece(pool: Pool, tokens: int, experts: int, k: int) -> None:
    """How many neighbouring rows that is depends on the threads and on the routes; the result does not."""
    case = Case(9, 96 if k > 2 else 1100, 1100, "F32", GATES[0], tokens=tokens, experts=experts, k=k)
    case.check(pool, SETS[0])
    alone = Pool(1)
    assert (case.run(pool, SETS[0])[0] == case.run(alone, SETS[0])[0]).all()
    alone.close()


def test_the_sum_is_made_in_the_order_of_k(pool: Pool) -> None:
    """float32 addition in route order, to the bit, whatever the experts' own order."""
    case = Case(5, 64, 64, "F32", GATES[0], tokens=6, experts=8, k=8)
    total, outputs, _ = case.run(pool, "scalar")
    want = np.zeros_like(total)
    for position in range(8):
        want += outputs[:, position] * case.scales[:, position, None]
    assert (total == want).all()


@pytest.mark.parametrize("name", SETS)
def test_large_and_small_values_go_through_the_activations(name: str) -> None:
    """Relative error about 1e-6 where the result is not denormal; no infinities from large arguments."""
    native = load()
    values = np.concatenate([np.linspace(-20, 20, 4001), [-1e30, -200.0, -90.0, 90.0, 200.0, 1e30]])
    for gate in GATES:
        g, u = values.astype(np.float32), np.ones(len(values), dtype=np.float32)
        if gate.kind == "xielu":  # which is a square
            g = g.clip(-1e15, 1e15)
        want = oracle.activated(gate, g.astype(np.float64).clip(-1e4, 1e30), u.astype(np.float64))
        activation = gate.native
        native.pllm_gate(choice(name).number, ctypes.addressof(activation), g.ctypes.data, u.ctypes.data, len(g))
        usual = np.abs(values) <= 20
        if gate.kind == "gelu":  # further out, one unit of float32 in the exponent is more than that
            usual &= values > -5
        if gate.kind == "gelu_tanh":
            usual &= values > -4
        least = 0.1 if gate.kind == "xielu" else 1e-9  # the difference of larger numbers crosses 0
        error = np.abs(g - want)[usual] / np.maximum(np.abs(want[usual]), least)
        assert error.max() < 4e-6, gate
        assert np.isfinite(g).all()


@pytest.mark.parametrize("name", SETS)
def test_the_exponentials_of_a_softmax(name: str) -> None:
    native = load()
    for count in (1, 15, 16, 17, 1000):
        values = np.linspace(-80, 5, count).astype(np.float32)
        want = np.exp(values.astype(np.float64) - 5)
        total = native.pllm_exp_sum(choice(name).number, values.ctypes.data, 5.0, count)
        assert np.abs(values / want - 1).max() < 1e-5
        assert total == pytest.approx(want.sum(), rel=1e-6)


# ---- Refusals, threads --------------------------------------------------------------------------------------------


def test_an_expert_that_does_not_exist_is_refused(pool: Pool) -> None:
    case = Case(1, 32, 32, "BF16", GATES[0])
    case.indices[1, 0] = 5
    with pytest.raises(ModelError, match="out of range"):
        case.run(pool, SETS[0])


def test_weights_that_cannot_be_read_in_place_are_refused() -> None:
    generator = np.random.default_rng(0)
    weights = oracle.expert(generator, 32, 16, "BF16", biases=False)
    other = oracle.StoredTensor("F8_E4M3", weights.gate.words)
    across = oracle.StoredTensor("BF16", np.ascontiguousarray(weights.gate.words.T).T)
    for wrong, text in ((other, "stored as F8_E4M3"), (across, "side by side")):
        broken = oracle.ExpertWeights(gate=wrong, up=weights.up, down=weights.down)
        with pytest.raises(ModelError, match=text):
            LayerExperts({0: broken}, 1, GATES[0], choice(SETS[0]))
    short = oracle.ExpertWeights(gate=weights.gate, up=weights.up, down=weights.gate)
    with pytest.raises(ModelError, match="damaged"):
        LayerExperts({0: short}, 1, GATES[0], choice(SETS[0]))


def test_a_set_this_cpu_lacks_is_never_run(pool: Pool) -> None:
    """The C functions look for themselves: on x86 NEON is not there, elsewhere AVX-512 is not."""
    absent = next(name for name in ("neon", "avx512_bf16") if name not in SETS)
    with pytest.raises(ModelError, match="lacks the instruction set"):
        Case(1, 32, 32, "BF16", GATES[0]).run(pool, absent)
    weight = oracle.stored(np.ones((4, 4)), "F32")
    with pytest.raises(ModelError, match="lacks the instruction set"):
        linear(pool, choice(absent), weight, None, np.ones((1, 4), dtype=np.float32))


@pytest.mark.sampled
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5])
def test_many_calls_give_the_same_bits(threads: int) -> None:
    """More threads than cores, hundreds of calls, shapes that change: a race would show."""
    cases = [Case(n, 64, 96, "BF16", GATES[0], tokens=tokens) for n, tokens in enumerate((1, 3, 30))]
    pool, alone = Pool(threads), Pool(1)
    want = [case.run(alone, SETS[0])[0] for case in cases]
    for turn in range(300):
        number = turn % len(cases)
        assert (cases[number].run(pool, SETS[0])[0] == want[number]).all()
    pool.close()
    alone.close()


def test_two_pools_and_two_callers_of_one_pool_at_once() -> None:
    case = Case(1, 64, 96, "BF16", GATES[0], tokens=5)
    pools = [Pool(2), Pool(3)]
    want = case.run(pools[0], SETS[0])[0]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(100):
            if not (case.run(pools[number % 2], SETS[0])[0] == want).all():
                wrong.append(number)

    callers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []
    for pool in pools:
        pool.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_calculates_on_its_own(pool: Pool) -> None:
    """The pool's threads do not exist there; waiting for them would hang for ever."""
    case = Case(1, 64, 96, "BF16", GATES[0])
    want = case.run(pool, SETS[0])[0]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child() -> None:
        queue.put(bool((case.run(pool, SETS[0])[0] == want).all()))

    process = context.Process(target=child)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert queue.get() is True
