"""The chat without its screen: what happens on send, stop, crash, asking again, editing, picking."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.chat.state import Entry, FellBack, NewQuestion, Phase, QuestionsReturned
from app.chat.thread import prompt_messages
from app.conversations.opening import open_store
from app.conversations.store import ConversationStore, StoreError
from app.settings.schema import Settings
from engine.ipc.messages import Beam, BeamEstimates, Generate, Load, Message, Pull, Watch
from tests.app.chat_helpers import Chat, on_disk, running
from tests.app.fake_engine import FakeEngine


async def test_an_answer_is_shown_and_saved(engine: FakeEngine, store: ConversationStore) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("Capital of France?")
        await chat.answered()
        assert [entry.content for entry in chat.path] == ["Capital of France?", "Paris is the capital."]
        assert [(r.role, r.content, r.state) for r in on_disk(store, chat)] == [
            ("user", "Capital of France?", "complete"),
            ("assistant", "Paris is the capital.", "complete"),
        ]
        assert chat.controller.thread.title == "Capital of France?"
        assert chat.controller.status.phase is Phase.READY
        assert chat.controller.status.context_used == 32


async def test_the_question_is_on_disk_before_the_engine_hears_of_it(
    engine: FakeEngine, store: ConversationStore
) -> None:
    seen: list[str] = []

    def answer(request: Generate) -> list[str]:
        seen.extend(record.content for record in store.shown(store.conversations()[0].id))
        return ["ok"]

    engine.answer = answer
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("first")
        await chat.answered()
    assert seen == ["first", ""]


async def test_how_an_answer_was_generated_is_saved(engine: FakeEngine, store: ConversationStore) -> None:
    engine.beam_steps = [[Beam("best", [1], -0.1)]]
    async with running(Chat(engine, store, Settings(temperature=0.5, seed=7))) as chat:
        chat.controller.submit("one")
        await chat.answered()
        chat.controller.change_settings({"beams": 2, "temperature": None, "seed": None})
        chat.controller.submit("two")
        await chat.answered()
        found = [record.generation.known for record in on_disk(store, chat)]
    assert found == [
        {}, {"temperature": 0.5, "seed": 7, "prompt_tokens": 20, "ttft_s": 0.1},
        {}, {"beams": 2, "length_penalty": 1.0, "prompt_tokens": 20, "ttft_s": 0.1},
    ]  # fmt: skip


async def test_an_early_question_waits_for_the_model(engine: FakeEngine, store: ConversationStore) -> None:
    engine.load_gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("early")
        await chat.until(lambda: chat.controller.status.phase is Phase.LOADING)
        assert chat.path[-1].note == "Waiting for the model."
        assert not engine.sent(Generate)
        engine.load_gate.set()
        await chat.answered()
        assert chat.path[-1].content == "Paris is the capital."


async def test_the_model_in_use_can_be_loaded_again(engine: FakeEngine, store: ConversationStore) -> None:
    """As an answer asks for that failed because a file was changed."""
    async with running(Chat(engine, store)) as chat:
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        chat.controller.load_again()
        await chat.until(lambda: len(engine.sent(Load)) == 2 and chat.controller.status.phase is Phase.READY)
        chat.controller.submit("and now?")
        await chat.answered()
        assert chat.path[-1].content == "Paris is the capital." and len(engine.sent(Load)) == 2


async def test_questions_asked_meanwhile_are_answered_in_order(engine: FakeEngine, store: ConversationStore) -> None:
    engine.gate = asyncio.Event()
    engine.answer = lambda request: [f"to {request.messages[-1].content if request.messages else ''}", "."]
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("one")
        await chat.until(lambda: chat.path[1].content)
        chat.controller.submit("two")
        assert chat.controller.status.queued == 1 and len(chat.path) == 2
        engine.gate.set()
        await chat.answered()
        assert [entry.content for entry in chat.path] == ["one", "to one.", "two", "to two."]
        assert [record.content for record in on_disk(store, chat)] == ["one", "to one.", "two", "to two."]


async def test_stopping_keeps_the_text(engine: FakeEngine, store: ConversationStore) -> None:
    engine.gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("go")
        await chat.until(lambda: chat.path[-1].content == "Paris")
        assert chat.controller.stop_soon()
        await chat.answered()
        assert (chat.path[-1].content, chat.path[-1].state) == ("Paris", "stopped")
        assert on_disk(store, chat)[-1].state == "stopped"
        assert on_disk(store, chat)[-1].content == "Paris"
        assert not chat.controller.stop_soon()


async def test_stopping_what_waits_for_the_model(engine: FakeEngine, store: ConversationStore) -> None:
    engine.load_gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("never mind")
        await chat.until(lambda: chat.controller.status.phase is Phase.LOADING)
        chat.controller.stop_soon()
        engine.load_gate.set()
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        assert chat.path[-1].state == "stopped"
        assert not engine.sent(Generate)
        assert on_disk(store, chat)[0].content == "never mind"


async def test_partial_text_reaches_the_disk_while_it_grows(engine: FakeEngine, store: ConversationStore) -> None:
    engine.gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("go")
        await chat.until(lambda: chat.path[-1].content)
        await chat.until(lambda: on_disk(store, chat)[-1].content == "Paris")
        assert on_disk(store, chat)[-1].state == "writing"


async def test_a_crash_keeps_the_text_and_the_next_question_works(engine: FakeEngine, store: ConversationStore) -> None:
    engine.dies_at = 2
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("crash")
        await chat.until(lambda: chat.path[-1].state == "failed")
        assert chat.path[-1].content == "Paris"
        assert on_disk(store, chat)[-1].content == "Paris"
        assert any("is restarting" in text for text in chat.said)
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        assert engine.starts == 2
        chat.controller.submit("again")
        await chat.answered()
        assert chat.path[-1].content == "Paris is the capital."


async def test_an_engine_that_dies_idle_is_started_again(engine: FakeEngine, store: ConversationStore) -> None:
    async with running(Chat(engine, store)) as chat:
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        engine.die()
        await chat.until(lambda: engine.starts == 2 and chat.controller.status.phase is Phase.READY)
        assert any("The engine ended." in text for text in chat.said)


async def test_an_engine_that_always_dies_loading_is_given_up(engine: FakeEngine, store: ConversationStore) -> None:
    engine.dies_loading = 2
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("hello?")
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        # Two deaths end one attempt; the question that waited made another, which worked.
        await chat.answered()
        assert engine.starts == 3


async def test_a_model_that_cannot_be_loaded(engine: FakeEngine, store: ConversationStore) -> None:
    engine.load_error = "There is no model called 'x'."
    async with running(Chat(engine, store)) as chat:
        await chat.until(lambda: chat.controller.status.phase is Phase.UNAVAILABLE)
        assert chat.controller.status.problem == "There is no model called 'x'."
        assert len(engine.sent(Load)) == 1
        chat.controller.submit("hi")
        await chat.answered()
        assert chat.path[-1].state == "failed"
        assert chat.path[-1].note == "There is no model called 'x'."
        engine.load_error = None
        chat.controller.regenerate()
        await chat.answered()
        assert chat.path[-1].content == "Paris is the capital."
        assert [entry.content for entry in chat.path] == ["hi", "Paris is the capital."]


async def test_the_old_model_stays_in_use_when_another_cannot_be_loaded(
    engine: FakeEngine, store: ConversationStore
) -> None:
    async with running(Chat(engine, store)) as chat:
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        engine.load_errors = {"broken": "model.safetensors is truncated."}
        chat.controller.change_settings({"model": "broken", "max_tokens": 7})
        await chat.until(lambda: any(isinstance(update, FellBack) for update in chat.updates))
        chat.controller.submit("hi")
        await chat.answered()
        assert chat.path[-1].content == "Paris is the capital."
        assert "broken cannot be loaded: model.safetensors is truncated. starter stays in use." in chat.said
        assert chat.controller.options == Settings(max_tokens=7)


async def test_forming_a_ring_is_stopped_and_begins_again_with_the_next_question(
    engine: FakeEngine, store: ConversationStore
) -> None:
    engine.load_gate = asyncio.Event()
    chat = Chat(engine, store, Settings(partitioning="ring"))
    async with running(chat):
        await chat.until(lambda: chat.controller.status.progress is not None)
        assert chat.controller.stop_soon()
        await chat.until(lambda: chat.controller.status.phase is Phase.UNAVAILABLE)
        assert len(engine.cancelled) == 1
        assert chat.said == ["Forming the ring was stopped; the next question begins it again."]
        assert chat.controller.status.problem == "Loading was stopped."
        assert not chat.controller.stop_soon()
        chat.controller.submit("And now?")
        await chat.answered()
        assert len(engine.sent(Load)) == 2 and chat.path[-1].state == "complete"


async def test_the_starter_is_fetched_first(engine: FakeEngine, store: ConversationStore) -> None:
    chat = Chat(engine, store)
    chat.missing = True
    async with running(chat):
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        kinds = [type(request) for request in engine.requests]
        assert kinds == [Pull, Load]


async def test_fetching_is_stopped_and_goes_on_with_the_next_question(
    engine: FakeEngine, store: ConversationStore
) -> None:
    chat = Chat(engine, store)
    chat.missing = True
    engine.pull_gate = asyncio.Event()
    async with running(chat):
        await chat.until(lambda: chat.controller.status.progress is not None)
        assert chat.controller.stop_soon()
        await chat.until(lambda: engine.cancelled)
        engine.pull_gate.set()
        await chat.until(lambda: chat.controller.status.phase is Phase.UNAVAILABLE)
        assert chat.controller.status.problem.startswith("The download was stopped")
        assert not chat.controller.stop_soon()
        chat.controller.submit("And now?")
        await chat.answered()
        assert [type(request) for request in engine.requests if isinstance(request, (Pull, Load))] == [Pull, Pull, Load]
        assert chat.path[-1].content == "Paris is the capital."


async def test_a_refused_prompt_says_why_and_keeps_the_question(engine: FakeEngine, store: ConversationStore) -> None:
    engine.generate_error = "The prompt is 9 tokens too long."
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("long")
        await chat.answered()
        assert chat.path[-1].note.startswith("The prompt is 9 tokens too long. Use /edit to shorten it")
        assert chat.path[0].content == "long"
        assert chat.controller.status.phase is Phase.READY


async def test_it_is_said_if_the_chat_and_not_the_question_is_too_long(
    engine: FakeEngine, store: ConversationStore
) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("A question of the past")
        await chat.answered()
        engine.generate_error = "The prompt is 9 tokens too long."
        chat.controller.submit("And?")
        await chat.until(lambda: len(chat.path) == 4)
        await chat.answered()
        note = chat.path[-1].note
        assert "Most of it is the chat before the question: /delete shortens it" in note and "/edit" not in note


async def test_a_question_that_did_not_fit_is_not_sent_again_with_the_next(
    engine: FakeEngine, store: ConversationStore
) -> None:
    async with running(Chat(engine, store)) as chat:
        engine.generate_error = "The prompt is 9 tokens too long."
        chat.controller.submit("long")
        await chat.answered()
        engine.generate_error = None
        chat.controller.submit("short")
        await chat.answered()
        assert engine.sent(Generate)[-1].messages == [Message("user", "short")]  # type: ignore[attr-defined]
        # The same after a restart.
        again = [Entry.of(record) for record in on_disk(store, chat)]
        assert [message.content for message in prompt_messages("", again)] == ["short", "Paris is the capital."]


async def test_stopping_hands_the_queue_back(engine: FakeEngine, store: ConversationStore) -> None:
    engine.gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        for text in ("one", "two", "three", "four"):
            chat.controller.submit(text)
        await chat.until(lambda: chat.path[1].content)
        assert chat.controller.queue.take(2) == NewQuestion("four")
        assert chat.controller.queue.take(2) is None
        assert chat.controller.stop()
        await chat.answered()
        assert [entry.content for entry in chat.path] == ["one", "Paris"]
        assert len(engine.sent(Generate)) == 1 and not chat.controller.queue.items
        assert QuestionsReturned((NewQuestion("two"), NewQuestion("three")), chat.controller.thread) in chat.updates


async def test_a_failed_answer_hands_the_queue_back(engine: FakeEngine, store: ConversationStore) -> None:
    engine.gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        engine.dies_at = 2
        chat.controller.submit("one")
        await chat.until(lambda: chat.path[1].content)
        chat.controller.submit("two")
        engine.gate.set()
        await chat.answered()
        assert [entry.content for entry in chat.path] == ["one", "Paris"]
        assert QuestionsReturned((NewQuestion("two"),), chat.controller.thread) in chat.updates


async def test_another_model_hands_the_questions_of_all_conversations_back(
    engine: FakeEngine, store: ConversationStore
) -> None:
    engine.load_gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("one")
        chat.controller.submit("two")
        first = chat.controller.thread
        chat.controller.new_conversation()
        assert not any(isinstance(update, QuestionsReturned) for update in chat.updates)
        # What is asked in the new conversation belongs to it at once, although the other's question is in progress.
        chat.controller.submit("three")
        chat.controller.submit("four")
        assert [entry.content for entry in chat.path] == ["three", ""]
        chat.controller.change_settings({"model": "other"})
        assert QuestionsReturned((NewQuestion("two"),), first) in chat.updates
        assert QuestionsReturned((NewQuestion("four"),), chat.controller.thread) in chat.updates
        engine.load_gate.set()
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        assert not chat.controller.busy and not engine.sent(Generate)


async def test_answering_again_keeps_the_old_answer(engine: FakeEngine, store: ConversationStore) -> None:
    answers = iter([["one"], ["two"]])
    engine.answer = lambda request: next(answers)
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("q")
        await chat.answered()
        chat.controller.regenerate()
        await chat.answered()
        answer = chat.path[-1]
        assert (answer.content, answer.siblings, answer.sibling_index) == ("two", 2, 1)
        chat.controller.switch(answer, -1)
        assert chat.path[-1].content == "one"
        chat.controller.switch(chat.path[-1], -1)
        assert chat.path[-1].content == "two"


async def test_editing_makes_a_branch(engine: FakeEngine, store: ConversationStore) -> None:
    engine.answer = lambda request: [f"to {request.messages[-1].content if request.messages else ''}"]
    async with running(Chat(engine, store)) as chat:
        for text in ("a", "b"):
            chat.controller.submit(text)
            await chat.answered()
        chat.controller.edit(chat.path[0], "A")
        await chat.answered()
        assert [entry.content for entry in chat.path] == ["A", "to A"]
        assert chat.path[0].siblings == 2
        chat.controller.switch(chat.path[0], 1)
        assert [entry.content for entry in chat.path] == ["a", "to a", "b", "to b"]


@pytest.mark.parametrize(
    ("place", "asked", "said"),
    [
        (0, 1, []),
        (1, 1, []),
        (0, 2, ["The 2 messages that followed stay with the version before: ← on this question shows it."]),
        (1, 2, ["The 2 messages that followed stay with the version before: ← on this answer shows it."]),
    ],
)
async def test_editing_in_the_middle_says_where_what_followed_is(
    engine: FakeEngine, store: ConversationStore, place: int, asked: int, said: list[str]
) -> None:
    async with running(Chat(engine, store)) as chat:
        for number in range(asked):
            chat.controller.submit(f"question {number}")
            await chat.answered()
        chat.controller.edit(chat.path[place], "Better")
        assert chat.said == said
        await chat.answered()
        assert len(chat.path) == 2 and chat.path[place].content == "Better"
        chat.controller.switch(chat.path[place], -1)
        assert len(chat.path) == 2 * asked


async def test_resuming_a_conversation(engine: FakeEngine, store: ConversationStore) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("remember")
        await chat.answered()
        conversation = chat.controller.thread.conversation
        assert conversation is not None
        chat.controller.new_conversation()
        assert chat.path == []
        assert chat.controller.open_conversation(conversation)
        assert [entry.content for entry in chat.path] == ["remember", "Paris is the capital."]
        chat.controller.submit("and then?")
        await chat.answered()
        last = engine.sent(Generate)[-1]
        assert isinstance(last, Generate)
        assert [message.content for message in last.messages or []] == [
            "remember", "Paris is the capital.", "and then?",
        ]  # fmt: skip


async def test_leaving_the_program_keeps_the_text(engine: FakeEngine, store: ConversationStore) -> None:
    engine.gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("go")
        await chat.until(lambda: chat.path[-1].content)
    assert on_disk(store, chat)[-1].content == "Paris"
    assert on_disk(store, chat)[-1].state == "stopped"


BEAMS = [Beam("first", [1], -0.1), Beam("second", [2], -0.2), Beam("third", [3], -0.3)]


async def test_picking_another_candidate(engine: FakeEngine, store: ConversationStore) -> None:
    engine.beam_steps = [BEAMS]
    async with running(Chat(engine, store, Settings(beams=3))) as chat:
        chat.controller.submit("q")
        await chat.answered()
        assert chat.path[-1].content == "first"
        chat.controller.pick_beam(1)
        assert (chat.path[-1].content, chat.path[-1].siblings) == ("second", 2)
        chat.controller.pick_beam(0)
        assert (chat.path[-1].content, chat.path[-1].siblings) == ("first", 2)
        assert [record.content for record in on_disk(store, chat)] == ["q", "first"]


async def test_picking_a_candidate_while_the_search_runs_ends_it(engine: FakeEngine, store: ConversationStore) -> None:
    engine.beam_steps = [BEAMS, BEAMS[::-1]]
    engine.gate = asyncio.Event()
    async with running(Chat(engine, store, Settings(beams=3))) as chat:
        chat.controller.submit("q")
        await chat.until(lambda: chat.controller.beams)
        chat.controller.pick_beam(2)
        await chat.answered()
        assert chat.path[-1].content == "third"
        assert {record.content for record in store.siblings(chat.path[-1].record or 0)} == {"first", "third"}


async def test_beams_are_sent_without_sampling_settings(engine: FakeEngine, store: ConversationStore) -> None:
    from engine.ipc.messages import Sampling

    engine.beam_steps = [BEAMS]
    async with running(Chat(engine, store, Settings(beams=3, temperature=0.7))) as chat:
        chat.controller.submit("q")
        await chat.answered()
        request = engine.sent(Generate)[-1]
        assert isinstance(request, Generate)
        assert request.beams == 3
        assert request.sampling == Sampling()


async def test_costs_of_beams_need_a_loaded_model(engine: FakeEngine, store: ConversationStore) -> None:
    async with running(Chat(engine, store)) as chat:
        assert isinstance(await chat.controller.estimate_beams([1, 2]), str)
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        costs = await chat.controller.estimate_beams([1, 2])
        assert isinstance(costs, BeamEstimates)
        assert [estimate.width for estimate in costs.estimates] == [1, 2]


async def test_other_settings_load_the_model_again_only_if_they_must(
    engine: FakeEngine, store: ConversationStore
) -> None:
    async with running(Chat(engine, store)) as chat:
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        chat.controller.change_settings({"max_tokens": 5})
        chat.controller.submit("q")
        await chat.answered()
        assert len(engine.sent(Load)) == 1
        chat.controller.change_settings({"model": "other"})
        await chat.until(lambda: len(engine.sent(Load)) == 2 and chat.controller.status.phase is Phase.READY)
        assert engine.sent(Load)[-1].model == "other"  # type: ignore[attr-defined]


async def test_a_watched_engine_is_watched_again_after_a_crash(engine: FakeEngine, store: ConversationStore) -> None:
    async with running(Chat(engine, store)) as chat:
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        await chat.controller.link.watch(True)
        engine.die()
        await chat.until(lambda: len(engine.sent(Watch)) == 2)
        assert engine.watching


class BrokenStore:
    """The real store, until ``broken`` is set: then it refuses like a full disk."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store
        self.broken = False

    def __getattr__(self, name: str) -> object:
        if self.broken and name in ("add", "update", "create", "change"):

            def refuse(*arguments: object, **more: object) -> None:
                raise StoreError("The disk is full; make room.", "full")

            return refuse
        return getattr(self._store, name)


