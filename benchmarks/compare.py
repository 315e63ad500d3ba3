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
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.engines import KINDS
from benchmarks.gguf_export import write_gguf
from benchmarks.measuring import (
    MEASURES,
    PREFILL_ONLY,
    REFERENCE,
    Comparison,
    Measure,
    Samples,
    bytes_per_token,
    compare_logits,
    markdown,
    read_fraction,
)
from benchmarks.plain_export import write_plain
from benchmarks.processes import Worker, WorkerFailed
from benchmarks.synthetic import MixtralShape, write_synthetic

READ_BYTES = 1 << 30
MEMORY_SHARE = 0.8
"""How much of the free memory or disk the benchmark takes."""


@dataclass(frozen=True)
class Subject:
    """A model to compare on: as a plain Hugging Face folder, as GGUF, and as a bank where there is one."""

    title: str
    folder: Path
    gguf: Path
    prepared: Path | None = None

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return config

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def path_for(self, engine: str) -> Path:
        if engine == "privatellm" and self.prepared is not None:
            return self.prepared
        return self.gguf if engine == "llama.cpp" else self.folder


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fitting_layers(work: Path) -> int:
    """Layers of the synthetic model that memory and disk have room for: two copies on disk (safetensors, GGUF), and in
    memory those two mapped and one that transformers holds for itself."""
    shape = MixtralShape(layers=0)
    memory = MEMORY_SHARE * psutil.virtual_memory().available / 3
    disk = MEMORY_SHARE * shutil.disk_usage(work).free / 2
    return max(1, int((min(memory, disk) - shape.nbytes) // shape.layer_bytes))


def synthetic_subject(work: Path, shape: MixtralShape) -> Subject:
    """Write the synthetic model and its GGUF into ``work``, or reuse them. Exits if the disk is too small."""
    name = f"mixtral-shaped-{shape.layers}x{shape.hidden}x{shape.ffn}"
    title = f"Synthetic Mixtral-shaped, {shape.layers} layer" + "s" * (shape.layers > 1)
    subject = Subject(title, work / name, work / f"{name}.gguf")
    missing = shape.nbytes * (2 - subject.gguf.is_file() - (subject.folder / "shape.json").is_file())
    if missing > 0.95 * shutil.disk_usage(work).free:
        raise SystemExit(f"The synthetic model needs {missing / 1e9:.0f} GB on {work}; give --work or fewer --layers.")
    say(f"{subject.title}: {shape.nbytes / 1e9:.1f} GB in {subject.folder}")
    write_synthetic(subject.folder, shape)
    write_gguf(subject.folder, subject.gguf)
    return subject


def starter_subject(work: Path) -> Subject:
    """The starter model, fetched if it is not on this machine."""
    from engine.models.store import resolve

    if resolve("starter").folder is None:
        from engine.models.starter import build_starter

        say("Fetching the starter model")
        build_starter(lambda stage, done, total, unit: None, lambda: False)
    return model_subject(resolve("starter").require_folder(), work, "Starter")


def model_subject(folder: Path, work: Path, title: str) -> Subject:
    """A Mixtral-shaped bfloat16 model that is already on this machine, prepared or plain."""
    prepared = folder if (folder / "bank.json").is_file() else None
    try:
        plain = write_plain(folder, work / f"{folder.name}.plain") if prepared is not None else folder
        return Subject(title, plain, write_gguf(plain, work / f"{folder.name}.gguf"), prepared)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{folder} cannot be compared: {error}.") from error


class Bench:
    """The workers of one subject: all alive at once where memory allows it, else started anew in every round."""

    def __init__(self, subject: Subject, engines: Sequence[str], threads: int, log: Path) -> None:
        self.subject = subject
        self.engines = list(engines)
        self._threads = threads
        self._log = log
        # Two mapped files and one copy that transformers holds, plus what each process needs for itself.
        needed = 3 * subject.nbytes + len(self.engines) * (1 << 30)
        self.together = needed < MEMORY_SHARE * psutil.virtual_memory().available
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


def check_equal(bench: Bench, vocabulary: int) -> list[Comparison]:
    """Every engine's logits against the reference's: after a prompt, and for two rows over three steps."""
    found: dict[str, Any] = {}
    for engine in sorted(bench.engines, key=lambda name: name != "transformers"):
        with bench.worker(engine) as worker:
            for variant in KINDS[engine].variants:
                answer = worker.ask("logits", variant=variant, tokens=24, rows=2, steps=3, vocabulary=vocabulary)
                found[variant] = np.array(answer)
    reference = REFERENCE if REFERENCE in found else next(iter(found))
    return [compare_logits(variant, logits, found[reference]) for variant, logits in found.items()]


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
                    if measure.rows and variant in PREFILL_ONLY:
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
        steps: list[float] = worker.ask("steps", rows=measure.rows, context=64, count=count, **common)
        return statistics.median(steps)
    seconds: float = worker.ask("prefill", tokens=measure.tokens, seed=index, **common)
    return seconds


def run(subject: Subject, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the engines on one model: equality first, then the rounds. Raises WorkerFailed."""
    config = subject.config
    vocabulary = config["vocab_size"]
    counts = {0: arguments.steps, 1: 2 * arguments.steps}
    merged: Samples = {}
    rates: list[float] = []
    with Bench(subject, arguments.engines, arguments.threads, arguments.work / "workers.log") as bench:
        versions = {}
        for engine in bench.engines:
            with bench.worker(engine) as worker:
                versions[engine] = worker.ask("version")
        comparisons = check_equal(bench, vocabulary)
        for comparison in comparisons:
            say(f"  {comparison}")
        unequal = [comparison.variant for comparison in comparisons if not comparison.equal]
        if unequal:
            raise SystemExit(f"{subject.title}: {', '.join(unequal)} computes something else; nothing was timed.")
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
        "nbytes": subject.nbytes,
        "bytes_per_token": bytes_per_token(config, tied=bool(config.get("tie_word_embeddings"))),
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
        lines += read_fraction(model["seconds"], model["read_bytes_per_s"], model["bytes_per_token"])
        lines += ["", "Compared: " + "; ".join(model["versions"].values()) + "."]
        if not model["together"]:
            lines.append("Memory did not hold all engines at once: each was started anew in every round.")
    return "\n".join(lines)


def parse(values: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["starter", "synthetic"],
                        help="starter, synthetic, or folders of Mixtral-shaped bfloat16 models")  # fmt: skip
    parser.add_argument("--engines", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--measures", nargs="+", choices=[m.name for m in MEASURES], default=[m.name for m in MEASURES])
    parser.add_argument("--layers", default="2", help="layers of the synthetic model: a number, or auto (all that fit)")
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size of the synthetic model (multiple of 128)")
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=8, help="steps per figure for several rows; twice that for one row"
    )
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    parser.add_argument("--work", type=Path, help="folder for the synthetic model and the GGUF files")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--markdown", action="store_true", help="print tables (the default unless --json is given)")
    arguments = parser.parse_args(values)
    arguments.measures = [measure for measure in MEASURES if measure.name in arguments.measures]
    if arguments.hidden % 128:
        parser.error(f"--hidden {arguments.hidden} is not a multiple of 128 (heads of 128, as Mixtral's)")
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps must be 1 or more")
    if arguments.layers != "auto" and not (arguments.layers.isdecimal() and int(arguments.layers)):
        parser.error(f"--layers {arguments.layers} is neither a number from 1 on nor auto")
    return arguments


def subject_named(name: str, arguments: argparse.Namespace) -> Subject:
    if name == "starter":
        return starter_subject(arguments.work)
    if name == "synthetic":
        layers = fitting_layers(arguments.work) if arguments.layers == "auto" else int(arguments.layers)
        heads = arguments.hidden // 128
        shape = MixtralShape(
            layers=layers, hidden=arguments.hidden, ffn=arguments.ffn, heads=heads, key_value_heads=max(1, heads // 4)
        )
        return synthetic_subject(arguments.work, shape)
    return model_subject(Path(name), arguments.work, Path(name).name)


def main(values: Sequence[str] | None = None) -> int:
    arguments = parse(values)
    if arguments.work is None:
        from engine.models.locations import locate

        arguments.work = locate("models") / "benchmarks"
    arguments.work.mkdir(parents=True, exist_ok=True)
    if "llama.cpp" in arguments.engines and importlib.util.find_spec("llama_cpp") is None:
        raise SystemExit("llama-cpp-python is not installed: `make bench` installs it, or leave it out with --engines.")
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
