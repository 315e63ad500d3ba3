"""privatellm, transformers and llama.cpp on the same weights, in one run, interleaved.

    python -m benchmarks.compare --markdown
    python -m benchmarks.compare --models synthetic --layers 1 --rounds 3 --json result.json

Before anything is timed the engines' logits are compared; a model on which they differ is not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.engines import DEFAULT, KINDS
from benchmarks.engines import PACKED as READ_PACKED
from benchmarks.measuring import (
    IK,
    IK_REPACKED,
    MEASURES,
    MIN_COSINE,
    NEAR_TIE,
    OURS,
    PACKED_COSINE,
    PACKED_MAY_DIFFER,
    PACKED_NEAR_TIE,
    REFERENCE,
    RUN_TOGETHER,
    Comparison,
    Measure,
    ReadBytes,
    Routing,
    Samples,
    compare_logits,
    markdown,
    read_fraction,
)
from benchmarks.packed_tensors import packed_tensors
from benchmarks.processes import Worker, WorkerFailed
from benchmarks.subjects import (
    MEMORY_SHARE,
    PACKED,
    Subject,
    add_arguments,
    check_arguments,
    say,
    subject_named,
    work_folder,
)
from benchmarks.targets import IN_PLACE, targets_table, verdicts
from engine.planning.memory import expected_distinct_experts

READ_BYTES = 1 << 30


def memory_needed(subject: Subject, engines: Sequence[str]) -> int:
    """Bytes of memory that ``engines`` need to be alive at once: each format that is mapped once, whoever maps it, the
    copies that transformers (one) and mlx-lm (in float32) hold, and 1 GiB for each process."""
    formats = {subject.path_for(engine) for engine in engines}
    copies = len(formats) + ("transformers" in engines) + 2 * ("mlx-lm" in engines)
    return copies * subject.nbytes + len(engines) * (1 << 30)


class Bench:
    """The workers of one subject: all alive at once where memory allows it, else started anew in every round."""

    def __init__(self, subject: Subject, engines: Sequence[str], threads: int, log: Path) -> None:
        self.subject = subject
        self.engines = list(engines)
        self._threads = threads
        self._log = log
        self.together = memory_needed(subject, engines) < MEMORY_SHARE * psutil.virtual_memory().available
        self._alive: dict[str, Worker] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Bench:
        if self.together:
            for engine in self.engines:
                self._alive[engine] = self._stack.enter_context(self._start(engine))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self, engine: str) -> Worker:
        model = None if engine == "none" else self.subject.path_for(engine)
        return Worker(engine, model, self._threads, self._log)

    @contextlib.contextmanager
    def worker(self, engine: str) -> Iterator[Worker]:
        if engine in self._alive:
            yield self._alive[engine]
        else:
            with self._start(engine) as worker:
                yield worker

    def read_rates(self, repeats: int) -> list[float]:
        """The machine's streaming-read rate, bytes per second."""
        with Worker("none", None, self._threads, self._log) as worker:
            rates: list[float] = worker.ask("read", nbytes=READ_BYTES, repeats=repeats)
        return rates


def check_equal(bench: Bench, apart: bool, vocabulary: int) -> list[Comparison]:
    """Every engine's logits against the reference's: after a prompt, and for two rows over three steps. ``apart``: of
    rows with prompts of their own, where an engine runs such in one pass."""
    found: dict[str, Any] = {}
    common = {"context": 24, "rows": 2, "steps": 3, "vocabulary": vocabulary}
    for engine in sorted(bench.engines, key=lambda name: name != "transformers"):
        variants = [variant for variant in KINDS[engine].variants if not apart or variant in RUN_TOGETHER]
        if not variants:
            continue
        with bench.worker(engine) as worker:
            for variant in variants:
                found[variant] = np.array(worker.ask("logits", variant=variant, apart=apart, **common))
    if not found:
        return []
    reference = REFERENCE if REFERENCE in found else next(iter(found))
    packed = bench.subject.packed
    least, tie = (PACKED_COSINE, PACKED_NEAR_TIE) if packed else (MIN_COSINE, NEAR_TIE)
    routed = packed and bytes_read(bench.subject).experts > 1
    others = PACKED_MAY_DIFFER if routed else 0
    return [compare_logits(variant, logits, found[reference], least, tie, others) for variant, logits in found.items()]


