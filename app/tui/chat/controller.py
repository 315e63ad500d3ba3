"""What happens when the person sends, stops, asks again, edits, picks: the chat without its screen. No Textual.

The controller owns the state; everything it changes it says to ``listener`` as an update of :mod:`app.tui.chat.state`.
Its calls come from one event loop, in which :meth:`ChatController.run` must be running.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress

from app.conversations.store import ConversationStore, MessageRecord, State, StoreError
from app.engine_client import Engine, EngineDied
from app.settings.schema import Settings
from app.text_safety import sanitize
from app.tui.chat.engine_link import EngineLink, Pulling
from app.tui.chat.saving import RETRY_SAVE_S, Saver, rename
from app.tui.chat.state import (
    BUSY,
    BeamsChanged,
    Entry,
    EntryAdded,
    EntryChanged,
    FellBack,
    NetworkChanged,
    PathChanged,
    Phase,
    Severity,
    Status,
    StatusChanged,
    TimingArrived,
    Update,
    UserNotice,
    context_to_come,
)
from app.tui.chat.thread import Thread, alternative, answer_place, stored_alternative
from app.tui.chat.turn import ChatTurn, autosave, completed, failed, generate_request
from engine.ipc.messages import (
    AnyEvent,
    Beam,
    BeamEstimates,
    BeamProgress,
    Cancel,
    Failed,
    Finished,
    Notice,
    Piece,
    Prefill,
    Progress,
    Timing,
)

AUTOSAVE_S = 0.5
"""Half of the second of text that a crash may cost; the other half is for a slow disk."""
WATCH_ENGINE_S = 1.0


class ChatController:
    def __init__(
        self,
        engine: Engine,
        store: ConversationStore,
        options: Settings,
        listener: Callable[[Update], None],
        *,
        is_missing: Callable[[str], bool] = lambda model: False,
        autosave_s: float = AUTOSAVE_S,
        watch_engine_s: float = WATCH_ENGINE_S,
    ) -> None:
        self._tell = listener
        self.store = store
        self.options = options
        self.status = Status(model=options.model, beams=options.beams)
        self.thread = Thread(system=options.system_prompt, model=options.model)
        self.beams: tuple[Beam, ...] = ()
        self.timing: Timing | None = None
        self.link = EngineLink(
            engine, self.status, self._status_changed, is_missing, self._fall_back, self._network_changed
        )
        self.pulling = Pulling(self.link, self._say)
        self._engine = engine
        self._saver = Saver(store, self._store_problem, self._saved_late)
        self._autosave_s = autosave_s
        self._watch_engine_s = watch_engine_s
        self._turns: deque[ChatTurn] = deque()
        self._current: ChatTurn | None = None
        self._beam_turn: ChatTurn | None = None
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        engine.on_notice = self._engine_notice

    # --- what the screen asks -------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Is a question being answered, or waiting?"""
        return self._current is not None or bool(self._turns)

    @property
    def beam_search_runs(self) -> bool:
        return self._beam_turn is not None and not self._beam_turn.ended

    @property
    def unsaved(self) -> int:
        """How many messages are not on disk."""
        return self._saver.unsaved

    def submit(self, text: str) -> None:
        """A new question at the end of the conversation. It is on disk (or the person told why not) before the engine
        hears of it."""
        question = Entry("user", sanitize(text))
        self._ask([*self.thread.path, question], EntryAdded(question))

    def regenerate(self, entry: Entry | None = None) -> None:
        """Another answer in the place of ``entry`` (default: the last one); the old one stays as an alternative."""
        path = self.thread.path
        if not path:
            self._say("Nothing to regenerate yet.", "warning")
            return
        index = path.index(entry) if entry in path else len(path) - 1
        last = index if path[index].role == "user" else index - 1
        if last < 0:
            return
        self.stop_soon()
        self._ask(path[: last + 1], PathChanged())

    def edit(self, entry: Entry, text: str) -> None:
        """Ask ``entry`` in other words: a new branch; the old one stays as an alternative."""
        path = self.thread.path
        if entry not in path or entry.role != "user":
            return
        self.stop_soon()
        self._ask([*path[: path.index(entry)], Entry("user", sanitize(text))], PathChanged())

    def switch(self, entry: Entry, offset: int) -> None:
        """Show the alternative ``offset`` after ``entry`` (around the end), and what follows it."""
        if entry.record is None or entry.siblings < 2:
            self._say("This message has no alternatives.", "information")
            return
        try:
            chosen = alternative(self.store, entry.record, offset)
            self._show(self.store.select(chosen), focus=chosen)
        except StoreError as error:
            self._say(str(error), "error")

    def new_conversation(self) -> None:
        self.stop_soon()
        self.thread = Thread(system=self.options.system_prompt, model=self.options.model)
        self._conversation_changed()
        self._tell(PathChanged())

    def open_conversation(self, conversation: int, message: int | None = None) -> bool:
        """Show a conversation of the store (at ``message``, whose branch is selected); whether that worked."""
        try:
            found = self.store.conversation(conversation)
            records = self.store.shown(conversation) if message is None else self.store.select(message)
        except StoreError as error:
            self._say(str(error), "error")
            return False
        if self.thread.conversation != conversation:
            self.stop_soon()
        self.thread = Thread(found.id, found.title, found.system, found.model)
        self._conversation_changed()
        self._show(records, focus=message)
        return True

    def forget_conversation(self, conversation: int) -> None:
        """``conversation`` was deleted: if it is the one shown, an empty one takes its place."""
        if self.thread.conversation == conversation:
            self.new_conversation()

    def rename(self, title: str, done: Callable[[], None] = lambda: None) -> None:
        """Name the conversation that is shown; ``done`` is called when that is on disk, or cannot be."""
        self._background(self._rename(self.thread, title, done))

    async def _rename(self, thread: Thread, title: str, done: Callable[[], None]) -> None:
        try:
            await rename(self.store, thread, title)
        except StoreError as error:
            self._say(str(error), "error")
        self._status_changed()
        done()

    def apply(self, options: Settings) -> None:
        """Other settings: the model is loaded again if it must be, the rest holds from the next answer on."""
        reload = not options.loads_like(self.options)
        self.options = options
        self.status.beams = options.beams
        if not self.thread.path:
            self.thread.system, self.thread.model = options.system_prompt, options.model
        if reload:
            self.stop_soon()
            self._background(self.link.abandon_loading())
            self._wake.set()
        self._status_changed()

    def load_again(self) -> None:
        """Load the model anew, after the answer that runs: it could not be had, or its files were changed."""
        self.link.forget()
        self.status.problem = ""
        self._wake.set()

    def stop_soon(self) -> bool:
        """Stop what is being answered and what waits; the text stays. If nothing is, stop fetching the model: what has
        come of it is kept, and the next question goes on with it. Whether there was anything to stop."""
        turns = [turn for turn in (self._current, *self._turns) if turn is not None and not turn.ended]
        self._turns.clear()
        for turn in turns:
            if turn.request is None:
                self._end(turn, "stopped", "Cancelled before answering.")
            elif not turn.stopping:
                turn.stopping = True
                self.status.phase = Phase.STOPPING
                self._background(self._cancel(turn.request))
        self._count_waiting()
        fetching = not turns and self.status.phase is Phase.FETCHING
        if fetching:
            self._background(self.link.abandon_loading())
        return bool(turns) or fetching

    def pick_beam(self, index: int) -> None:
        """Make candidate ``index`` the answer: at once if the search has ended, else it is stopped for it."""
        turn = self._beam_turn
        if turn is None or not 0 <= index < len(self.beams):
            self._say("There are no candidates to pick from.", "warning")
            return
        text = sanitize(self.beams[index].text)
        if not turn.ended:
            turn.picked = text
            self.stop_soon()
        else:
            self._take_candidate(turn, text)

    async def estimate_beams(self, widths: Sequence[int]) -> BeamEstimates | str:
        return await self.link.estimate_beams(widths, self.context_to_come)

    @property
    def context_to_come(self) -> int:
        return context_to_come(self.status, self.thread.path, self.options.max_tokens)

    # --- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Load the model, then answer what is asked, for ever. When cancelled, what there is of an answer is saved."""
        watcher = asyncio.create_task(self._watch_engine(), name="engine watch")
        try:
            await self.link.bring_up(lambda: self.options)
            while True:
                while self._turns:
                    turn = self._current = self._turns.popleft()
                    self._count_waiting()
                    await self._answer(turn)
                    self._current = None
                if not self.status.problem and not self.link.has(self.options):
                    await self.link.bring_up(lambda: self.options)
                    continue
                self._wake.clear()
                if not self._turns:
                    await self._wake.wait()
        finally:
            watcher.cancel()
            for unfinished in (self._current, *self._turns):
                if unfinished is not None:
                    self._end(unfinished, "stopped", "Stopped.")
            self._saver.retry()
            await self._saver.settle()

    async def _watch_engine(self) -> None:
        """Notice an engine that dies while nothing is asked of it; try again to save what could not be saved."""
        waited = 0.0
        while True:
            await asyncio.sleep(self._watch_engine_s)
            idle = self._current is None and self.status.phase is Phase.READY
            if idle and not self._engine.running:
                self._engine_died("The engine ended.")
                self._wake.set()
            waited += self._watch_engine_s
            if self._saver.problem and waited >= RETRY_SAVE_S:
                waited = 0.0
                self._saver.retry()

    def _save(self, turn: ChatTurn | None = None) -> None:
        """Bring ``turn`` (default: what is shown) to disk, now or, if the database is locked, as soon as it can be."""
        thread, path = (turn.thread, turn.whole) if turn is not None else (self.thread, self.thread.path)
        if not self._saver.save(thread, path):
            self._background(self._saver.settle())

    # --- one turn -------------------------------------------------------------------------------------------------

    def _ask(self, path: list[Entry], update: Update) -> None:
        answer = Entry("assistant", "", state="writing", model=self.options.model)
        turn = ChatTurn(self.thread, path, answer, self.options.beams)
        self.thread.path = [*path, answer]
        self._save()
        self._turns.append(turn)
        if not self.link.has(self.options):
            answer.note = "Waiting for the model."
        elif self._current is not None or len(self._turns) > 1:
            answer.note = "Queued behind the previous answer."
        self._count_waiting()
        self._tell(update)
        if isinstance(update, EntryAdded):
            self._tell(EntryAdded(answer))
        self._wake.set()

    async def _answer(self, turn: ChatTurn) -> None:
        saving = asyncio.create_task(autosave(turn, self._saver, self._autosave_s), name="autosave")
        try:
            ready = await self.link.bring_up(lambda: self.options)
            if turn.ended:
                return
            if not ready:
                self._end(turn, "failed", self.status.problem)
                return
            await self._saver.settle()
            if not turn.ended:
                await self._generate(turn)
        except EngineDied as died:
            self._end(turn, "failed", "The engine died before the answer was complete.")
            self._engine_died(str(died))
        finally:
            saving.cancel()
            if turn.request is not None and self.status.phase in BUSY:
                self.status.phase = Phase.READY
                self._status_changed()

    async def _generate(self, turn: ChatTurn) -> None:
        request = generate_request(self._engine.new_id(), turn, self.options)
        turn.request = request.id
        turn.answer.note = ""
        if self.link.status.facts is not None:
            turn.answer.model = self.link.status.facts.name
        self.status.phase, self.status.prefill, self.status.tokens_per_s = Phase.READING, None, 0.0
        if turn.beams > 1:
            self.beams, self._beam_turn = (), turn
            self._tell(BeamsChanged((), 0, True))
        self._tell(EntryChanged(turn.answer, live=True))
        self._status_changed()
        async for event in self._engine.stream(request):
            self._take(turn, event)
        if not turn.ended:
            self._end(turn, "failed", "The engine gave no answer.")

    def _take(self, turn: ChatTurn, event: AnyEvent) -> None:
        self.status.progress = event if isinstance(event, Progress) else None
        match event:
            case Progress():
                self._status_changed()
            case Prefill():
                self.status.prefill, turn.prompt_tokens = event, event.total
                self.status.context_used = event.done
                self._status_changed()
            case Piece():
                self._grow(turn, turn.answer.content + turn.safe.feed(event.text), event.tokens, event.tokens_per_s)
            case BeamProgress():
                self.beams = tuple(event.beams)
                best = sanitize(event.beams[0].text) if event.beams else ""
                self._grow(turn, best, event.step, event.tokens_per_s)
                self._tell(BeamsChanged(self.beams, event.step, True, event.tokens_per_s))
            case Timing():
                self.timing = event
                self._tell(TimingArrived(event))
            case Finished():
                self._finished(turn, event)
            case Failed():
                self._end(turn, *failed(turn.answer, event))

    def _grow(self, turn: ChatTurn, text: str, tokens: int, tokens_per_s: float) -> None:
        turn.answer.content, turn.answer.dirty = text, True
        turn.answer.tokens, turn.answer.tokens_per_s = tokens, tokens_per_s
        status = self.status
        before = status.phase
        if not turn.stopping:
            status.phase = Phase.ANSWERING
        status.prefill, status.tokens_per_s = None, tokens_per_s
        status.context_used = turn.prompt_tokens + tokens
        self._tell(EntryChanged(turn.answer, live=True))
        if status.phase is not before:
            self._status_changed()

    def _finished(self, turn: ChatTurn, event: Finished) -> None:
        self.status.tokens_per_s = event.tokens_per_s
        self.status.context_used = event.prompt_tokens + event.completion_tokens
        self._end(turn, *completed(turn.answer, event))
        if event.probe_s is not None:
            self.status.probe_s = event.probe_s
        if event.timing is not None:
            self.timing = event.timing
            self._tell(TimingArrived(event.timing))
        if turn.beams > 1:
            self.beams = tuple(event.beams) or self.beams
            self._tell(BeamsChanged(self.beams, event.completion_tokens, False, event.tokens_per_s))
            if turn.picked is not None:
                self._take_candidate(turn, turn.picked)

    def _end(self, turn: ChatTurn, state: State, note: str) -> None:
        if not turn.end():
            return
        answer = turn.answer
        answer.state, answer.note, answer.dirty = state, note, True
        self.status.prefill = None
        self._save(turn)
        if self._beam_turn is turn:
            self._tell(BeamsChanged(self.beams, answer.tokens, False, answer.tokens_per_s))
        self._tell(EntryChanged(answer))

    def _take_candidate(self, turn: ChatTurn, text: str) -> None:
        """``text`` is the answer of ``turn`` from now on, beside the others."""
        path = self.thread.path if turn.thread is self.thread else []
        index = answer_place(path, turn.path[-1])
        if index is None:
            self._say("That question is not on the screen any more.", "warning")
            return
        shown = path[index] if index < len(path) else None
        if shown is not None and shown.content == text:
            return
        try:
            same = stored_alternative(self.store, shown, text)
            if same is not None:
                self._show(self.store.select(same.id), focus=same.id)
                return
        except StoreError as error:
            self._say(str(error), "error")
        answer = Entry("assistant", text, model=turn.answer.model, finish_reason="stop", note="")
        self.thread.path = [*path[:index], answer]
        self._save()
        self._tell(PathChanged(answer))

    async def _cancel(self, request: int) -> None:
        with suppress(EngineDied):
            await self._engine.send(Cancel(id=self._engine.new_id(), target=request))

    # --- telling --------------------------------------------------------------------------------------------------

    def _show(self, records: Sequence[MessageRecord], focus: int | None = None) -> None:
        running = {turn.answer.record: turn.answer for turn in (self._current, *self._turns) if turn is not None}
        entries = [running.get(record.id) or Entry.of(record) for record in records]
        self.thread.path = entries
        self._tell(PathChanged(next((entry for entry in entries if entry.record == focus), None)))

    def _conversation_changed(self) -> None:
        self.beams, self._beam_turn = (), None
        self.status.context_used, self.status.tokens_per_s = None, 0.0
        self._tell(BeamsChanged((), 0, False))
        self._status_changed()

    def _fall_back(self, problem: str, worked: Settings) -> None:
        self._say(f"{self.options.model} cannot be used: {problem} {worked.model} stays in use.", "error")
        self.options = self.options.loading_as(worked)
        self._tell(FellBack(self.options))

    def _engine_died(self, reason: str) -> None:
        self.link.lost()
        self._say(f"{reason} The text is kept; the engine is started again.", "error")

    def _store_problem(self, problem: str) -> None:
        recovered = bool(self.status.unsaved) and not problem
        self.status.unsaved = problem
        if problem:
            self._say(f"Not saved: {problem}", "error")
        elif recovered:
            self._say("Everything is saved again.")
        self._status_changed()

    def _saved_late(self) -> None:
        for entry in self.thread.path:
            if entry.state != "writing":
                self._tell(EntryChanged(entry))
        self._status_changed()

    def _engine_notice(self, notice: Notice) -> None:
        # A machine that is lost and what becomes of the ring are two lines, and both matter.
        self._tell(UserNotice(sanitize(notice.text), "warning", beside=True))

    def _network_changed(self) -> None:
        for line in self.link.machines_away():
            self._tell(UserNotice(line, "warning", beside=True))
        self._tell(NetworkChanged())

    def _count_waiting(self) -> None:
        self.status.waiting = len(self._turns)
        self._status_changed()

    def _status_changed(self) -> None:
        self._tell(StatusChanged())

    def _say(self, text: str, severity: Severity = "information") -> None:
        self._tell(UserNotice(text, severity))

    def _background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
