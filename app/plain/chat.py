"""The chat in lines: it asks for a line, runs it as a question or a command, and writes what comes of it."""

from __future__ import annotations

import asyncio
import queue
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from app.attachments.attachment import Attachment
from app.attachments.figures import unseen
from app.attachments.references import resolve
from app.chat.commands.table import UnknownCommand, parse, unescaped
from app.chat.controller import ChatController
from app.chat.drafts import MOST_RECALLED
from app.chat.starting import Start
from app.chat.state import Entry, EntryChanged, Phase, StatusChanged, Update, UserNotice
from app.conversations.store import ConversationStore, StoreError
from app.engine_client import Engine
from app.interrupts import INTERRUPTED, leave_on_interrupt
from app.plain.console import Console, ReaderGone
from app.plain.front import PlainFront
from app.plain.speaking import Speaker
from app.settings.file import SettingsFile

PROMPT = "You: "
_PATIENCE_S = 10.0
"""Seconds for an orderly end: saving through another program's lock, leaving a ring."""
_GREETING = "privatellm in plain lines. /help lists the commands. ctrl+c stops an answer, ctrl+d leaves."


class Leaving(Exception):
    """The person leaves, or a signal ends the program."""

    def __init__(self, status: int = 0) -> None:
        super().__init__(status)
        self.status = status


class _Interrupt:
    """ctrl+c was pressed."""


