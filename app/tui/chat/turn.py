"""One question and its answer, while it is being made. No Textual."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from app.conversations.store import ConversationStore, State, StoreError
from app.settings.schema import Settings
from app.text_safety import Sanitizer, sanitize
from app.tui.chat.saving import RETRY_SAVE_S, Saver
from app.tui.chat.state import TOO_LONG, Entry
from app.tui.chat.thread import Thread, prompt_messages
from engine.ipc.messages import Failed, Finished, Generate, Sampling


@dataclass(eq=False)
class ChatTurn:
    """One question that waits for its answer, or is being answered. ``path`` ends with the question."""

    thread: Thread
    path: list[Entry]
    answer: Entry
    beams: int
    request: int | None = None
    stopping: bool = False
    prompt_tokens: int = 0
    picked: str | None = None
    """The candidate of a beam search that was chosen while it ran."""
    safe: Sanitizer = field(default_factory=Sanitizer)
    ended: bool = False
    _writing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def whole(self) -> list[Entry]:
        return [*self.path, self.answer]

    def end(self) -> bool:
        """No partial text is written any more. Waits for one that is on its way; False if it had ended before."""
        with self._writing:
            before, self.ended = self.ended, True
        return not before

    def write_partial(self, store: ConversationStore, record: int, text: str) -> None:
        """Put ``text`` on disk unless the answer is complete by now. For a thread. Raises StoreError."""
        with self._writing:
            if not self.ended:
                store.update(record, content=text)


def completed(answer: Entry, event: Finished) -> tuple[State, str]:
    """Give ``answer`` what ``event`` says of it; how it ended, and what there is to say about that."""
    answer.content = sanitize(event.text)
    answer.tokens, answer.tokens_per_s = event.completion_tokens, event.tokens_per_s
    answer.finish_reason = event.finish_reason
    if event.finish_reason == "cancelled":
        return "stopped", "Stopped."
    return "complete", "The length limit was reached." if event.finish_reason == "length" else ""


def failed(answer: Entry, event: Failed) -> tuple[State, str]:
    """The same for an answer that cannot be given."""
    too_long = event.kind == "context"
    answer.finish_reason = TOO_LONG if too_long else ""
    return "failed", event.error + (" /edit changes it; later questions skip it." if too_long else "")


def generate_request(request_id: int, turn: ChatTurn, options: Settings) -> Generate:
    """What the engine is asked. A beam search takes the likeliest continuations: sampling means nothing to it."""
    return Generate(
        id=request_id,
        messages=prompt_messages(turn.thread.system, turn.path),
        sampling=options.sampling if turn.beams == 1 else Sampling(),
        max_tokens=options.max_tokens,
        beams=turn.beams,
        length_penalty=options.length_penalty,
    )


async def autosave(turn: ChatTurn, saver: Saver, interval_s: float) -> None:
    """Keep the growing answer on disk, every ``interval_s``. A thread writes it: the screen goes on meanwhile."""
    answer = turn.answer
    while not turn.ended:
        await asyncio.sleep(RETRY_SAVE_S if saver.problem else interval_s)
        if turn.ended or not answer.dirty:
            continue
        if answer.record is None or saver.problem:
            saver.save(turn.thread, turn.whole)
        else:
            text, answer.dirty = answer.content, False
            try:
                await asyncio.to_thread(turn.write_partial, saver.store, answer.record, text)
            except StoreError as error:
                answer.dirty = True
                saver.refused(turn.thread, turn.whole, error)
        await saver.settle()
