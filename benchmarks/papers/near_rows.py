"""The MoNDE paper's tables and figures, simulated on its device, with nominal inputs and with chosen ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.papers.findings import Findings, Input, Row, Table
from benchmarks.papers.near_data_device import Link, NearMemory, NearSystem, RooflineGpu
from benchmarks.papers.near_settings import (
    BANDS,
    BATCHES,
    CHOSEN_INPUTS,
    NOMINAL,
    NOMINAL_END,
    SEQUENCE,
    STACKS,
    Point,
    measure,
    points,
)
from benchmarks.papers.near_workflows import (
    NLLB_DECODER,
    NLLB_ENCODER,
    SWITCH_DECODER,
    SWITCH_ENCODER,
    Stack,
    expert_bytes_of,
)
from benchmarks.papers.page import percent

Points = Mapping[tuple[str, int], Point]
MEANS = {
    SWITCH_ENCODER.name: "3.1",
    SWITCH_DECODER.name: "1.1",
    NLLB_ENCODER.name: "6.7",
    NLLB_DECODER.name: "1.9",
}
"""MD+LB over GPU+PM, end to end, means over batches (section 4.2)."""
CHOSEN = "this figure: its inputs were chosen with it known"
T5_LARGE_WEIGHTS = 0.770e9
SWITCH_SIZES = (
    Stack("Switch-Base-64", 12, 2, 768, 3072, 64, 1),
    Stack("Switch-Base-128", 12, 2, 768, 3072, 128, 1),
    Stack("Switch-Large-128", 24, 2, 1024, 4096, 128, 1),
)
BANDWIDTHS = (0.5, 1.0, 1.5, 2.0)
DEVICES = (1, 2, 4)


@dataclass(frozen=True)
class Measures:
    """Figure 6's points with every setting."""

    nominal: Points
    nominal_end: Points
    """With the other end of the popularity's exponent, which is chosen there, too."""
    central: Points
    ends: Mapping[str, tuple[Points, Points]]

    def band(self, measured: Callable[[Points], float]) -> tuple[float, float, float]:
        """What ``measured`` gives with the chosen inputs, and the least and most: each input's effect alone,
        multiplied with those of the others."""
        middle = measured(self.central)
        low = high = middle
        for ends in self.ends.values():
            shares = [measured(end) / middle for end in ends]
            low *= min(1.0, *shares)
            high *= max(1.0, *shares)
        return middle, low, high


def near_rows() -> Findings:
    """Everything: about half a minute."""
    ends = {name: (points(low), points(high)) for name, (low, high) in BANDS.items()}
    found = Measures(points(NOMINAL), points(NOMINAL_END), points(CHOSEN_INPUTS), ends)
    return Findings(
        rows=[*exact_rows(), *device_rows(), *figure_3(found), *figure_6(found), *figure_8(found), *trends(), *ABSENT],
        inputs=INPUTS,
        tables=[volumes(), speeds(found), sensitivities(found)],
        notes=NOTES,
    )


def exact_rows() -> list[Row]:
    """What follows from the paper's own numbers."""
    areas, powers = (2.042, 0.053, 0.289, 0.570), (0.993, 0.033, 0.258, 0.526)
    switch, nllb = (expert_bytes_of(pair) / 1e9 for pair in (STACKS[:2], STACKS[2:]))
    in_float32 = 2 * (switch + 1.1) * 1e9
    times_t5 = in_float32 / (4 * T5_LARGE_WEIGHTS)
    notation = Row(where="table 1", what="notation", tag="exact", note="used below")
    given = [
        ("table 2", "Switch-Large-128, expert weights, GB", "51.5", switch),
        ("table 2", "NLLB-MoE, expert weights, GB", "103.1", nllb),
        ("section 2.2", "Switch-Large-128 over T5-Large, bytes in float32", "34", times_t5),
        ("section 3.1", "one channel of LPDDR 8533, GB/s", "68", 8533e6 * 8 / 1e9),
        ("section 3.1", "capacity of a module, GB", "64", 32 * 16 / 8),
        ("section 3.1", "capacity of the device, GB", "512", 8 * 32 * 16 / 8),
        ("section 4.2", "device over CPU, bandwidth", "2.7", 512 / 187),
        ("section 4.2", "encoders, mean of both models", "4.9", (3.1 + 6.7) / 2),
        ("section 4.2", "decoders, mean of both models", "1.5", (1.1 + 1.9) / 2),
        ("table 3", "area of all parts, mm²", "3.0", sum(areas)),
        ("table 3", "power over the base memory system", "1.6 %", 100 * sum(powers) / 114.2),
    ]
    return [
        notation,
        *(Row(where=where, what=what, tag="exact", paper=paper, ours=ours) for where, what, paper, ours in given),
    ]


