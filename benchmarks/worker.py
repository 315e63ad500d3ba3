"""A process that holds one engine and measures when asked: one JSON object per line in, one per line out.

Requests: {"do": "version"}, {"do": "logits", ...}, {"do": "prefill", ...}, {"do": "steps", ...}, {"do": "read", ...};
an answer is {"ok": ...} or {"error": text}.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import KINDS, Engine, PrivatellmEngine
from engine.models.folders.opening import open_model
from engine.models.store.local_models import profile_key
from engine.moe.popularity import model_of, save_profile
from engine.moe.timing import PARTS
from engine.residency.mapped import MappedWeights
from engine.system.locations import profile_paths

LEARNED_STEPS = 48
"""Steps of 16 rows from which the popularity of experts is learned."""
CHUNK = 512
"""Tokens of a prompt that are read at once, as a conversation does by default."""
LOOK_S = 0.002
"""Seconds between two looks at the memory."""
PLAIN_READ = 2 << 20
"""Bytes of one plain read of a file."""
PLAIN_SECONDS = 0.3
"""Seconds of plain reads between two blocks of steps."""
BLOCK = 8
"""Steps between two changes: hooks are put in and taken out once per block, as when the panel opens and closes."""


begun: dict[str, int] = {}
"""``resident``: bytes of this process in memory before the model was loaded."""


def random_tokens(seed: int, count: int, vocabulary: int) -> list[int]:
    """The same ``count`` token ids in every engine. Greedy loops of random models repeat one token; these do not."""
    tokens: list[int] = np.random.default_rng(seed).integers(3, vocabulary, count).tolist()
    return tokens


def begin(engine: Engine, context: int, rows: int, apart: bool, vocabulary: int) -> None:
    """Make ``rows`` rows ready to be stepped: after a common prompt of ``context`` tokens or, ``apart``, each after a
    prompt of its own, of one token less than the one before."""
    if apart:
        engine.answers([random_tokens(1 + index, context - index, vocabulary) for index in range(rows)])
    else:
        engine.prompt(random_tokens(1, context, vocabulary))
        engine.rows(rows)


def logits(engine: Engine, context: int, rows: int, apart: bool, steps: int, vocabulary: int) -> list[list[float]]:
    """Logits after a prompt, then of every row of :func:`begin` in every step."""
    found = [engine.prompt(random_tokens(7, context, vocabulary))]
    begin(engine, context, rows, apart, vocabulary)
    for step in range(steps):
        found += list(engine.step(random_tokens(1000 + step, rows, vocabulary)))
    return [row.tolist() for row in found]


def prefill(engine: Engine, tokens: list[int]) -> float:
    """Seconds to prefill ``tokens`` into an empty cache, logits of the last one included."""
    start = time.perf_counter()
    engine.prompt(tokens)
    return time.perf_counter() - start


def steps(
    engine: Engine, context: int, rows: int, apart: bool, count: int, vocabulary: int, warm_up: int = 2
) -> list[float]:
    """Seconds of each of ``count`` decoding steps of the rows of :func:`begin`."""
    begin(engine, context, rows, apart, vocabulary)
    seconds = []
    for index in range(warm_up + count):
        tokens = random_tokens(100 + index, rows, vocabulary)
        start = time.perf_counter()
        engine.step(tokens)
        seconds.append(time.perf_counter() - start)
    return seconds[warm_up:]


def first(engine: Engine, tokens: list[int], count: int, vocabulary: int) -> dict[str, float]:
    """Seconds of a prompt, and of ``count`` tokens decoded after it, none of them left out."""
    begun = time.perf_counter()
    engine.prompt(tokens)
    prompted = time.perf_counter()
    engine.rows(1)
    for index in range(count):
        engine.step(random_tokens(100 + index, 1, vocabulary))
    return {"prompt": prompted - begun, "tokens": time.perf_counter() - prompted}


def populate(engine: Engine, folder: Path) -> float:
    """Seconds to touch every piece of the weights once, as the page warmer does."""
    assert isinstance(engine, PrivatellmEngine)
    begun = time.perf_counter()
    weights = MappedWeights(folder, in_use=engine.model.mapped_files)
    for index in range(len(weights.sizes)):
        weights.touch(index)
    return time.perf_counter() - begun


def anonymous() -> float:
    """Bytes of this process's memory that no file backs: what a second process over the same file takes again."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return 1024.0 * int(found[1])


def read_from_disk() -> int:
    """Bytes that this process has had read from a disk so far, by page faults too."""
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1])


