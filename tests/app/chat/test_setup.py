"""System prompt, persona and values of one chat, without the screen."""

from __future__ import annotations

import pytest

from app.chat.setup import setup_line
from app.chat.state import Phase
from app.conversations.store import ConversationStore, StoreError
from app.settings.fields import SettingError
from app.settings.file import SettingsFile
from app.settings.layers import PRESETS
from app.settings.personas import Persona
from app.settings.schema import Settings
from engine.ipc.messages import Generate, Load, Pull
from tests.app.chat_helpers import Chat, running
from tests.app.fake_engine import FakeEngine

POET = Persona("Poet", "Answer in rhymes.", "other", {"temperature": 1.2, "seed": 7})


def last_request(engine: FakeEngine) -> Generate:
    request = engine.sent(Generate)[-1]
    assert isinstance(request, Generate)
    return request


async def asked(chat: Chat, text: str = "q") -> None:
    chat.controller.submit(text)
    await chat.answered()


async def test_a_chat_has_its_own_values_and_an_old_one_has_them_again(
    engine: FakeEngine, store: ConversationStore
) -> None:
    async with running(Chat(engine, store, Settings(system_prompt="Be brief.", temperature=0.9, top_p=0.8))) as chat:
        setup = chat.controller.setup
        assert setup.system == "Be brief."
        setup.set_system("Answer in French.")
        setup.change({"temperature": 0.2, "thinking": "off"})
        await asked(chat)
        request = last_request(engine)
        assert request.messages[0].content == "Answer in French."
        assert (request.sampling.temperature, request.sampling.top_p, request.thinking) == (0.2, 0.8, False)

        setup.change({"max_tokens": 9})
        setup.set_system(" \n")
        await asked(chat, "again")
        request = last_request(engine)
        assert [message.role for message in request.messages] == ["user", "assistant", "user"]
        assert request.max_tokens == 9
        old = chat.controller.thread.conversation
        assert old is not None

        chat.controller.new_conversation()
        assert (setup.system, setup.options) == ("Be brief.", chat.controller.options)
        await asked(chat)
        assert last_request(engine).sampling.temperature == 0.9
        assert last_request(engine).max_tokens is None

        await chat.until(lambda: store.conversation(old).own_values["own"]["max_tokens"] == 9)
        assert chat.controller.open_conversation(old)
        assert setup.system == ""
        assert (setup.options.temperature, setup.options.max_tokens, setup.options.thinking) == (0.2, 9, "off")


async def test_a_question_that_waits_has_the_values_of_its_own_chat(
    engine: FakeEngine, store: ConversationStore
) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.setup.change({"seed": 5})
        chat.controller.submit("one")
        await chat.answered()
        other = chat.controller.thread
        chat.controller.new_conversation()
        await asked(chat, "two")
        assert last_request(engine).sampling.seed is None
        assert other.values.own == {"seed": 5}


async def test_a_persona_sets_the_chat_and_loads_its_model_for_now(
    engine: FakeEngine, store: ConversationStore
) -> None:
    async with running(Chat(engine, store, Settings(temperature=0.9))) as chat:
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        setup = chat.controller.setup
        setup.change({"beams": 3})
        assert setup.use_persona(POET) == ""
        await asked(chat)
        request = last_request(engine)
        assert request.messages[0].content == "Answer in rhymes."
        assert (request.sampling.temperature, request.sampling.seed, request.beams) == (1.2, 7, 1)
        assert engine.sent(Load)[-1].model == "other"  # type: ignore[attr-defined]
        assert not chat.controller.is_saved("model")
        assert setup_line(chat.controller.thread, chat.controller.options) == "Poet · system prompt"
        setup.change({"top_k": 4})
        assert setup_line(chat.controller.thread, chat.controller.options) == "Poet · system prompt · ● top-k 4"

        kept = chat.controller.thread.conversation
        assert kept is not None
        await chat.until(lambda: store.conversation(kept).own_values.get("own") == {"top_k": 4})
        assert store.conversation(kept).own_values["persona"] == "Poet"
        assert setup.as_persona(" Bard ") == Persona(
            "Bard", "Answer in rhymes.", "other", {"temperature": 1.2, "seed": 7, "top_k": 4}
        )
        setup.leave_persona()
        assert (setup.system, setup.options.temperature) == ("", 0.9)
        with pytest.raises(SettingError):
            setup.as_persona("\n")