class PlainChat:
    """One chat over ``console``. ``is_missing``: whether a model is to be fetched before it is loaded."""

    def __init__(
        self,
        console: Console,
        engine: Engine,
        store: ConversationStore,
        settings: SettingsFile,
        is_missing: Callable[[str], bool] = lambda model: False,
    ) -> None:
        self.console = console
        self.speaker = Speaker(console)
        self.background = BackgroundLoop()
        self._updates: queue.SimpleQueue[Update | _Interrupt] = queue.SimpleQueue()
        self._engine = engine
        self.controller = ChatController(engine, store, settings, self._updates.put, is_missing=is_missing)
        self._front = PlainFront(self)
        self._told_model = ""
        self._told_problem = ""

    def run(self, notices: Sequence[str] = (), start: Start | None = None) -> int:
        """Chat until the person leaves, stdin ends or a signal arrives; the exit status. Everything is saved."""
        end = self.background.begin(self.controller.run())
        status = 0
        try:
            self.console.write_line(_GREETING)
            with suppress(StoreError):
                self.console.remember(self.controller.store.questions(limit=MOST_RECALLED))
            for line in notices:
                self.speaker.say(line, "Warning")
            if start is not None:
                self.call(start.begin, self.controller)
                self.show_conversation()
            while True:
                with suppress(KeyboardInterrupt):
                    self._one_line()
        except Leaving as leaving:
            status = leaving.status
        except (EOFError, ReaderGone):
            pass
        finally:
            before = signal.getsignal(signal.SIGINT)
            leave_on_interrupt()
            with suppress(TimeoutError):
                self.background.run(end(), _PATIENCE_S)
                self.background.run(self._engine.close(), _PATIENCE_S)
            self.background.close()
            signal.signal(signal.SIGINT, before)
        with suppress(ReaderGone):
            self._tell_news()
            self.console.end_line()
        return status

    def _one_line(self) -> None:
        self._tell_news()
        try:
            text = self.console.read_text(PROMPT)
        except KeyboardInterrupt:
            self.console.write("\n")
            self.speaker.say("ctrl+d or /quit leaves.")
            return
        if not text.strip():
            return
        self._tell_news()
        try:
            call = parse(text)
            if call is None:
                self.ask(unescaped(text))
            else:
                call.command.run(self._front, call.argument)
        except UnknownCommand as unknown:
            self.speaker.say(str(unknown), "Warning")
        except KeyboardInterrupt:
            self.console.write("\n")
            self.speaker.say("Cancelled.")

    def ask(self, text: str) -> None:
        """Ask a new question, with the files that it names, and write its answer."""
        attachments = self.attached(text)
        if attachments is not None:
            self.call(self.controller.submit, text, attachments)
            self.follow()

    def attached(self, text: str, already_attached: Sequence[Attachment] = ()) -> Sequence[Attachment] | None:
        """Read and name the files that ``text`` refers to; None if one cannot be attached, which is said.

        ``already_attached``: those of the question that was edited.
        """
        resolved = resolve(text, Path(), already_attached)
        facts = self.controller.status.facts
        problems = [*resolved.problems, *filter(None, [unseen(resolved.attachments, facts)])]
        for problem in (*problems, *resolved.left_out):
            self.speaker.say(problem, "Warning")
        if problems:
            self.speaker.say("Nothing was sent.")
            return None
        self.speaker.files(resolved.attachments, facts)
        return resolved.attachments

    def call(self, function: Callable[..., object], *arguments: object) -> object:
        """Call a function of the controller in the loop that it belongs to."""
        return self.background.call(function, *arguments)

    def follow(self) -> None:
        """Write the answer at the end of the conversation until it has ended. ctrl+c stops it, and its text stays."""
        answer = self.controller.thread.path[-1]
        streams = self.controller.setup.options.beams == 1
        self.speaker.begin(answer)
        self.speaker.doing(self.controller.status)
        with self._interrupts_queued():
            self._write_until_ended(answer, streams)
        self.speaker.end(answer)
        if not streams and len(self.controller.beams) > 1:
            self.speaker.say(f"{len(self.controller.beams)} candidates. /beams lists them.")

    def _write_until_ended(self, answer: Entry, streams: bool) -> None:
        interrupts = 0
        while True:
            match self._updates.get():
                case EntryChanged(entry, live) if entry is answer and not live and entry.state != "writing":
                    return
                case EntryChanged(entry) if entry is answer:
                    self.speaker.grow(entry, streams=streams)
                case StatusChanged():
                    self.speaker.doing(self.controller.status)
                    if not answer.content:
                        self._tell_model()
                case UserNotice() as notice:
                    self.speaker.notice(notice)
                case _Interrupt():
                    interrupts += 1
                    if interrupts > 2:
                        raise Leaving(INTERRUPTED)
                    if interrupts > 1:
                        self.speaker.say("Stopping. Press ctrl+c again to leave.")
                    self.background.call(self.controller.stop_soon)
                case _:
                    pass

    @contextmanager
    def _interrupts_queued(self) -> Iterator[None]:
        """Inside, ctrl+c is an item of the queue, so that it never cuts a line that is being written."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            self._updates.put(_Interrupt())

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def show_conversation(self) -> None:
        """Write the whole conversation."""
        for entry in self.controller.thread.path:
            self.speaker.message(entry)

    def _tell_news(self) -> None:
        """Say what happened while nothing was being answered."""
        while not self._updates.empty():
            update = self._updates.get()
            if isinstance(update, UserNotice):
                self.speaker.notice(update)
        status = self.controller.status
        if status.phase is Phase.UNAVAILABLE and status.problem != self._told_problem:
            self.speaker.say(f"No model is loaded: {status.problem} /model chooses another one.", "Error")
        self._told_problem = status.problem
        self._tell_model()

    def _tell_model(self) -> None:
        """Say which model is loaded, once, before the first answer of it."""
        facts = self.controller.status.facts
        if facts is not None and facts.name != self._told_model:
            self._told_model = facts.name
            self.speaker.say(f"The model {facts.name} is loaded.")
            for line in facts.notices:
                self.speaker.say(line)


# --- the chat's event loop -------------------------------------------------------------------------------------------


_Result = TypeVar("_Result")


class BackgroundLoop:
    """An event loop that runs until :meth:`close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _Result], timeout_s: float | None = None) -> _Result:
        """Run ``work`` in the loop and wait for its result. Raises what it raises, and TimeoutError."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def call(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Call ``function`` in the loop and wait for its result. Raises what it raises."""

        async def work() -> _Result:
            return function(*arguments)

        return self.run(work())

    def begin(self, work: Coroutine[Any, Any, None]) -> Callable[[], Coroutine[Any, Any, None]]:
        """Start ``work`` in the loop. Returns what cancels it and waits for its end."""

        async def start() -> asyncio.Task[None]:
            return asyncio.get_running_loop().create_task(work)

        task = self.run(start())

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task])

        return end

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