def device_rows() -> list[Row]:
    """Of the memory and of one expert: section 3.1, figure 2(c)."""
    gpu = RooflineGpu()
    ends = [Link(rate).seconds(NLLB.expert_bytes) / gpu.expert(1, 2048, 8192) for rate in (32e9, 22.6e9)]
    rate = NearMemory().stream_rate / 1e9
    return [
        Row(where="section 3.1", what="rate of the device's memory, GB/s", tag="simulated", paper="512", ours=rate),
        Row(
            where="figure 2(c)",
            what="copy over computing, one token, at most",
            tag="simulated",
            paper="30",
            ours=ends[0],
            low=ends[0],
            high=ends[1],
            note="d_model 2048; nominal link, and as measured elsewhere",
        ),
    ]


NLLB = NearSystem(NLLB_ENCODER.hidden, NLLB_ENCODER.ffn)


def few_tokens(each: Points, name: str, batch: int) -> float:
    """Share of experts with 0 to 7 tokens."""
    return each[name, batch].few


def figure_3(found: Measures) -> list[Row]:
    """Experts with 0 to 7 tokens."""
    rows = []
    for batch in BATCHES:
        middle, low, high = found.band(partial(few_tokens, name=NLLB_ENCODER.name, batch=batch))
        rows.append(
            Row(
                where="figure 3",
                what=f"share of experts with 0–7 tokens, NLLB-MoE, batch {batch}",
                tag="simulated",
                paper="the majority",
                ours=middle,
                low=low,
                high=min(1.0, high),
                note=f"with {SEQUENCE} routed tokens per sentence {found.nominal[NLLB_ENCODER.name, batch].few:.2f}",
            )
        )
    return rows


def mean_speed(each: Points, name: str) -> float:
    """MD+LB over GPU+PM, end to end, mean over batches."""
    return statistics.mean(each[name, batch].speed("MD+LB") for batch in BATCHES)


def largest_speed(each: Points, stacks: Sequence[Stack]) -> float:
    """MD+LB over GPU+PM, end to end, the most of ``stacks`` and batches."""
    return max(each[stack.name, batch].speed("MD+LB") for stack in stacks for batch in BATCHES)


def figure_6(found: Measures) -> list[Row]:
    """Means and maxima."""
    rows = []
    for name, paper in MEANS.items():
        ends = [mean_speed(each, name) for each in (found.nominal, found.nominal_end)]
        rows.append(
            Row(
                where="figure 6, nominal inputs",
                what=f"{name}, MD+LB over GPU+PM",
                tag="simulated",
                paper=paper,
                ours=ends[0],
                low=min(ends),
                high=max(ends),
            )
        )
    measured = [(f"{name}, MD+LB over GPU+PM", paper, partial(mean_speed, name=name)) for name, paper in MEANS.items()]
    measured += [
        ("encoders, the largest gain", "7.5", partial(largest_speed, stacks=STACKS[::2])),
        ("decoders, the largest gain", "3.7", partial(largest_speed, stacks=STACKS[1::2])),
    ]
    for what, paper, speed in measured:
        middle, low, high = found.band(speed)
        row = Row(
            where="figure 6, chosen inputs",
            what=what,
            tag="simulated",
            paper=paper,
            ours=middle,
            low=low,
            high=high,
            fitted_on=CHOSEN,
        )
        rows.append(row if row.covered else replace(row, note="does not come out: outside of the band"))
    return rows


def over_cpu(each: Points, stack: Stack, workflow: str = "MD+LB") -> float:
    """CPU+AM over ``workflow``, experts' blocks, mean over batches."""
    return statistics.mean(
        each[stack.name, batch].seconds["CPU+AM"] / each[stack.name, batch].seconds[workflow] for batch in BATCHES
    )


def figure_8(found: Measures) -> list[Row]:
    """Against the CPU."""
    rows = []
    for stack, paper in ((NLLB_ENCODER, "9.1"), (NLLB_DECODER, "1.9")):
        middle, low, high = found.band(partial(over_cpu, stack=stack))
        named = f"over MD+AM, which the text names here, {over_cpu(found.central, stack, 'MD+AM'):.2f}"
        lacks = "decided by the CPU's rate in bfloat16, which it lacks; " if stack is NLLB_ENCODER else ""
        rows.append(
            Row(
                where="figure 8",
                what=f"{stack.name}, CPU+AM over MD+LB",
                tag="simulated",
                paper=paper,
                ours=middle,
                low=low,
                high=high,
                note=lacks + named,
            )
        )
    return rows


