"""What choosing a token costs beside computing its logits, by size of the vocabulary and by rule.

    python -m benchmarks.sampling [--vocabulary 49152,151936,201088] [--rounds 200] [--json]

Logits are drawn from a normal distribution with a deviation of 3, which is flatter than most models' are: more tokens
survive the filters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from engine.generation.sampling import Sampler, SamplingRule

RULES = {
    "greedy": SamplingRule(),
    "t 0.7": SamplingRule(0.7, seed=1),
    "t 0.7, top-p 0.9": SamplingRule(0.7, top_p=0.9, seed=1),
    "t 0.7, top-k 20, top-p 0.9": SamplingRule(0.7, top_k=20, top_p=0.9, seed=1),
    "t 0.7, min-p 0.05": SamplingRule(0.7, min_p=0.05, seed=1),
    "t 1.5, top-p 0.999": SamplingRule(1.5, top_p=0.999, seed=1),
}


def milliseconds(rule: SamplingRule, vocabulary: int, rounds: int) -> float:
    """The median of ``rounds`` draws from logits of ``vocabulary`` tokens."""
    logits = (np.random.default_rng(0).standard_normal(vocabulary) * 3).astype(np.float32)
    sampler = Sampler(rule)
    times = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        sampler.choose(logits)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", default="49152,151936,201088")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.vocabulary.split(",")]
    figures = {
        name: {size: milliseconds(rule, size, arguments.rounds) for size in sizes} for name, rule in RULES.items()
    }
    if arguments.json:
        print(json.dumps(figures))
        return
    print(f"{'ms a token':28}" + "".join(f"{size:>10}" for size in sizes))
    for name, by_size in figures.items():
        print(f"{name:28}" + "".join(f"{by_size[size]:10.3f}" for size in sizes))


if __name__ == "__main__":
    main()
