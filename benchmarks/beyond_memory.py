"""A file larger than the memory, decoded from the disk: the speed that `plan` announces beside the speed that is seen.

    python -m benchmarks.beyond_memory --models qwen3-q4 --work FOLDER [--shares 0.6 0.8] [--rounds 3] [--markdown]

The processes that are measured run in a control group whose memory, the pages of files included, is a share of the
file's size. Where no such group can be made, start the benchmark in one (`systemd-run --scope -p MemoryMax=2G -p
MemorySwapMax=0`), and it measures with that limit alone. Pages that were read before, by anybody, belong to nobody's
limit: the file is dropped from the system's cache first, and a file that another process maps is refused.

Each round plans, as `privatellm plan` does, and then measures, in processes of their own. What a token takes besides
reading is calibrated once, by `privatellm bench`, in a folder of the benchmark's own, and so is the popularity of
experts, by other tokens than those that are measured. Times of disks that other programs use mean nothing: look at the
bytes, and at the rate of plain reads beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.control_group import limited
from benchmarks.first_touch import evict
from benchmarks.measuring import OURS, table
from benchmarks.processes import Worker, run_privatellm
from benchmarks.subjects import Subject, add_arguments, check_arguments, say, subject_named, work_folder
from engine.calibration.samples import Spread
from engine.system.free_memory import container_limit

CACHED_LIMIT = 0.02
"""Largest share of a file's pages that may be in memory before a process reads it."""


def cached_share(path: Path) -> float:
    """Share of the pages of ``path`` that are in the system's memory."""
    size = path.stat().st_size
    states = (ctypes.c_uint8 * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        pages = ctypes.c_uint8.from_buffer(mapped)
        failed = _libc.mincore(ctypes.addressof(pages), size, states)
        del pages  # a mapping that is looked at cannot be closed
    return 1.0 if failed else sum(state & 1 for state in states) / len(states)


@contextlib.contextmanager
def limit_of(nbytes: int) -> Iterator[list[str]]:
    """As :func:`benchmarks.control_group.limited`; nothing where this process has such a limit already."""
    if (container_limit() or sys.maxsize) <= nbytes:
        yield []
        return
    with limited(nbytes) as command:
        yield command


def measure(subject: Subject, nbytes: int, home: str, arguments: argparse.Namespace) -> dict[str, float]:
    """One round with ``nbytes`` of memory: announced and measured."""
    flags = ["--threads", str(arguments.threads)]
    with limit_of(nbytes) as prefix:
        evict(subject.gguf)
        planned = run_privatellm(["plan", str(subject.folder), *flags], home, prefix)
        evict(subject.gguf)
        if cached_share(subject.gguf) > CACHED_LIMIT:
            raise SystemExit(f"Another process maps {subject.gguf}; give --work another folder for a copy of its own.")
        with Worker(OURS, subject.folder, arguments.threads, arguments.work / "workers.log", prefix) as worker:
            seen = worker.ask(
                "from_disk",
                variant=OURS,
                context=64,
                warm_up=arguments.warm_up,
                count=arguments.tokens,
                vocabulary=subject.config["vocab_size"],
                path=str(subject.gguf),
            )
    return {"announced": planned["tokens_per_s"] or 0.0, **seen}


def row_of(title: str, size: int, memory: int, rounds: list[dict[str, float]]) -> list[str]:
    """Medians of the rounds; the ratio's range is that of the rounds' own."""

    def median(key: str) -> float:
        return statistics.median(each[key] for each in rounds)

    ratios = Spread.of([each["tokens_per_s"] / each["announced"] for each in rounds if each["announced"]] or [0.0])
    plain = Spread.of([each["rate"] / each["plain_rate"] for each in rounds if each["plain_rate"]] or [0.0])
    return [
        title,
        f"{size / 1e9:.2f}",
        f"{memory / 1e9:.2f}",
        f"{median('announced'):.2f}",
        f"{median('tokens_per_s'):.2f}",
        f"{ratios.median:.2f} ({ratios.low:.2f}–{ratios.high:.2f})",
        f"{median('bytes_per_token') / 1e6:.0f}",
        f"{median('plain_rate') / 1e6:.0f}",
        f"{plain.median:.2f} ({plain.low:.2f}–{plain.high:.2f})",
    ]


HEADER = [
    "model",
    "file, GB",
    "memory, GB",
    "announced, tokens/s",
    "measured, tokens/s",
    "measured / announced",
    "read from disk, MB/token",
    "plain reads, MB/s",
    "reading while decoding / plain reads",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["qwen3-q4"])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.6, 0.8], help="memory, as shares of the file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="tokens that are measured in a round")
    parser.add_argument("--warm-up", type=int, default=24, help="tokens before them")
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    arguments.work = work_folder(arguments)
    rows, everything = [], []
    for name in arguments.models:
        subject = subject_named(name, arguments)
        if not subject.packed:
            parser.error(f"--models {name}: only packed models are one file")
        with tempfile.TemporaryDirectory() as home:
            say(f"{subject.title}: calibrating")
            flags = ["--threads", str(arguments.threads), "--rounds", "3", "--even-if-busy"]
            run_privatellm(["bench", "decode", str(subject.folder), *flags], home)
            with Worker(OURS, subject.folder, arguments.threads, arguments.work / "workers.log") as worker:
                request = {"variant": OURS, "vocabulary": subject.config["vocab_size"], "home": home}
                worker.ask("learn_popularity", folder=str(subject.folder), **request)
            for share in arguments.shares:
                memory = min(round(share * subject.nbytes), container_limit() or sys.maxsize)
                rounds = []
                for number in range(arguments.rounds):
                    rounds.append(measure(subject, memory, home, arguments))
                    say(f"{memory / 1e9:.2f} GB, round {number + 1}: {rounds[-1]}")
                rows.append(row_of(subject.title, subject.nbytes, memory, rounds))
                everything.append({"model": name, "memory_bytes": memory, "rounds": rounds})
    print("\n".join(table(HEADER, rows)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(everything, indent=1), encoding="utf-8")


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


if __name__ == "__main__":
    main()