def plain_rate(path: Path, seed: int) -> float:
    """Bytes per second at which PLAIN_READ bytes at a time come from places of ``path`` that no memory holds."""
    places = np.random.default_rng(seed).permutation(path.stat().st_size // PLAIN_READ)
    done, begun = 0, time.perf_counter()
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, PLAIN_READ) as buffer:
        for place in places.tolist():
            done += os.preadv(file, [buffer], place * PLAIN_READ)
            if time.perf_counter() - begun > PLAIN_SECONDS:
                break
    os.close(file)
    return done / (time.perf_counter() - begun)


def learn_popularity(engine: Engine, folder: Path, home: str, vocabulary: int) -> None:
    """Keep which experts ``LEARNED_STEPS`` steps of 16 random tokens use where plans of the folder ``home`` find it, as
    the program keeps that of a person's conversations."""
    assert isinstance(engine, PrivatellmEngine)
    experts, counted = open_model(folder).experts, engine.model.popularity
    if experts is None or counted is None:
        return
    engine.prompt(random_tokens(1, 64, vocabulary))
    engine.rows(16)
    for index in range(LEARNED_STEPS):
        engine.step(random_tokens(10_000 + index, 16, vocabulary))
    os.environ["PRIVATELLM_HOME"] = home
    counts = {layer: counted.counts(layer) for layer in counted.layers}
    save_profile(profile_paths(profile_key(folder))[1], model_of(experts), counts)


def from_disk(engine: Engine, path: Path, context: int, warm_up: int, count: int, vocabulary: int) -> dict[str, float]:
    """Decoding one row after a prompt of ``context`` tokens, and ``warm_up`` more, where memory does not hold the file
    ``path``: tokens per second, bytes read from the disk per token, their rate, and that of plain reads between."""
    engine.prompt(random_tokens(1, context, vocabulary))
    engine.rows(1)
    for index in range(warm_up):
        engine.step(random_tokens(100 + index, 1, vocabulary))
    seconds, nbytes, plain = 0.0, 0, [plain_rate(path, 0)]
    for index in range(count):
        tokens = random_tokens(100 + warm_up + index, 1, vocabulary)
        before, begun = read_from_disk(), time.perf_counter()
        engine.step(tokens)
        seconds += time.perf_counter() - begun
        nbytes += read_from_disk() - before
        if index % BLOCK == BLOCK - 1:
            plain.append(plain_rate(path, 1 + index))
    return {
        "tokens_per_s": count / seconds,
        "bytes_per_token": nbytes / count,
        "rate": nbytes / seconds,
        "plain_rate": statistics.median(plain),
    }


def resident() -> int:
    """Bytes of this process that are in memory, pages of files included."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def highest_memory(engine: Engine, folder: Path, context: int, vocabulary: int) -> float:
    """Bytes that this process has in memory, beyond those before it loaded the model, at the highest moment of a prompt
    of ``context`` tokens and a few steps, once all weights were touched."""
    assert isinstance(engine, PrivatellmEngine)
    populate(engine, folder)
    highest, ended = resident(), threading.Event()

    def watch() -> None:
        nonlocal highest
        while not ended.wait(LOOK_S):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    rows = engine.model.start()
    tokens = random_tokens(1, context - BLOCK, vocabulary)
    for start in range(0, len(tokens), CHUNK):
        rows.extend(tokens[start : start + CHUNK], want_logits=start + CHUNK >= len(tokens))
    for token in random_tokens(2, BLOCK, vocabulary):
        rows.step([token])
    ended.set()
    watcher.join()
    return float(highest - begun["resident"])


def own_memory() -> float:
    """Bytes of this process's memory that no other process has."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return sum(1024.0 * int(kb) for kb in re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+) kB", text, re.MULTILINE))


def alternate(engine: Engine, context: int, count: int, vocabulary: int) -> dict[str, list[float]]:
    """Seconds per step with the recorder off and on: the median of each of ``count`` pairs of blocks."""
    assert isinstance(engine, PrivatellmEngine)
    recorder = engine.model.recorder
    engine.prompt(random_tokens(1, context, vocabulary))
    medians: dict[str, list[float]] = {"off": [], "on": []}
    for block in range(count + 1):
        for state in ("off", "on") if block % 2 else ("on", "off"):
            recorder.enabled = state == "on"
            engine.rows(1)
            seconds = []
            for step in range(BLOCK):
                tokens = random_tokens(100 + step, 1, vocabulary)
                start = time.perf_counter()
                engine.step(tokens)
                seconds.append(time.perf_counter() - start)
            if block:  # the first pair warms up
                medians[state].append(statistics.median(seconds))
    recorder.enabled = False
    return medians


