"""What commands do in the chat in lines: lists to pick from, and values as sentences."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

from app.chat.commands.table import COMMANDS, choose_persona, use_model, use_persona
from app.chat.controller import ChatController
from app.chat.drafts import with_words
from app.chat.model_choices import model_options
from app.chat.state import Entry, Severity, UserNotice
from app.chat.thread import Copying
from app.chat.words import timing_words
from app.clipboard import Clipboard, copies_file
from app.conversations.records import Conversation
from app.conversations.store import StoreError
from app.editor import EditorProblem, edited
from app.log_tail import LOGS, log_path, read_tail
from app.plain.speaking import speaker, thoughts_mark
from app.ring_words import machine_name, state_words
from app.settings.fields import SettingError
from app.settings.layers import ADJUSTABLE, PRESETS, shown, value_in_effect
from app.settings.personas import open_personas
from app.settings.schema import SCHEMA, setting_named
from app.text_safety import one_line
from engine.errors import ModelError

if TYPE_CHECKING:
    from app.plain.chat import PlainChat

Result = TypeVar("Result")

_MOST_LISTED = 20
"""Number of conversations or questions in a list to pick from."""
_LONGEST_LINE = 300
"""Characters of a question that are written in a list."""
_LOG_LINES = 20
"""Number of lines of each log that are printed."""
_KEYS = (
    'Several lines: begin and end with """, or end each line but the last with \\.',
    "Up brings back earlier questions of all chats.",
    "ctrl+c stops an answer and keeps its text. ctrl+d leaves. ctrl+z goes back to the shell.",
)
_SOURCES = {"chat": ", of this chat", "persona": ", of the persona", "settings": ", of the settings", "default": ""}


