"""The engine as the chat needs it: running, with the wanted model loaded, started again when it died. No Textual."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from app.chat.state import Phase, Status
from app.engine_client import Engine, EngineDied
from app.network import NetworkClient, NetworkProblem
from app.ring_words import away, away_lines
from app.running_servers import running_servers, servers_folder
from app.settings.fields import SettingError
from app.settings.ring import open_network, ring_choice
from app.settings.schema import Settings
from app.text_safety import one_line
from engine.ipc.messages import (
    AnyEvent,
    BeamEstimates,
    Cancel,
    CountTokens,
    Done,
    EstimateBeams,
    Failed,
    ForgetPrefixes,
    Load,
    Loaded,
    MachineMeasured,
    MeasureMachine,
    Plan,
    Planned,
    Progress,
    Pull,
    Resize,
    RingChanged,
    RingChoice,
    TokensCounted,
    WarmUp,
    Watch,
)

_MOST_COUNTED = 10_000_000
"""Maximum characters whose tokens are counted at once. They travel to the engine in one message."""
_ATTEMPTS = 2
"""Maximum number of starts of an engine that dies while it loads."""


class EngineLink:
    """Brings the engine up and keeps ``status`` current; ``on_status`` is called when it changed.

    ``is_missing``: must a model be fetched or built before it is loaded? ``on_fallback`` is called when
    a model cannot be loaded, with the reason and the options that worked before, which are loaded next. ``on_network``
    is called when the network changed.
    """

    def __init__(
        self,
        engine: Engine,
        status: Status,
        on_status: Callable[[], None],
        is_missing: Callable[[str], bool],
        on_fallback: Callable[[str, Settings], None] = lambda problem, worked: None,
        on_network: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.network = NetworkClient(engine, on_network)
        self.looking = False
        """True if the person asked to look for machines, whatever the partitioning."""
        self.may_fetch = True
        """Whether the person asked for the model, so that it is fetched if it is missing."""
        self.status = status
        self.watching = False
        self._on_status = on_status
        self._is_missing = is_missing
        self._on_fallback = on_fallback
        self._loaded: Settings | None = None
        self._worked: Settings | None = None
        self._request: int | None = None
        engine.on_warm_up = self._warm_up
        engine.on_ring = self._ring_changed

    def has(self, options: Settings) -> bool:
        """Whether the engine is running with the model that ``options`` want."""
        return self.engine.running and self._loaded is not None and self._loaded.loads_like(options)

    async def bring_up(self, options: Callable[[], Settings]) -> bool:
        """Start the engine and load what ``options()`` want, which may change meanwhile.

        Returns False if that failed; ``status.problem`` says why.
        """
        deaths = 0
        while True:
            wanted = options()
            try:
                if self.has(wanted):
                    self._worked = self._loaded
                    self._set(Phase.READY)
                    return True
                await self._start()
                problem = await self._fetch_and_load(wanted)
            except EngineDied as died:
                self._loaded, self.status.facts, problem = None, None, str(died)
                self.network.lost()
                deaths += 1
                if deaths < _ATTEMPTS:
                    continue
            if problem and options().loads_like(wanted):
                worked, self._worked = self._worked, None
                if worked is not None and not worked.loads_like(wanted):
                    deaths = 0
                    self._on_fallback(problem, worked)
                    continue
                self._fail(problem)
                return False

    async def abandon_loading(self) -> None:
        """Cancel the loading."""
        if self._request is not None:
            with suppress(EngineDied):
                await self.engine.send(Cancel(id=self.engine.new_id(), target=self._request))

    async def watch(self, timing: bool) -> None:
        """Turn the engine's measuring of times on or off. It stays so after a restart."""
        self.watching = timing
        if not timing:
            self.status.slowest = ""
            self._on_status()
        if self.engine.running:
            with suppress(EngineDied):
                await self.engine.send(Watch(id=self.engine.new_id(), timing=timing))

    async def estimate_beams(self, widths: Sequence[int], context_tokens: int) -> BeamEstimates | str:
        """The costs of the widths, or why they are not known."""
        if self._loaded is None or not self.engine.running:
            return "The cost is known once the model is loaded."
        request = EstimateBeams(id=self.engine.new_id(), widths=list(widths), context_tokens=context_tokens)
        try:
            async for event in self.engine.stream(request):
                if isinstance(event, BeamEstimates):
                    return event
                if isinstance(event, Failed):
                    return event.error
        except EngineDied as died:
            return str(died)
        return "The engine gave no estimate."

    async def count_tokens(self, texts: Sequence[str]) -> list[int] | None:
        """The tokens of each text by the loaded model's tokenizer; None if they cannot be counted now."""
        if self._loaded is None or self.status.phase is not Phase.READY or sum(map(len, texts)) > _MOST_COUNTED:
            return None
        with suppress(EngineDied):
            async for event in self.engine.stream(CountTokens(id=self.engine.new_id(), texts=list(texts))):
                if isinstance(event, TokensCounted) and len(event.counts) == len(texts):
                    return event.counts
        return None

    async def forget_prefixes(self, names: Sequence[str]) -> None:
        """Tell the engine, if there is one, that nothing is kept on disk under ``names``."""
        if self.engine.running:
            with suppress(EngineDied):
                await self.engine.send(ForgetPrefixes(id=self.engine.new_id(), conversations=list(names)))

    async def plan(self, options: Settings) -> Planned | str | None:
        """Memory and speed that ``options`` would give, or why they are unknown; None if no engine is running yet."""
        if not self.engine.running:
            return None
        try:
            ring = await self._ring(options, only_ask=True)
            request = Plan(id=self.engine.new_id(), load=msgspec.structs.replace(options.load, ring=ring))
            async for event in self.engine.stream(request):
                if isinstance(event, Planned):
                    return event
                if isinstance(event, Failed):
                    return event.error
        except EngineDied:
            return None
        except (NetworkProblem, SettingError) as problem:
            return _sentence(problem)
        return "The engine gave no prediction."

    async def measure_machine(self) -> MachineMeasured | None:
        """This machine's memory and how fast it is read; None if the engine does not say."""
        try:
            await self._start()
            async for event in self.engine.stream(MeasureMachine(id=self.engine.new_id())):
                if isinstance(event, MachineMeasured):
                    return event
                if isinstance(event, Failed):
                    return None
        except EngineDied:
            return None
        return None

    async def list_machines(self) -> str:
        """Ask which machines are paired, and reachable if the network is open. Returns what went wrong."""
        try:
            await self._start()
            await self.network.refresh()
        except (NetworkProblem, EngineDied) as problem:
            return _sentence(problem)
        return ""

    def machines_away(self) -> list[str]:
        """Check which machines of the ring are gone or are back. Returns a line for each.

        Returns none during an answer: the engine's notices say then what happens to the ring.
        """
        facts, before = self.status.facts, self.status.away
        self.status.away = away(facts.ring if facts is not None else None, self.network.state)
        if self.status.away == before:
            return []
        self._on_status()
        return away_lines(before, self.status.away) if self.status.phase is Phase.READY else []

    async def look_for_machines(self, options: Settings) -> str:
        """Open the network until the chat ends. Returns what went wrong."""
        try:
            await self._start()
            self.looking = True
            await self.network.ensure_open(open_network(options))
        except (NetworkProblem, EngineDied) as problem:
            self.looking = False
            return _sentence(problem)
        return ""

    async def stop_looking(self, options: Settings) -> str:
        """Close the network unless a ring is wanted. Returns what went wrong."""
        self.looking = False
        return await self.close_unless_wanted(options)

    async def close_unless_wanted(self, options: Settings) -> str:
        """Close the network unless machines are looked for or the partitioning is ``ring``. Returns what went wrong."""
        if self.looking or options.partitioning == "ring" or not self.network.is_open:
            return ""
        try:
            await self.network.close()
        except (NetworkProblem, EngineDied) as problem:
            return _sentence(problem)
        return ""

    async def _ring(self, options: Settings, *, only_ask: bool = False) -> RingChoice:
        """The choices for the ring, with the network opened for it.

        ``only_ask``: a network that is open is not changed, so its ring stays. Raises NetworkProblem, SettingError,
        EngineDied.
        """
        if options.partitioning != "ring":
            return RingChoice()
        if not (only_ask and self.network.is_open):
            await self.network.ensure_open(open_network(options))
        return ring_choice(options, self.network.state)

    async def pull(self, model: str, on_request: Callable[[int], None]) -> AsyncIterator[Progress | Done | Failed]:
        """Fetch a model. ``on_request`` is called with the id that cancels it. Raises EngineDied."""
        if not self.engine.running:
            await self._start()
        request = Pull(id=self.engine.new_id(), model=model)
        on_request(request.id)
        async for event in self.engine.stream(request):
            if isinstance(event, Progress | Done | Failed):
                yield event

    def forget(self) -> None:
        """Load the model again when it is next needed."""
        self._loaded = None

    def lost(self) -> None:
        """The engine died, and the model with it."""
        self._loaded = None
        self.network.lost()
        self.status.facts = self.status.progress = self.status.prefill = self.status.warm_up = None
        self.status.memory = self.status.ttft_s = None
        self._set(Phase.RESTARTING)

    async def _start(self) -> None:
        if self.engine.running:
            return
        self._loaded = None
        if self.status.phase is not Phase.RESTARTING:
            self._set(Phase.STARTING)
        self.network.lost()
        await self.engine.start()
        if self.watching:
            await self.engine.send(Watch(id=self.engine.new_id(), timing=True))

    async def _fetch_and_load(self, wanted: Settings) -> str:
        """Load the model, fetched first if necessary. Returns what went wrong; empty if it is loaded."""
        if self._differs_in_gpu_memory(wanted):
            return await self._resize(wanted)
        self.status.model, self.status.problem = wanted.model, ""
        self._loaded = self.status.facts = None
        if self._is_missing(wanted.model):
            if not self.may_fetch:
                return f"{wanted.model} is not on this machine yet."
            self._set(Phase.FETCHING)
            if wanted.partitioning == "ring":
                with suppress(NetworkProblem):
                    await self.network.ensure_open(open_network(wanted))
            problem = await self._follow(Pull(id=self.engine.new_id(), model=wanted.model), wanted)
            if problem:
                return problem
        self._set(Phase.LOADING)
        if self.looking and wanted.partitioning != "ring":
            with suppress(NetworkProblem):
                await self.network.ensure_open(open_network(wanted))
        try:
            ring = await self._ring(wanted)
        except (NetworkProblem, SettingError) as error:
            return _sentence(error)
        problem = await self._follow(msgspec.structs.replace(wanted.load, id=self.engine.new_id(), ring=ring), wanted)
        if not problem:
            await self.close_unless_wanted(wanted)
        return problem

    def _differs_in_gpu_memory(self, wanted: Settings) -> bool:
        """Whether the wanted model is loaded and only the GPU memory for its experts differs."""
        there, facts = self._loaded, self.status.facts
        if there is None or facts is None or facts.policy is None:
            return False
        return replace(wanted, gpu_expert_memory=there.gpu_expert_memory).loads_like(there)

    async def _resize(self, wanted: Settings) -> str:
        """Change the GPU memory while the model stays loaded. Returns what went wrong; nothing changed then."""
        request = Resize(id=self.engine.new_id(), gpu_expert_bytes=wanted.load.gpu_expert_bytes)
        async for event in self.engine.stream(request):
            if isinstance(event, Failed):
                return event.error
            if isinstance(event, Loaded):
                self._loaded = self._worked = wanted
                self.status.facts, self.status.memory = event.facts, event.memory
                return ""
        return "The engine did not say whether it changed the GPU memory for experts."

    async def _follow(self, request: Pull | Load, wanted: Settings) -> str:
        self._request = request.id
        try:
            async for event in self.engine.stream(request):
                problem = self._take(event, wanted)
                if problem is not None:
                    return problem
        finally:
            self._request = None
            self.status.progress = None
        return "Loading was stopped."

    def _take(self, event: AnyEvent, wanted: Settings) -> str | None:
        """Take an event of loading. Returns what went wrong, empty at the end, None before it."""
        match event:
            case Progress():
                self.status.progress = event
                self._on_status()
            case Loaded():
                self._loaded = self._worked = wanted
                self.status.facts, self.status.memory, self.status.ttft_s = event.facts, event.memory, None
                self.status.context_used, self.status.warm_up = None, None
                self.status.away = away(event.facts.ring, self.network.state)
                return ""
            case Done():
                return ""
            case Failed():
                return event.error
        return None

    def look_for_servers(self) -> None:
        """Notice servers of other programs that began or ended: it takes some microseconds."""
        found = tuple(one_line(server.url) for server in running_servers(servers_folder()))
        if found != self.status.served_at:
            self.status.served_at = found
            self._on_status()

    def _warm_up(self, progress: WarmUp) -> None:
        self.status.warm_up = progress if progress.done < progress.total else None
        self.status.memory = progress.memory or self.status.memory
        self._on_status()

    def _ring_changed(self, news: RingChanged) -> None:
        facts = self.status.facts
        if facts is not None:
            self.status.facts = msgspec.structs.replace(facts, ring=news.ring, executor=news.executor)
            self.status.away = away(news.ring, self.network.state)
            self._on_status()

    def _set(self, phase: Phase) -> None:
        self.status.phase = phase
        if phase is Phase.READY:
            self.status.progress, self.status.problem = None, ""
        self._on_status()

    def _fail(self, problem: str) -> None:
        self.status.problem, self.status.facts = problem, None
        self._set(Phase.UNAVAILABLE)


def _sentence(problem: Exception) -> str:
    text = str(problem)
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
