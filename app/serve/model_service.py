"""The served model: loaded once, asked for many clients, loaded again if the engine dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

import msgspec

from app.engine_client import Engine, EngineDied, ends
from app.serve.replies import STOPPED, Refused, refused_by_engine
from engine.ipc.messages import (
    AnyEvent,
    CountTokens,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    ModelFacts,
    Notice,
    Piece,
    Prefill,
    Progress,
    TokensCounted,
    Watch,
)
from engine.models.store.prefix_files import SERVED

WATCHED_S = 300.0
"""Seconds for which steps are measured after the figures were read: nobody pays for what nobody reads."""

MOST_WAITING = 256
"""Maximum number of requests that wait for the engine."""
MOST_NOTES = 100
"""Maximum number of different notices about requests that are shown."""
AnswerEvent = Prefill | Piece | Finished


class LoadFailed(Exception):
    """The model could not be loaded. The text is one sentence."""


class ModelService:
    """Answers for many clients by one engine, in whose queue they take turns.

    ``load`` is what the engine is asked to load. ``names`` are further names under which clients may ask for the
    model. ``show`` is told how loading goes on, ``note`` what a person should know.
    """

    def __init__(
        self,
        engine: Engine,
        load: Load,
        *,
        names: Sequence[str] = (),
        show: Callable[[Progress | None], None] = lambda progress: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.facts: ModelFacts | None = None
        self.started = int(time.time())
        self.waiting = 0
        """Number of requests that the engine has not begun with."""
        self.running = 0
        """Number of requests that the engine answers."""
        self.quotes = False
        """Whether clients are told what they asked before: only where a key keeps others from asking in their name."""
        self.metrics = Metrics()
        self._engine = engine
        self._load = load
        # Other machines need not know in which folder it lies.
        self._asked = Path(load.model).name if Path(load.model).expanduser().exists() else load.model
        self._names = tuple(names)
        self._show = show
        self._note = note
        self._noted: set[str] = set()
        self._loading = asyncio.Lock()
        self._stopping = False
        self._watched_until = 0.0
        self._watching = False
        self._pumps: set[asyncio.Task[None]] = set()

    # --- the model --------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.facts is not None and self._engine.running

    @property
    def sees(self) -> bool:
        """Whether the model gets pictures. While that is not known they are sent to the engine, which knows."""
        return self.facts is None or self.facts.sight is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the model answers, the usual one first."""
        usual = self.facts.name if self.facts is not None else self._asked
        return tuple(dict.fromkeys([usual, self._asked, *self._names]))

    def check_name(self, name: str | None) -> str:
        """``name`` if the model has it; its usual one for no name. Raises Refused."""
        if not name:
            return self.names[0]
        if name in self.names:
            return name
        raise Refused(
            f"The model {name[:200]} is not served here: use {self.names[0]}, or start `privatellm serve` with "
            f"--model or --alias {name[:200]}.",
            404,
            code="model_not_found",
            parameter="model",
        )

    async def loaded(self) -> ModelFacts:
        """The facts of the loaded model, which is loaded now if it is not. Raises LoadFailed."""
        async with self._loading:
            if self.facts is not None and self._engine.running:
                return self.facts
            self.facts = None
            self._watching = False
            try:
                await self._engine.start()
                self.facts = await self._load_now()
            except EngineDied as error:
                raise LoadFailed(str(error)) from error
            finally:
                self._show(None)
            for notice in self.facts.notices:
                self._note(notice)
            return self.facts

    async def _load_now(self) -> ModelFacts:
        request = msgspec.structs.replace(self._load, id=self._engine.new_id())
        async for event in self._engine.stream(request):
            match event:
                case Progress():
                    self._show(event)
                case Notice():
                    self._note(event.text)
                case Failed():
                    raise LoadFailed(event.error)
                case Loaded():
                    return event.facts
                case _:
                    continue
        raise LoadFailed("The engine ended the loading without a result.")

    # --- answers ----------------------------------------------------------------------------------------------------

    async def answer(self, request: Generate, client: str) -> AsyncGenerator[AnswerEvent, None]:
        """The events of ``request`` (whatever its id), Finished last. Closing it early cancels the answer.

        A slow reader does not keep the engine from others. Raises Refused.
        """
        arrived: asyncio.Queue[AnswerEvent | Refused] = asyncio.Queue()
        request = msgspec.structs.replace(
            request, program="serve", quotes=self.quotes, client=client, conversation=SERVED
        )
        pump = asyncio.create_task(self._pump(request, arrived), name="answer")
        self._pumps.add(pump)
        try:
            while True:
                event = await arrived.get()
                if isinstance(event, Refused):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._pumps.discard(pump)
            pump.cancel()
            with suppress(asyncio.CancelledError):
                await pump

    async def finished(self, request: Generate, client: str) -> Finished:
        """The end of :meth:`answer`, which holds all of it. Raises Refused."""
        async with aclosing(self.answer(request, client)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    return event
        raise Refused("The engine ended the answer without a result.", 500)

    async def prompt_tokens(self, request: Generate) -> int:
        """Number of tokens of the prompt of ``request``. It does not wait for answers. Raises Refused."""
        try:
            await self.loaded()
            async with aclosing(self._events(CountTokens(id=0, question=request))) as events:
                async for event in events:
                    if isinstance(event, Failed):
                        raise refused_by_engine(event)
                    if isinstance(event, TokensCounted):
                        return event.counts[-1]
        except (EngineDied, LoadFailed) as error:
            raise Refused(str(error), 503) from error
        raise Refused("The engine ended the count without a result.", 500)

    async def _pump(self, request: Generate, arrived: asyncio.Queue[AnswerEvent | Refused]) -> None:
        try:
            if self._stopping:
                raise Refused(STOPPED, 503)
            if self.waiting >= MOST_WAITING:
                raise Refused(f"{MOST_WAITING} requests are waiting already: try again later.", 429, code="queue_full")
            if not await self._ask(request, arrived):
                await self._ask(request, arrived, again=True)
        except Refused as refused:
            arrived.put_nowait(refused)
        except (EngineDied, LoadFailed) as error:
            arrived.put_nowait(Refused(str(error), 503))
        except asyncio.CancelledError:
            self.metrics.cancelled()
            arrived.put_nowait(Refused(STOPPED, 503))
            raise

    async def _ask(
        self, request: Generate, arrived: asyncio.Queue[AnswerEvent | Refused], *, again: bool = False
    ) -> bool:
        """Ask the engine. Returns False if it died while ``request`` waited: another request was the cause.

        ``again``: whatever the cause, EngineDied is raised instead. Raises LoadFailed, Refused.
        """
        came, waits = time.monotonic(), True
        self.waiting += 1
        try:
            await self.loaded()
            await self._tell_whether_watched()
            async with aclosing(self._events(request)) as events:
                async for event in events:
                    if isinstance(event, Failed):
                        raise refused_by_engine(event)
                    if isinstance(event, Notice):
                        self._note_once(event.text)
                    if not isinstance(event, AnswerEvent):
                        continue
                    if waits:
                        waits = False
                        self.waiting -= 1
                        self.running += 1
                        self.metrics.waited(time.monotonic() - came)
                    if isinstance(event, Finished):
                        self.metrics.answered(event)
                    arrived.put_nowait(event)
        except EngineDied:
            if again or not waits:
                raise
            return False
        finally:
            if waits:
                self.waiting -= 1
            else:
                self.running -= 1
        return True

    def _note_once(self, text: str) -> None:
        """Tell the person ``text``, which comes with every request of one kind."""
        if text not in self._noted and len(self._noted) < MOST_NOTES:
            self._noted.add(text)
            self._note(text)

    def watch(self) -> None:
        """Measure where the time of answers goes, for as long as somebody reads the figures."""
        self._watched_until = time.monotonic() + WATCHED_S

    async def _tell_whether_watched(self) -> None:
        wanted = time.monotonic() < self._watched_until
        if wanted != self._watching:
            await self._engine.send(Watch(id=self._engine.new_id(), timing=wanted))
            self._watching = wanted

    async def _events(self, request: Generate | CountTokens) -> AsyncGenerator[AnyEvent, None]:
        stream = self._engine.stream(msgspec.structs.replace(request, id=self._engine.new_id()))
        assert isinstance(stream, AsyncGenerator)
        async with aclosing(stream):
            async for event in stream:
                yield event
                if ends(event):
                    return

    def stop(self) -> None:
        """Cancel what is being answered, and refuse what comes."""
        self._stopping = True
        for pump in self._pumps:
            pump.cancel()


# --- metrics ---------------------------------------------------------------------------------------------------------


class Metrics:
    """Sums since the start. They tell nothing of what was asked."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        """Number of requests by (path, status)."""
        self.answers: dict[str, int] = {}
        """Number of answers by the reason of their end."""
        self.read_again: dict[tuple[str, str], int] = {}
        """Number of prompts of which older parts were read again, by (cause, role of the first other message)."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.waiting_s = 0.0
        self.first_token_s = 0.0
        self.expert_hits = 0
        self.expert_misses = 0
        self.exchange_s = 0.0
        self.measured_tokens = 0
        self.answering_s = 0.0

    def requested(self, path: str, status: int) -> None:
        self.requests[path, status] = self.requests.get((path, status), 0) + 1

    def waited(self, seconds: float) -> None:
        self.waiting_s += seconds

    def cancelled(self) -> None:
        self.answers["cancelled"] = self.answers.get("cancelled", 0) + 1

    def answered(self, finished: Finished) -> None:
        self.answers[finished.finish_reason] = self.answers.get(finished.finish_reason, 0) + 1
        self.prompt_tokens += finished.prompt_tokens
        self.cached_tokens += finished.cached_tokens
        if (why := finished.read_again) is not None:
            self.read_again[why.cause, why.role] = self.read_again.get((why.cause, why.role), 0) + 1
        self.completion_tokens += finished.completion_tokens
        self.reasoning_tokens += finished.reasoning_tokens
        self.first_token_s += finished.ttft_s
        if finished.tokens_per_s > 0:
            self.answering_s += finished.completion_tokens / finished.tokens_per_s
        timing = finished.timing
        if timing is None:
            return
        if timing.movement is not None:
            self.expert_hits += timing.movement.hits
            self.expert_misses += timing.movement.misses
        for phase in (timing.prefill, timing.decode):
            self.measured_tokens += phase.tokens
            self.exchange_s += sum(layer.exchange for layer in phase.layers) * phase.tokens / 1000

    def text(self, *, waiting: int, running: int, loaded: bool) -> str:
        """The text format of Prometheus, version 0.0.4."""
        lines: list[str] = []

        def family(name: str, kind: str, about: str, *samples: tuple[str, float]) -> None:
            lines.append(f"# HELP privatellm_{name} {about}")
            lines.append(f"# TYPE privatellm_{name} {kind}")
            lines.extend(f"privatellm_{name}{labels} {value:.10g}" for labels, value in samples)

        family("model_loaded", "gauge", "Whether the model is loaded.", ("", loaded))
        family("requests_waiting", "gauge", "Requests that wait for the engine.", ("", waiting))
        family("requests_running", "gauge", "Requests that the engine answers now.", ("", running))
        family("requests_total", "counter", "Requests by path and HTTP status.", *(
            (f'{{path="{path}",status="{status}"}}', count) for (path, status), count in sorted(self.requests.items())
        ))  # fmt: skip
        family("answers_total", "counter", "Answers by the reason of their end.", *(
            (f'{{reason="{reason}"}}', count) for reason, count in sorted(self.answers.items())
        ))  # fmt: skip
        family("prompts_read_again_total", "counter", "Prompts of which older parts were read again, by cause.", *(
            (f'{{cause="{cause}",role="{role}"}}', count) for (cause, role), count in sorted(self.read_again.items())
        ))  # fmt: skip
        for name, value, about in (
            ("prompt_tokens_total", self.prompt_tokens, "Tokens of prompts."),
            ("prompt_tokens_cached_total", self.cached_tokens, "Tokens of prompts that were in the cache."),
            ("completion_tokens_total", self.completion_tokens, "Tokens of answers, thoughts included."),
            ("reasoning_tokens_total", self.reasoning_tokens, "Tokens of thoughts."),
            ("waiting_seconds_total", self.waiting_s, "Seconds that requests waited for the engine."),
            ("first_token_seconds_total", self.first_token_s, "Seconds from the engine's start to first tokens."),
            ("decoding_seconds_total", self.answering_s, "Seconds that the engine spent on tokens of answers."),
            ("expert_hits_total", self.expert_hits, "Active experts that were in GPU memory, where it is shared."),
            ("expert_misses_total", self.expert_misses, "Active experts that were not in GPU memory."),
            ("measured_tokens_total", self.measured_tokens, "Tokens of the steps whose parts were measured."),
            ("exchange_seconds_total", self.exchange_s, "Seconds of exchanges in a ring, for the measured tokens."),
        ):
            family(name, "counter", about, ("", value))
        return "\n".join(lines) + "\n"