def check_routing(bench: Bench, measures: Sequence[Measure], reads: ReadBytes, vocabulary: int) -> dict[str, Routing]:
    """How many experts the measured steps use: they are the same in every engine, so one is asked."""
    found = {}
    common = {"variant": OURS, "tokens": 0, "context": 64, "count": 8, "vocabulary": vocabulary}
    with bench.worker(OURS) as worker:
        for measure in measures:
            if not measure.rows:
                continue
            passes = worker.ask("watched", rows=measure.rows, apart=measure.apart, **common)
            distinct = statistics.mean(each["distinct"] for each in passes)
            expected = expected_distinct_experts(reads.experts, reads.per_token, measure.rows)
            found[measure.name] = Routing(distinct, expected)
    return found


def measure_round(
    bench: Bench, index: int, measures: Sequence[Measure], counts: dict[int, int], vocabulary: int
) -> Samples:
    """One figure per engine and measure; the order of the engines turns by one in each round."""
    turned = bench.engines[index % len(bench.engines) :] + bench.engines[: index % len(bench.engines)]
    if bench.together:
        # The engines follow one another within each measure: a slow minute of the machine meets all of them.
        order = [(engine, [measure]) for measure in measures for engine in turned]
    else:
        order = [(engine, list(measures)) for engine in turned]
    samples: Samples = {}
    for engine, wanted in order:
        with bench.worker(engine) as worker:
            for variant in KINDS[engine].variants:
                for measure in wanted:
                    if not measure.of(variant):
                        continue
                    seconds = measure_once(worker, variant, measure, counts, vocabulary, index)
                    samples.setdefault(variant, {}).setdefault(measure.name, []).append(seconds)
    return samples


def measure_once(
    worker: Worker, variant: str, measure: Measure, counts: dict[int, int], vocabulary: int, index: int
) -> float:
    """Seconds of one forward pass: of a prompt, or the median step of a short decoding."""
    common = {"variant": variant, "vocabulary": vocabulary}
    if measure.rows:
        count = counts.get(measure.rows, counts[0])
        steps: list[float] = worker.ask(
            "steps", rows=measure.rows, apart=measure.apart, context=64, count=count, **common
        )
        return statistics.median(steps)
    seconds: float = worker.ask("prefill", tokens=measure.tokens, seed=index, **common)
    return seconds


def bytes_read(subject: Subject) -> ReadBytes:
    """What a step reads of the subject's weights."""
    config = subject.config
    if not subject.packed:
        return ReadBytes.of(config)
    return ReadBytes.packed(packed_tensors(config, PACKED[subject.kind][2]), config)


