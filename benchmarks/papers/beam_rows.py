"""Figure 6 of the Twiddler paper, executed: both beam searches on the starter, in turns, on one thread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers.beam_search import Searched, one_by_one, together
from benchmarks.papers.findings import Findings, Input, Row, Table
from engine.bench.experts import calibration_prompts
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.store.catalogue import STARTER
from engine.models.text.tokenizer_files import read_tokenizer
from engine.runtimes import runtime_named
from engine.runtimes.choosing import choose_runtime, on_one_machine
from engine.runtimes.common.loading import load_model
from engine.runtimes.protocol import LoadedModel
from engine.session.loading import find_folder

WIDTHS = (4, 8, 12)
PROMPT, NEW = 32, 64
PAPER = "11.57"
REPEATS = 1
"""Prompts per width."""


def beam_rows() -> Findings:
    """Both searches on the starter. If it is not on this machine, the row says how to get it."""
    try:
        _, folder = find_folder(STARTER, lambda *_: None, None)
    except ModelError as error:
        return absent(str(error))
    load = Load(id=0, model=STARTER, cpu_threads=1, keep_resident=False)
    runtime = runtime_named(choose_runtime(load, folder).name)
    model = load_model(runtime, STARTER, folder, on_one_machine(load, runtime.name), lambda *_: None)
    try:
        return searched(model, prompts_of(folder))
    finally:
        model.close()


def absent(reason: str) -> Findings:
    """What is printed without the starter."""
    row = Row(
        where="figure 6", what="beams, Twiddler over llama.cpp", tag="not possible here", paper=PAPER, note=reason
    )
    return Findings(rows=[row])


def prompts_of(folder: Path, count: int = REPEATS) -> list[list[int]]:
    """The first PROMPT tokens of ``count`` of the calibration prompts, by the tokenizer of ``folder``."""
    tokenizer = read_tokenizer(folder).backend
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in calibration_prompts()]
    return [tokens[:PROMPT] for tokens in found if len(tokens) >= PROMPT][:count]


def searched(
    model: LoadedModel, prompts: Sequence[Sequence[int]], widths: Sequence[int] = WIDTHS, new: int = NEW
) -> Findings:
    """Both searches for every width and prompt, in turns."""
    lines, ratios, counts = [], [], []
    for width in widths:
        pairs = [(one_by_one(model, prompt, width, new), together(model, prompt, width, new)) for prompt in prompts]
        ratio = statistics.median(theirs.seconds / ours.seconds for theirs, ours in pairs)
        count = statistics.mean(theirs.decoded / ours.decoded for theirs, ours in pairs)
        ratios.append(ratio)
        counts.append(count)
        lines.append(_line(width, pairs, ratio, count))
    names = ", ".join(map(str, widths))
    row = Row(
        where="figure 6",
        what=f"beams one by one over together, time, mean of widths {names}",
        tag="executed",
        paper=PAPER,
        ours=statistics.mean(ratios),
        note=f"tokens decoded: {statistics.mean(counts):.1f} times as many, which is exact and repeats",
    )
    columns = [
        "width",
        "theirs / ours, time",
        "tokens, theirs",
        "tokens, ours",
        "theirs / ours",
        "most per beam and step",
    ]
    texts = "1 prompt" if len(prompts) == 1 else f"{len(prompts)} prompts"
    caption = f"""Figure 6, executed on {model.facts.name}: {len(prompts[0])} tokens in, {new} out, {texts},
        one thread; times are medians of the prompts' ratios, tokens sums."""
    return Findings(rows=[row], inputs=INPUTS, tables=[Table(caption, columns, lines)], notes=NOTES)


def _line(width: int, pairs: Sequence[tuple[Searched, Searched]], ratio: float, count: float) -> list[str]:
    theirs, ours = (sum(pair[side].decoded for pair in pairs) for side in (0, 1))
    longest = max(pair[0].longest for pair in pairs)
    return [str(width), f"{ratio:.1f}", str(theirs), str(ours), f"{count:.1f}", str(longest)]


INPUTS = (
    Input("widths, tokens in and out", "4, 8, 12; 32, 64", "paper", "section 4.1; figure 6's caption says four widths"),
    Input(
        "how llama.cpp's beams ran", "one by one, decoded again", "published", "its function llama_beam_search, 2024"
    ),
)
NOTES = (
    """The paper gives no cause for its 11.57 beyond "different batching effects". llama.cpp's beam search of that time
    ran the beams one after another and, for each beam and step, decoded again every token since the last one that all
    beams share. Here the same engine, weights, kernels and selection run both ways; only the algorithm differs. How far
    beams stay apart depends on model and text, so another model gives another factor.""",
)