async def test_a_store_that_refuses_loses_nothing(engine: FakeEngine, store: ConversationStore) -> None:
    broken = BrokenStore(store)
    async with running(Chat(engine, broken)) as chat:  # type: ignore[arg-type]
        broken.broken = True
        chat.controller.submit("precious")
        await chat.answered()
        assert [entry.content for entry in chat.path] == ["precious", "Paris is the capital."]
        assert chat.controller.unsaved == 2
        assert chat.said.count("Not saved: The disk is full; make room.") == 1
        broken.broken = False
        chat.controller.submit("more")
        await chat.answered()
        assert chat.controller.unsaved == 0
        assert [record.content for record in on_disk(store, chat)] == [
            "precious", "Paris is the capital.", "more", "Paris is the capital.",
        ]  # fmt: skip
        assert "All messages are saved again." in chat.said


async def test_control_characters_of_a_model_are_neither_shown_nor_kept(
    engine: FakeEngine, store: ConversationStore
) -> None:
    engine.answer = lambda request: ["a\x1b", "[31mb\x07", "\x9dc"]
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("q")
        await chat.answered()
        assert chat.path[-1].content == "ab"
        assert "\x1b" not in on_disk(store, chat)[-1].content


def test_the_prompt_joins_what_would_break_a_template() -> None:
    path = [Entry("user", "a"), Entry("assistant", "", state="failed"), Entry("user", "b"), Entry("assistant", "c")]
    assert prompt_messages("", path) == [Message("user", "a\n\nb"), Message("assistant", "c")]
    assert prompt_messages("be brief", path)[0] == Message("system", "be brief")


@pytest.mark.parametrize("pieces", [1, 3])
async def test_conversations_survive_reopening(
    engine: FakeEngine, store: ConversationStore, home: Path, pieces: int
) -> None:
    async with running(Chat(engine, store)) as chat:
        for number in range(pieces):
            chat.controller.submit(f"q{number}")
            await chat.answered()
    reopened = open_store(home / "conversations.sqlite")
    try:
        found = reopened.conversations()[0]
        assert len(reopened.shown(found.id)) == 2 * pieces
    finally:
        reopened.close()
