"""From the start of ``privatellm ask hi`` to its end, as a person waits for it: whole processes, one after the other.

    python -m benchmarks.first_answer [--model starter] [--rounds 7]

The first run, which brings the files into memory, does not count. Python keeps its compiled files, as in every
installation, whatever PYTHONDONTWRITEBYTECODE says here: without them a source tree is compiled anew each time.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "app.cli", "ask", "hi", "--no-stdin", "--max-tokens", "10", "--temperature", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds, processor = [], []
    for _ in range(arguments.rounds + 1):
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([*command, "--model", arguments.model], check=True, stdout=subprocess.DEVNULL, env=environment)
        seconds.append(time.perf_counter() - begun)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    for name, values in (("wall", seconds[1:]), ("processor", processor[1:])):
        print(f"{name:10} {statistics.median(values):.2f} s ({min(values):.2f}–{max(values):.2f})")


if __name__ == "__main__":
    main()
