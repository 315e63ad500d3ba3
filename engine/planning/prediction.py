"""Predicted tokens per second, from a calibration, before anything is loaded. Pure.

A forward pass is the trunk, and for every MoE layer the layer's time by :mod:`engine.planning.balancing` with the
expected routes. Decoding reads every weight it uses once, so the trunk's time is its bytes over the rate at which
weights stream. A prompt of many tokens is bound by arithmetic: then the time is that of its operations, at the rate of
the largest measured expert, if that is longer. All times are in seconds, all memory is in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

from engine.planning.calibration import GUESSED_CPU, Calibration, Curve
from engine.planning.memory import ModelSizes, expected_distinct_experts
from engine.planning.policy import ActiveExpert, Policy

DECODE_CONTEXT = 512
"""Tokens in the cache that predictions of decoding assume."""
PREFILL_TOKENS = 512
"""Tokens of the prompt that predictions of prefill assume."""
TRUNK_OPERATIONS = 60
"""Small GPU operations by which a decoder layer of transformers occupies the host, if it runs on a GPU. This and the
next two are fitted to the time of a token in three models on an H100."""
EXECUTOR_OPERATIONS = 65
"""Small GPU operations of a layer's experts beside running them: routes, decisions, activations."""
RESIDENT_OPERATIONS = 15
"""Small GPU operations of a layer whose experts are all on the GPU, where few tokens find them without the host."""
SLOW_GPU_MEMORY = 128e9
"""Memory rate of the slowest GPU for which torch is built (GTX 1650), in bytes per second. It stands in for a
measurement, because a small expert's time is the host's and says nothing about the GPU's memory."""


@dataclass(frozen=True)
class Shares:
    """The distribution of a layer's routes over its experts, most used first. ``of`` sums to 1."""

    of: tuple[float, ...]

    @classmethod
    def even(cls, experts: int) -> Shares:
        return cls((1.0 / experts,) * experts if experts else ())

    @classmethod
    def counted(cls, layers: Sequence[Sequence[int]]) -> Shares:
        """The mean over ``layers`` ([layer][expert] routes) of each layer's own order; even if nothing was counted.

        Raises ValueError if the layers have different numbers of experts, or none.
        """
        if not layers or len({len(layer) for layer in layers}) != 1 or not layers[0]:
            raise ValueError("a popularity profile has layers of the same number of experts, at least one")
        ranked = [sorted(layer, reverse=True) for layer in layers if sum(layer) > 0]
        if not ranked:
            return cls.even(len(layers[0]))
        return cls(tuple(sum(row[i] / sum(row) for row in ranked) / len(ranked) for i in range(len(layers[0]))))

    def caught(self, slots: float) -> float:
        """Share of routes that go to the ``slots`` most used experts. A fraction of a slot counts as that fraction."""
        whole = min(int(slots), len(self.of))
        part = self.of[whole] * (slots - whole) if whole < len(self.of) else 0.0
        return min(1.0, sum(self.of[:whole]) + part)


@dataclass(frozen=True)
class Speed:
    """Predicted seconds: of a decoding step, and of a prompt of PREFILL_TOKENS tokens.

    ``layer_s``: seconds of one MoE layer's experts within a step.
    """

    step_s: float
    prefill_s: float
    layer_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return 1.0 / self.step_s if self.step_s > 0 else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return PREFILL_TOKENS / self.prefill_s if self.prefill_s > 0 else 0.0


def expected_tokens(shares: Shares, per_token: int, rows: int) -> list[int]:
    """Tokens per expert, most used first, if ``rows`` tokens are sent to ``per_token`` experts each.

    The sum is exactly ``rows * per_token``; one expert gets at most ``rows``.
    """
    routes = rows * min(per_token, len(shares.of))
    tokens = [0] * len(shares.of)
    sent, wanted = 0, 0.0
    for place, part in enumerate(shares.of):
        wanted += part * routes
        tokens[place] = max(0, min(rows, round(wanted) - sent))
        sent += tokens[place]
    for place in range(len(tokens)):
        more = min(rows - tokens[place], routes - sent)
        tokens[place] += more
        sent += more
    return tokens


