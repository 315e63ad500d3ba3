"""The cluster performance model of the paper of private LLMs on Apple Silicon: equation (1), section 4.4, table 1.

It bounds the time of one token from below: the weights one node reads per token at its memory's rate (or their
operations, if those take longer), one exchange's latency per layer, and the data at the network's rate. For what the
app itself predicts, with measured terms and unlike nodes, see :mod:`engine.planning.ring_speed`.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    self_attention_bytes: float | None = None
    """As stated; None: by footnote b's formula. For DBRX that gives 13.3e9 bytes where the table, and all that follows
    from it, has 7e9: the formula without the precision, that is the number of weights, gives 6.6e9."""

    @property
    def exchanged_bytes(self) -> float:
        """Per token (footnote a)."""
        return self.embed * self.experts_per_token * self.layers * self.precision

    @property
    def attention_bytes(self) -> float:
        """Self-attention weights read per token (footnote b)."""
        if self.self_attention_bytes is not None:
            return self.self_attention_bytes
        return (self.qkv_hidden * self.embed + self.ffn**2) * self.layers * self.precision

    @property
    def attention_operations(self) -> float:
        """Per token (footnote c)."""
        return 2 * self.attention_bytes

    @property
    def expert_bytes(self) -> float:
        """One expert of every layer (footnote d)."""
        return self.embed * self.ffn * 3 * self.layers * self.precision

    @property
    def expert_operations(self) -> float:
        """Per token, one expert of every layer (footnote e)."""
        return 2 * self.embed * self.ffn * 3 * self.layers


DBRX = ClusterModel(self_attention_bytes=7e9)
"""The paper's model, with the self-attention bytes of its table."""


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
