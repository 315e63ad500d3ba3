"""Answers to the questions of the chat: the turns that wait, the engine's events, the text on disk. No Textual."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from app.attachments.figures import too_much, unseen
from app.chat.engine_link import EngineLink
from app.chat.saving import RETRY_SAVE_S, Saver
from app.chat.state import (
    BUSY,
    TOO_LONG,
    AnswerEnded,
    BeamsChanged,
    Entry,
    EntryChanged,
    Guesses,
    Phase,
    PromptRead,
    StatusChanged,
    TimingArrived,
    Update,
    UserNotice,
    characters,
)
from app.chat.thread import NOTHING, BegunAnswer, Thread, prompt_messages
from app.chat.titling import TitleWriter
from app.chat.words import slowest_words
from app.conversations.kept_prefixes import prefix_owner
from app.conversations.records import Generation, State, Thoughts
from app.conversations.store import ConversationStore, StoreError
from app.engine_client import Engine, EngineDied
from app.settings.layers import effective
from app.settings.schema import Settings
from app.text_safety import Sanitizer, sanitize
from engine.ipc.messages import (
    AnyEvent,
    Beam,
    BeamProgress,
    Cancel,
    Failed,
    Finished,
    Generate,
    Piece,
    Prefill,
    Progress,
    Sampling,
    Timing,
)

_LONG_CHAT = "Most of it is the chat before the question: /delete shortens it, /new begins another."
"""Addition to the message if the question itself is not too long."""

UNEXPECTED = "Something went wrong; details are in the log."
"""Message for an error of this program that ended an answer or loading."""


@dataclass(eq=False)
class Growing:
    """The text that a turn has added to ``answer``, and to its thoughts, so far."""

    answer: Entry
    text: str = ""
    thought: str = ""
    safe: Sanitizer = field(default_factory=Sanitizer)
    safe_thoughts: Sanitizer = field(default_factory=Sanitizer)

    def add(self, event: Piece, begun: BegunAnswer) -> None:
        """Add ``event`` to what was there before the turn."""
        if event.withdrawn:
            self.text = self.thought = ""
            self.safe, self.safe_thoughts = Sanitizer(), Sanitizer()
        if event.reasoning or event.reasoning_tokens:
            self.thought += self.safe_thoughts.feed(event.reasoning)
            new = Thoughts(self.thought, event.reasoning_tokens, event.reasoning_s)
            self.answer.thoughts = begun.with_thoughts(new)
        self.text += self.safe.feed(event.text)


@dataclass(eq=False)
class ChatTurn:
    """One question and its answer, waiting or being answered. ``path`` ends with the question."""

    thread: Thread
    path: list[Entry]
    answer: Entry
    beams: int
    begun: BegunAnswer = NOTHING
    """The part of the answer that was there before, and is gone on with."""
    others: list[Entry] = field(default_factory=list)
    """Further answers to the question, which are written at the same time."""
    temperatures: list[float] = field(default_factory=list)
    """Temperature of each of several answers."""
    growing: list[Growing] = field(init=False)
    request: int | None = None
    stopping: bool = False
    prompt_tokens: int = 0
    picked: Beam | None = None
    """The candidate that was picked while the beam search ran."""
    ended: bool = False
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.growing = [Growing(answer) for answer in self.answers]

    @property
    def answers(self) -> list[Entry]:
        """The answer, and the others to the same question."""
        return [self.answer, *self.others]

    @property
    def shown(self) -> Entry:
        """The answer that its conversation shows."""
        return next((answer for answer in self.others if answer in self.thread.path), self.answer)

    def whole(self, answer: Entry) -> list[Entry]:
        """The path that ends with ``answer``."""
        return [*self.path, answer]

    def end(self) -> bool:
        """End the turn. Waits for a partial text that is being written; none is written afterwards.

        Returns False if the turn had ended before.
        """
        with self._writing:
            before, self.ended = self.ended, True
        return not before

    def write_partial(self, store: ConversationStore, record: int, text: str, thoughts: Thoughts) -> None:
        """Write ``text`` to disk unless the turn has ended. Called in a thread. Raises StoreError."""
        with self._writing:
            if not self.ended:
                self.thread.store_in(store).update(record, content=text, thoughts=thoughts)


def ends_of(turn: ChatTurn, event: Finished) -> list[tuple[State, str]]:
    """Complete the answers of ``turn`` from ``event``. Returns the state of each and a note about how it ended."""
    if not turn.others:
        return [completed(turn.answer, turn.begun, event)]
    sampling, ends = event.sampling or Sampling(), list[tuple[State, str]]()
    for answer, sample, temperature in zip(turn.answers, event.samples, turn.temperatures, strict=False):
        own_event = msgspec.structs.replace(
            event,
            text=sample.text,
            finish_reason=sample.finish_reason,
            completion_tokens=len(sample.token_ids),
            tokens_per_s=event.tokens_per_s / len(event.samples),
            reasoning=sample.reasoning,
            reasoning_tokens=sample.reasoning_tokens,
            reasoning_s=answer.thoughts.seconds,
            sampling=msgspec.structs.replace(sampling, temperature=temperature),
        )
        ends.append(completed(answer, NOTHING, own_event))
    return ends + [("stopped", "Stopped.")] * (len(turn.answers) - len(ends))


def completed(answer: Entry, begun: BegunAnswer, event: Finished) -> tuple[State, str]:
    """Complete ``answer`` from ``event``. Returns its state and a note about how it ended."""
    answer.content = begun.text + sanitize(event.text)
    thoughts = Thoughts(sanitize(event.reasoning), event.reasoning_tokens, event.reasoning_s)
    answer.thoughts = begun.with_thoughts(thoughts)
    answer.tokens, answer.tokens_per_s = begun.tokens + event.completion_tokens, event.tokens_per_s
    answer.finish_reason = event.finish_reason
    answer.generation = generated(answer.generation, event)
    if event.finish_reason == "cancelled":
        return "stopped", "Stopped."
    if event.finish_reason != "length":
        return "complete", _nothing_said(answer, begun)
    if answer.thoughts.text and not answer.content:
        return "complete", "The length limit was reached before the answer began. Raise it, or turn thinking off."
    return "complete", "The answer reached the length limit."


def _nothing_said(answer: Entry, begun: BegunAnswer) -> str:
    """A note about an answer that ended by itself without a word; empty if it has one."""
    if begun.text:
        return "The model had nothing to add." if answer.content == begun.text else ""
    if answer.content.strip():
        return ""
    if answer.thoughts.text:
        return "The model thought, and then said nothing. Ask again, or turn thinking off."
    return "The model said nothing."


def generated(begun: Generation, event: Finished) -> Generation:
    """``begun`` with what ``event`` says of how the answer was generated."""
    used = msgspec.structs.asdict(event.sampling or Sampling())
    kept = {field.name for field in dataclasses.fields(Generation)}  # the penalties that only programs ask for are not
    return dataclasses.replace(
        begun,
        **{name: value for name, value in used.items() if name in kept},
        prompt_tokens=event.prompt_tokens,
        ttft_s=event.ttft_s or None,
    )


def failed(turn: ChatTurn, event: Failed) -> tuple[State, str]:
    """State and text of an answer that failed, as :func:`completed` gives them."""
    if turn.begun.text:
        return "failed", event.error
    too_long = event.kind == "context"
    for answer in turn.answers:
        answer.finish_reason = TOO_LONG if too_long else ""
    if not too_long:
        return "failed", event.error
    *before, question = map(characters, turn.path)
    if sum(before) > question:
        return "failed", f"{event.error} {_LONG_CHAT}"
    return "failed", f"{event.error} Use /edit to shorten it; later questions leave it out."


def generate_request(request_id: int, turn: ChatTurn, options: Settings, *, sees: bool = False) -> Generate:
    """The request to the engine, with the values of ``options``. ``sees``: with the pictures.

    A beam search takes the likeliest continuations, so it gets no sampling. What is read of a temporary conversation is
    never kept on disk, and never quoted.
    """
    saved = turn.thread.conversation
    conversation = "" if saved is None or turn.thread.memory is not None else prefix_owner(saved)
    return Generate(
        id=request_id,
        messages=[*prompt_messages(turn.thread.system, turn.path, sees=sees), *turn.begun.messages],
        continue_last=bool(turn.begun.text),
        sampling=options.sampling if turn.beams == 1 else Sampling(),
        max_tokens=options.max_tokens,
        samples=len(turn.answers),
        temperatures=turn.temperatures,
        beams=turn.beams,
        length_penalty=options.length_penalty,
        thinking=options.thinks,
        effort=options.thinking_effort,
        program="chat",
        quotes=bool(conversation),
        conversation=conversation,
    )


STEP, HOTTEST = 0.3, 1.5
"""Difference between the temperatures of several answers to one question, and the highest."""


def spread_temperatures(middle: float, count: int) -> list[float]:
    """``count`` temperatures in rising order, around ``middle`` as far as there is room between 0 and HOTTEST."""
    hottest = max(HOTTEST, middle)
    first = max(0.0, min(middle - STEP * ((count - 1) // 2), hottest - STEP * (count - 1)))
    step = min(STEP, (hottest - first) / max(1, count - 1))
    return [round(first + step * index, 2) for index in range(count)]


async def autosave(turn: ChatTurn, saver: Saver, interval_s: float) -> None:
    """Write the growing answer to disk every ``interval_s`` seconds, in a thread so that the screen is not blocked."""
    while not turn.ended:
        await asyncio.sleep(RETRY_SAVE_S if saver.problem else interval_s)
        for answer in turn.answers:
            if not turn.ended and answer.dirty:
                await _save_partial(turn, answer, saver)


async def _save_partial(turn: ChatTurn, answer: Entry, saver: Saver) -> None:
    if answer.record is None or saver.problem:
        saver.save(turn.thread, turn.whole(answer))
    else:
        text, thoughts, answer.dirty = answer.content, answer.thoughts, False
        try:
            await asyncio.to_thread(turn.write_partial, saver.store, answer.record, text, thoughts)
        except StoreError as error:
            answer.dirty = True
            saver.refused(turn.thread, turn.whole(answer), error)
    await saver.settle()


class AnswerLoop:
    """Answers questions one after the other: has the model loaded, follows the engine's events, saves the text.

    Each answer belongs to its conversation, whichever one is shown. ``options`` gives the settings for the next answer.
    ``shows`` says whether a conversation is shown. ``emit`` is called with each change, ``on_picked`` with a turn and
    the candidate that was picked while its beam search ran, and ``on_free`` with each turn that has ended.
    """

    def __init__(
        self,
        engine: Engine,
        link: EngineLink,
        saver: Saver,
        options: Callable[[], Settings],
        shows: Callable[[Thread], bool],
        emit: Callable[[Update], None],
        on_picked: Callable[[ChatTurn, Beam], None],
        on_free: Callable[[ChatTurn], None],
        *,
        autosave_s: float,
        watch_engine_s: float,
    ) -> None:
        self.beams: tuple[Beam, ...] = ()
        """Candidates of the last beam search, best first."""
        self.beam_turn: ChatTurn | None = None
        """The turn of those candidates."""
        self.several: ChatTurn | None = None
        """The last turn with several answers at once."""
        self.timing: Timing | None = None
        self._engine = engine
        self._link = link
        self._status = link.status
        self._saver = saver
        self._options = options
        self._shows = shows
        self._emit = emit
        self._on_picked = on_picked
        self._on_free = on_free
        self._autosave_s = autosave_s
        self._watch_engine_s = watch_engine_s
        self._waiting: deque[ChatTurn] = deque()
        self._current: ChatTurn | None = None
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._titles = TitleWriter(engine, link, saver.store, options, emit)

    @property
    def busy(self) -> bool:
        """Whether a question is being answered or is waiting."""
        return self._current is not None or bool(self._waiting)

    @property
    def unfinished(self) -> list[ChatTurn]:
        """The turn being answered and those that wait."""
        return [turn for turn in (self._current, *self._waiting) if turn is not None]

    def answers(self, thread: Thread) -> bool:
        """Whether a question of ``thread`` is being answered or is waiting."""
        return any(turn.thread is thread and not turn.ended for turn in self.unfinished)

    def add(self, turn: ChatTurn) -> None:
        """Answer ``turn`` after those that wait."""
        if not self._link.has(self._options()):
            turn.answer.note = "Waiting for the model."
        elif self.busy:
            last = self.unfinished[-1]
            other = "the answer in another chat" if last.thread is not turn.thread else "the previous answer"
            turn.answer.note = f"Waiting for {other}."
        self._waiting.append(turn)
        self._count_waiting()

    def wake(self) -> None:
        """Look again for a question to answer, or a model to load."""
        self._wake.set()

    def stop(self, thread: Thread) -> bool:
        """Stop the answer in ``thread`` and drop its questions that wait. The text stays. False if there was none."""
        turns = [turn for turn in self.unfinished if turn.thread is thread and not turn.ended]
        self._waiting = deque(turn for turn in self._waiting if turn.thread is not thread)
        for turn in turns:
            if turn.request is None:
                self._end(turn, "stopped", "Cancelled before the answer began.")
            elif not turn.stopping:
                turn.stopping = True
                self._status.phase = Phase.STOPPING
                self.run_in_background(self._cancel(turn.request))
        self._count_waiting()
        return bool(turns)

    def shown(self, thread: Thread) -> None:
        """``thread`` is shown now, another one than before: its beam search is followed, if one runs in it."""
        current = self._current
        self.beam_turn = current if current is not None and current.beams > 1 and current.thread is thread else None
        self.beams = ()
        self._status.elsewhere = current is not None and current.thread is not thread
        self._status.context_used, self._status.tokens_per_s = None, 0.0
        self._status.prefill = self._status.under_way = self._status.prompt = self._status.guesses = None
        self._emit(BeamsChanged((), 0, self.beam_turn is not None))

    def save(self, thread: Thread, path: Sequence[Entry]) -> None:
        """Write ``path`` to disk, now or as soon as the database is no longer locked."""
        if not self._saver.save(thread, path):
            self.run_in_background(self._saver.settle())

    def run_in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> None:
        """Load the model, then answer questions until cancelled. Partial answers are saved at the end."""
        watcher = asyncio.create_task(self._watch_engine(), name="engine watch")
        try:
            await self._attempt(self._link.bring_up(self._options))
            while True:
                await self._attempt(self._next())
        finally:
            watcher.cancel()
            for turn in self.unfinished:
                self._end(turn, "stopped", "Stopped.")
            self._saver.retry()
            await self._saver.settle()

    async def _next(self) -> None:
        """Answer the question that waits longest. If none does, load the model, or wait until there is work."""
        if self._waiting:
            turn = self._current = self._waiting.popleft()
            self._count_waiting()
            await self._answer(turn)
            self._current = None
            self._status.elsewhere = False
            self._titles.answered(turn.thread)
            self._on_free(turn)
        elif not self._status.problem and not self._link.has(self._options()):
            await self._link.bring_up(self._options)
        else:
            await self._wait()

    async def _wait(self) -> None:
        """Wait until there is work. Meanwhile chats get their titles."""
        self._wake.clear()
        titling = asyncio.create_task(self._titles.write(), name="titles")
        try:
            await self._wake.wait()
        finally:
            titling.cancel()
            for failure in await asyncio.gather(titling, return_exceptions=True):
                if isinstance(failure, Exception):
                    context = {"message": "Writing a title failed.", "exception": failure}
                    asyncio.get_running_loop().call_exception_handler(context)

    async def _attempt(self, work: Awaitable[object]) -> None:
        try:
            await work
        except Exception as error:
            self._went_wrong(error)

    def _went_wrong(self, error: Exception) -> None:
        """An error of this program ends one answer, or loading; nothing is tried again before the person asks."""
        turn, self._current = self._current, None
        self._status.elsewhere = False
        if turn is None:
            self._status.problem = UNEXPECTED
            self._status.phase = Phase.UNAVAILABLE
        else:
            self._end(turn, "failed", f"{UNEXPECTED} /again answers the question again.")
        self._emit(StatusChanged())
        asyncio.get_running_loop().call_exception_handler({"message": "Answering failed.", "exception": error})
        if turn is not None:
            self._on_free(turn)

    async def _watch_engine(self) -> None:
        """Notice an engine that dies between questions, and servers; try again to save what could not be saved."""
        waited = 0.0
        while True:
            self._link.look_for_servers()
            for line in self._saver.look_after_file():
                self._emit(UserNotice(line, "warning", beside=True))
            await asyncio.sleep(self._watch_engine_s)
            idle = self._current is None and self._status.phase is Phase.READY
            if idle and not self._engine.running:
                self._engine_died("The engine ended.")
                self._wake.set()
            waited += self._watch_engine_s
            if self._saver.problem and waited >= RETRY_SAVE_S:
                waited = 0.0
                self._saver.retry()

    # --- one turn -------------------------------------------------------------------------------------------------

    async def _answer(self, turn: ChatTurn) -> None:
        saving = asyncio.create_task(autosave(turn, self._saver, self._autosave_s), name="autosave")
        try:
            ready = await self._link.bring_up(self._options)
            if turn.ended:
                return
            if not ready:
                self._end(turn, "failed", self._status.problem)
                return
            await self._saver.settle()
            if not turn.ended:
                await self._generate(turn)
        except EngineDied as died:
            self._end(turn, "failed", "The engine ended before the answer was complete.")
            self._engine_died(str(died))
        finally:
            saving.cancel()
            if turn.request is not None and self._status.phase in BUSY:
                self._status.phase = Phase.READY
                self._emit(StatusChanged())

    async def _generate(self, turn: ChatTurn) -> None:
        facts = self._status.facts
        sees = facts is not None and facts.sight is not None
        # Earlier pictures become their names for a model that sees none, but what is asked now does not.
        problem = unseen(turn.path[-1].attachments, facts)
        if sees:
            problem = problem or too_much([each for entry in turn.path for each in entry.attachments])
        if problem:
            self._end(turn, "failed", problem)
            return
        options = effective(self._options(), turn.thread.values)
        request = generate_request(self._engine.new_id(), turn, options, sees=sees)
        turn.request = request.id
        for answer in turn.answers:
            answer.note = ""
        shown = self._shows(turn.thread)
        if turn.beams > 1:
            turn.answer.generation = dataclasses.replace(
                turn.answer.generation, beams=turn.beams, length_penalty=request.length_penalty
            )
        if self._status.facts is not None:
            for answer in turn.answers:
                answer.model = self._status.facts.name
        self._status.phase, self._status.prefill, self._status.tokens_per_s = Phase.READING, None, 0.0
        self._status.elsewhere = not shown
        if turn.beams > 1 and shown:
            self.beams, self.beam_turn = (), turn
            self._emit(BeamsChanged((), 0, True))
        self._emit(EntryChanged(turn.shown, live=True))
        self._emit(StatusChanged())
        async for event in self._engine.stream(request):
            self._take(turn, event)
        if not turn.ended:
            self._end(turn, "failed", "The engine gave no answer.")

    def _take(self, turn: ChatTurn, event: AnyEvent) -> None:
        self._status.progress = event if isinstance(event, Progress) else None
        match event:
            case Progress():
                self._emit(StatusChanged())
            case Prefill():
                turn.prompt_tokens = event.total
                if self._shows(turn.thread):
                    self._status.prefill, self._status.context_used = event, event.done
                    self._status.under_way = event.under_way
                    self._emit(StatusChanged())
            case Piece():
                growing = turn.growing[event.sample]
                growing.add(event, turn.begun)
                share = event.tokens_per_s / len(turn.growing)
                self._grow(turn, growing.answer, growing.text, event.tokens, share, event)
            case BeamProgress():
                best = event.beams[0] if event.beams else Beam("", [], 0.0)
                turn.answer.thoughts = turn.begun.with_thoughts(Thoughts(sanitize(best.reasoning)))
                self._grow(turn, turn.answer, sanitize(best.text), event.step, event.tokens_per_s, event)
                if self.beam_turn is turn:
                    self.beams = tuple(event.beams)
                    self._emit(BeamsChanged(self.beams, event.step, True, event.tokens_per_s))
            case Timing():
                self._measured(event)
            case Finished():
                self._finished(turn, event)
            case Failed():
                self._end(turn, *failed(turn, event))

    def _grow(
        self, turn: ChatTurn, answer: Entry, text: str, tokens: int, tokens_per_s: float, event: Piece | BeamProgress
    ) -> None:
        """``event`` says that the turn has added ``text`` to ``answer`` so far, in ``tokens`` tokens."""
        answer.content, answer.dirty = turn.begun.text + text, True
        answer.tokens, answer.tokens_per_s = turn.begun.tokens + tokens, tokens_per_s
        status = self._status
        before = status.phase
        if not turn.stopping:
            status.phase = Phase.THINKING if answer.thoughts.text and not answer.content else Phase.ANSWERING
        if self._shows(turn.thread):
            status.prefill, status.tokens_per_s, status.under_way = None, event.tokens_per_s, event.under_way
            status.context_used = turn.prompt_tokens + tokens
        self._emit(EntryChanged(answer, live=True))
        if status.phase is not before:
            self._emit(StatusChanged())

    def _finished(self, turn: ChatTurn, event: Finished) -> None:
        ends = ends_of(turn, event)
        if self._shows(turn.thread):
            self._status.tokens_per_s = event.tokens_per_s
            tokens = turn.shown.tokens if turn.others else event.completion_tokens
            self._status.context_used = event.prompt_tokens + tokens
            self._status.prompt = PromptRead(event.prompt_tokens, event.cached_tokens, event.read_again)
            guesses = Guesses(event.completion_tokens, event.drafted_tokens, event.accepted_tokens)
            self._status.guesses = guesses if guesses.drafted and not turn.others else None
        self._status.ttft_s = event.ttft_s or None
        self._status.memory = event.memory or self._status.memory
        self._end_all(turn, ends)
        if event.probe_s is not None:
            self._status.probe_s = event.probe_s
        if event.timing is not None:
            self._measured(event.timing)
        if self.beam_turn is turn:
            self.beams = tuple(event.beams) or self.beams
            self._emit(BeamsChanged(self.beams, event.completion_tokens, False, event.tokens_per_s))
            if turn.picked is not None:
                self._on_picked(turn, turn.picked)

    def _measured(self, timing: Timing) -> None:
        self.timing = timing
        self._status.slowest = slowest_words(timing) if self._link.watching else ""
        self._emit(TimingArrived(timing))

    def _end(self, turn: ChatTurn, state: State, note: str) -> None:
        """End all answers of ``turn`` in the same way."""
        self._end_all(turn, [(state, note)] * len(turn.answers))

    def _end_all(self, turn: ChatTurn, ends: Sequence[tuple[State, str]]) -> None:
        if not turn.end():
            return
        for answer, (state, note) in zip(turn.answers, ends, strict=True):
            self._end_answer(turn, answer, state, note)
        if self.beam_turn is turn:
            answer = turn.answer
            self._emit(BeamsChanged(self.beams, answer.tokens, False, answer.tokens_per_s))
        for answer in turn.answers:
            self._emit(EntryChanged(answer))
        self._emit(AnswerEnded(turn.thread, turn.shown, self._shows(turn.thread)))

    def _end_answer(self, turn: ChatTurn, answer: Entry, state: State, note: str) -> None:
        if turn.begun.text and answer.content == turn.begun.text and state != "complete":
            # Nothing was added, so it is as complete as it was.
            state = turn.begun.state
        answer.state, answer.note, answer.dirty = state, note, True
        self._status.prefill = self._status.under_way = None
        self.save(turn.thread, turn.whole(answer))

    async def _cancel(self, request: int) -> None:
        with suppress(EngineDied):
            await self._engine.send(Cancel(id=self._engine.new_id(), target=request))

    def _engine_died(self, reason: str) -> None:
        self._link.lost()
        self._emit(UserNotice(f"{reason} The text is saved, and the engine is restarting.", "error"))

    def _count_waiting(self) -> None:
        self._status.waiting = len(self._waiting)
        self._emit(StatusChanged())
