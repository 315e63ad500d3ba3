"""The values of a chat over those of its persona and of the settings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.settings.fields import SettingError, Value
from app.settings.layers import (
    ADJUSTABLE,
    PRESETS,
    ChatValues,
    adjustable,
    allowed,
    effective,
    preset_in,
    value_in_effect,
)
from app.settings.schema import Settings
from engine.generation.sampling import own_sampling, sampling_rule


def test_the_chat_comes_before_the_persona_and_the_persona_before_the_settings() -> None:
    person = Settings(temperature=0.9, top_p=0.8, min_p=0.1)
    chat = ChatValues("Poet", {"temperature": 1.2, "top_k": 5}, {"top_k": None, "beams": 3})
    options = effective(person, chat)
    assert (options.temperature, options.top_p, options.top_k, options.beams) == (1.2, 0.8, None, 3)
    assert options.model == person.model
    sources = {key: chat.source(key, person) for key in ("temperature", "top_p", "top_k", "beams", "seed", "thinking")}
    assert sources == {
        "temperature": "persona", "top_p": "settings", "top_k": "chat", "beams": "chat", "seed": "default",
        "thinking": "default",
    }  # fmt: skip
    assert effective(person, chat.without(["top_k"])).top_k == 5
    assert effective(person, ChatValues()) is person


def test_values_are_checked_by_the_schema() -> None:
    with pytest.raises(SettingError, match="temperature cannot be 11"):
        ChatValues().having({"seed": 1, "temperature": 11})
    for key in ("model", "system_prompt", "nothing"):
        with pytest.raises(SettingError, match="A chat has no value"):
            ChatValues().having({key: "x"})
    assert [adjustable(name).key for name in ("Top-p", "repetition penalty", "MAX_TOKENS")] == [
        "top_p", "repetition_penalty", "max_tokens",
    ]  # fmt: skip
    assert all(setting.group == "answer" for setting in ADJUSTABLE)


_json: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["persona", "given", "own", "temperature", "beams", "model"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(_json)
def test_what_a_conversation_kept_is_believed_only_as_far_as_it_is_allowed(content: Any) -> None:
    chat = ChatValues.restored(content)
    assert chat.persona.isprintable()
    assert effective(Settings(), chat).with_value("beams", 1)
    assert ChatValues.restored(chat.stored) == chat


_fractions = st.none() | st.floats(0.01, 1.0)


@given(
    st.builds(
        Settings, temperature=_fractions, top_p=_fractions, top_k=st.none() | st.integers(0, 9), min_p=_fractions
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "do_sample": st.booleans(), "temperature": st.floats(0.0, 2.0), "top_p": st.floats(0.01, 1.0),
            "top_k": st.integers(0, 100), "repetition_penalty": st.floats(0.5, 2.0),
        },
    ),
)  # fmt: skip
@example(Settings(min_p=1.0), {"do_sample": True, "temperature": 0.0})
def test_what_is_shown_as_in_effect_is_what_the_engine_uses(options: Settings, defaults: dict[str, Any]) -> None:
    rule, own = sampling_rule(options.sampling, defaults), own_sampling(defaults)
    assert own is not None
    for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"):
        assert value_in_effect(key, options, own) == getattr(rule, key)


def test_impossible_defaults_of_a_model_are_unknown() -> None:
    assert own_sampling({"do_sample": True, "temperature": -1.0}) is None
    assert own_sampling({"do_sample": True, "top_p": "high"}) is None
    assert value_in_effect("top_p", Settings(), None) is None


def test_values_survive_being_kept() -> None:
    chat = ChatValues("Poet", {"temperature": 1.2}, {"seed": None, "thinking": "off"})
    assert ChatValues.restored(chat.stored) == chat
    assert ChatValues().stored == {}
    assert allowed({"temperature": 99, "seed": 4, "model": "x", 3: 4}) == {"seed": 4}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_presets_are_allowed_and_recognised(preset: Any) -> None:
    person = Settings(temperature=0.5, beams=4)
    chat = ChatValues(own={"seed": 7, "beams": 2}).with_preset(preset, person)
    options = effective(person, chat)
    assert preset_in(options) is preset
    assert (options.seed, options.beams) == (7, 1)
    assert effective(person, chat.without(preset.values)).temperature == 0.5


def test_a_preset_says_nothing_that_is_so_anyway() -> None:
    balanced = next(preset for preset in PRESETS if preset.name == "balanced")
    assert ChatValues(own={"temperature": 2.0}).with_preset(balanced, Settings()).own == {}
    values: dict[str, Value] = dict(ChatValues().with_preset(balanced, Settings(temperature=0.5)).own)
    assert values == {"temperature": None}
