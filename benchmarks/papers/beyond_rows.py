"""What goes beyond the papers, measured: one table, each line with its ruler; what gains nothing is printed too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from benchmarks.papers.beam_rows import prompts_of
from benchmarks.papers.cache_bound import RULES, best_hit_rate, decoding, hit_rate, popular, recorded
from benchmarks.papers.cluster_model import realised_placement
from benchmarks.papers.findings import Findings, Input, Table
from benchmarks.papers.next_router import SHARE, Prefetched, prefetched_starter
from benchmarks.papers.page import percent
from benchmarks.papers.replay import Step
from benchmarks.papers.timed_node import Pace
from benchmarks.papers.timed_ring import TimedMethod, TimedResult, TimedRing
from benchmarks.papers.timed_rows import PASSES, dbrx_pace
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.store.catalogue import STARTER
from engine.moe.expert_parallel import Mode
from engine.planning.placement import ExpertGrid, Placement
from engine.planning.placement_planner import NodeRoom, place
from engine.runtimes import runtime_named
from engine.runtimes.choosing import choose_runtime, on_one_machine
from engine.runtimes.common.loading import load_model
from engine.session.loading import find_folder

NODES = 4
EXPONENT = 0.5
"""The n-th most popular expert is n to the power of minus this as popular as the first."""
SHARED_S = 0.5e-3
"""A shared expert of one layer."""
DECODED = 48
"""Tokens decoded after each prompt for the cache's routes."""
PROMPTS = 4
ROUNDS = 2
SHARES = (0.25, 0.5)
"""Parts of all experts that the GPU holds."""


@dataclass(frozen=True)
class Gain:
    """A line of the table."""

    idea: str
    ruler: str
    before: str
    after: str
    gain: str

    @property
    def cells(self) -> list[str]:
        return [self.idea, self.ruler, self.before, self.after, self.gain]


def beyond_rows() -> Findings:
    """All of it: about two minutes."""
    with TimedRing(NODES) as ring:
        gains = [by_popularity(ring), *overlapped(ring)]
    found = prefetched_starter()
    if found is not None:
        gains += read_ahead(found)
    columns = ["idea", "ruler", "without", "with", "gain"]
    replayed = against_the_bound()
    if replayed is not None:
        gains += cached(replayed)
    tables = [Table("Measured gains.", columns, [gain.cells for gain in gains])]
    if replayed is not None:
        tables.append(bound_table(replayed))
    return Findings(inputs=INPUTS, tables=tables, notes=NOTES)


def skewed_routes(passes: int, layers: int, seed: int = 3) -> tuple[list[list[list[int]]], list[float]]:
    """Routes [pass][layer][4] of 16 experts of unequal popularity, and this popularity, by expert."""
    generator = np.random.default_rng(seed)
    popularity = np.arange(1, 17, dtype=np.float64) ** -EXPONENT
    scores = np.log(popularity) + generator.gumbel(size=(passes, layers, 16))
    routes: list[list[list[int]]] = np.argsort(-scores, axis=-1)[..., :4].tolist()
    return routes, [float(each) for each in popularity]


def placed_by(popularity: Sequence[float]) -> Placement:
    """Our placement on NODES nodes with room for eight of sixteen experts each, by ``popularity``."""
    found = place(ExpertGrid((0,), 16, 4, 1), [NodeRoom(8)] * NODES, [popularity])
    assert isinstance(found, Placement)
    return found


def in_turns(ring: TimedRing, methods: Sequence[TimedMethod], pace: Pace) -> list[TimedResult]:
    """Each method's fastest of ROUNDS, which take turns: what another program disturbs only gets slower."""
    rounds = [[ring.run(method, pace, PASSES) for method in methods] for _ in range(ROUNDS)]
    return [min(found, key=lambda result: result.seconds) for found in zip(*rounds, strict=True)]


def by_popularity(ring: TimedRing) -> Gain:
    """Replicas where tokens go, beside replicas for even use."""
    routes, popularity = skewed_routes(PASSES + 1, 40)
    even = TimedMethod(realised_placement(NODES), routes=routes)
    before, after = in_turns(ring, (even, replace(even, placement=placed_by(popularity))), dbrx_pace())
    return Gain(
        f"replicas by measured popularity, {NODES} nodes",
        "tokens/s, timed ring; executed experts",
        f"{before.per_s:.2f}; {before.executed:.2f}",
        f"{after.per_s:.2f}; {after.executed:.2f}",
        percent(after.per_s / before.per_s - 1),
    )


def overlapped(ring: TimedRing) -> list[Gain]:
    """A shared expert computed while the exchange is on its way, in both modes."""
    gains = []
    pace = msgspec.structs.replace(dbrx_pace(), shared_s=SHARED_S)
    modes: tuple[Mode, ...] = ("fast", "exact")
    for mode in modes:
        method = TimedMethod(realised_placement(2), mode=mode)
        both = [replace(method, shared_meanwhile=each) for each in (False, True)]
        before, after = (result.per_s for result in in_turns(ring, both, pace))
        gains.append(
            Gain(
                f"exchange beside a shared expert of {1e3 * SHARED_S:g} ms, 2 nodes, {mode}",
                "tokens/s, timed ring",
                f"{before:.2f}",
                f"{after:.2f}",
                percent(after / before - 1),
            )
        )
    return gains