def run(subject: Subject, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the engines on one model: equality first, then the rounds. Raises WorkerFailed."""
    config = subject.config
    vocabulary = config["vocab_size"]
    reads = bytes_read(subject)
    engines = [name for name in arguments.engines if (name in READ_PACKED if subject.packed else name != IN_PLACE)]
    counts = {0: arguments.steps, 1: 2 * arguments.steps}
    merged: Samples = {}
    rates: list[float] = []
    with Bench(subject, engines, arguments.threads, arguments.work / "workers.log") as bench:
        versions = {}
        for engine in bench.engines:
            with bench.worker(engine) as worker:
                versions[engine] = worker.ask("version")
        comparisons = check_equal(bench, False, vocabulary)
        if any(measure.apart for measure in arguments.measures):
            comparisons += check_equal(bench, True, vocabulary)
        for comparison in comparisons:
            say(f"  {comparison}")
        unequal = [comparison.variant for comparison in comparisons if not comparison.equal]
        if unequal:
            raise SystemExit(f"{subject.title}: {', '.join(unequal)} computes something else; nothing was timed.")
        routed = OURS in bench.engines and reads.experts > 1
        routing = check_routing(bench, arguments.measures, reads, vocabulary) if routed else {}
        for name, use in routing.items():
            say(f"  distinct experts per layer: {name} {use}" + (", DEGENERATE" if use.degenerate else ""))
        # A round that is not counted: pages come in, threads start, kernels choose themselves.
        measure_round(bench, 0, arguments.measures[:1] + arguments.measures[-1:], {0: 1}, vocabulary)
        for index in range(arguments.rounds):
            say(f"  round {index + 1} of {arguments.rounds}")
            rates += bench.read_rates(3)
            for variant, measured in measure_round(bench, index, arguments.measures, counts, vocabulary).items():
                for name, values in measured.items():
                    merged.setdefault(variant, {}).setdefault(name, []).extend(values)
    return {
        "title": subject.title,
        "kind": subject.kind,
        "nbytes": subject.nbytes,
        "step_bytes": {
            measure.name: int(reads.step(routing[measure.name].distinct if routing else None))
            for measure in arguments.measures
            if measure.rows and (routing or reads.experts <= 1 or measure.rows == 1)
        },
        "routing": {name: asdict(use) for name, use in routing.items()},
        "together": bench.together,
        "versions": versions,
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "read_bytes_per_s": rates,
        "seconds": merged,
    }


def machine(threads: int) -> dict[str, Any]:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    flags: list[str] = []
    if Path("/proc/cpuinfo").is_file():
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            if key.strip() == "flags":
                flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in value.split()]
    return {
        "processor": name,
        "instructions": flags,
        "threads": threads,
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.system(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def report(result: dict[str, Any], measures: Sequence[Measure]) -> str:
    """The run as Markdown."""
    host = result["machine"]
    lines = [
        f"{host['processor']} ({', '.join(host['instructions']) or 'no vector extensions listed'}), "
        f"{host['threads']} threads of {host['cores']}, {host['memory_bytes'] / 2**30:.0f} GiB, "
        f"load average {host['load_average']:.1f} at the start; {result['rounds']} rounds.",
    ]
    for model in result["models"]:
        lines += ["", markdown(model["title"], model["seconds"], measures), ""]
        lines += read_fraction(model["seconds"], model["read_bytes_per_s"], model["step_bytes"])
        if model["routing"]:
            uses = "; ".join(f"{name} {Routing(**use)}" for name, use in model["routing"].items())
            lines += ["", f"Distinct experts per layer and step: {uses}."]
        lines += ["", "Compared: " + "; ".join(model["versions"].values()) + "."]
        if not model["together"]:
            lines.append("Memory did not hold all engines at once: each was started anew in every round.")
    judged = targets_table(verdicts(result["models"]))
    if judged:
        lines += ["", judged]
    return "\n".join(lines)


def parse(values: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["starter", "synthetic", "qwen3-moe"])
    parser.add_argument("--engines", nargs="+", choices=KINDS, default=list(DEFAULT))
    parser.add_argument("--measures", nargs="+", choices=[m.name for m in MEASURES], default=[m.name for m in MEASURES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=8, help="steps per figure for several rows; twice that for one row"
    )
    parser.add_argument("--markdown", action="store_true", help="print tables (the default unless --json is given)")
    arguments = parser.parse_args(values)
    arguments.measures = [measure for measure in MEASURES if measure.name in arguments.measures]
    check_arguments(parser, arguments)
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps must be 1 or more")
    return arguments


def main(values: Sequence[str] | None = None) -> int:
    arguments = parse(values)
    arguments.work = work_folder(arguments)
    if "llama.cpp" in arguments.engines and importlib.util.find_spec("llama_cpp") is None:
        raise SystemExit("llama-cpp-python is not installed: `make bench` installs it, or leave it out with --engines.")
    if {IK, IK_REPACKED} & set(arguments.engines) and importlib.util.find_spec("ik_llama_cpp") is None:
        raise SystemExit("ik-llama-cpp-python is not installed: install it, or leave it out with --engines.")
    result: dict[str, Any] = {"machine": machine(arguments.threads), "rounds": arguments.rounds, "models": []}
    try:
        for name in arguments.models:
            result["models"].append(run(subject_named(name, arguments), arguments))
            # After each model: what was measured stays, whatever happens to the next.
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(result, indent=2), encoding="utf-8")
    except WorkerFailed as error:
        say(str(error))
        return 1
    if arguments.markdown or arguments.json is None:
        print(report(result, arguments.measures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
