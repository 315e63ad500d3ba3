"""What the project has set itself to reach, and whether a run reached it.

    python -m benchmarks.targets compare.json kernels.json screen.json

takes what ``benchmarks.compare``, ``benchmarks.kernels`` and ``benchmarks.screen`` wrote with ``--json`` and prints one
table. Everything else here is pure: figures in, verdicts out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.measuring import IK, IK_REPACKED, MEASURES, OURS, Samples, ratio_text, speed_ratio, table, time_ratio
from engine.calibration.samples import Spread

OTHER, IN_PLACE = "llama.cpp", "llama.cpp, in place"


@dataclass(frozen=True)
class Target:
    """One target: a ratio of the medians of one run, and the bound it must keep.

    ``speed``: how many times as fast we are as llama.cpp; ``time``: our time relative to llama.cpp's; ``step``: our
    time of ``measure`` relative to our own time of ``base``; ``total``: our tokens per second of ``measure`` relative
    to those of ``base``.
    """

    model: str
    """The kind of the model (``benchmarks.subjects.Kind``)."""
    measure: str
    ratio: Literal["speed", "time", "step", "total"]
    bound: float
    base: str = ""

    @property
    def at_least(self) -> bool:
        return self.ratio in ("speed", "total")

    @property
    def text(self) -> str:
        if self.ratio == "step":
            return f"time of {self.measure} relative to {self.base}"
        if self.ratio == "total":
            return f"total tokens/s of {self.measure} relative to {self.base}"
        return f"{self.measure}: {self.ratio} relative to {OTHER}"


def _together(model: str, *bounds: float) -> Iterator[Target]:
    """The total tokens per second wanted of 2, 4, 8 and 16 answers at once, relative to one answer, and to the rivals'
    of as many."""
    for measure, bound in zip((measure.name for measure in MEASURES if measure.apart), bounds, strict=True):
        yield Target(model, measure, "total", bound, base="decode")
        yield Target(model, measure, "speed", 1.3)


def _packed(model: str, *bounds: float | None) -> list[Target]:
    """The speeds wanted of a packed model, in the order of the measures; None: no bound."""
    wanted = zip((measure.name for measure in MEASURES if not measure.apart), bounds, strict=True)
    return [Target(model, measure, "speed", bound) for measure, bound in wanted if bound is not None]


LOW_BITS = {
    "qwen3-q3": "Q3_K", "qwen3-q2": "Q2_K", "qwen3-iq3s": "IQ3_S", "qwen3-iq3xxs": "IQ3_XXS", "qwen3-iq2s": "IQ2_S",
    "qwen3-iq2xs": "IQ2_XS", "qwen3-iq2xxs": "IQ2_XXS",
}  # fmt: skip
"""Models whose experts are in two or three bits, and the format of these."""

TARGETS = (
    Target("mixtral", "decode", "time", 0.95),
    Target("mixtral", "4 rows", "time", 0.75),
    Target("mixtral", "8 rows", "time", 0.55),
    Target("mixtral", "12 rows", "time", 0.50),
    # llama.cpp as it is: of the prompt's tokens that need no logits it leaves out the last layer's experts, as we do.
    Target("mixtral", "prefill 64", "time", 0.35),
    Target("qwen3-moe", "decode", "speed", 1.10),
    *_packed("mixtral-q4", 1.15, 1.3, 1.5, 1.8, 1.5, 2.0),
    *_packed("qwen3-q4", 1.15, 1.1, 1.2, 1.3, 1.5, 2.0),
    *_packed("qwen3-mxfp4", 1.15, 1.1, 1.2, 1.3, 1.5, 2.0),
    *_packed("qwen35-q4", 1.1, 1.1, None, None, 1.2, 1.5),
    *_packed("dense-q4", 1.1, 1.5, None, None, 1.5, 1.5),
    *_together("mixtral-q4", 1.2, 1.6, 2.5, 4.2),
    *_together("qwen3-q4", 1.2, 1.45, 1.75, 2.2),
    *_together("dense-q4", 1.6, 2.6, 3.6, 4.5),
    *_packed("dense-q8", 1.1, 1.5, None, None, 1.5, 1.5),
    # The others are never to be slower.
    *(
        target
        for kind in ("next-q4", "glm47-q4", "gemma4-q4", "lfm2-q4", "glm45-q4")
        for target in _packed(kind, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    ),
    *(target for kind in LOW_BITS for target in _packed(kind, 1.1, 1.3, 1.5, None, 1.3, 1.3)),
    Target("starter", "decode", "speed", 1.00),
    Target("starter", "prefill 512", "speed", 1.00),
    Target("starter", "12 rows", "step", 5.0, base="decode"),
    Target("mixtral", "12 rows", "step", 5.0, base="decode"),
    Target("qwen3-moe", "12 rows", "step", 5.0, base="decode"),
)


SPEED_WITH_SCREEN = 0.95
"""Tokens per second with the chat open and its timing panel on, relative to ``ask``."""
ECHO_MILLISECONDS = 50.0
READ_SHARE = 0.90
"""Of the streaming-read rate, for one expert and one token."""
FOUR_TOKENS = 1.25
"""Time of one expert for four tokens relative to one."""

TITLES = {
    "mixtral": "Mixtral-shaped",
    "qwen3-moe": "Qwen3-MoE-shaped",
    "starter": "Starter",
    "mixtral-q4": "Mixtral-shaped, Q4_K_M",
    "qwen3-q4": "Qwen3-MoE-shaped, Q4_K_M",
    "qwen3-mxfp4": "Qwen3-MoE-shaped, MXFP4",
    "qwen35-q4": "Qwen3.6-MoE-shaped, Q4_K_M",
    "next-q4": "Qwen3-Next-shaped, Q4_K_M",
    "glm47-q4": "GLM-4.7-Flash-shaped, Q4_K_M",
    "gemma4-q4": "Gemma-4-MoE-shaped, Q4_K_M",
    "lfm2-q4": "LFM2-MoE-shaped, Q4_K_M",
    "glm45-q4": "GLM-4.5-Air-shaped, Q4_K_M",
    **{kind: f"Qwen3-MoE-shaped, experts in {name}" for kind, name in LOW_BITS.items()},
    "dense-q4": "dense 1B, Q4_K_M",
    "dense-q8": "dense 1B, Q8_0",
}


@dataclass(frozen=True)
class Verdict:
    """A target beside what a run measured: the ratio of medians with the range of the rounds' own ratios."""

    model: str
    what: str
    bound: float
    at_least: bool
    measured: Spread | None
    """None: the run did not measure what the target needs."""

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:.2f}"

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        value = self.measured.median
        return value >= self.bound if self.at_least else value <= self.bound


