"""The MoNDE paper's ways to run a layer of experts (its figure 5), simulated over given routes. Pure.

GPU+PM: active experts are copied to the GPU one after another and run there. MD+AM: all run near the memory, the
activations travel. MD+LB: the hottest H are copied to the GPU, the others stay, both at once; H is equation 6 with an
alpha that is tuned on a few layers. CPU+AM: MD+AM with the host's CPU in the place of the device. Ideal: everything is
on a GPU of endless memory. All times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.papers.near_data_device import NearSystem, RooflineGpu

Workflow = Literal["GPU+PM", "MD+AM", "MD+LB", "CPU+AM", "Ideal"]
Tokens = Sequence[int]
"""Tokens of each active expert of one layer, at least one each."""
_TUNING_STEPS = 256


@dataclass(frozen=True)
class HostCpu:
    """The host's CPU for CPU+AM: reads at ``memory_rate``, computes at ``operations_rate``, and takes ``fixed_s``."""

    memory_rate: float = 187e9
    operations_rate: float = 1.0e12
    fixed_s: float = 0.0

    def expert(self, tokens: int, hidden: int, ffn: int, bytes_per_number: int = 2) -> float:
        """One expert of two matrices."""
        numbers = 2 * hidden * ffn
        reading = numbers * bytes_per_number / self.memory_rate
        return self.fixed_s + max(reading, 2 * tokens * numbers / self.operations_rate) if tokens else 0.0


def ideal(system: NearSystem, tokens: Tokens) -> float:
    """All experts on the GPU, their weights there."""
    return sum(map(system.gpu_expert, tokens))


def several_gpus(system: NearSystem, tokens: Tokens, gpus: int) -> float:
    """The experts' weights divided among ``gpus``, numbered experts in turn, each GPU with a host process of its own:
    the later one counts (section 4.2, figure 10)."""
    return max((sum(map(system.gpu_expert, tokens[gpu::gpus])) for gpu in range(gpus)), default=0.0)


def parameter_movement(system: NearSystem, tokens: Tokens) -> float:
    """Copies one after another, each expert's computing beside the next one's copy, the longest first."""
    if not tokens:
        return 0.0
    copy = system.link.seconds(system.expert_bytes)
    computing = [system.gpu_expert(count) for count in tokens]
    return max(copy + sum(computing), len(computing) * copy + min(computing))


def activation_movement(
    system: NearSystem, tokens: Tokens, expert: Callable[[int], float] | None = None, devices: int = 1
) -> float:
    """Activations to each device in turn, its experts one after another there, results back in turn.

    Experts go to the devices round robin, those with the most tokens first; the host waits for each, so that its own
    time comes on top, for all devices together. ``expert`` is the seconds of one expert by
    its tokens, the near-data device's if None.
    """
    one = expert if expert is not None else system.near_expert
    ranked = sorted(tokens, reverse=True)
    arrived = 0.0
    done: list[tuple[float, int]] = []
    for device in range(devices):
        mine = ranked[device::devices]
        if mine:
            arrived += system.activations(sum(mine))
            done.append((arrived + sum(map(one, mine)), sum(mine)))
    back = 0.0
    for finished, count in sorted(done):
        back = max(back, finished) + system.activations(count)
    return back + system.host_s * len(ranked)


def load_balanced(system: NearSystem, tokens: Tokens, hot: int) -> float:
    """The ``hot`` experts with the most tokens by parameter movement, the others by activation movement, at once. The
    host's one loop goes over all of them."""
    ranked = sorted(tokens, reverse=True)
    hot = max(0, min(hot, len(ranked)))
    cold = activation_movement(system, ranked[hot:], devices=system.devices)
    return max(parameter_movement(system, ranked[:hot]), cold + system.host_s * hot)


def hot_count(system: NearSystem, active: int, alpha: float) -> int:
    """Equation 6, to the nearest whole expert."""
    return min(active, round(alpha * system.hot_share * active))


def tuned_alpha(system: NearSystem, layers: Sequence[Tokens]) -> float:
    """The alpha from which no step of one expert, up or down, or of two up, makes ``layers`` faster; starts at 1."""
    most = max((len(tokens) for tokens in layers), default=0)
    if not most:
        return 1.0
    step = 1.0 / (system.hot_share * most)
    costs: dict[float, float] = {}
    alpha = 1.0
    for _ in range(_TUNING_STEPS):
        for near in (max(0.0, alpha - step), alpha, alpha + step, alpha + 2 * step):
            if near not in costs:
                costs[near] = sum(load_balanced(system, t, hot_count(system, len(t), near)) for t in layers)
        best = min(costs, key=lambda near: (costs[near], abs(near - 1.0)))
        if best == alpha:
            break
        alpha = best
    return alpha


