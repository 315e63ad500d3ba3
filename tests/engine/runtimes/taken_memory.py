"""A process that answers with a model and says what memory it took for that."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import NoReturn

from engine.ipc.messages import Load
from engine.runtimes import runtime_named
from engine.runtimes.protocol import LoadedModel
from engine.system.free_memory import give_back


def resident() -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")}


class Peak:
    """The most anonymous memory that there was when somebody looked."""

    def __init__(self) -> None:
        self.nbytes = 0

    def look(self, *_: object) -> None:
        self.nbytes = max(self.nbytes, resident()["RssAnon"])


def answer(folder: str, tokens: int, look: Peak) -> LoadedModel:
    """A prompt of so many tokens, and after a short one some steps."""
    model = runtime_named("torch").load(Path(folder), Load(id=1, model="m", cpu_threads=1), look.look)
    model.between_layers = look.look
    rows = model.start()
    prompt = [3 + place * 7 % 150 for place in range(tokens)]
    for start in range(0, len(prompt), 512):
        rows.extend(prompt[start : start + 512], want_logits=start + 512 >= len(prompt))
        give_back()
    if len(prompt) < 512:
        beams = rows.fan_out(4)
        for step in range(12):
            beams.step([5 + 4 * step, 6 + 4 * step, 7 + 4 * step, 8 + 4 * step])
            rows.step([9 + step])
            look.look()
    return model


def run(folder: str, tokens: int, tiny: str) -> NoReturn:
    """What is taken for ``folder``'s model beyond what the libraries keep from their first pass on, with ``tiny``."""
    answer(tiny, 140, Peak()).close()
    give_back()
    before, peak, ended = resident(), Peak(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            peak.look()

    threading.Thread(target=watch, daemon=True).start()
    model = answer(folder, tokens, peak)
    ended.set()
    peak.look()
    facts, popularity = model.facts, model.popularity
    assert popularity is not None
    found = {
        "taken": peak.nbytes - before["RssAnon"],
        "mapped": resident()["RssFile"] - before["RssFile"],
        "used": [sum(count > 0 for count in popularity.counts(layer)) for layer in facts.moe_layers],
        "trunk": facts.trunk_bytes,
        "experts": facts.expert_bytes,
        "cached": facts.key_value_bytes_per_token * tokens,
    }
    print(json.dumps(found), flush=True)
    raise SystemExit(0)
