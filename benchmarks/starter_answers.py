"""How well a small model answers 60 everyday questions, by its chat template and its sampling.

    python -m benchmarks.starter_answers [--prompts short] [--temperatures 0.0] [--penalties 1.1] [--counts answer]

An answer is right if its first 30 words contain what the question's pattern asks for, so that rambling finds nothing by
chance. It runs away if it reaches the limit of tokens or says the same line four times. Prompts are the system prompts
that the template gives to conversations without one: ``own`` is the published one, ``bare`` none. The penalty counts
the tokens of the prompt, too, as in transformers, or those of the answer alone.

``--model`` may name the dense model of the starter's package, too (``--model PACKAGE.gguf``).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from benchmarks.measuring import table
from engine.generation.sampling import PENALISES_PROMPT
from engine.ipc.messages import AnyEvent, Generate, Load, Message, Sampling
from engine.models.store.starter_defaults import PUBLISHED_PROMPT, SYSTEM_PROMPT
from engine.session.loading import find_folder, load_session
from engine.session.session import Session

QUESTIONS: tuple[tuple[str, str], ...] = (
    ("What is the capital of France?", r"\bparis\b"),
    ("What is the capital of Italy?", r"\brome\b"),
    ("What is the capital of Japan?", r"\btokyo\b"),
    ("What is the capital of Germany?", r"\bberlin\b"),
    ("What is the capital of Spain?", r"\bmadrid\b"),
    ("Which country is Lisbon the capital of?", r"\bportugal\b"),
    ("On which continent is Egypt?", r"\bafrica\b"),
    ("Which ocean lies between Europe and America?", r"\batlantic\b"),
    ("What is the largest planet of our solar system?", r"\bjupiter\b"),
    ("Which planet is called the red planet?", r"\bmars\b"),
    ("What does the Earth orbit?", r"\bsun\b"),
    ("How many days are in a week?", r"\b(7|seven)\b"),
    ("How many months are in a year?", r"\b(12|twelve)\b"),
    ("How many minutes are in an hour?", r"\b(60|sixty)\b"),
    ("How many legs does a spider have?", r"\b(8|eight)\b"),
    ("How many legs does a dog have?", r"\b(4|four)\b"),
    ("What is 2 + 2?", r"\b(4|four)\b"),
    ("What is 5 + 3?", r"\b(8|eight)\b"),
    ("What is 10 - 4?", r"\b(6|six)\b"),
    ("What is 3 times 3?", r"\b(9|nine)\b"),
    ("What is half of 10?", r"\b(5|five)\b"),
    ("Which is larger, 7 or 12?", r"\b12\b|\btwelve\b"),
    ("What colour is the sky on a clear day?", r"\bblue\b"),
    ("What colour is grass?", r"\bgreen\b"),
    ("What colour is snow?", r"\bwhite\b"),
    ("What colour do you get when you mix blue and yellow?", r"\bgreen\b"),
    ("What is the opposite of hot?", r"\bcold\b|\bcool\b"),
    ("What is the opposite of big?", r"\bsmall\b|\blittle\b|\btiny\b"),
    ("What is the opposite of up?", r"\bdown\b"),
    ("Give me a synonym for happy.", r"\b(joyful|glad|cheerful|content|delighted|pleased|joyous|elated|merry)\b"),
    ("Give me a synonym for fast.", r"\b(quick|rapid|swift|speedy|quickly|rapidly)\b"),
    ("What is the plural of mouse?", r"\bmice\b"),
    ("What is the past tense of go?", r"\bwent\b"),
    ("Translate 'dog' into French.", r"\bchien\b"),
    ("Translate 'thank you' into Spanish.", r"\bgracias\b"),
    ("Translate 'water' into German.", r"\bwasser\b"),
    ("Who wrote Romeo and Juliet?", r"\bshakespeare\b"),
    ("Who painted the Mona Lisa?", r"\b(da vinci|leonardo)\b"),
    ("Who was the first president of the United States?", r"\bwashington\b"),
    ("Who developed the theory of relativity?", r"\beinstein\b"),
    ("What is frozen water called?", r"\bice\b"),
    ("At what temperature in degrees Celsius does water boil?", r"\b100\b"),
    ("What gas do plants take in for photosynthesis?", r"\bcarbon dioxide\b|\bco2\b"),
    ("What do bees make?", r"\bhoney\b"),
    ("What do cows drink?", r"\bwater\b"),
    ("Which animal says meow?", r"\bcats?\b|\bkittens?\b"),
    ("What is a baby dog called?", r"\bpupp(y|ies)\b|\bpup\b"),
    ("Which season comes after winter?", r"\bspring\b"),
    ("Which month comes after June?", r"\bjuly\b"),
    ("Which day comes after Monday?", r"\btuesday\b"),
    ("Name three fruits.", r"\b(apples?|bananas?|oranges?|grapes?|strawberr(y|ies)|mango(es)?|blueberr(y|ies))\b"),
    ("Name two primary colours.", r"\b(red|blue|yellow)\b"),
    ("What do you use to write on paper?", r"\b(pens?|pencils?)\b"),
    ("What do you use an umbrella for?", r"\brain\b|\bsun\b|\bwet\b"),
    ("What should I do if I cut my finger?", r"\b(clean|wash|water|bandage|pressure|bleeding)\b"),
    ("How do I boil an egg?", r"\b(water|boil|pot|minutes)\b"),
    ("Write a haiku about rain.", r"\brain|\bdrops?\b|\bclouds?\b"),
    ("Write a short birthday greeting.", r"\b(happy|birthday|wish)"),
    ("Say hello in one sentence.", r"\b(hello|hi|hey)\b"),
    ("Who are you?", r"\b(i am|i'm|assistant|model|ai)\b"),
)
"""Questions, and a pattern (lower case) that a right answer contains."""

MOST_TOKENS = 400
"""Limit of an answer, in tokens. No question needs a third of it."""
REPEATED = 4
"""Times that a line may not be said."""
FIRST_WORDS = 30
"""Words of an answer in which what is right must stand: rambling would find it by chance."""
NONE = "bare"
PROMPTS = {
    "own": PUBLISHED_PROMPT,
    NONE: "",
    "short": SYSTEM_PROMPT,
    "brief": "You are a helpful assistant. Answer briefly.",
    "helpful": "You are a helpful assistant.",
}
"""System prompts that the template adds to a conversation without one; the empty one: none."""


@dataclass(frozen=True)
class Score:
    """The answers of one setting."""

    right: int
    runaway: int
    tokens: float
    """Mean tokens of an answer."""


def is_right(text: str, pattern: str) -> bool:
    """Whether the beginning of an answer contains what ``pattern`` asks for."""
    return re.search(pattern, " ".join(text.split()[:FIRST_WORDS]).lower()) is not None


def runs_away(text: str, finish_reason: str) -> bool:
    """Whether an answer did not end by itself, or repeats itself."""
    lines = Counter(line.strip() for line in text.splitlines() if len(line.split()) > 2)
    return finish_reason == "length" or max(lines.values(), default=0) >= REPEATED


def asked(session: Session, sampling: Sampling, number: int) -> tuple[str, str, int]:
    """The answer to question ``number``: text, how it ended, tokens."""

    class Control:
        owner = "somebody"

        def cancelled(self) -> bool:
            return False

        def watching(self) -> bool:
            return False

    def emit(event: AnyEvent) -> None:
        pass

    question = QUESTIONS[number][0]
    request = Generate(id=1, messages=[Message("user", question)], sampling=sampling, max_tokens=MOST_TOKENS)
    found = session.generate(request, emit, Control())
    return found.text, found.finish_reason, found.completion_tokens


def scored(session: Session, sampling: Sampling, seeds: int, verbose: bool) -> Score:
    """All questions, each asked with ``seeds`` seeds (once if greedy). Figures are per seed."""
    right, runaway, tokens = 0, 0, []
    rounds = seeds if sampling.temperature else 1
    for number, (question, pattern) in enumerate(QUESTIONS):
        for seed in range(rounds):
            drawn = msgspec.structs.replace(sampling, seed=seed)
            text, reason, count = asked(session, drawn, number)
            hit, loop = is_right(text, pattern), runs_away(text, reason)
            right, runaway = right + hit, runaway + loop
            tokens.append(count)
            if verbose:
                print(f"{'runs away' if loop else 'right' if hit else 'wrong'}: {question} {text[:150]!r}", flush=True)
    return Score(round(right / rounds), round(runaway / rounds), statistics.mean(tokens))


def variants(folder: Path, prompts: list[str], counts: list[str]) -> Iterator[tuple[str, str, Path]]:
    """For each system prompt and each way to count a penalty: both, and a folder with the model that has them."""
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = default_template(settings["chat_template"])
    for prompt in prompts:
        for counted in counts:
            with tempfile.TemporaryDirectory(prefix="starter-answers-") as place:
                for path in folder.iterdir():
                    (Path(place) / path.name).symlink_to(path)
                changed = settings | {"chat_template": with_prompt(template, PROMPTS[prompt])}
                generation = {"do_sample": False, PENALISES_PROMPT: counted == "prompt"}
                for name, value in (("tokenizer_config.json", changed), ("generation_config.json", generation)):
                    (Path(place) / name).unlink()
                    (Path(place) / name).write_text(json.dumps(value), encoding="utf-8")
                yield prompt, counted, Path(place)


def default_template(stored: str | list[dict[str, str]]) -> str:
    """The template that conversations are written by; a model may have several, by name."""
    return stored if isinstance(stored, str) else next(each["template"] for each in stored if each["name"] == "default")


def with_prompt(template: str, prompt: str) -> str:
    """``template`` with another system prompt for conversations that have none; the empty one: with none."""
    start = template.index("{% if loop.first and messages[0]['role'] != 'system' %}")
    end = template.index("{% endif %}", start) + len("{% endif %}")
    own = template[start:end]
    for known in PROMPTS.values():
        if known and known in own:
            own = own.replace(known, prompt)
            break
    return template[:start] + (own if prompt else "") + template[end:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--prompts", nargs="+", choices=list(PROMPTS), default=["own", NONE, "short"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--penalties", nargs="+", type=float, default=[1.0, 1.1])
    parser.add_argument("--counts", nargs="+", choices=["prompt", "answer"], default=["prompt", "answer"])
    parser.add_argument("--top-p", type=float, default=None)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    parser.add_argument("--verbose", action="store_true", help="print every answer")
    arguments = parser.parse_args()
    rows = []
    _, folder = find_folder(arguments.model, lambda stage, done, total, unit: None, None)
    for prompt, counted, place in variants(folder, arguments.prompts, arguments.counts):
        request = Load(id=1, model=str(place), cpu_threads=arguments.threads)
        session = load_session(request, lambda stage, done, total, unit: None)
        for temperature in arguments.temperatures:
            for penalty in arguments.penalties:
                if penalty == 1.0 and counted != arguments.counts[0]:
                    continue  # there is nothing to count
                top_p = arguments.top_p if temperature else None
                sampling = Sampling(temperature=temperature, top_p=top_p, repetition_penalty=penalty)
                found = scored(session, sampling, arguments.seeds, arguments.verbose)
                row = [prompt, f"{temperature}", f"{penalty}", counted, str(found.right), str(found.runaway)]
                rows.append([*row, f"{found.tokens:.0f}"])
                print(" | ".join(rows[-1]), flush=True)
        session.close()
    print("\n".join(table(["prompt", "temperature", "penalty", "counts", "right", "run away", "tokens"], rows)))


if __name__ == "__main__":
    main()