async def test_a_model_for_now_that_cannot_be_loaded_changes_no_settings(
    engine: FakeEngine, store: ConversationStore
) -> None:
    engine.load_errors = {"other": "There is no such model."}
    async with running(Chat(engine, store)) as chat:
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        chat.controller.setup.use_persona(POET)
        await chat.until(lambda: any("other cannot be loaded" in line for line in chat.said))
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        assert chat.controller.options.model == "starter"
        assert not chat.controller._settings.path.exists()


async def test_the_model_of_a_persona_is_not_downloaded_unasked(engine: FakeEngine, store: ConversationStore) -> None:
    async with running(Chat(engine, store)) as chat:
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        chat.missing = True
        chat.controller.setup.use_persona(POET)
        await chat.until(lambda: any("other is not on this machine yet. starter stays" in line for line in chat.said))
        assert not engine.sent(Pull)


async def test_a_choice_that_cannot_be_loaded_after_a_model_for_now_leaves_the_saved_one(
    engine: FakeEngine, store: ConversationStore
) -> None:
    engine.load_errors = {"broken": "There is no such model."}
    async with running(Chat(engine, store)) as chat:
        loaded = chat.controller.change_settings({"model": "saved"})
        assert not loaded
        chat.controller.use_model("other")
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        chat.controller.change_settings({"model": "broken"})
        await chat.until(lambda: any("broken cannot be loaded" in line for line in chat.said))
        await chat.until(lambda: chat.controller.status.phase is Phase.READY)
        assert chat.controller.options.model == "other" and not chat.controller.is_saved("model")
        assert SettingsFile(chat.controller._settings.path).settings.model == "saved"


async def test_values_are_typed_by_name_and_label(engine: FakeEngine, store: ConversationStore) -> None:
    chat = Chat(engine, store, Settings(temperature=0.9))
    setup = chat.controller.setup
    assert setup.change_typed("Temperature", "0.2") == "Temperature of this chat: 0.2."
    assert setup.change_typed("top-p", "default") == "Top-p of this chat: default."
    assert setup.values.own == {"temperature": 0.2, "top_p": None}
    assert setup.change_typed("temperature", " ").startswith("Temperature of this chat: 0.2. It can be a number from 0")
    assert setup.change_typed("temperature", "Reset") == "Temperature of this chat: 0.9."
    for name, text, problem in (("temperature", "hot", "'hot'"), ("theme", "nord", "no value 'theme'")):
        with pytest.raises(SettingError, match=problem):
            setup.change_typed(name, text)
    setup.use_preset(PRESETS[0])
    assert setup.options.temperature == 0.0
    setup.reset(list(setup.values.own))
    assert setup.options == chat.controller.options


async def test_new_settings_leave_what_the_person_gave_an_empty_chat(
    engine: FakeEngine, store: ConversationStore
) -> None:
    chat = Chat(engine, store, Settings(system_prompt="old"))
    chat.controller.change_settings({"system_prompt": "new"})
    assert chat.controller.setup.system == "new"
    chat.controller.setup.set_system("mine")
    chat.controller.change_settings({"system_prompt": "newer"})
    assert chat.controller.setup.system == "mine"


async def test_a_change_that_cannot_be_saved_is_told_and_holds(
    engine: FakeEngine, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(Chat(engine, store)) as chat:
        await asked(chat)

        def refuse(*_: object, **__: object) -> None:
            raise StoreError("There is no space left.", "full")

        monkeypatch.setattr(store, "change", refuse)
        chat.controller.setup.change({"temperature": 0.4})
        await chat.until(lambda: any("not saved: There is no space left." in line for line in chat.said))
        assert chat.controller.setup.options.temperature == 0.4