@dataclass(frozen=True)
class Simulated:
    """The sum over all layers, and for MD+LB its alpha and the mean share of active experts on the GPU."""

    seconds: float
    alpha: float | None = None
    hot_share: float | None = None


def simulate(
    system: NearSystem, workflow: Workflow, layers: Sequence[Tokens], tune_on: int = 8, cpu: HostCpu | None = None
) -> Simulated:
    """``layers`` of experts by ``workflow``; MD+LB tunes its alpha on ``tune_on`` of them, evenly chosen."""
    if workflow == "MD+LB":
        every = max(1, len(layers) // max(1, tune_on))
        alpha = tuned_alpha(system, layers[::every])
        hot = [hot_count(system, len(tokens), alpha) for tokens in layers]
        total = sum(load_balanced(system, tokens, h) for tokens, h in zip(layers, hot, strict=True))
        active = sum(map(len, layers))
        return Simulated(total, alpha, sum(hot) / active if active else 0.0)
    host = cpu if cpu is not None else HostCpu()

    def on_cpu(count: int) -> float:
        return host.expert(count, system.hidden, system.ffn, system.bytes_per_number)

    per_layer: dict[str, Callable[[Tokens], float]] = {
        "GPU+PM": lambda tokens: parameter_movement(system, tokens),
        "MD+AM": lambda tokens: activation_movement(system, tokens, devices=system.devices),
        "CPU+AM": lambda tokens: activation_movement(system, tokens, on_cpu),
        "Ideal": lambda tokens: ideal(system, tokens),
    }
    return Simulated(sum(map(per_layer[workflow], layers)))


@dataclass(frozen=True)
class Stack:
    """An encoder's or decoder's blocks: every ``moe_every``-th has experts, the others a dense network of that size."""

    name: str
    blocks: int
    moe_every: int
    hidden: int
    ffn: int
    experts: int
    experts_per_token: int
    cross_attention: bool = False
    head_columns: int = 0
    """Of the output's matrix; a decoder's vocabulary."""

    @property
    def moe_blocks(self) -> int:
        return self.blocks // self.moe_every


SMALL_KERNELS_PER_BLOCK = 24
"""Kernels per block for norms, additions, softmax and reshaping; each takes a GPU about its launch."""
ROUTING_KERNELS = 16
"""Kernels of a MoE block for scores, the best experts, sorting and weighting."""


def block_seconds(stack: Stack, gpu: RooflineGpu, rows: int, context: int, block_overhead_s: float = 0.0) -> float:
    """One block without its network or experts: ``rows`` tokens in one pass, each attending to ``context`` others.

    ``block_overhead_s``: what the framework takes per block on the host, if the GPU waits for it.
    """
    attention = 4 * gpu.product(rows, stack.hidden, stack.hidden)
    attention += 2 * gpu.product(rows, stack.hidden, context)
    kernels = SMALL_KERNELS_PER_BLOCK * gpu.kernel_s
    return attention * (2 if stack.cross_attention else 1) + kernels + block_overhead_s


def routing_seconds(stack: Stack, gpu: RooflineGpu, rows: int) -> float:
    """The router of one block with experts."""
    return gpu.product(rows, stack.hidden, stack.experts) + ROUTING_KERNELS * gpu.kernel_s


def dense_seconds(stack: Stack, gpu: RooflineGpu, rows: int, context: int, block_overhead_s: float = 0.0) -> float:
    """Everything but the experts, on the GPU; arguments as for :func:`block_seconds`."""
    network = gpu.product(rows, stack.hidden, stack.ffn) + gpu.product(rows, stack.ffn, stack.hidden)
    dense_blocks = stack.blocks - stack.moe_blocks
    head = gpu.product(rows, stack.hidden, stack.head_columns) if stack.head_columns else 0.0
    blocks = stack.blocks * block_seconds(stack, gpu, rows, context, block_overhead_s)
    return blocks + dense_blocks * network + stack.moe_blocks * routing_seconds(stack, gpu, rows) + head


SWITCH_ENCODER = Stack("Switch-Large-128 encoder", 24, 2, 1024, 4096, 128, 1)
SWITCH_DECODER = Stack("Switch-Large-128 decoder", 24, 2, 1024, 4096, 128, 1, True, 32128)
NLLB_ENCODER = Stack("NLLB-MoE encoder", 24, 4, 2048, 8192, 128, 2)
NLLB_DECODER = Stack("NLLB-MoE decoder", 24, 4, 2048, 8192, 128, 2, True, 256206)


def expert_bytes_of(stacks: Iterable[Stack], bytes_per_number: int = 2) -> int:
    """All experts of a model's ``stacks``."""
    return sum(stack.moe_blocks * stack.experts * 2 * stack.hidden * stack.ffn * bytes_per_number for stack in stacks)
