"""The chat without its screen: sending, stopping, asking again, editing, switching branches, picking. No Textual."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from app.attachments.attachment import Attachment
from app.chat.answering import AnswerLoop, ChatTurn, spread_temperatures
from app.chat.deletions import Deletions
from app.chat.downloads import ModelFetcher
from app.chat.engine_link import EngineLink
from app.chat.saving import Saver, rename
from app.chat.setup import ChatSetup
from app.chat.state import (
    AnswerEnded,
    Entry,
    EntryAdded,
    EntryChanged,
    FellBack,
    NetworkChanged,
    NewQuestion,
    PathChanged,
    Phase,
    QuestionQueue,
    QuestionsReturned,
    QueueChanged,
    SettingsChanged,
    Severity,
    Status,
    StatusChanged,
    Update,
    UserNotice,
    context_to_come,
    new_key,
)
from app.chat.thread import BegunAnswer, Thread, alternative, answer_place, stored_alternative, why_not
from app.conversations.kept_prefixes import remove_prefixes_of
from app.conversations.opening import open_temporary
from app.conversations.records import EDITED, MessageRecord, Thoughts
from app.conversations.store import ConversationStore, StoreError
from app.engine_client import Engine
from app.settings.fields import SettingError
from app.settings.file import SettingsFile
from app.settings.layers import effective, value_in_effect
from app.settings.schema import RELOADING, Settings
from app.text_safety import one_line, sanitize
from engine.ipc.messages import Beam, BeamEstimates, Notice, Timing

AUTOSAVE_S = 0.5
"""Seconds between two writes of a growing answer. A crash may cost one second of text; half is left for a slow disk."""
WATCH_ENGINE_S = 1.0
"""Seconds between two checks whether the engine still runs."""


class ChatController:
    """Owns the state of the chat. Each change of it is emitted as an update of :mod:`app.chat.state`.

    It is also the one place that changes settings while the chat runs. Use it from one event loop, in which :meth:`run`
    is running.
    """

    def __init__(
        self,
        engine: Engine,
        store: ConversationStore,
        settings: SettingsFile,
        emit: Callable[[Update], None],
        *,
        is_missing: Callable[[str], bool] = lambda model: False,
        autosave_s: float = AUTOSAVE_S,
        watch_engine_s: float = WATCH_ENGINE_S,
    ) -> None:
        self._emit = emit
        self.store = store
        self._settings = settings
        options = settings.settings
        self.status = Status(model=options.model, beams=options.beams)
        self.thread = Thread(system=options.system_prompt, model=options.model)
        self.link = EngineLink(
            engine, self.status, self._status_changed, is_missing, self._fall_back, self._network_changed
        )
        self.pulling = ModelFetcher(self.link, emit)
        self._saver = Saver(store, self._store_problem, self._saved_late)
        self.answers = AnswerLoop(
            engine,
            self.link,
            self._saver,
            lambda: self.options,
            lambda thread: thread is self.thread,
            self._answer_changed,
            self._take_candidate,
            self._next_question,
            autosave_s=autosave_s,
            watch_engine_s=watch_engine_s,
        )
        self.setup = ChatSetup(
            store,
            lambda: self.thread,
            lambda: self.options,
            use_model=self.use_model,
            run=self.answers.run_in_background,
            changed=self._setup_changed,
            emit=emit,
        )
        self.deletions = Deletions(self)
        self.unread: set[int] = set()
        """Saved conversations with an answer that ended while another one was shown."""
        self._left: list[Thread] = []
        """Conversations that were left while questions of theirs waited."""
        self._watch_queue(self.thread)
        engine.on_notice = self._engine_notice

    # --- what the screen asks -------------------------------------------------------------------------------------

    @property
    def options(self) -> Settings:
        """The settings in effect. Those of the shown chat's answers are ``setup.options``."""
        return self._settings.settings

    @property
    def beams(self) -> tuple[Beam, ...]:
        """Candidates of the last beam search, best first."""
        return self.answers.beams

    @property
    def timing(self) -> Timing | None:
        """The latest measurements."""
        return self.answers.timing

    @property
    def busy(self) -> bool:
        """Whether a question is being answered or is waiting, in any conversation."""
        return self.answers.busy or any(thread.queue.items for thread in self.unfinished)

    @property
    def queue(self) -> QuestionQueue:
        """The questions that wait for the answer in the shown conversation."""
        return self.thread.queue

    @property
    def unfinished(self) -> list[Thread]:
        """The conversations of which a question is being answered or waits."""
        threads = [self.thread, *self._left]
        return [thread for thread in threads if thread.queue.items or self.answers.answers(thread)]

    @property
    def answering(self) -> frozenset[int]:
        """The saved conversations of :attr:`unfinished`."""
        return frozenset(thread.conversation or 0 for thread in self.unfinished if thread.memory is None)

    @property
    def beam_search_runs(self) -> bool:
        turn = self.answers.beam_turn
        return turn is not None and not turn.ended

    @property
    def unsaved(self) -> int:
        """Number of messages that are not on disk."""
        return self._saver.unsaved

    async def settle(self) -> None:
        """Wait while another write locks the store, until everything is on disk or cannot be."""
        await self._saver.settle()

    def submit(self, text: str, attachments: Sequence[Attachment] = ()) -> None:
        """Ask a new question at the end of the conversation, after the answer in progress and the questions queued.

        It is on disk before the engine gets it; if it cannot be saved, a notice says why.
        """
        question = NewQuestion(sanitize(text), tuple(attachments))
        if self.queue.items or self.answers.answers(self.thread):
            self.queue.add(question)
        else:
            self._submit(question)

    def regenerate(self, entry: Entry | None = None) -> None:
        """Ask for another answer in place of ``entry`` (default: the last). The old one stays as an alternative."""
        path = self.thread.path
        if not path:
            self.notify("There is no answer to regenerate yet.", "warning")
            return
        index = path.index(entry) if entry in path else len(path) - 1
        last = index if path[index].role == "user" else index - 1
        if last < 0:
            return
        self.stop_soon()
        self._ask(path[: last + 1], PathChanged())

    def ask_several(self, count: int, text: str = "") -> bool:
        """Ask the question ``text`` (empty: the last one, again) ``count`` times at once, at different temperatures.

        The other answers are alternatives to the first one. Returns False if there is no question, or one waits.
        """
        path = self.thread.path
        if self.queue.items or (text and self.answers.answers(self.thread)):
            self.notify("Wait for the answer, or stop it, before you ask several times at once.", "warning")
            return False
        update: Update = PathChanged()
        if text:
            question = Entry("user", sanitize(text))
            path, update = [*path, question], EntryAdded(question)
        else:
            self.stop_soon()
            path = path[:-1] if path and path[-1].role == "assistant" else path
        if not path:
            self.notify("There is no question to ask again yet.", "warning")
            return False
        facts = self.status.facts
        usual = value_in_effect("temperature", self.setup.options, facts.sampling if facts is not None else None)
        answers = [Entry("assistant", "", state="writing", model=self.options.model) for _ in range(count)]
        temperatures = spread_temperatures(usual if isinstance(usual, float) else 1.0, count)
        turn = ChatTurn(self.thread, list(path), answers[0], 1, others=answers[1:], temperatures=temperatures)
        self.answers.several = turn
        self._start(turn, update)
        if text:
            self._emit(EntryAdded(turn.answer))
        return True

    def pick_answer(self, index: int) -> None:
        """Show answer ``index`` of those that :meth:`ask_several` asked for. The others stay as alternatives."""
        turn = self.answers.several
        if turn is None or not 0 <= index < len(turn.answers):
            self.notify("There are no answers to choose from.", "warning")
            return
        picked = turn.answers[index]
        if turn.thread is not self.thread or answer_place(self.thread.path, turn.path[-1]) is None:
            self.notify("That question is no longer on the screen.", "warning")
        elif picked.record is None:
            self._replace_path(turn.whole(picked), picked)
        elif all(entry.record != picked.record for entry in self.thread.path):
            try:
                self.show(turn.thread.store_in(self.store).select(picked.record), focus=picked.record)
            except StoreError as error:
                self.notify(str(error), "error")

    def edit(self, entry: Entry, text: str, attachments: Sequence[Attachment] = ()) -> None:
        """Put a message with another ``text`` and ``attachments`` in place of ``entry``, which stays as an alternative.

        A question is answered again. An answer is marked as edited, and nothing is asked.
        """
        path, text = self.thread.path, sanitize(text)
        if entry not in path:
            return
        self.stop_soon()
        before = path[: path.index(entry)]
        if entry.role == "user":
            self._ask([*before, Entry("user", text, attachments=tuple(attachments))], PathChanged())
        elif text != entry.content:
            edited = Entry("assistant", text, model=entry.model, thoughts=entry.thoughts, generation=EDITED)
            self._replace_path([*before, edited], edited)
        else:
            return
        self._tell_what_followed(entry, path[len(before) + 1 :])

    def _tell_what_followed(self, entry: Entry, followed: Sequence[Entry]) -> None:
        """Say where the messages are that followed ``entry``, which was replaced; its answer is in another place."""
        count = len(followed) - (entry.role == "user")
        if count > 0:
            some = "The message that followed stays" if count == 1 else f"The {count} messages that followed stay"
            what = "question" if entry.role == "user" else "answer"
            self.notify(f"{some} with the version before: ← on this {what} shows it.")

    def continue_answer(self, entry: Entry | None = None) -> None:
        """Let the model go on writing from the end of the answer ``entry`` (default: the last message).

        If messages follow it, it is gone on with in an alternative, so that they keep the answer that they followed.
        """
        path = self.thread.path
        answer = entry if entry in path else path[-1] if path and entry is None else None
        problem = why_not(answer)
        if problem or answer is None:
            self.notify(problem, "warning")
            return
        self.stop_soon()
        before = path[: path.index(answer)]
        update: Update = EntryChanged(answer, live=True)
        if answer is not path[-1]:
            answer = dataclasses.replace(answer, record=None, siblings=1, sibling_index=0, key=new_key())
            update = PathChanged()
        turn = ChatTurn(self.thread, before, answer, self.setup.options.beams, BegunAnswer.of(answer))
        answer.state, answer.note, answer.dirty = "writing", "", True
        self._start(turn, update)

    def switch(self, entry: Entry, offset: int) -> None:
        """Show the alternative ``offset`` places after ``entry``, wrapping around, and what follows it."""
        if entry.record is None or entry.siblings < 2:
            self.notify("This message has no alternatives.", "information")
            return
        try:
            store = self.thread.store_in(self.store)
            chosen = alternative(store, entry.record, offset)
            self.show(store.select(chosen), focus=chosen)
        except StoreError as error:
            self.notify(str(error), "error")

    def new_conversation(self, *, temporary: bool = False) -> None:
        """Show an empty conversation. ``temporary``: nothing of it is written to disk, and it ends when it is left.

        Answers of a saved one that is left go on.
        """
        self._leave()
        memory = open_temporary() if temporary else None
        self._show_thread(Thread(system=self.options.system_prompt, model=self.options.model, memory=memory))
        self._emit(PathChanged())

    def empty(self) -> None:
        """Show an empty conversation of the same kind as the shown one."""
        self._show_thread(dataclasses.replace(self.thread, conversation=None, title="", path=[], queue=QuestionQueue()))
        self._emit(PathChanged())

    def forget_prefixes(self, conversations: Sequence[int]) -> None:
        """Remove what the engine keeps on disk of saved conversations."""
        self.answers.run_in_background(self.link.forget_prefixes(remove_prefixes_of(conversations)))

    def open_conversation(
        self, conversation: int, message: int | None = None, memory: ConversationStore | None = None
    ) -> bool:
        """Show a conversation, at ``message`` and its branch if given. False if it cannot be read.

        ``memory``: the store of a temporary one.
        """
        store = memory or self.store
        open_threads = [
            thread for thread in self.unfinished if (thread.conversation, thread.memory) == (conversation, memory)
        ]
        try:
            record = store.conversation(conversation)
            records = [] if open_threads and message is None else self._records(store, conversation, message)
        except StoreError as error:
            self.notify(str(error), "error")
            return False
        if (self.thread.conversation, self.thread.memory) != (conversation, memory):
            self._leave()
        if not open_threads:
            self._show_thread(Thread.of(record, memory))
            self.show(records, focus=message)
            return True
        # What is on the screen of an unfinished conversation may be ahead of the disk.
        open_threads[0].title = record.title
        self._show_thread(open_threads[0])
        if message is None:
            self._emit(PathChanged())
        else:
            self.show(records, focus=message)
        return True

    @staticmethod
    def _records(store: ConversationStore, conversation: int, message: int | None) -> list[MessageRecord]:
        return store.shown(conversation) if message is None else store.select(message)

    def rename(self, title: str, done: Callable[[], None] = lambda: None) -> None:
        """Give the shown conversation a title. ``done`` is called when it is on disk or saving it failed."""
        self.answers.run_in_background(self._rename(self.thread, title, done))

    async def _rename(self, thread: Thread, title: str, done: Callable[[], None]) -> None:
        try:
            await rename(self.store, thread, title)
        except StoreError as error:
            self.notify(str(error), "error")
        self._status_changed()
        done()

    def change_settings(self, changes: Mapping[str, object]) -> str:
        """Set and save ``changes`` and use them from the next answer on.

        The model is loaded again, once for all of them, if they require it. Returns what went wrong, in sentences, or
        an empty text.
        """
        before = self.options
        problem = self._save(changes, self._settings.change)
        self._settings_changed(before, changes)
        return problem

    def use_model(self, model: str) -> str:
        """Load ``model`` and use it until another is chosen or the program ends; the settings file stays as it is.

        One that is not on this machine is not fetched: a persona names it, not the person. Returns what went wrong, or
        an empty text.
        """
        before = self.options
        try:
            self._settings.use("model", model)
        except SettingError as error:
            return str(error)
        self._settings_changed(before, ["model"])
        self.link.may_fetch = False
        return ""

    def is_saved(self, key: str) -> bool:
        """Whether the effective value of the setting also applies at the next start."""
        return key not in self._settings.unsaved

    def _settings_changed(self, before: Settings, keys: Iterable[str]) -> None:
        options = self.options
        self.link.may_fetch |= "model" in keys
        self._setup_changed()
        if not self.thread.path:
            self.thread.model = options.model
            # A system prompt that the person gave to the empty chat stays.
            if self.thread.system == before.system_prompt:
                self.thread.system = options.system_prompt
        if not options.loads_like(before):
            for thread in self.unfinished:
                self._stop(thread)
            # What kept another model from being loaded says nothing about this one.
            self.status.problem = ""
            self.answers.run_in_background(self.link.abandon_loading())
            self.answers.wake()
        self._emit(SettingsChanged(frozenset(keys)))
        self._status_changed()

    def tell(self, notice: UserNotice) -> None:
        """Show ``notice`` to the person."""
        self._emit(notice)

    def load_again(self, *, fetch: bool = False) -> None:
        """Load the model again after the current answer: it could not be loaded, or its files changed.

        ``fetch``: the person asked for it by name, so that it is fetched if it is missing.
        """
        self.link.forget()
        self.link.may_fetch |= fetch
        self.status.problem = ""
        self.answers.wake()

    @property
    def can_stop(self) -> bool:
        """Whether :meth:`stop` would do anything."""
        return self.thread in self.unfinished or self._can_stop_loading

    @property
    def _can_stop_loading(self) -> bool:
        """Whether a model is being downloaded, or its ring formed."""
        forming = self.status.phase is Phase.LOADING and self.options.partitioning == "ring"
        return forming or self.status.phase is Phase.FETCHING

    def stop(self) -> bool:
        """Stop the answer like :meth:`stop_soon`, and return the queued questions to the prompt."""
        questions = self._return_questions(self.thread)
        return self.stop_soon() or questions

    def stop_conversations(self, numbers: Sequence[int]) -> None:
        """Stop the answers of saved conversations, which are about to be deleted."""
        for thread in self.unfinished:
            if thread.memory is None and thread.conversation in numbers:
                self._stop(thread)
        self.unread.difference_update(numbers)

    def _stop(self, thread: Thread) -> None:
        self._return_questions(thread)
        self.answers.stop(thread)

    def _return_questions(self, thread: Thread) -> bool:
        """Give the questions that wait in ``thread`` back to its prompt. False if there are none."""
        questions = thread.queue.take_all()
        if questions:
            self._emit(QuestionsReturned(questions, thread))
        return bool(questions)

    def _leave(self) -> None:
        """The shown conversation is about to be left. A temporary one ends; of another the answers go on."""
        if self.thread.memory is not None:
            self.stop()

    def stop_soon(self) -> bool:
        """Stop the answer in the shown conversation; its text stays.

        Without one, stop the download of the model, or forming its ring.
        The next question continues what was stopped. Returns False if there was nothing to stop.
        """
        if self.answers.stop(self.thread):
            return True
        if not self._can_stop_loading:
            return False
        if self.status.phase is Phase.LOADING:
            self.notify("Forming the ring was stopped; the next question begins it again.")
        self.answers.run_in_background(self.link.abandon_loading())
        return True

    def pick_beam(self, index: int) -> None:
        """Make candidate ``index`` the answer. A search that still runs is stopped first."""
        turn = self.answers.beam_turn
        if turn is None or not 0 <= index < len(self.beams):
            self.notify("There are no candidates to choose from.", "warning")
            return
        picked = self.beams[index]
        if not turn.ended:
            turn.picked = picked
            self.stop_soon()
        else:
            self._take_candidate(turn, picked)

    async def estimate_beams(self, widths: Sequence[int]) -> BeamEstimates | str:
        return await self.link.estimate_beams(widths, self.context_to_come)

    @property
    def context_to_come(self) -> int:
        return context_to_come(self.status, self.thread.path, self.setup.options.max_tokens)

    async def run(self) -> None:
        """Load the model, then answer questions until cancelled. Partial answers are saved at the end."""
        await self.answers.run()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _submit(self, question: NewQuestion, thread: Thread | None = None) -> None:
        entry = Entry("user", question.text, attachments=question.attachments)
        thread = thread or self.thread
        self._ask([*thread.path, entry], EntryAdded(entry), thread)

    def _next_question(self, last: ChatTurn) -> None:
        """Ask the next question of the conversation of ``last``, which has ended; return all of them if it failed."""
        thread = last.thread
        if not self.answers.answers(thread):
            if last.answer.state == "failed":
                self._return_questions(thread)
            else:
                question = thread.queue.take()
                if question is not None:
                    self._submit(question, thread)
        self._left = [left for left in self._left if left in self.unfinished]
        self._status_changed()

    def _watch_queue(self, thread: Thread) -> None:
        thread.queue.on_change = lambda: self._queue_changed(thread)

    def _queue_changed(self, thread: Thread) -> None:
        self.status.queued = len(self.queue.items)
        self._emit(QueueChanged(thread))
        self._status_changed()

    def _answer_changed(self, update: Update) -> None:
        if isinstance(update, AnswerEnded) and not update.shown:
            thread = update.thread
            if thread.memory is None and thread.conversation is not None and update.entry.state != "stopped":
                self.unread.add(thread.conversation)
                how = "failed" if update.entry.state == "failed" else "is complete"
                self.notify(f"The answer in “{one_line(thread.title)}” {how}.")
        self._emit(update)

    def _ask(self, path: list[Entry], update: Update, thread: Thread | None = None) -> None:
        thread = thread or self.thread
        answer = Entry("assistant", "", state="writing", model=self.options.model)
        beams = effective(self.options, thread.values).beams
        self._start(ChatTurn(thread, path, answer, beams), update)
        if isinstance(update, EntryAdded) and thread is self.thread:
            self._emit(EntryAdded(answer))

    def _start(self, turn: ChatTurn, update: Update) -> None:
        """Show and save the path of ``turn``, and have its answer written after those that wait."""
        turn.thread.path = turn.whole(turn.answer)
        self.answers.save(turn.thread, turn.thread.path)
        if turn.others:
            self._save_others(turn)
        self.answers.add(turn)
        if turn.thread is self.thread:
            self._emit(update)
        self.answers.wake()

    def _save_others(self, turn: ChatTurn) -> None:
        """Save the other answers of ``turn``, which have just begun, as alternatives to the one that is shown."""
        for answer in turn.others:
            self.answers.save(turn.thread, turn.whole(answer))
        shown, store = turn.answer.record, turn.thread.store_in(self.store)
        if shown is None:
            return
        with suppress(StoreError):  # what cannot be saved now is said by the saver
            store.select(shown)
            records = {record.id: record for record in store.siblings(shown)}
            for answer in turn.answers:
                if answer.record in records:
                    record = records[answer.record]
                    answer.siblings, answer.sibling_index = record.siblings, record.sibling_index

    def _replace_path(self, path: list[Entry], focus: Entry) -> None:
        self.thread.path = path
        self.answers.save(self.thread, path)
        self._emit(PathChanged(focus))

    def _take_candidate(self, turn: ChatTurn, picked: Beam) -> None:
        """Make ``picked`` the answer of ``turn``. The others stay as alternatives."""
        text = turn.begun.text + sanitize(picked.text)
        path = self.thread.path if turn.thread is self.thread else []
        index = answer_place(path, turn.path[-1])
        if index is None:
            self.notify("That question is no longer on the screen.", "warning")
            return
        shown = path[index] if index < len(path) else None
        thoughts = turn.begun.with_thoughts(Thoughts(sanitize(picked.reasoning)))
        if shown is not None and (shown.content, shown.thoughts.text) == (text, thoughts.text):
            return
        try:
            store = turn.thread.store_in(self.store)
            same = stored_alternative(store, shown, text, thoughts.text)
            if same is not None:
                self.show(store.select(same.id), focus=same.id)
                return
        except StoreError as error:
            self.notify(str(error), "error")
        answer = Entry("assistant", text, model=turn.answer.model, finish_reason="stop", note="")
        answer.thoughts = thoughts
        self._replace_path([*path[:index], answer], answer)

    def show(self, records: Sequence[MessageRecord], focus: int | None = None) -> None:
        """Show another path of the conversation, at the message ``focus`` if given."""
        turns = [turn for turn in self.answers.unfinished if turn.thread is self.thread]
        running = {answer.record: answer for turn in turns for answer in turn.answers}
        entries = [running.get(record.id) or Entry.of(record) for record in records]
        self.thread.path = entries
        self._emit(PathChanged(next((entry for entry in entries if entry.record == focus), None)))

    def _show_thread(self, thread: Thread) -> None:
        left = self.thread.memory
        if left is not None and left is not thread.memory:
            self.deletions.forget(left)
        self._left = [other for other in self.unfinished if other is not thread]
        self.thread = thread
        self._watch_queue(thread)
        if thread.memory is None:
            self.unread.discard(thread.conversation or 0)
        self._setup_changed()
        self.answers.shown(thread)
        self._queue_changed(thread)

    def _setup_changed(self) -> None:
        self.status.beams = self.setup.options.beams

    def _fall_back(self, problem: str, worked: Settings) -> None:
        self.notify(f"{self.options.model} cannot be loaded: {problem} {worked.model} stays in use.", "error")
        options = self.options.loading_as(worked)
        keys = [setting.key for setting in RELOADING if options.value(setting.key) != self.options.value(setting.key)]
        if "model" in keys and not self.is_saved("model"):
            # What could not be loaded was not saved, so what replaces it need not be.
            keys.remove("model")
            self._settings.use("model", worked.model)
        problem = self._save({key: options.value(key) for key in keys}, self._settings.go_back)
        if problem:
            self._emit(UserNotice(problem, "error", beside=True))
        self._emit(FellBack())

    def _save(self, changes: Mapping[str, object], save: Callable[[str, Any], object]) -> str:
        problems = []
        for key, value in changes.items():
            try:
                save(key, value)
            except SettingError as error:
                problems.append(str(error))
        return " ".join(problems)

    def _store_problem(self, problem: str) -> None:
        recovered = bool(self.status.unsaved) and not problem
        self.status.unsaved = problem
        if problem:
            self.notify(f"Not saved: {problem}", "error")
        elif recovered:
            self.notify("All messages are saved again.")
        self._status_changed()

    def _saved_late(self) -> None:
        for entry in self.thread.path:
            if entry.state != "writing":
                self._emit(EntryChanged(entry))
        self._status_changed()

    def _engine_notice(self, notice: Notice) -> None:
        # A lost machine and what happens to its ring are two notices, so one must not replace the other.
        self._emit(UserNotice(sanitize(notice.text), "warning", beside=True))

    def _network_changed(self) -> None:
        for line in self.link.machines_away():
            self._emit(UserNotice(line, "warning", beside=True))
        self._emit(NetworkChanged())

    def _status_changed(self) -> None:
        self._emit(StatusChanged())

    def run_in_background(self, work: Coroutine[None, None, None]) -> None:
        """Do ``work`` beside the answers."""
        self.answers.run_in_background(work)

    def notify(self, text: str, severity: Severity = "information") -> None:
        self._emit(UserNotice(text, severity))
