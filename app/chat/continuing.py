"""Answers that the model goes on writing: what was there before, and what is added to it. No Textual."""

from __future__ import annotations

from dataclasses import dataclass

from app.chat.state import Entry
from app.conversations.records import NO_THOUGHTS, State, Thoughts
from engine.ipc.messages import Message


@dataclass(frozen=True)
class BegunAnswer:
    """The part of an answer that was there before a turn. Empty for a new answer."""

    text: str = ""
    thoughts: Thoughts = NO_THOUGHTS
    tokens: int = 0
    state: State = "complete"

    @staticmethod
    def of(answer: Entry) -> BegunAnswer:
        return BegunAnswer(answer.content, answer.thoughts, answer.tokens, answer.state)

    @property
    def messages(self) -> list[Message]:
        """What the model is given at the end of the prompt, to go on from."""
        return [Message("assistant", self.text, self.thoughts.text)] if self.text else []

    def with_thoughts(self, new: Thoughts) -> Thoughts:
        """The thoughts before, and ``new`` ones."""
        old = self.thoughts
        text = "\n\n".join(filter(None, [old.text, new.text]))
        return Thoughts(text, old.tokens + new.tokens, old.seconds + new.seconds)


NOTHING = BegunAnswer()
"""The beginning of a new answer."""


def why_not(answer: Entry | None) -> str:
    """Why ``answer`` cannot be gone on with, as a sentence; empty if it can."""
    if answer is None or answer.role != "assistant":
        return "There is no answer to go on with; only an answer can be continued."
    if answer.state == "writing":
        return "This answer is still being written."
    if not answer.content.strip():
        return "This answer has no text to go on from. Use /again for another answer."
    return ""