def judge(samples: Samples, target: Target) -> Verdict:
    """What ``samples`` of the target's model say about it."""
    return Verdict(TITLES[target.model], target.text, target.bound, target.at_least, _measured(samples, target))


def _measured(samples: Samples, target: Target) -> Spread | None:
    other = _fastest(samples, target.measure)
    needed = [(OURS, target.measure)]
    needed.append((OURS, target.base) if target.base else (other, target.measure))
    if any(not samples.get(variant, {}).get(measure) for variant, measure in needed):
        return None
    ours = samples[OURS][target.measure]
    if target.ratio == "step":
        return time_ratio(ours, samples[OURS][target.base])
    if target.ratio == "total":
        tokens = {measure.name: measure.tokens_per_pass for measure in MEASURES}
        each = [seconds / tokens[target.measure] for seconds in ours]
        return time_ratio([seconds / tokens[target.base] for seconds in samples[OURS][target.base]], each)
    if target.ratio == "speed":
        return speed_ratio(samples, target.measure, other)
    return time_ratio(ours, samples[other][target.measure])


def _fastest(samples: Samples, measure: str) -> str:
    """llama.cpp or ik_llama.cpp, as it loads packed weights by default or otherwise, whichever was fastest."""
    found = [variant for variant in (OTHER, IN_PLACE, IK, IK_REPACKED) if samples.get(variant, {}).get(measure)]
    return min(found, key=lambda variant: statistics.median(samples[variant][measure]), default=OTHER)


def verdicts(models: Sequence[Mapping[str, Any]], targets: Sequence[Target] = TARGETS) -> list[Verdict]:
    """The targets of the models that ``benchmarks.compare`` measured, in their order."""
    return [
        judge(model["seconds"], target) for target in targets for model in models if model.get("kind") == target.model
    ]


def kernel_verdicts(figures: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """The targets of one expert alone, for every set of kernels that ``benchmarks.kernels`` measured."""
    found = []
    large = [figure for figure in figures if figure["shape"] == "mixtral" and figure["format"] == "BF16"]
    for kernels in dict.fromkeys(figure["kernels"] for figure in large):
        by_rows = {figure["rows"]: figure for figure in large if figure["kernels"] == kernels}
        one, four = by_rows.get(1), by_rows.get(4)
        share = None if one is None else Spread.of([one["read_shard"]])
        ratio = None if one is None or four is None else Spread.of([four["milliseconds"] / one["milliseconds"]])
        title = f"One expert ({kernels})"
        found.append(Verdict(title, "1 token: share of the streaming-read rate", READ_SHARE, True, share))
        found.append(Verdict(title, "time of 4 tokens relative to 1", FOUR_TOKENS, False, ratio))
    return found


def screen_verdicts(result: Mapping[str, Any]) -> list[Verdict]:
    """The targets of the screen, from what ``benchmarks.screen`` measured. Of the echoes the slowest counts."""
    title = f"Chat, {result['model']}, " + ("timing panel on" if result["panel"] else "no panel")
    slowest = Spread.of([1000 * max(result["echo_s"])]) if result["echo_s"] else None
    speed = time_ratio(result["chat"], result["headless"])
    return [
        Verdict(title, "tokens/s relative to `ask`", SPEED_WITH_SCREEN, True, speed),
        Verdict(title, "slowest echo of a typed character, ms", ECHO_MILLISECONDS, False, slowest),
    ]


def targets_table(found: Sequence[Verdict]) -> str:
    """The verdicts in Markdown; empty if there are none."""
    if not found:
        return ""
    rows = []
    for verdict in found:
        measured = "not measured" if verdict.measured is None else ratio_text(verdict.measured)
        met = {True: "yes", False: "no", None: "–"}[verdict.met]
        rows.append([verdict.model, verdict.what, verdict.wanted, measured, met])
    lines = ["### Targets", "", "Ratios of medians of one run (range over rounds)", ""]
    return "\n".join(lines + table(["model", "what", "wanted", "measured", "met"], rows))


def judge_result(result: Any) -> list[Verdict]:
    """The verdicts on what one of the three benchmarks wrote. Raises ValueError for anything else."""
    if isinstance(result, list):
        return kernel_verdicts(result)
    if isinstance(result, dict) and "models" in result and "rounds" in result:
        return verdicts(result["models"])
    if isinstance(result, dict) and "echo_s" in result:
        return screen_verdicts(result)
    raise ValueError("neither of benchmarks.compare nor of benchmarks.kernels nor of benchmarks.screen")


def main(values: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="what the benchmarks wrote with --json")
    found = []
    for path in parser.parse_args(values).results:
        try:
            found += judge_result(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise SystemExit(f"{path} holds no results: {error}") from error
    print(targets_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