def watched(
    engine: Engine, context: int, rows: int, apart: bool, tokens: int, count: int, vocabulary: int
) -> list[dict[str, Any]]:
    """Where the time of each of ``count`` forward passes went: the steps that :func:`steps` times, or (``rows`` 0)
    prompts of ``tokens`` tokens.

    Per pass: ``parts`` (seconds by part, summed over the layers; ``outside``: embedding and head), ``distinct`` (how
    many experts a MoE layer used, the mean) and ``routes`` (of all layers).
    """
    assert isinstance(engine, PrivatellmEngine)
    recorder = engine.model.recorder
    if rows:
        begin(engine, context, rows, apart, vocabulary)
    found = []
    recorder.enabled = True
    try:
        for index in range(count):
            recorder.reset()
            if rows:
                engine.step(random_tokens(100 + index, rows, vocabulary))
            else:
                engine.prompt(random_tokens(index, tokens, vocabulary))
            frame = recorder.frame(0)
            phase = frame.decode if rows else frame.prefill
            scale = phase.tokens / 1000
            parts: dict[str, float] = {
                part: scale * sum(getattr(layer, part) for layer in phase.layers) for part in PARTS
            }
            parts["outside"] = scale * phase.outside_layers
            used = [sum(number > 0 for number in layer) for layer in frame.expert_use]
            routes = sum(sum(layer) for layer in frame.expert_use)
            found.append({"parts": parts, "distinct": statistics.mean(used) if used else 0.0, "routes": routes})
    finally:
        recorder.enabled = False
        recorder.reset()
    return found


def streaming_read(nbytes: int, repeats: int, threads: int) -> list[float]:
    """Bytes per second with which ``threads`` threads read ``nbytes`` of memory in one pass, one figure per pass.

    The best of three plain reductions over the same buffer: which of them comes nearest to the memory's rate differs
    between machines.
    """
    import torch

    torch.set_num_threads(threads)
    words = torch.ones(nbytes // 4, dtype=torch.float32)
    matrix = words[: words.numel() // 4096 * 4096].view(-1, 4096)
    vector = torch.ones(4096)
    integers = words.view(torch.int32)
    passes: list[Callable[[], Any]] = [words.sum, lambda: matrix @ vector, integers.max]
    rates = []
    for index in range(repeats + 1):
        best = 0.0
        for read in passes:
            start = time.perf_counter()
            read()
            best = max(best, words.nbytes / (time.perf_counter() - start))
        if index:  # the first round warms up
            rates.append(best)
    return rates


def answer(engine: Engine | None, request: dict[str, Any], threads: int) -> Any:
    """What ``request`` asks for. Raises KeyError for a request that does not exist."""
    if request["do"] == "read":
        return streaming_read(request["nbytes"], request["repeats"], threads)
    assert engine is not None
    if request["do"] == "version":
        return engine.version()
    if request["do"] == "anonymous":
        return anonymous()
    if request["do"] == "own":
        return own_memory()
    if request["do"] == "populate":
        return populate(engine, Path(request["folder"]))
    engine.select(request["variant"])
    vocabulary = request["vocabulary"]
    if request["do"] == "logits":
        apart, count = request["apart"], request["steps"]
        return logits(engine, request["context"], request["rows"], apart, count, vocabulary)
    if request["do"] == "prefill":
        return prefill(engine, random_tokens(request["seed"], request["tokens"], vocabulary))
    if request["do"] == "first":
        tokens = random_tokens(request["seed"], request["tokens"], vocabulary)
        return first(engine, tokens, request["count"], vocabulary)
    if request["do"] == "steps":
        return steps(engine, request["context"], request["rows"], request["apart"], request["count"], vocabulary)
    if request["do"] == "watched":
        rows, apart, tokens = request["rows"], request["apart"], request["tokens"]
        return watched(engine, request["context"], rows, apart, tokens, request["count"], vocabulary)
    if request["do"] == "memory":
        return highest_memory(engine, Path(request["folder"]), request["context"], vocabulary)
    if request["do"] == "learn_popularity":
        return learn_popularity(engine, Path(request["folder"]), request["home"], vocabulary)
    if request["do"] == "from_disk":
        return from_disk(
            engine, Path(request["path"]), request["context"], request["warm_up"], request["count"], vocabulary
        )
    if request["do"] == "looking":
        return alternate(engine, request["context"], request["count"], vocabulary)
    raise KeyError(request["do"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=[*KINDS, "none"], required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    # Libraries print: the answers get the real standard output, everything else goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        begun["resident"] = resident()
        start = time.perf_counter()
        engine = None if arguments.engine == "none" else KINDS[arguments.engine](arguments.model, arguments.threads)
        reply({"ok": time.perf_counter() - start})
        for line in sys.stdin:
            reply({"ok": answer(engine, json.loads(line), arguments.threads)})
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