def hybrid_speed(
    model: ModelSizes,
    calibration: Calibration,
    policy: Policy,
    slots_per_layer: float,
    shares: Shares,
    layer_overhead_s: float = 0.0,
) -> Speed:
    """Speed with the trunk and ``slots_per_layer`` of each MoE layer's experts on the GPU (mean over the layers).

    The experts there are assumed to be the most used ones. Raises ValueError if the calibration knows no GPU.
    """
    if calibration.gpu is None:
        raise ValueError(f"the calibration of {calibration.machine!r} has no GPU: measure one before sharing experts")
    rate = _weight_rate(calibration.gpu, calibration)
    if calibration.gpu_operation_s:
        rate = max(rate, SLOW_GPU_MEMORY)
    per_s = _operations_rate(calibration.gpu, calibration, model)
    by_layer = policy.cache.kind == "layers"
    resident = slots_per_layer / model.experts if by_layer and model.experts else shares.caught(slots_per_layer)
    whole = resident if by_layer else float(slots_per_layer >= model.experts)
    other = model.layers * layer_overhead_s
    active = min(model.experts_per_token, model.experts)
    decode = decode_layer_s(active, resident, calibration, policy)
    prefill = prefill_layer_s(_tokens(model, shares), slots_per_layer, calibration, policy)
    return Speed(
        step_s=other + _begun_s(model, calibration, whole) + _trunk(model, 1, rate, per_s) + model.moe_layers * decode,
        prefill_s=other
        + _begun_s(model, calibration, 0.0)
        + _trunk(model, PREFILL_TOKENS, rate, per_s)
        + model.moe_layers * prefill,
        layer_s=decode,
    )


def _begun_s(model: ModelSizes, calibration: Calibration, whole: float) -> float:
    """Seconds of the host's time for starting the GPU's operations in a forward pass.

    ``whole``: the share of MoE layers whose experts are all on the GPU, where few tokens find them without the host.
    """
    sharing = whole * RESIDENT_OPERATIONS + (1.0 - whole) * EXECUTOR_OPERATIONS
    trunk = TRUNK_OPERATIONS * model.layers if model.trunk_bytes else 0
    return (trunk + sharing * model.moe_layers) * calibration.gpu_operation_s


def cpu_speed(
    model: ModelSizes,
    calibration: Calibration,
    shares: Shares,
    layer_overhead_s: float = 0.0,
    read_share: float = 1.0,
) -> Speed:
    """Speed with everything on the CPU. The trunk is read at ``read_share`` of the memory rate."""
    rate = read_share * calibration.memory_read
    per_s = _operations_rate(calibration.cpu, calibration, model)
    other = model.layers * layer_overhead_s
    many = sum(calibration.cpu.at(tokens) for tokens in _tokens(model, shares))
    return Speed(
        step_s=cpu_step_s(model, calibration, shares, layer_overhead_s, read_share),
        prefill_s=other + _trunk(model, PREFILL_TOKENS, rate, per_s) + model.moe_layers * many,
    )


def cpu_step_s(
    model: ModelSizes,
    calibration: Calibration,
    shares: Shares,
    layer_overhead_s: float = 0.0,
    read_share: float = 1.0,
    rows: int = 1,
) -> float:
    """Seconds of a decoding step of ``rows`` independent rows with everything on the CPU.

    The trunk is read once, at ``read_share`` of the memory rate, and each expert that any row uses once. More rows take
    as many times as long in the trunk as in an expert.
    """
    rate = read_share * calibration.memory_read
    longer = calibration.cpu.at(rows) / calibration.cpu.at(1)
    trunk = (longer * model.trunk_read_bytes + rows * model.cache_bytes(DECODE_CONTEXT)) / rate
    chances = tuple(min(1.0, min(model.experts_per_token, model.experts) * share) for share in shares.of)
    return model.layers * layer_overhead_s + trunk + model.moe_layers * experts_s(calibration.cpu, chances, rows)


def experts_s(curve: Curve, chances: Sequence[float], rows: int) -> float:
    """Expected seconds of a layer's experts, one after the other, for ``rows`` rows that choose independently.

    ``chances``: probability that a row uses each expert. ``curve``: seconds of an expert by its rows.
    """
    seconds = [curve.at(count) for count in range(rows + 1)]

    def expected(chance: float) -> float:
        return sum(
            comb(rows, count) * chance**count * (1.0 - chance) ** (rows - count) * seconds[count]
            for count in range(1, rows + 1)
        )

    return sum(chances.count(chance) * expected(chance) for chance in set(chances))


def streaming_step_s(model: ModelSizes, memory_read: float, layer_overhead_s: float = 0.0, rows: int = 1) -> float:
    """Seconds of a decoding step of ``rows`` rows on the CPU if it takes the time of streaming its weights; for models
    without a calibration. Many rows take that of the trunk's operations on a processor that is guessed."""
    distinct = expected_distinct_experts(model.experts, model.experts_per_token, rows)
    used = distinct * model.moe_layers * model.slab_bytes
    per_s = GUESSED_CPU.operations_rate * memory_read / GUESSED_CPU.memory_rate
    return model.layers * layer_overhead_s + _trunk(model, rows, memory_read, per_s, rows) + used / memory_read


