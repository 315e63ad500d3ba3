"""Pictures in the chat: what the model gets, what is kept, and what a model that sees nothing gets."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from app.attachments.attachment import Attachment
from app.chat.state import Entry
from app.chat.thread import export_thread, prompt_messages
from app.conversations.store import ConversationStore
from app.settings.schema import Settings
from engine.ipc.messages import Generate, Message, PictureFile
from tests.app.attachments.pictures import SEEING, picture
from tests.app.chat_helpers import Chat, on_disk, running
from tests.app.fake_engine import FACTS, FakeEngine

RED, BLUE = picture("red.png"), picture("blue.png", colour="blue")
NAMED = "what is it?\n\n[Picture `red.png`, 64 x 32 pixels, which is not shown here]"


def asked(engine: FakeEngine) -> list[list[Message]]:
    requests = [request for request in engine.sent(Generate) if isinstance(request, Generate)]
    return [request.messages or [] for request in requests]


def test_questions_that_are_joined_keep_their_pictures_in_place() -> None:
    path = [Entry("user", "one", attachments=(RED,)), Entry("user", "two", attachments=(BLUE,)), Entry("user", "end")]
    (message,) = prompt_messages("", path, sees=True)
    assert message.content == "one\n\ntwo\n\nend"
    assert message.pictures == [PictureFile(RED.data, 0), PictureFile(BLUE.data, 5)]
    assert prompt_messages("", path)[0].pictures == []


async def test_a_picture_is_sent_saved_and_sent_again(engine: FakeEngine, store: ConversationStore, home: Path) -> None:
    engine.facts = SEEING
    async with running(Chat(engine, store)) as chat:
        await chat.until(lambda: chat.controller.status.facts)
        chat.controller.submit("what is it?", [RED])
        await chat.answered()
        chat.controller.submit("and now?")
        await chat.answered()
        first = Message("user", "what is it?", pictures=[PictureFile(RED.data)])
        said = Message("assistant", "Paris is the capital.")
        assert asked(engine) == [[first], [first, said, Message("user", "and now?")]]
        assert on_disk(store, chat)[0].attachments == (RED,)
        assert prompt_messages("", [Entry.of(record) for record in on_disk(store, chat)], sees=True)[0] == first
        assert chat.controller.context_to_come > 30
        assert NAMED in export_thread(store, chat.controller.thread, home / "out.md").read_text()
        number = chat.controller.thread.conversation
        chat.controller.new_conversation()
        assert number is not None and chat.controller.open_conversation(number)
        chat.controller.regenerate()
        await chat.answered()
        assert asked(engine)[-1] == [first, said, Message("user", "and now?")]


async def test_a_model_that_sees_nothing_is_not_asked_and_the_question_stays(
    engine: FakeEngine, store: ConversationStore
) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("what is it?", [RED])
        await chat.answered()
        assert (chat.path[-1].state, chat.path[-1].note) == (
            "failed", "starter sees no pictures: leave red.png out, or load a model that sees.",
        )  # fmt: skip
        assert not asked(engine) and on_disk(store, chat)[0].attachments == (RED,)
        # A model that sees gets it.
        engine.facts = msgspec.structs.replace(SEEING, name="seeing")
        chat.controller.change_settings({"context_limit": 4096})
        chat.controller.regenerate()
        await chat.answered()
        assert asked(engine) == [[Message("user", "what is it?", pictures=[PictureFile(RED.data)])]]
        # One that sees nothing gets the names of earlier ones.
        engine.facts = FACTS
        chat.controller.change_settings({"context_limit": 2048})
        chat.controller.submit("and now?")
        await chat.answered()
        assert [message.content for message in asked(engine)[-1]][::2] == [NAMED, "and now?"]


async def test_more_pictures_than_can_be_sent_are_a_sentence(
    engine: FakeEngine, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.facts = SEEING
    monkeypatch.setattr("app.attachments.figures.MOST_PICTURE_BYTES", RED.size + 1)
    async with running(Chat(engine, store)) as chat:
        for attachments in ((RED,), (BLUE,)):
            chat.controller.submit("what is it?", attachments)
            await chat.answered()
        assert len(asked(engine)) == 1
        assert "/new begins another chat" in chat.path[-1].note and chat.path[-1].state == "failed"


async def test_a_title_is_asked_for_with_the_pictures_that_were_read(
    engine: FakeEngine, store: ConversationStore
) -> None:
    engine.facts = msgspec.structs.replace(SEEING, parameters=10**11)
    file = Attachment("a.py", "print(1)\n")
    async with running(Chat(engine, store, Settings(chat_titles=True))) as chat:
        chat.controller.submit("what is it?", [RED, file])
        await chat.until(lambda: len(asked(engine)) == 2)
        question, title = asked(engine)
        assert title[: len(question)] == question and question[0].pictures
