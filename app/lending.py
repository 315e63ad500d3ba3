"""Lending this machine to the rings of others (``privatellm join``): the engine is kept running with the network open,
and each event becomes a line of text. No Textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.engine_client import Engine, EngineDied
from app.network import NetworkClient, NetworkProblem, close_quietly
from app.ring_words import fingerprint, link_words, machine_name, place_words, short_id, state_words
from app.text_safety import one_line
from engine.ipc.messages import LendingFacts, NetworkState, Notice, OpenNetwork, PeerFacts
from engine.planning.ring_words import as_clause
from engine.planning.units import byte_size

WATCH_S = 0.5
"""Seconds between two checks whether the engine is still running."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""Seconds before an engine that died is started again: the first wait and the longest. Each wait is twice the one
before."""
STEADY_S = 120.0
"""Seconds an engine must have run for the wait to begin at the shortest again."""
CODE_OVER = "The code has expired; `privatellm peers code` shows a new one."
_STEPS = 4
"""Number of lines about the progress of one stage."""


class LendingService:
    """Keeps an engine running with the network open for lending, until :meth:`leave`.

    ``emit_line`` is called with one line for each event; ``changed`` is called when :attr:`state` changed. An engine
    that cannot be started the first time is the caller's to report.
    """

    def __init__(
        self,
        engine: Engine,
        wanted: OpenNetwork,
        emit_line: Callable[[str], None],
        changed: Callable[[], None] = lambda: None,
        *,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self.network = NetworkClient(engine, self._network_changed)
        self.restarting = False
        """True from the death of the engine until it runs again."""
        self._engine = engine
        self._wanted = wanted
        self._emit_line = emit_line
        self._changed = changed
        self._first_wait_s = first_wait_s
        self._before: NetworkState | None = None
        engine.on_notice = self._notice

    @property
    def state(self) -> NetworkState | None:
        return self.network.state

    async def run(self) -> None:
        """Lend this machine until cancelled.

        Raises NetworkProblem if the network cannot be opened the first time, EngineDied if the engine dies before that.
        """
        try:
            await self._open()
        except EngineDied:
            # The network is announced as open a moment before the request is answered.
            if self.state is None or not self.state.open:
                raise
        loop = asyncio.get_running_loop()
        wait, since = self._first_wait_s, loop.time()
        while True:
            await asyncio.sleep(WATCH_S)
            if self._engine.running:
                continue
            if loop.time() - since > STEADY_S:
                wait = self._first_wait_s
            wait = await self._come_back(wait)
            since = loop.time()

    async def new_code(self) -> None:
        """Raises NetworkProblem, EngineDied."""
        await self.network.show_code()

    async def leave(self) -> None:
        """Leave the ring and close every socket."""
        await close_quietly(self.network)

    async def _open(self) -> None:
        await self._engine.start()
        await self.network.ensure_open(self._wanted, wait=False)
        if self.restarting:
            self.restarting = False
            self._changed()

    async def _come_back(self, wait: float) -> float:
        """Start the engine again, however many attempts that takes. Returns the next wait in seconds."""
        self.restarting = True
        self.network.lost()
        problem = "The engine ended."
        while True:
            self._emit_line(f"{problem} It restarts in {wait:g} s.")
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)
            try:
                await self._open()
            except (EngineDied, NetworkProblem) as error:
                problem = str(error)
                continue
            self._emit_line("The engine is back, and this machine can be used again.")
            return wait

    def _network_changed(self) -> None:
        before, self._before = self._before, self.network.state
        if self._before is not None:
            for line in event_lines(before, self._before):
                self._emit_line(line)
        self._changed()

    def _notice(self, notice: Notice) -> None:
        self._emit_line(one_line(notice.text))


def event_lines(before: NetworkState | None, after: NetworkState) -> list[str]:
    """A line for each event between two states."""
    lines = _about_me(before, after)
    peers_before = {peer.node_id: peer for peer in before.peers} if before is not None else {}
    for peer in after.peers:
        was = peers_before.get(peer.node_id)
        if before is not None and peer.state != "found" and (was is None or was.state == "found"):
            lines.append(f"Paired with {machine_name(peer)}.")
        else:
            lines += _about_peer(was, peer)
    there = {peer.node_id for peer in after.peers}
    if before is not None and after.code_expired and not before.code_expired:
        lines.append(CODE_OVER)
    lines += [
        f"{machine_name(peer)} is gone." for peer in peers_before.values() if peer.node_id not in there and peer.name
    ]
    lines += _about_lending(before.lending if before is not None else None, after.lending)
    known_problems = before.problems if before is not None else []
    return lines + [one_line(problem) for problem in after.problems if problem not in known_problems]


def _about_me(before: NetworkState | None, after: NetworkState) -> list[str]:
    lines = []
    me = after.me
    if after.open and (before is None or not before.open):
        words = f" ({fingerprint(me.words)})" if me.words else ""
        where = ", ".join(map(one_line, me.listening))
        does = f"listens on {where}" if where else "is found automatically only: it has no address to type elsewhere"
        lines.append(f"{one_line(me.name) or 'This machine'}, {short_id(me.node_id)}{words}, {does}.")
    if before is not None and before.open and not after.open:
        lines.append("The network is closed.")
    if after.code and (before is None or before.code != after.code):
        lines.append(
            f"Code: {one_line(after.code)} (valid for {after.code_seconds} s, {after.code_tries} tries). Type it on "
            "the machine with the chat."
        )
    return lines


def _about_peer(before: PeerFacts | None, after: PeerFacts) -> list[str]:
    if before is not None and (before.state, before.problem) == (after.state, after.problem):
        return []
    if before is None and after.state in ("paired", "found"):
        # Nothing is known of a machine that only announced itself, and an absent paired machine is no event.
        return []
    name = machine_name(after)
    link = f" ({link_words(after.link)})" if after.link is not None and after.state in ("ready", "ring") else ""
    problem = f": {as_clause(one_line(after.problem))}" if after.problem else ""
    return [f"{name}: {state_words(after, of_head=True)}{link}{problem}."]


def _about_lending(before: LendingFacts | None, after: LendingFacts | None) -> list[str]:
    if after is None:
        # How a ring that was formed ended is a notice of the engine's.
        return [f"{one_line(before.head)} formed no ring with this machine."] if before and not before.nodes else []
    lines = [] if before is not None else [f"{one_line(after.head)} forms a ring with this machine."]
    if after.nodes and (before is None or _place(before) != _place(after)):
        amount = f", {byte_size(after.expert_bytes)}" if after.expert_bytes else ""
        lines.append(
            f"In the ring of {one_line(after.head)}: {one_line(after.model)}, {place_words(after)}, "
            f"{after.experts:,} experts{amount}."
        )
    same = before is not None and before.stage == after.stage
    if not after.stage or (same and _step(before) == _step(after)):
        return lines
    stage = one_line(after.stage)
    if after.total:
        lines.append(f"{stage.capitalize()}: {min(100, 100 * after.done // after.total)} %.")
    elif not same and after.stage != "answering" and not _went_idle(before, after):
        lines.append(f"{stage.capitalize()}.")
    return lines


def _place(facts: LendingFacts) -> tuple[str, str, int, int]:
    return facts.head, facts.model, facts.rank, facts.nodes


def _went_idle(before: LendingFacts | None, after: LendingFacts) -> bool:
    """Whether an answer ended, so that the next stage, ``ready``, needs no line."""
    return before is not None and before.stage == "answering" and after.stage == "ready"


def _step(facts: LendingFacts | None) -> int:
    return facts.done * _STEPS // facts.total if facts is not None and facts.total > 0 else 0