def trends() -> list[Row]:
    """Figures 7(a), 7(b), 9 and 10, of which the text states directions."""
    pair = (NLLB_ENCODER, NLLB_DECODER)
    sizes = [measure(stack, 4, CHOSEN_INPUTS).speed("MD+LB") for stack in SWITCH_SIZES]
    rows = [_trend("figure 7(a)", "Switch-Base-64, Base-128, Large-128, encoders, batch 4", "rising", sizes)]
    for stack in pair:
        scaled = [measure(stack, 4, CHOSEN_INPUTS, bandwidth) for bandwidth in BANDWIDTHS]
        what = f"{stack.name}, batch 4, bandwidth times 0.5, 1, 1.5, 2"
        rows.append(_trend("figure 7(b)", f"{what}: MD+LB", "rising", [each.speed("MD+LB") for each in scaled]))
        gaps = [each.speed("MD+LB") / each.speed("MD+AM") for each in scaled]
        rows.append(_trend("figure 7(b)", f"{what}: MD+LB over MD+AM", "falling, at least 1", gaps))
    for stack, paper in zip(pair, ("rising", "flat"), strict=True):
        for batch in BATCHES:
            found = [measure(stack, batch, CHOSEN_INPUTS, devices=count) for count in DEVICES]
            what = f"{stack.name}, batch {batch}, 1, 2, 4 devices, MoE layers"
            row = _trend("figure 9", what, paper, [each.moe_speed("MD+LB") for each in found])
            alone = ", ".join(f"{each.expert_speed('MD+LB'):.2f}" for each in found)
            rows.append(replace(row, note=f"{row.note}; experts alone {alone}"))
    for stack, paper in zip(pair, ("two GPUs ahead", "about even"), strict=True):
        ratios = []
        for batch in BATCHES:
            point = measure(stack, batch, CHOSEN_INPUTS)
            ratios.append((point.dense_s + point.seconds["MD+LB"]) / (point.dense_s + point.two_gpus_s))
        rows.append(_trend("figure 10", f"{stack.name}, two GPUs over MD+LB, batches 1, 4, 16", paper, ratios))
    return rows


HOLDS: Mapping[str, Callable[[list[float]], bool]] = {
    "rising": lambda values: values == sorted(values) and values[-1] > 1.02 * values[0],
    "falling, at least 1": lambda values: values == sorted(values, reverse=True) and values[0] > values[-1] >= 1.0,
    "flat": lambda values: max(values) < 1.1 * min(values),
    "two GPUs ahead": lambda values: min(values) > 1.15,
    "about even": lambda values: 0.87 < min(values) <= max(values) < 1.15,
}
"""When ours has the direction that the paper states."""


def _trend(where: str, what: str, paper: str, values: list[float]) -> Row:
    rounded = [round(value, 2) for value in values]
    found = ", ".join(f"{value:.2f}" for value in rounded)
    word = "holds" if HOLDS[paper](rounded) else "does not hold"
    return Row(where=where, what=what, tag="simulated", paper=paper, note=f"{word}: {found}")


def volumes() -> Table:
    """Figures 2(a) and 2(b): equations (1) and (2)."""
    lines = []
    for hidden in (768, 1024, 2048, 4096):
        for experts in (64, 128, 256):
            moved = 2 * experts * hidden * 4 * hidden / 1e6
            activations = 2 * 4 * SEQUENCE * hidden / 1e6
            lines.append(
                [str(hidden), str(experts), f"{moved:.0f}", f"{activations:.1f}", f"{moved / activations:.0f}"]
            )
    columns = ["d_model", "E", "parameters moved, millions", "activations moved, millions", "ratio"]
    return Table(
        f"Figures 2(a) and 2(b): equations (1) and (2), d_ff = 4 d_model, four sequences of {SEQUENCE}.", columns, lines
    )


def speeds(found: Measures) -> Table:
    """Figure 6 in full, with nominal and with chosen inputs."""
    lines = []
    for stack in STACKS:
        for batch in BATCHES:
            cells = [stack.name, str(batch)]
            for each in (found.nominal, found.central):
                point = each[stack.name, batch]
                cells += [f"{point.active:.0f}", *(f"{point.speed(name):.2f}" for name in ("MD+AM", "MD+LB", "Ideal"))]
            lines.append(cells)
    names = ["active experts", "MD+AM", "MD+LB", "Ideal"]
    columns = ["stack", "batch", *(f"{name}, nominal" for name in names), *(f"{name}, chosen" for name in names)]
    return Table("Figure 6 by batch: speed over GPU+PM, end to end.", columns, lines)


