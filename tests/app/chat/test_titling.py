"""Chats get titles from the model: after the first answer, while nothing else waits, unless the person named them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from app.chat.titling import LEAST_PARAMETERS, can_title, clean_title
from app.conversations.kept_prefixes import prefix_owner
from app.conversations.store import ConversationStore
from engine.ipc.messages import Generate, ReasoningFacts
from tests.app.chat_helpers import Chat, running
from tests.app.fake_engine import FACTS, FakeEngine


@pytest.fixture
def titled(engine: FakeEngine) -> FakeEngine:
    """An engine whose model is large enough for titles. It holds a title back until its ``gate`` is open."""
    engine.facts = msgspec.structs.replace(FACTS, parameters=LEAST_PARAMETERS)
    engine.answer = lambda request: ["“Rain", " in Spring”"] if is_title(request) else ["an answer"]
    return engine


def is_title(request: Generate) -> bool:
    return bool(request.messages) and "title" in request.messages[-1].content  # type: ignore[index]


def asked_titles(engine: FakeEngine) -> list[Generate]:
    return [request for request in engine.sent(Generate) if isinstance(request, Generate) and is_title(request)]


async def test_the_first_answer_gives_the_chat_its_title(titled: FakeEngine, store: ConversationStore) -> None:
    async with running(Chat(titled, store)) as chat:
        chat.controller.submit("about rain")
        await chat.until(lambda: chat.controller.thread.title == "Rain in Spring")
        (request,) = asked_titles(titled)
        assert [message.content for message in request.messages or []][:2] == ["about rain", "an answer"]
        assert request.sampling.temperature == 0 and request.thinking is False
        assert request.conversation == prefix_owner(store.conversations()[0].id), "its prefix stays the chat's"
        assert store.conversations()[0].title == "Rain in Spring"
        assert [entry.content for entry in chat.path] == ["about rain", "an answer"] and not chat.said
        chat.controller.submit("more")
        await chat.until(lambda: len(chat.path) == 4 and not chat.controller.busy)
        assert asked_titles(titled) == [request]


async def test_a_question_comes_first_and_the_title_after_its_answer(
    titled: FakeEngine, store: ConversationStore
) -> None:
    titled.gate = asyncio.Event()
    async with running(Chat(titled, store)) as chat:
        chat.controller.submit("one")
        await chat.until(lambda: asked_titles(titled))
        assert not chat.controller.busy
        chat.controller.submit("two")
        await chat.until(lambda: len(chat.path) == 4 and not chat.controller.busy)
        assert chat.controller.thread.title == "one"
        titled.gate.set()
        await chat.until(lambda: chat.controller.thread.title == "Rain in Spring")
        assert len(asked_titles(titled)) == 2


async def test_the_name_that_the_person_gives_stays(titled: FakeEngine, store: ConversationStore) -> None:
    titled.gate = asyncio.Event()
    async with running(Chat(titled, store)) as chat:
        chat.controller.submit("one")
        await chat.until(lambda: asked_titles(titled))
        chat.controller.rename("Mine")
        await chat.until(lambda: chat.controller.thread.title == "Mine")
        titled.gate.set()
        chat.controller.new_conversation()
        chat.controller.submit("other")
        await chat.until(lambda: chat.controller.thread.title == "Rain in Spring")
        assert {found.title for found in store.conversations()} == {"Mine", "Rain in Spring"}


@pytest.mark.parametrize("case", ["off", "temporary", "nonsense"])
async def test_chats_without_a_title_of_the_model(titled: FakeEngine, store: ConversationStore, case: str) -> None:
    titled.answer = lambda request: ["Here is one:\n", "a title"] if is_title(request) else ["an answer"]
    async with running(Chat(titled, store)) as chat:
        chat.controller.change_settings({"chat_titles": case != "off"})
        if case == "temporary":
            chat.controller.new_conversation(temporary=True)
        for count, question in enumerate(["one", "two"], start=1):
            chat.controller.submit(question)
            await chat.until(lambda count=count: len(chat.path) == 2 * count and not chat.controller.busy)  # type: ignore[misc]
        assert chat.controller.thread.title == "one" and not chat.said
        assert len(asked_titles(titled)) <= (2 if case == "nonsense" else 0)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Rain in Spring", "Rain in Spring"),
        ('**Title:** "Rain in Spring."\n', "Rain in Spring"),
        ("Titel: Regen\u202e im\x1b[31m Frühling", "Regen im Frühling"),
        ("春の雨", "春の雨"),
        ("C++ : a guide", "C++ : a guide"),
        ("", ""),
        ("…!?", ""),
        ("the the the the", ""),
        ("Here is a title:\n\nRain", ""),
        ("The capital of France is Paris, which is on the river Seine.", ""),
        ("x" * 61, ""),
        ("<think>", ""),
        ("At most six words", ""),
    ],
)
def test_what_is_taken_as_a_title(text: str, title: str) -> None:
    assert clean_title(text) == title


def test_which_models_are_asked() -> None:
    large = msgspec.structs.replace(FACTS, parameters=LEAST_PARAMETERS)
    assert can_title(large) and not can_title(FACTS) and not can_title(None)
    assert not can_title(msgspec.structs.replace(large, state_bytes=1))
    assert can_title(msgspec.structs.replace(large, reasoning=ReasoningFacts(format="think", switch=True)))
    assert not can_title(msgspec.structs.replace(large, reasoning=ReasoningFacts(format="think")))
