"""Where the time of a forward pass goes, and how far each part is from what the memory and the processor allow.

    python -m benchmarks.profile_step --models synthetic --rows 1 4 12 --prompts 64

Seconds are the runtime's own spans, as the timing panel shows them (measuring costs a little: ``benchmarks.looking``).
Bytes are those of the weights that a part reads once; rates are beside the streaming-read rate of the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compare import READ_BYTES, bytes_read, machine
from benchmarks.engines import KINDS
from benchmarks.measuring import ReadBytes, table
from benchmarks.packed_tensors import packed_tensors
from benchmarks.processes import Worker, WorkerFailed
from benchmarks.subjects import PACKED, Subject, add_arguments, check_arguments, say, subject_named, work_folder

TITLES = {
    "attention": "attention", "router": "router", "experts": "experts", "exchange": "exchange", "wait": "wait",
    "other": "other in layers", "outside": "embedding, head",
}  # fmt: skip


@dataclass(frozen=True)
class PartProfile:
    """One part of a forward pass, summed over the layers: median seconds, weight bytes read once, multiplications
    and additions done with them (of attention only those with weights). Feed-forward networks without experts are in
    ``other``."""

    part: str
    seconds: float
    nbytes: float
    operations: float


def profile(
    passes: Sequence[Mapping[str, Any]], reads: ReadBytes, tokens: int, wanted: int, widened: ReadBytes | None = None
) -> list[PartProfile]:
    """The parts of forward passes over ``tokens`` tokens each, of which ``wanted`` give logits.

    ``passes`` are those of ``benchmarks.worker.watched``. Parts that took no time are left out. ``widened`` are the
    bytes of the same weights in bfloat16; None if they are.
    """
    wide = reads if widened is None else widened
    distinct = statistics.mean(each["distinct"] for each in passes)
    routes = statistics.mean(each["routes"] for each in passes)
    nbytes = {
        "attention": reads.layers * reads.attention,
        "router": reads.layers * reads.router,
        "experts": reads.layers * distinct * reads.expert,
        "other": reads.layers * reads.dense,
        "outside": reads.head,
    }
    # A bfloat16 weight has two bytes, and costs a multiplication and an addition per token.
    operations = {
        "attention": tokens * wide.layers * wide.attention,
        "router": tokens * wide.layers * wide.router,
        "experts": routes * wide.expert,
        "other": tokens * wide.layers * wide.dense,
        "outside": wanted * wide.head,
    }
    found = []
    for part in TITLES:
        seconds = statistics.median(each["parts"][part] for each in passes)
        if seconds > 0:
            found.append(PartProfile(part, seconds, nbytes.get(part, 0), operations.get(part, 0)))
    return found


def profile_table(parts: Sequence[PartProfile], rate: float) -> str:
    """Markdown: each part and the whole; ``rate`` is the streaming-read rate in bytes per second."""
    whole = PartProfile(
        "whole", sum(part.seconds for part in parts), sum(part.nbytes for part in parts),
        sum(part.operations for part in parts),
    )  # fmt: skip
    rows = []
    for part in (*parts, whole):
        read = part.nbytes / part.seconds
        rows.append(
            [
                TITLES.get(part.part, part.part),
                f"{1000 * part.seconds:.2f}",
                f"{part.seconds / whole.seconds:.0%}",
                f"{part.nbytes / 1e6:.0f}" if part.nbytes else "–",
                f"{read / 1e9:.1f}" if part.nbytes else "–",
                f"{read / rate:.0%}" if part.nbytes else "–",
                f"{part.operations / part.seconds / 1e9:.0f}" if part.operations else "–",
            ]
        )
    header = ["part", "ms", "of the time", "MB of weights", "GB/s", "of the streaming rate", "GFLOP/s"]
    floor = 1000 * whole.nbytes / rate
    bound = f"Reading these weights once at the streaming rate would take {floor:.2f} ms."
    return "\n".join([*table(header, rows), "", bound])


def measure(subject: Subject, arguments: argparse.Namespace) -> dict[str, Any]:
    """The profiles of one model. Raises WorkerFailed."""
    log = arguments.work / "workers.log"
    config = subject.config
    common = {"vocabulary": config["vocab_size"], "variant": arguments.engine, "context": arguments.context}
    with Worker("none", None, arguments.threads, log) as worker:
        rates = worker.ask("read", nbytes=READ_BYTES, repeats=5)
    found: dict[str, Any] = {"title": subject.title, "rate": statistics.median(rates), "passes": []}
    with Worker(arguments.engine, subject.path_for(arguments.engine), arguments.threads, log) as worker:
        found["version"] = worker.ask("version")
        wanted = [(rows, 0, arguments.steps) for rows in arguments.rows]
        wanted += [(0, tokens, max(3, arguments.steps // 4)) for tokens in arguments.prompts]
        for rows, tokens, count in wanted:
            # The first quarter warms up.
            passes = worker.ask(
                "watched", rows=rows, apart=False, tokens=tokens, count=count + count // 4 + 1, **common
            )
            found["passes"].append({"rows": rows, "tokens": tokens, "passes": passes[-count:]})
    return found


def report(model: Mapping[str, Any], reads: ReadBytes, widened: ReadBytes | None = None) -> str:
    """One table per number of rows or length of prompt; ``widened`` as for :func:`profile`."""
    lines = [f"### {model['title']}", "", f"{model['version']}; streaming read {model['rate'] / 1e9:.1f} GB/s"]
    for measured in model["passes"]:
        rows, tokens = measured["rows"], measured["tokens"]
        what = f"a step of {rows} row{'s' * (rows > 1)}" if rows else f"a prompt of {tokens} tokens"
        distinct = statistics.mean(each["distinct"] for each in measured["passes"])
        parts = profile(measured["passes"], reads, rows or tokens, rows or 1, widened)
        lines += ["", f"**{what}**, {distinct:.1f} distinct experts per layer", ""]
        lines.append(profile_table(parts, model["rate"]))
    return "\n".join(lines)


def _widened(subject: Subject) -> ReadBytes | None:
    if not subject.packed:
        return None
    return ReadBytes.widened(packed_tensors(subject.config, PACKED[subject.kind][2]), subject.config)


def main(values: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["starter", "synthetic", "qwen3-moe"])
    ours = [name for name in KINDS if name.startswith("privatellm")]
    parser.add_argument("--engine", choices=ours, default=ours[0])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 12], help="rows of the steps")
    parser.add_argument("--prompts", nargs="*", type=int, default=[512], help="lengths of the prompts")
    parser.add_argument("--context", type=int, default=64, help="tokens in the cache before the steps")
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args(values)
    check_arguments(parser, arguments)
    if any(number < 1 for number in (*arguments.rows, *arguments.prompts, arguments.context, arguments.steps)):
        parser.error("--rows, --prompts, --context and --steps take numbers from 1 on")
    arguments.work = work_folder(arguments)
    result: dict[str, Any] = {"machine": machine(arguments.threads), "models": []}
    try:
        for name in arguments.models:
            subject = subject_named(name, arguments)
            result["models"].append(measure(subject, arguments))
            print(report(result["models"][-1], bytes_read(subject), _widened(subject)), end="\n\n", flush=True)
    except WorkerFailed as error:
        say(str(error))
        return 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
