"""The cluster performance model of the paper of private LLMs on Apple Silicon: equation (1), section 4.4, table 1.

It bounds the time of one token from below: the weights one node reads per token at its memory's rate (or their
operations, if those take longer), one exchange's latency per layer, and the data at the network's rate. For what the
app itself predicts, with measured terms and unlike nodes, see :mod:`engine.planning.ring_speed`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.planning.placement import ExpertGrid, Placement
from engine.planning.placement_planner import NodeRoom, place

RDMA_LATENCY_S = {"RoCEv2": 750e-9, "Infiniband": 600e-9}
RDMA_BYTES_PER_S = {"RoCEv2": 25e9 / 8, "Infiniband": 200e9 / 8}
"""Rate of the network cards of section 5.5 in bytes per second."""


@dataclass(frozen=True)
class ClusterModel:
    """A model as table 1 describes it; the defaults are DBRX. ``precision``: bytes per weight."""

    layers: int = 40
    precision: int = 2
    embed: int = 6144
    qkv_hidden: int = 8192
    ffn: int = 10752
    experts_per_token: int = 4

    @property
    def exchanged_bytes(self) -> float:
        """Per token (footnote a)."""
        return self.embed * self.experts_per_token * self.layers * self.precision

    @property
    def attention_bytes(self) -> float:
        """Self-attention weights read per token: the projections to queries, keys and values, and the output's.

        Footnote b prints the latter as D_ffn squared, a misprint of D_embed squared: DBRX's is 6144 x 6144, with which
        the table's 7e9 follows (7.046e9), and with D_ffn squared 13.3e9.
        """
        return (self.qkv_hidden * self.embed + self.embed**2) * self.layers * self.precision

    @property
    def attention_operations(self) -> float:
        """Per token (footnote c), which counts two per byte where two per weight would be half; it decides nothing."""
        return 2 * self.attention_bytes

    @property
    def expert_bytes(self) -> float:
        """One expert of every layer (footnote d)."""
        return self.embed * self.ffn * 3 * self.layers * self.precision

    @property
    def expert_operations(self) -> float:
        """Per token, one expert of every layer (footnote e)."""
        return 2 * self.embed * self.ffn * 3 * self.layers


DBRX = ClusterModel()
"""The paper's model."""


@dataclass(frozen=True)
class ClusterHardware:
    """One node and the network as table 1 describes them; the defaults are M2 Ultra and 10 Gb Ethernet."""

    operations_per_s: float = 54e12
    memory_bytes_per_s: float = 800e9
    network_bytes_per_s: float = 1.25e9
    latency_s: float = 1e-3


@dataclass(frozen=True)
class ClusterBound:
    """A row of table 6, in seconds per token."""

    load_s: float
    compute_s: float
    latency_s: float
    transfer_s: float

    @property
    def time_s(self) -> float:
        """Loading and computing overlap; the exchange follows."""
        return max(self.load_s, self.compute_s) + self.latency_s + self.transfer_s

    @property
    def tokens_per_s(self) -> float:
        return 1.0 / self.time_s


def cluster_bound(model: ClusterModel, hardware: ClusterHardware, executed_experts: float) -> ClusterBound:
    """Equation (1). ``executed_experts``: the paper's E[#exec. experts per node and layer], see
    :func:`engine.planning.cluster_load.expected_experts`."""
    read = model.attention_bytes + model.expert_bytes * executed_experts
    operations = model.attention_operations + model.expert_operations * executed_experts
    return ClusterBound(
        load_s=read / hardware.memory_bytes_per_s,
        compute_s=operations / hardware.operations_per_s,
        latency_s=hardware.latency_s * model.layers,
        transfer_s=model.exchanged_bytes / hardware.network_bytes_per_s,
    )


def replicated_halves(nodes: int, experts: int = 16) -> Placement:
    """Where the paper's experts are, as its numbers of executed experts tell: two nodes hold one half each, and every
    further node copies one half, in turn (section 5.3 says only that experts are loaded overlappingly)."""
    holders = tuple(tuple(range(half, nodes, 2)) for half in (0, 1))
    return Placement((0,), nodes, (tuple(holders[expert >= experts // 2] for expert in range(experts)),))


def realised_placement(nodes: int, experts: int = 16, slots: int = 8) -> Placement:
    """Where this repository's planner puts them, with room for ``slots`` of each layer's experts on every node."""
    placed = place(ExpertGrid((0,), experts, 4, 1), [NodeRoom(slots)] * nodes)
    if not isinstance(placed, Placement):
        raise ValueError(f"{nodes} nodes of {slots} slots cannot hold {experts} experts")
    return placed
