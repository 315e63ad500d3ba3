"""A head and lent machines, each an engine process of its own on loopback, that can be made to differ."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine.bench.local_ring import Launcher, LocalEngine, open_network, pair_homes
from engine.ipc.messages import Beam, Finished, Generate, Load, Loaded, NetworkState, OpenNetwork, Sampling, Shutdown
from engine.ipc.messages.ring import RingChoice, RingFacts
from tests.engine.cluster import machine_hooks
from tests.support.engine_forks import forked, measured_before
from tests.support.hooked_engine import hooked

PROMPT = [5, 17, 101, 42, 9, 77, 30, 12, 64, 3, 88, 120, 7, 55, 90, 33]
ANSWER = 12
TRUSTED = ["127.0.0.0/8"]
PATIENCE_S = 120.0
"""After so long a test fails rather than hangs; nothing is asserted about time."""


@dataclass(frozen=True)
class Machine:
    """How an engine process is started. ``arguments``: of its interpreter, by which it measures little, or is another
    machine than it is (see machine_hooks.py); ``models``: folders that it has as models of its own, so that they are
    compared instead of sent."""

    environment: dict[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = tuple(hooked(machine_hooks.quick))
    models: tuple[Path, ...] = ()


def with_runtimes(*names: str) -> Machine:
    """A machine on which only these runtimes are installed."""
    return Machine(arguments=hooked(machine_hooks.with_runtimes, names=names))


FORMATIONS = 3
"""Times that a ring is formed before it must have all its machines."""


class RealRing:
    """The first of ``machines`` is the head. ``launch``: ``with_libraries`` where models are loaded with torch."""

    def __init__(
        self, folder: Path, machines: Sequence[Machine], launch: Launcher = forked, lent_threads: int | None = 1
    ) -> None:
        """``lent_threads``: that each of the others lends; None: all it has."""
        homes = [folder / f"node-{rank}" for rank in range(len(machines))]
        for home, machine in zip(homes, machines, strict=True):
            (home / "config" / "network").mkdir(parents=True)
            (home / "models").mkdir()
            measured_before(home)
            for model in machine.models:
                (home / "models" / model.name).symlink_to(model, target_is_directory=True)
        self.ids = [identity.node_id for identity in pair_homes(homes)]
        self.engines: list[LocalEngine] = []
        self.threads = 1
        """That the head is told to compute with."""
        try:
            self.engines = [_started(home, machine, launch) for home, machine in zip(homes, machines, strict=True)]
            addresses = []
            for rank, engine in enumerate(self.engines[1:], 1):
                opened = OpenNetwork(id=engine.new_id(), name=f"node {rank}", listen="127.0.0.1:0", lend=True)
                engine.ask(replace(opened, cpu_threads=lent_threads))
                state = engine.wait(lambda event: isinstance(event, NetworkState) and bool(event.me.listening))
                assert isinstance(state, NetworkState)
                addresses += state.me.listening
            self.head = self.engines[0]
            open_network(self.head, "head", peers=addresses)
            self.all_ready()
        except BaseException:
            self.close()
            raise

    def all_ready(self, seconds: float = PATIENCE_S, since: int = 0) -> None:
        """All have answered, whatever they said."""
        wanted = len(self.engines) - 1
        self.head.wait(
            lambda event: (
                isinstance(event, NetworkState)
                and sum(peer.state in ("ready", "ring", "refused") for peer in event.peers) == wanted
            ),
            seconds,
            since,
        )

    def load(self, model: Path, runtime: str, followers: int = 1, dtype: str = "float32", **choice: Any) -> Loaded:
        """A ring of the head and the first ``followers`` of the others.

        It is over TLS unless told otherwise, as measuring all exchanges starts an envoy on every machine.
        """
        chosen = RingChoice(
            **{
                "even_if_slower": True,
                "overlap": False,
                "exchange": "tls",
                "nodes": self.ids[1 : followers + 1],
                **choice,
            }
        )
        return self._load(model, runtime, dtype, partitioning="ring", ring=chosen)

    def form(self, model: Path, runtime: str, followers: int = 1, dtype: str = "float32", **choice: Any) -> RingFacts:
        """The same; all of them are in it. On a busy machine one that is slow to answer is left out of a ring, and is
        in the next one."""
        for _ in range(FORMATIONS):
            facts = self.load(model, runtime, followers, dtype, **choice).facts
            assert facts.runtime == runtime
            assert facts.ring is not None
            if len(facts.ring.nodes) == followers + 1:
                break
        assert len(facts.ring.nodes) == followers + 1, facts.notices
        assert all(share.experts for share in facts.ring.nodes)
        return facts.ring

    def alone(self, model: Path, runtime: str, dtype: str = "float32") -> Loaded:
        return self._load(model, runtime, dtype, partitioning="cpu")

    def answer(self, tokens: int = ANSWER, **options: Any) -> list[int]:
        return self.finished(tokens, **options).token_ids

    def beams(self, width: int = 3) -> list[Beam]:
        """Scores are sums of log-probabilities: equal only if the logits are."""
        return self.finished(beams=width).beams

    def finished(self, tokens: int = ANSWER, **options: Any) -> Finished:
        found = self.head.ask(self.question(tokens, **options), PATIENCE_S)
        assert isinstance(found, Finished)
        return found

    def question(self, tokens: int = ANSWER, **options: Any) -> Generate:
        greedy = Sampling(temperature=0.0)
        return Generate(id=self.head.new_id(), prompt_ids=PROMPT, sampling=greedy, max_tokens=tokens, **options)

    def close(self) -> None:
        for engine in self.engines:
            with contextlib.suppress(OSError, ValueError):
                engine.send(Shutdown(id=0))
        for engine in self.engines:
            engine.close()

    def __enter__(self) -> RealRing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, model: Path, runtime: str, dtype: str, **options: Any) -> Loaded:
        load = Load(
            id=self.head.new_id(),
            model=str(model),
            runtime=runtime,  # type: ignore[arg-type]
            dtype=dtype,  # type: ignore[arg-type]
            cpu_threads=self.threads,
            **options,
        )
        found = self.head.ask(load, PATIENCE_S)
        assert isinstance(found, Loaded)
        return found


def _started(home: Path, machine: Machine, launch: Launcher) -> LocalEngine:
    return LocalEngine(home, {"OMP_NUM_THREADS": "1", **machine.environment}, machine.arguments, launch)


__all__ = ["ANSWER", "PROMPT", "TRUSTED", "Machine", "RealRing", "with_runtimes"]
