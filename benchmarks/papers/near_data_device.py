"""A memory device that computes: MoNDE's near-data unit, simulated at the level of tiles and bursts. Pure.

The device (MoNDE paper, section 3.1): eight channels of LPDDR, each four x16 chips wide and eight ranks deep; 64
systolic arrays of 4x4 multiply-and-accumulate elements at 1 GHz, which make one 4x256 tile of the output at a time and
keep it while it grows (output-stationary). One row of the weights' tile, 256 numbers, is needed per cycle, which is
what the memory gives: the device is balanced for four tokens, and more tokens take proportionally longer.

What is modelled: bursts, pages and the opening of banks (contiguous weights are spread over channels first, ranks and
bank groups next, so a page is opened while others are read), refresh, the filling and draining of the arrays, operand
buffers filled while the tile before is computed, and the commands' way to the device. What is not: contention between
weights and activations, which the paper maps to different banks for that reason.

Sizes are bytes, times seconds, rates bytes per second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil


@dataclass(frozen=True)
class NearMemory:
    """LPDDR5X as the paper's modules have it: 8533 MT/s on eight channels of 64 bits, 546 GB/s before losses."""

    channels: int = 8
    channel_bytes: int = 8
    transfers_per_s: float = 8533e6
    burst_transfers: int = 16
    page_bytes: int = 8192
    """Of one rank of a channel: four chips with pages of 2 KB."""
    banks: int = 64
    """Per channel that take turns: half of 8 ranks of 16 banks, the other half being the activations'."""
    row_cycle_s: float = 60e-9
    """Between two openings of the same bank (tRC)."""
    first_word_s: float = 55e-9
    """From a closed bank to its first word (tRCD, then the read latency)."""
    refresh_interval_s: float = 3.9e-6
    refresh_s: float = 0.26e-6
    """All banks of a rank; the ranks take turns, and one channel waits for its own."""

    @property
    def peak_rate(self) -> float:
        return self.channels * self.channel_bytes * self.transfers_per_s

    @property
    def stream_rate(self) -> float:
        """Of long contiguous reads."""
        page_s = self.page_bytes / (self.channel_bytes * self.transfers_per_s)
        opening = max(1.0, self.row_cycle_s / (self.banks * page_s))
        return self.peak_rate / opening * (1.0 - self.refresh_s / self.refresh_interval_s)

    def seconds(self, nbytes: int) -> float:
        """One contiguous read or write: whole bursts on all channels, after the first page was opened."""
        if nbytes <= 0:
            return 0.0
        burst = self.channels * self.channel_bytes * self.burst_transfers
        return self.first_word_s + ceil(nbytes / burst) * burst / self.stream_rate


@dataclass(frozen=True)
class NearDevice:
    """The unit beside that memory. ``bandwidth_factor`` scales memory and clock together, as figure 7 does."""

    memory: NearMemory = NearMemory()
    arrays: int = 64
    rows: int = 4
    """Of one array, and so tokens per tile."""
    columns: int = 4
    clock_hz: float = 1e9
    buffer_bytes: int = 264 * 1024
    command_s: float = 1e-6
    """From the host's command to the first request, and from the last result to the host's notice."""
    bytes_per_number: int = 2
    bandwidth_factor: float = 1.0

    @property
    def tile_columns(self) -> int:
        """Columns of the output made at a time: 256."""
        return self.arrays * self.columns

    @property
    def stream_rate(self) -> float:
        """At which weights arrive."""
        return self.memory.stream_rate * self.bandwidth_factor

    def gemm(self, tokens: int, inner: int, outer: int) -> float:
        """``tokens`` x ``inner`` times ``inner`` x ``outer``, the paper's ``gemm`` command. Its ``gemm+relu`` takes no
        longer, for the function is applied while a tile drains.

        Tiles of 4 x 256 follow one another. A tile's weights arrive in blocks of the operand buffer's half while the
        block before is computed, so a tile takes the longer of both; more than four tokens read the weights again.
        """
        if tokens <= 0:
            return 0.0
        clock = self.clock_hz * self.bandwidth_factor
        fill = self.rows + self.columns - 2
        seconds = 0.0
        for first in range(0, tokens, self.rows):
            rows = min(self.rows, tokens - first)
            for left in range(0, outer, self.tile_columns):
                columns = min(self.tile_columns, outer - left)
                operands = inner * (columns + rows) * self.bytes_per_number
                reading = operands / self.stream_rate
                seconds += max(inner / clock, reading) + self._storing(rows, columns)
        half = self.buffer_bytes // 2
        first_block = self.memory.seconds(min(half, inner * self.tile_columns * self.bytes_per_number))
        return seconds + first_block / self.bandwidth_factor + (fill + self.rows) / clock

    def _storing(self, rows: int, columns: int) -> float:
        """A finished tile's way to memory, between two reads."""
        return rows * columns * self.bytes_per_number / self.stream_rate

    def expert(self, tokens: int, hidden: int, ffn: int) -> float:
        """One expert of two matrices: gemm+relu, then gemm."""
        if tokens <= 0:
            return 0.0
        return 2 * self.command_s + self.gemm(tokens, hidden, ffn) + self.gemm(tokens, ffn, hidden)