def sensitivities(found: Measures) -> Table:
    """What each chosen input does alone."""
    lines = []
    for name, ends in found.ends.items():
        cells = [name]
        for stack in STACKS:
            middle = mean_speed(found.central, stack.name)
            cells.append(" to ".join(percent(mean_speed(end, stack.name) / middle - 1) for end in ends))
        cells += [
            " to ".join(percent(over_cpu(end, stack) / over_cpu(found.central, stack) - 1) for end in ends)
            for stack in (NLLB_ENCODER, NLLB_DECODER)
        ]
        lines.append(cells)
    columns = ["input", *(stack.name for stack in STACKS), "figure 8, encoder", "figure 8, decoder"]
    return Table("What each chosen input does to figures 6 and 8 by itself, from one end to the other.", columns, lines)


INPUTS = (
    Input("device: 64 arrays of 4×4 at 1 GHz, 264 KB, 8 channels of LPDDR 8533", "512 GB/s", "paper", "section 3.1"),
    Input("models, batches, sequence", "table 2; 1, 4, 16; 512", "paper", "section 4.1"),
    Input("link, nominal", "32 GB/s", "paper", "table 2, PCIe Gen4 ×16"),
    Input("A100: memory, bfloat16", "1555 GB/s, 312 TFLOP/s", "published", "NVIDIA's data sheet of the PCIe card"),
    Input(
        "share of that which products reach, launch",
        "0.8 and 0.5, 6 µs",
        "chosen",
        "half or double a launch: 4 % with chosen inputs, but a third for decoders with nominal ones",
    ),
    Input("T5-Large", "770 million weights", "published", "its paper"),
    Input("link, chosen", "22.6 GB/s (20–25)", "published", "DeepSpeed with pinned memory on Gen4 ×16, by others"),
    Input(
        "host time per active expert", "200 µs (120–240)", "chosen", "two gathers with a sync, five kernels, a scatter"
    ),
    Input("library's time per block", "0.5 ms encoder, 2.5 ms decoder (± 40 %)", "chosen", "PyTorch's models"),
    Input(
        "popularity falls with rank to the power of", "1.5 (1.2–1.5)", "chosen", "figure 3 prints bars without numbers"
    ),
    Input("routed tokens per FLORES sentence", "40 (30–60)", "chosen", "its sentences have about 25 words; no padding"),
    Input("different rows in a decoder's batch", "its square root", "chosen", "rows of a batch resemble one another"),
    Input("CPU: memory", "187 GB/s", "paper", "table 2"),
    Input("CPU: bfloat16 products", "0.4 TFLOP/s (0.15–1)", "chosen", "the Xeon 4310 has no bfloat16 instructions"),
)

ABSENT = (
    Row(
        where="table 3",
        what="area and power of the parts",
        tag="not possible here",
        note="needs synthesis in a 28 nm library; its sums are above",
    ),
    Row(
        where="figures 1, 4, 5",
        what="block, device and workflows",
        tag="simulated",
        note="drawings; the workflows of figure 5 are those of figure 6",
    ),
)

NOTES = (
    """*Nominal*: data sheets, kernels only, and a chosen popularity; wrong for Switch and for all decoders. *Chosen*:
    the paper measured everything but the experts' computing on a PyTorch program, so host time per active expert
    (hidden behind copies in GPU+PM, not in the others), an achieved link and short sentences belong in. It prints none
    of these; they were chosen with its four means known, so the agreement of figure 6 shows that its figures are
    consistent with its device, not that they are right. Figure 3 is a reason for short sentences; figures 7, 8, 9 and
    10 played no part. A band multiplies the effects of all chosen inputs. The decoders' largest gain, 3.7, is far
    outside of it.""",
    """Figure 6's bars are over Ideal; its text, and so this page, over GPU+PM. With chosen inputs MD+LB is faster than
    Ideal for Switch's encoder: an expert is small there, the GPU is charged five kernels for it and the device two
    commands, and both work at once. Figure 10's two GPUs have a host process each.""",
    """Ramulator's cycles are replaced by bursts, pages and refresh: weights are long contiguous reads, of which a
    simulator sees nothing else.""",
    """Figure 9 is of "MoE layers". Taken as whole blocks with experts, their attention, routing and the library's time
    included, the decoder is flat with batches 1 and 4, as in the paper, and gains an eighth with batch 16. Taken as the
    experts alone it would gain with any batch, because it has about as many active experts as devices. The reading was
    chosen with the figure known.""",
)