@lru_cache(maxsize=4096)
def decode_layer_s(active: int, resident: float, calibration: Calibration, policy: Policy) -> float:
    """Expected seconds of a layer for one token and its ``active`` experts.

    Each expert is on the GPU with the probability ``resident``. With a policy that keeps whole layers, all or none are.
    Raises ValueError if the calibration knows no GPU.
    """
    if not active:
        return 0.0
    if policy.cache.kind == "layers":
        chances = [1.0 - resident, *([0.0] * (active - 1)), resident]
    else:
        chances = [
            comb(active, hits) * resident**hits * (1 - resident) ** (active - hits) for hits in range(active + 1)
        ]
    expected = 0.0
    for hits, chance in enumerate(chances):
        if chance > 0.0:
            decision = policy.decide(0, [ActiveExpert(e, 1, e < hits) for e in range(active)], calibration)
            expected += chance * max(decision.cpu_s, decision.gpu_s)
    return expected


def prefill_layer_s(tokens: Sequence[int], slots: float, calibration: Calibration, policy: Policy) -> float:
    """Seconds of a layer whose experts have ``tokens`` tokens each, most used first.

    ``slots`` is the mean number of a layer's experts on the GPU, the most used ones. With a policy that keeps whole
    layers, it gives the share of layers that are there. Raises ValueError if the calibration knows no GPU.
    """

    def with_slots(first: int) -> float:
        active = [ActiveExpert(expert, count, expert < first) for expert, count in enumerate(tokens) if count]
        decision = policy.decide(0, active, calibration)
        return max(decision.cpu_s, decision.gpu_s)

    if policy.cache.kind == "layers":
        whole = min(1.0, slots / len(tokens)) if tokens else 0.0
        return whole * with_slots(len(tokens)) + (1.0 - whole) * with_slots(0)
    least = int(slots)
    part = slots - least
    return (1.0 - part) * with_slots(least) + (part * with_slots(least + 1) if part else 0.0)


def _tokens(model: ModelSizes, shares: Shares) -> list[int]:
    return expected_tokens(shares, model.experts_per_token, PREFILL_TOKENS)


def _trunk_bytes_read(model: ModelSizes, texts: int = 1) -> float:
    """Bytes of the trunk, and of the keys and values of so many texts."""
    return model.trunk_read_bytes + texts * model.cache_bytes(DECODE_CONTEXT)


def _trunk(model: ModelSizes, rows: int, rate: float, operations_per_s: float, texts: int = 1) -> float:
    operations = 2.0 * rows * model.trunk_read_bytes * model.weights_per_trunk_byte
    return max(_trunk_bytes_read(model, texts) / rate, operations / operations_per_s)


def _weight_rate(curve: Curve, calibration: Calibration) -> float:
    """Bytes per second at which an expert with one token reads its weights."""
    return calibration.shape.expert_bytes / curve.at(1)


def _operations_rate(curve: Curve, calibration: Calibration, model: ModelSizes) -> float:
    """Operations per second at the largest measured number of tokens."""
    tokens = curve.tokens[-1]
    weights = model.slab_weights or calibration.shape.expert_bytes / model.width
    return 2.0 * tokens * weights / curve.at(tokens)


# --- several answers at once -----------------------------------------------------------------------------------------


ANSWERS = (1, 2, 4, 8, 16)
"""Numbers of answers at once for which a plan predicts the speed."""


def answers_per_s(step_s: Callable[[int], float], rows_together: int) -> tuple[float, ...]:
    """Tokens per second of each of :data:`ANSWERS`, all of its answers together.

    ``step_s``: seconds of a step by its rows. ``rows_together``: maximum rows of a step; further answers take turns.
    """

    def rate(answers: int) -> float:
        whole, rest = divmod(answers, rows_together)
        return answers / ((whole * step_s(rows_together) if whole else 0.0) + (step_s(rest) if rest else 0.0))

    return tuple(rate(answers) for answers in ANSWERS)


# --- a rough prediction ----------------------------------------------------------------------------------------------


ASSUMED_MEMORY_READ = 20e9
"""Rate at which a processor that was not measured streams memory, in bytes per second: a mid-range laptop."""
DECODING_SHARE = 0.75
"""Fraction of the streaming rate at which decoding reads weights. Measured values are 0.77 to 0.92."""


def rough_tokens_per_s(weight_bytes: float, active_share: float, memory_read: float) -> float:
    """Tokens per second if a token takes the time of streaming its weights.

    ``weight_bytes`` are the model's, of which a token uses ``active_share``. ``memory_read`` is in bytes per second;
    0.0 stands for a machine that was not measured. Raises ValueError for a model without weights.
    """
    read = weight_bytes * active_share
    if read <= 0:
        raise ValueError(f"a token reads {read:g} bytes of weights; it must read some")
    return DECODING_SHARE * (memory_read or ASSUMED_MEMORY_READ) / read