@dataclass(frozen=True)
class Link:
    """PCIe between host, GPU and device; ``rate`` one way. ``fixed_s`` is what starting a copy costs."""

    rate: float = 32e9
    fixed_s: float = 10e-6

    def seconds(self, nbytes: float) -> float:
        return self.fixed_s + nbytes / self.rate if nbytes > 0 else 0.0


@dataclass(frozen=True)
class RooflineGpu:
    """A GPU: the longer of reading and computing, and a fixed time per kernel. By default an A100 (40 GB, PCIe)."""

    memory_rate: float = 1555e9
    operations_rate: float = 312e12
    memory_share: float = 0.8
    """Of the memory's rate, what matrix products reach."""
    operations_share: float = 0.5
    kernel_s: float = 6e-6
    bytes_per_number: int = 2

    def product(self, tokens: int, inner: int, outer: int) -> float:
        """``tokens`` x ``inner`` times ``inner`` x ``outer``."""
        if tokens <= 0:
            return 0.0
        numbers = inner * outer + tokens * (inner + outer)
        reading = numbers * self.bytes_per_number / (self.memory_rate * self.memory_share)
        computing = 2.0 * tokens * inner * outer / (self.operations_rate * self.operations_share)
        return self.kernel_s + max(reading, computing)

    def expert(self, tokens: int, hidden: int, ffn: int) -> float:
        """One expert of two matrices: gathering its tokens, product, function, product, scattering."""
        if tokens <= 0:
            return 0.0
        return 3 * self.kernel_s + self.product(tokens, hidden, ffn) + self.product(tokens, ffn, hidden)


@dataclass(frozen=True)
class NearSystem:
    """GPU, link, and one or more near-data devices that share the link."""

    hidden: int
    ffn: int
    gpu: RooflineGpu = RooflineGpu()
    link: Link = Link()
    device: NearDevice = NearDevice()
    devices: int = 1
    host_s: float = 0.0
    """What the program on the host takes per active expert, whichever device runs it: a loop in Python that gathers the
    expert's tokens, launches its kernels or commands, and scatters the results."""
    bytes_per_number: int = 2
    _near: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def expert_bytes(self) -> int:
        return 2 * self.hidden * self.ffn * self.bytes_per_number

    @property
    def hot_share(self) -> float:
        """Equation 6 with alpha 1 for one active expert, from the aggregate rate of all devices."""
        near = self.devices * self.device.stream_rate
        return self.link.rate / (near + self.link.rate)

    def near_expert(self, tokens: int) -> float:
        """Remembered: a layer's cold experts have few different numbers of tokens."""
        if tokens not in self._near:
            self._near[tokens] = self.device.expert(tokens, self.hidden, self.ffn)
        return self._near[tokens]

    def gpu_expert(self, tokens: int) -> float:
        """The host's time included."""
        return self.host_s + self.gpu.expert(tokens, self.hidden, self.ffn)

    def activations(self, tokens: int) -> float:
        """One way, for all tokens of one expert."""
        return self.link.seconds(tokens * self.hidden * self.bytes_per_number)