class PlainFront:
    """The chat in lines as commands see it."""

    def __init__(self, chat: PlainChat) -> None:
        self._chat = chat
        self._speaker = chat.speaker
        self._console = chat.console

    @property
    def controller(self) -> ChatController:
        return self._chat.controller

    @property
    def copying(self) -> Copying:
        """Copies without a sequence for the terminal, which might print it, and writes no file of a temporary chat."""

        def copy(text: str, what: str) -> None:
            may_write = self.controller.thread.memory is None
            clipboard = Clipboard(None, copies_file if may_write else None)
            self._speaker.say(self._chat.background.run(clipboard.copy(text, what)))

        return Copying(lambda: self.controller.thread, copy, lambda problem: self.say(problem, "warning"))

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        return self._chat.background.call(function, *arguments)

    def run(self, work: Coroutine[None, None, None]) -> None:
        self._chat.background.run(work)

    # --- words ------------------------------------------------------------------------------------------------------

    def say(self, text: str, severity: Severity = "information", *, in_lines: str | None = None) -> None:
        text = text if in_lines is None else in_lines
        if text:
            self._speaker.notice(UserNotice(text, severity))

    def tell(self, title: str, lines: Sequence[str]) -> None:
        for line in lines:
            self._console.write_line(line)

    def ask(self, question: str, then: Callable[[str], object], *, text: str = "", in_lines: str = "") -> None:
        answer = self._read(in_lines) if in_lines else text
        if answer:
            then(answer)

    def change(self, title: str, text: str, hint: str, then: Callable[[str], object], *, in_lines: str) -> None:
        self.say(in_lines)

    def hide_notice(self) -> None:
        pass

    def to_prompt(self, *, end: bool = False) -> None:
        pass

    def write_answer(self) -> None:
        if self.controller.busy:
            self._chat.follow()

    def _read(self, question: str) -> str:
        return self._console.read_line(f"{question}; empty: back. ").strip()

    def _pick(self, lines: Sequence[str], what: str) -> int | str | None:
        """Number ``lines`` from 1 and read one number. Returns its index, other words as typed, None for nothing."""
        self.tell(what, [f"{number}. {line}" for number, line in enumerate(lines, start=1)])
        word = self._read(what)
        if word.isascii() and word.isdecimal() and 1 <= int(word) <= len(lines):
            return int(word) - 1
        return word or None

    # --- lists ------------------------------------------------------------------------------------------------------

    def help(self) -> None:
        for command in COMMANDS:
            self._console.write_line(f"{command.usage}: {command.help_in_lines or command.help}.")
        self.keys()

    def keys(self) -> None:
        self.tell("Keys", _KEYS)

    def chats(self, words: str = "") -> None:
        """List the chats that have ``words``, and open the one that is picked."""
        store = self.controller.store
        try:
            if words:
                conversations = list({hit.conversation.id: hit.conversation for hit in store.search(words)}.values())
            else:
                conversations = store.conversations()
        except StoreError as error:
            self.say(str(error), "error")
            return
        if not conversations:
            self.say("No chat was found." if words else "There are no chats yet.")
            return
        picked = self._pick(
            [_chat_line(known) for known in conversations[:_MOST_LISTED]], "Number, or words to search for"
        )
        if isinstance(picked, str):
            self.chats(picked)
        elif picked is not None and self.call(self.controller.open_conversation, conversations[picked].id):
            self._speaker.say(one_line(conversations[picked].title), "Chat")
            self._chat.show_conversation()

    def models(self) -> None:
        try:
            options = model_options()
        except (ModelError, OSError) as error:
            self.say(str(error), "error")
            return
        here = [option for option in options if option.here]
        current = self.controller.options.model
        lines = [f"{one_line(known.name)}, {known.figures}{', in use' * (known.name == current)}" for known in here]
        self.say("Models on this machine. `privatellm models pull` downloads others.")
        picked = self._pick(lines, "Number, or the name of another model")
        if picked is not None:
            use_model(self, picked if isinstance(picked, str) else here[picked].name)

    def machines(self) -> None:
        problem = self._chat.background.run(self.controller.link.list_machines())
        if problem:
            self.say(problem, "error")
            return
        state = self.controller.link.network.state
        peers = state.peers if state is not None else []
        for peer in peers:
            self._console.write_line(f"{machine_name(peer)}: {state_words(peer)}.")
        if not peers:
            self.say("No machine is paired.")
        self.say("`privatellm peers pair` pairs a machine, /settings partitioning ring uses them.")

    def settings(self) -> None:
        options = self.controller.options
        changed = [setting for setting in SCHEMA if options.value(setting.key) != setting.default]
        for setting in changed:
            self._console.write_line(f"{setting.key} {_shown(options.value(setting.key))}: {setting.label}.")
        if not changed:
            self.say("All settings have their defaults.")
        line = self._read("A setting and its value, such as temperature 0.7; ? lists all")
        if line == "?":
            for setting in SCHEMA:
                value = _shown(options.value(setting.key))
                self._console.write_line(
                    f"{setting.key} {value}: {setting.label}. {setting.help} {setting.allowed.capitalize()}."
                )
            return
        key, _, value = line.partition(" ")
        if not key:
            return
        try:
            wanted = setting_named(key).parse(value)
        except SettingError as error:
            self.say(f"{error}.", "warning")
            return
        self.say(self.call(self.controller.change_settings, {key: wanted}), "error")
        self.say(f"{key} is now {_shown(self.controller.options.value(key))}.")

    def personas(self) -> None:
        file = open_personas()
        for notice in file.notices:
            self.say(notice, "warning")
        if not file.personas:
            self.say(f"There are no personas yet. They are kept in {file.path}.")
            return
        lines = [f"{one_line(known.name)}: {one_line(known.system)}" for known in file.personas]
        picked = self._pick(lines, "Number of the persona, or none")
        if isinstance(picked, int):
            use_persona(self, file.personas[picked])
        elif picked:
            choose_persona(self, picked)

    def sampling(self, used: str = "") -> None:
        setup = self.controller.setup
        facts = self.controller.status.facts
        for setting in ADJUSTABLE:
            source = _SOURCES[setup.values.source(setting.key, self.controller.options)]
            value = value_in_effect(setting.key, setup.options, facts.sampling if facts is not None else None)
            self._console.write_line(f"{setting.label}: {shown(setting, value)}{source}")
        names = ", ".join(known.name for known in PRESETS)
        self.say(f"/set NAME VALUE changes one for this chat. /sampling sets several by a preset: {names}.")

    def beams(self) -> None:
        candidates = self.controller.beams
        self.say(f"The beam width is {self.controller.setup.options.beams}. /beams WIDTH changes it, from 1 to 16.")
        if not candidates:
            return
        lines = [f"score {beam.score:.3f}: {one_line(beam.text) or '(empty)'}" for beam in candidates]
        picked = self._pick(lines, "Number of the candidate to use")
        if isinstance(picked, int):
            self.call(self.controller.pick_beam, picked)
            self._speaker.message(self.controller.thread.path[-1])
        elif picked:
            self.say("There is no such candidate.", "warning")

    def several(self) -> None:
        turn = self.controller.answers.several
        if turn is None:
            self.say("Nothing was asked several times at once yet: /n 4 QUESTION asks four times.")
            return
        answers = zip(turn.answers, turn.temperatures, strict=True)
        lines = [f"temperature {each:g}: {one_line(answer.content) or '(empty)'}" for answer, each in answers]
        picked = self._pick(lines, "Number of the answer to go on with")
        if isinstance(picked, int):
            self.call(self.controller.pick_answer, picked)
            self._speaker.message(self.controller.thread.path[-1])
        elif picked:
            self.say("There is no such answer.", "warning")

    def timing(self) -> None:
        timing = self.controller.timing
        if not self.controller.link.watching:
            self._chat.background.run(self.controller.link.watch(True))
            self.say("Times are measured from the next answer on. /timing prints them.")
        elif timing is None:
            self.say("Nothing has been measured yet.")
        self.tell("Timing", timing_words(timing) if timing is not None else [])

    def log(self) -> None:
        for log in LOGS:
            self._speaker.say(str(log_path(log)), f"Log of the {log}")
            self.tell(log, read_tail(log_path(log)).splitlines()[-_LOG_LINES:])

    # --- the conversation -------------------------------------------------------------------------------------------

    def thoughts(self) -> None:
        answers = [entry for entry in self.controller.thread.path if entry.thoughts.text]
        if answers:
            self._speaker.say(answers[-1].thoughts.text, thoughts_mark(answers[-1]))
        else:
            self.say("No answer here has thoughts.")

    def edit(self, question: Entry) -> None:
        self._speaker.say(question.content, "The last question")
        text = self._console.read_text("In its place; empty: back. ")
        attachments = self._chat.attached(text, question.attachments) if text.strip() else None
        if attachments is not None:
            self.call(self.controller.edit, question, text, attachments)
            self._chat.follow()

    def history(self, words: str) -> None:
        """List the earlier questions of all chats that have ``words``, and ask the one that is picked."""
        try:
            questions = with_words(self.controller.store.questions, words, _MOST_LISTED)
        except StoreError as error:
            self.say(str(error), "error")
            return
        if not questions:
            self.say("No earlier question was found." if words else "There are no earlier questions yet.")
            return
        lines = [one_line(question[:_LONGEST_LINE]) for question in questions]
        picked = self._pick(lines, "Number of the question to ask, or words")
        if isinstance(picked, str):
            self.history(picked)
        elif picked is not None:
            self._ask(questions[picked])

    def editor(self) -> None:
        """Ask the question that is written in the person's own editor."""
        if not self._console.interactive:
            self.say("An editor cannot be opened: there is no terminal.", "warning")
            return
        self._console.end_line()
        try:
            text = asyncio.run(edited("", nullcontext))
        except EditorProblem as problem:
            self.say(str(problem), "warning")
            return
        if text.strip():
            self._ask(text)
        else:
            self.say("Nothing was written, so nothing is asked.")

    def _ask(self, question: str) -> None:
        self._console.write_line(f"You: {question}")
        self._chat.ask(question)

    def find(self, text: str) -> None:
        text = text or self._read("Find")
        if not text:
            return
        hits = [
            f"{speaker(entry)}, message {number}: {line.strip()}"
            for number, entry in enumerate(self.controller.thread.path, start=1)
            for line in entry.content.splitlines()
            if text.casefold() in line.casefold()
        ]
        self.say(f"{len(hits)} line{'' if len(hits) == 1 else 's'} found.")
        self.tell("Find", hits)

    # --- the program ------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self.say("No answer is being written. ctrl+c stops one while it is.")

    def suspend(self) -> None:
        if not self._console.interactive or os.getpgrp() == os.getsid(0):
            self.say("There is no shell to go back to.", "warning")
        else:
            signal.raise_signal(signal.SIGTSTP)

    def quit(self) -> None:
        raise EOFError


def _chat_line(conversation: Conversation) -> str:
    day = datetime.fromtimestamp(conversation.updated).strftime("%Y-%m-%d %H:%M")
    return f"{one_line(conversation.title) or 'Untitled'}, {day}"


def _shown(value: object) -> str:
    if value is None or value == "":
        return "(empty)"
    return one_line(str(value).lower() if isinstance(value, bool) else str(value))