def read_ahead(found: Prefetched) -> list[Gain]:
    """Experts read from disk before their layer's router has chosen them."""
    half = f"{100 * SHARE:.0f} % of each layer's experts in memory"
    guesses = (
        (f"next layer's router prefetched, {half}", found.router),
        ("the same, if it were always right", found.known),
    )
    return [
        Gain(
            idea,
            "recall; MB read per token; tokens/s",
            f"{100 * found.chance:.0f} % by chance; {found.none.megabytes:.0f}; {found.none.per_s:.2f}",
            f"{100 * reading.recall:.0f} %; {reading.megabytes:.0f}; {reading.per_s:.2f}",
            percent(reading.per_s / found.none.per_s - 1),
        )
        for idea, reading in guesses
    ]


def against_the_bound() -> HitRates | None:
    """Hit rates on the starter's own routes; None if the starter is not on this machine."""
    try:
        _, folder = find_folder(STARTER, lambda *_: None, None)
    except ModelError:
        return None
    load = Load(id=0, model=STARTER, keep_resident=False)
    runtime = runtime_named(choose_runtime(load, folder).name)
    model = load_model(runtime, STARTER, folder, on_one_machine(load, runtime.name), lambda *_: None)
    try:
        with recorded(model) as trace:
            for prompt in prompts_of(folder, PROMPTS):
                rows = model.start()
                logits = rows.extend(prompt)
                for _ in range(DECODED):
                    assert logits is not None
                    logits = rows.step([int(logits.argmax())]).reshape(-1)
        facts = model.facts
    finally:
        model.close()
    return hit_rates(trace, facts.experts, facts.experts_per_token)


@dataclass(frozen=True)
class HitRates:
    """For each of SHARES the hit rate of every rule, and last Belady's bound; how many steps seeded the caches, and how
    many were replayed."""

    rates: dict[float, list[float]]
    seen: int
    later: int


def hit_rates(trace: Sequence[Step], experts: int, per_token: int) -> HitRates:
    """Replay ``trace``. The first half of the decoded steps tells which experts are popular."""
    steps = decoding(trace, per_token)
    seen, later = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    layers = max((len(step.layers) for step in later), default=0)
    order = popular(seen)
    found = {}
    for share in SHARES:
        slots = int(share * layers * experts)
        rates = [hit_rate(rule, later, slots, layers, experts, order) for rule in RULES.values()]
        found[share] = [*rates, best_hit_rate(later, slots)]
    return HitRates(found, len(seen), len(later))


def bound_table(replayed: HitRates) -> Table:
    """Every rule beside Belady's bound."""
    lines = [
        [f"{100 * share:.0f} %", *(f"{100 * rate:.1f} %" for rate in rates)] for share, rates in replayed.rates.items()
    ]
    caption = f"""Hit rates of caches beside Belady's bound, which knows the future and begins with the best experts, on
        the starter's routes: {replayed.later} decoded tokens, after {replayed.seen} that seeded the other caches."""
    return Table(caption, ["experts on the GPU", *RULES, "bound"], lines)


def cached(replayed: HitRates) -> list[Gain]:
    """The live cache in place of the last use per layer, beside the bound."""
    names = [*RULES, "bound"]
    gains = []
    for share, rates in replayed.rates.items():
        by_name = dict(zip(names, rates, strict=True))
        before, after, bound = by_name["LRU per layer"], by_name["ours (LFRU)"], by_name["bound"]
        gains.append(
            Gain(
                f"the live cache (LFRU) for LRU per layer, {100 * share:.0f} % of the experts on the GPU",
                "hit rate, replayed; of Belady's bound",
                f"{100 * before:.1f} %; {100 * before / bound:.0f} %",
                f"{100 * after:.1f} %; {100 * after / bound:.0f} %",
                percent(after / before - 1),
            )
        )
    return gains


INPUTS = (
    Input("nodes, wire", "table 4's constants, wire 0.95 ms", "fitted", "table 4, two nodes"),
    Input("popularity of the ring's experts", f"rank to the power of -{EXPONENT:g}", "chosen", "for even use: no gain"),
    Input("a shared expert", f"{1e3 * SHARED_S:g} ms per layer", "chosen", "DBRX has none"),
)
NOTES = (
    """In exact mode the exchange carries unweighted results and the sum is made in the order of the routes on every
    node, so running the shared expert meanwhile changes no bit; the tests of the ring compare them.""",
    """Prefetch is executed on the starter: while a layer waits for its experts, the next layer's router is asked about
    this layer's hidden state, and its choice is read from disk, past the system's cache, in pieces of 1 MiB by four
    threads. What is read is thrown away, and experts are computed from memory, so that the limit can be kept exactly;
    the decoded tokens are the same. What a right guess gains depends on the disk: it hides a read behind the computing
    of one layer, and a wrong one is read for nothing. On a machine with other programs beside, the same rows found no
    gain. Guesses displace only guesses; in one list with all other experts they would put out those in use. The
    product asks for a layer's experts when its own router has chosen them.""",
)
