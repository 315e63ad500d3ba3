"""How much faster answers are with guessed tokens than without, on texts whose tokens are given.

    python -m benchmarks.drafts [--models starter qwen3-q4] [--rounds 5]

What a model would answer does not matter for the cost of a pass, so the next token is taken from a text instead of the
model: one that repeats the prompt with every hundredth token changed, one that repeats its lines in another order, and
one in which nothing is said twice. Both ways take turns, in one process; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measuring import table
from benchmarks.subjects import add_arguments, check_arguments, say, subject_named, work_folder
from engine.generation.drafts import PassCosts
from engine.generation.programs import Program
from engine.ipc.messages import Generate, Load
from engine.runtimes import runtime_named
from engine.runtimes.protocol import LoadedModel, Logits
from engine.session.prefix_cache import PrefixCache
from engine.session.scheduler import Scheduler
from engine.session.sharing import PassLog
from engine.session.turn import Turn
from engine.session.turn_cache import TurnCache

PROMPT = 2000
LINE = 20
CHANGED = 100
"""Every so many-th token of the edited text is another one."""


@dataclass(frozen=True)
class Drafted:
    """A text of ``tokens``: seconds with guesses and without, and how many guesses were made and right."""

    with_s: float
    without_s: float
    tokens: int
    drafted: int
    accepted: int


class _Nobody:
    """Controls that nobody touches."""

    owner = None

    def cancelled(self) -> bool:
        return False

    def watching(self) -> bool:
        return False


def _given(token: int, logits: Logits) -> int:
    """``token``, whatever the model thinks comes next."""
    return token


def texts(vocabulary: int, length: int, seed: int = 0) -> tuple[list[int], dict[str, list[int]]]:
    """A prompt, and texts of ``length`` tokens after it."""
    random = np.random.default_rng(seed)
    drawn = random.choice(vocabulary, PROMPT, replace=vocabulary < PROMPT)
    prompt = [int(token) for token in drawn]
    edited = [token if (index + 1) % CHANGED else (token + 1) % vocabulary for index, token in enumerate(prompt)]
    lines = [prompt[begin : begin + LINE] for begin in range(0, PROMPT, LINE)]
    sorted_anew = [token for index in random.permutation(len(lines)) for token in lines[index]]
    new = [int(token) for token in random.integers(0, vocabulary, length)]
    return prompt, {"edited": edited[:length], "lines in another order": sorted_anew[:length], "new": new}


def written(
    model: LoadedModel,
    kept: PrefixCache,
    costs: PassCosts,
    prompt: list[int],
    text: Sequence[int],
    *,
    drafts: bool,
) -> tuple[float, Turn]:
    """Seconds in which ``text`` is written after ``prompt``, which is read unless it is ``kept``, and the turn's
    counts. ``costs``: those of passes so far."""
    request = Generate(id=1, prompt_ids=prompt)
    turn = Turn(request, model.recorder, PassLog(), lambda event: None, _Nobody(), time.perf_counter, len(prompt))
    cache = TurnCache(kept, model, turn, 512, repeatable=False, drafts=drafts)
    seconds = 0.0

    def program() -> Program[None]:
        nonlocal seconds
        yield from cache.prefill(prompt)
        begun = time.perf_counter()
        for token, following in itertools.pairwise(text):
            yield from cache.step(token, functools.partial(_given, following))
        seconds = time.perf_counter() - begun
        cache.close()

    Scheduler(model, costs=costs).run(program())
    return seconds, turn


def measure(folder: Path, threads: int, rounds: int, length: int) -> dict[str, Drafted]:
    """The kinds of text, with guesses and without. Raises ModelError."""
    request = Load(id=1, model=str(folder), runtime="native", cpu_threads=threads)
    model = runtime_named("native").load(folder, request, lambda *_: None)
    results = {}
    try:
        prompt, kinds = texts(model.facts.vocabulary, length)
        kept, costs = PrefixCache(model), PassCosts()
        for kind, text in kinds.items():
            taken: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(rounds):
                for drafts in (True, False):
                    seconds, turn = written(model, kept, costs, prompt, text, drafts=drafts)
                    taken[drafts].append(seconds)
                    if drafts:
                        guessed, right = turn.drafted_tokens, turn.accepted_tokens
            with_s, without_s = (statistics.median(taken[drafts]) for drafts in (True, False))
            results[kind] = Drafted(with_s, without_s, len(text), guessed, right)
    finally:
        model.close()
    return results


def report(results: dict[str, Drafted]) -> str:
    """Markdown: the speed of each kind of text with guesses, relative to none."""
    rows = [
        [
            kind,
            f"{found.without_s / found.with_s:.2f}",
            f"{found.tokens / (found.tokens - found.accepted):.1f}",
            f"{found.accepted / found.drafted:.0%}" if found.drafted else "–",
        ]
        for kind, found in results.items()
    ]
    return "\n".join(table(["text", "speed with guesses", "tokens a pass", "right"], rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["starter"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400)
    arguments = parser.parse_args(argv)
    check_arguments(parser, arguments)
    arguments.work = work_folder(arguments)
    for name in arguments.models:
        subject = subject_named(name, arguments)
        say(f"{subject.title}: with and without guesses")
        results = measure(subject.path_for("privatellm"), arguments.threads, arguments.rounds, arguments.tokens)
        print(f"\n**{subject.title}**\n\n{report(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
