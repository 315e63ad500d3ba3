"""The Twiddler paper's two machines and its baselines as they were, as settings of the replay. Pure.

Its appendix A states that a copy of an expert takes 2 to 5 times its computing on the GPU, whatever the tokens, and its
Algorithm 1 runs expert after expert. llama.cpp (b2956) ran whole layers on the CPU, their attention too, but moved
products of 32 rows and more to the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.papers.replay import Key, Step, replay
from benchmarks.policies import MIXTRAL, MIXTRAL_SHAPE
from engine.ipc.messages import ExpertPolicy
from engine.planning.balancing import ActiveExpert, Place, layer_sides
from engine.planning.calibration import Calibration, Curve, Processor, estimated
from engine.planning.policy import CacheRule, Decision, Policy, policy_named

ATTENTION_BYTES = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
"""Weights of one layer's attention in bytes."""
OFFLOADED_ROWS = 32
"""Rows of a product from which llama.cpp moves it to the GPU."""
COPY_OVER_GPU = (2.0, 3.16, 5.0)
"""A copy over the GPU's computing: the ends of appendix A, and the middle of their ratio."""


@dataclass(frozen=True)
class Machine:
    """One of the paper's. ``link``: bytes per second one way, as achieved; ``slots``: experts on the GPU, of 256."""

    name: str
    link: float
    cpu: Processor
    gpu_memory_rate: float
    slots: int
    gpu_layers: int
    kept_per_layer: int
    """Experts that Mixtral-offloading keeps per layer."""

    def calibration(self, copy_over_gpu: float, linear: bool, cpu_rate: float = 1.0) -> Calibration:
        """Its costs of one expert. ``linear``: a CPU whose time grows with the tokens, as the paper's own does.
        ``cpu_rate``: a factor of the CPU's rates."""
        found = estimated(
            MIXTRAL_SHAPE,
            cpu=Processor(cpu_rate * self.cpu.memory_rate, cpu_rate * self.cpu.operations_rate),
            gpu=Processor(memory_rate=self.gpu_memory_rate, operations_rate=1e15),
            pcie_rate=self.link,
            machine=self.name,
        )
        one = found.cpu.at(1)
        # Few tokens read the weights once; from a few dozen on the appendix's constant counts.
        many = max(self.gpu_s, found.weight_copy / copy_over_gpu)
        gpu = Curve((1, 16, 32, 4096), (self.gpu_s, self.gpu_s, many, many))
        cpu = Curve((1, 2), (one, 2 * one)) if linear else found.cpu
        return msgspec.structs.replace(found, cpu=cpu, gpu=gpu)

    @property
    def gpu_s(self) -> float:
        """Reading one expert."""
        return MIXTRAL_SHAPE.expert_bytes / self.gpu_memory_rate


MACHINES = (
    Machine("environment 1", 11.3e9, Processor(50e9, 1.5e12), 0.8 * 672e9, 56, 8, 1),
    Machine("environment 2", 22.6e9, Processor(120e9, 5e12), 0.8 * 960e9, 125, 16, 3),
)


LAYERS_STAY = CacheRule("layers", admits_moved=False, scope="layer")
"""What llama.cpp's GPU keeps."""


@dataclass(frozen=True)
class LlamaCpp:
    """Whole layers on the GPU; those of the CPU are moved there for passes of OFFLOADED_ROWS rows and more."""

    name: ExpertPolicy = "layers"
    cache: CacheRule = LAYERS_STAY
    per_token: int = MIXTRAL.experts_per_token

    def decide(self, layer: int, active: Sequence[ActiveExpert], calibration: Calibration) -> Decision:
        rows = sum(each.tokens for each in active) // self.per_token
        elsewhere: Place = "pmove" if rows >= OFFLOADED_ROWS else "amove"
        places: list[Place] = ["gpu" if each.resident else elsewhere for each in active]
        cpu, gpu = layer_sides(active, places, calibration)
        return Decision(tuple(places), cpu, gpu, tuple(active), calibration)

    def observe(self, layer: int, decision: Decision, cpu_s: float, gpu_s: float) -> LlamaCpp:
        return self


def trunk_s(machine: Machine, rows: Sequence[int], cpu_layers: int, cpu_memory_rate: float) -> float:
    """Everything but the experts, for passes of so many ``rows``; the attention of ``cpu_layers`` on the CPU."""
    total = 0.0
    for count in rows:
        on_cpu = 0 if count >= OFFLOADED_ROWS else cpu_layers * ATTENTION_BYTES
        total += (MIXTRAL.trunk_bytes - on_cpu) / machine.gpu_memory_rate + on_cpu / cpu_memory_rate
    return total


def system_s(
    system: str, machine: Machine, calibration: Calibration, trace: Sequence[Step], order: Sequence[Key]
) -> float:
    """Seconds of ``trace`` by Twiddler, llama.cpp, DeepSpeed, Mixtral-offloading, or ours. Raises KeyError."""
    rows = [step.rows for step in trace]
    slots, policy, overlap, cpu_layers = _SYSTEMS[system](machine)
    done = replay(trace, policy, calibration, slots, MIXTRAL.experts, order, overlap=overlap)
    return done.total_s + trunk_s(machine, rows, cpu_layers, calibration.memory_read)


_SYSTEMS: Mapping[str, Callable[[Machine], tuple[int, Policy, bool, int]]] = {
    "Twiddler": lambda m: (m.slots, policy_named("twiddler"), False, 0),
    "llama.cpp": lambda m: (m.gpu_layers * 8, LlamaCpp(), False, 32 - m.gpu_layers),
    "DeepSpeed": lambda m: (0, policy_named("stream", MIXTRAL.experts), True, 0),
    "Mixtral-offloading": lambda m: (32 * m.kept_per_layer, policy_named("lru-offload"), False, 0),
    "ours": lambda m: (m.slots, policy_named("balanced"), True, 0),
}
