"""Personas in their file, and the values of a chat over the settings."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
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
from app.settings.personas import LONGEST_NAME, Persona, PersonasFile, open_personas
from app.settings.schema import Settings
from app.text_safety import sanitize
from engine.generation.sampling import own_sampling, sampling_rule
from tests.support.random_examples import examples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "personas.toml"


EDITOR = Persona("Strict editor", "You correct spelling.\nNothing else.", "qwen3", {"temperature": 0.2, "seed": None})
POET = Persona("Poet", values={"temperature": 1.2, "thinking": "off", "beams": 2})


def test_personas_come_back_as_they_were_saved(path: Path) -> None:
    file = PersonasFile(path)
    assert file.personas == () and file.notices == []
    file.put(EDITOR)
    file.put(POET)
    again = PersonasFile(path)
    assert again.personas == (EDITOR, POET) and again.notices == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert again.find(" strict EDITOR ") == EDITOR


def test_the_file_is_edited_by_hand_and_keeps_what_it_said(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('# mine\n[Poet]\ntemperature = 1.1 # warm\nmood = "grey"\n\n[Last]\nseed = 3\n')
    file = PersonasFile(path)
    assert file.notices == ["personas.toml: Poet: mood is unknown; it is kept and not used."]
    file.put(dataclasses.replace(file.find("Poet"), name="Bard", system="Sing."), old="Poet")
    text = path.read_text()
    assert "# mine" in text and "mood" in text and "# warm" in text
    assert [persona.name for persona in file.personas] == ["Bard", "Last"]
    assert PersonasFile(path).find("bard") == Persona("Bard", "Sing.", "", {"temperature": 1.1})
    file.delete("Bard")
    assert file.personas == (Persona("Last", values={"seed": 3}),)
    assert "[Last]" in path.read_text() and "Bard" not in path.read_text()


def test_values_that_are_not_allowed_stay_in_the_file_and_are_told(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(
        "answer = 3\n[A]\ntemperature = -1\ntop_p = 0.5\ntop_k = ''\n"
        "[B]\nsystem_prompt = 4\nmodel = ''\n[\"\\u001b[2J\"]\n"
    )
    file = PersonasFile(path)
    assert file.personas == (Persona("A", values={"top_p": 0.5, "top_k": None}), Persona("B"))
    told = " ".join(file.notices)
    for part in ("'answer' is no persona", "temperature cannot be -1", "system_prompt cannot be 4", "name is one line"):
        assert part in told
    assert "\x1b" not in told
    file.put(POET)
    assert "temperature = -1" in path.read_text() and "answer = 3" in path.read_text()


@pytest.mark.parametrize("content", [b"[[[", b"\xff\xfe", b"a = " + b"[" * 5000, b"[A]\n[A]\n"])
def test_a_damaged_file_is_left_alone_until_something_is_saved(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    file = PersonasFile(path)
    assert file.personas == () and "personas.toml is damaged" in file.notices[0]
    assert path.read_bytes() == content
    file.put(POET)
    assert PersonasFile(path).personas == (POET,)
    (aside,) = path.parent.glob("personas.damaged-*")
    assert aside.read_bytes() == content


def test_what_cannot_be_read_or_written_is_one_sentence(path: Path) -> None:
    path.mkdir(parents=True)
    file = PersonasFile(path)
    assert "cannot be read" in file.notices[0]
    with pytest.raises(SettingError, match="could not be saved"):
        file.put(POET)


def test_what_acts_on_a_terminal_and_names_with_spaces_are_not_used(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text('[" bob "]\nsystem_prompt = "kept"\n[Ann]\nsystem_prompt = "a\\u001b[2Jb\\u202e\\nc"\n')
    file = PersonasFile(path)
    assert file.personas == (Persona("Ann", "ab\nc"),)
    assert file.notices == [
        "personas.toml: A persona's name has no spaces around it, unlike ' bob '; it is kept and not used."
    ]
    file.put(Persona("bob", "new"))
    assert [persona.name for persona in file.personas] == ["Ann", "bob"] and '[" bob "]' in path.read_text()


def test_names_are_unique_whatever_their_case(path: Path) -> None:
    file = PersonasFile(path)
    with pytest.raises(SettingError, match=r"no persona 'Poet'; there are none yet"):
        file.find("Poet")
    file.put(POET)
    file.put(EDITOR)
    with pytest.raises(SettingError, match="a persona 'Poet' already"):
        file.put(Persona("POET"))
    with pytest.raises(SettingError, match="a persona 'Poet' already"):
        file.put(Persona("poet"), old="Strict editor")
    file.put(Persona("POET"), old="Poet")
    with pytest.raises(SettingError, match=r"no persona 'x'; there are POET, Strict editor\."):
        file.find("x")
    for name in ("", " ", "two\nlines", "x" * (LONGEST_NAME + 1), "\x1b[2J"):
        with pytest.raises(SettingError, match="A persona's name"):
            file.put(Persona(name))
    with pytest.raises(SettingError, match="top_k cannot be -1"):
        file.put(Persona("new", values={"top_k": -1}))


_NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20).map(str.strip).filter(bool)


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(_NAMES, st.text(), _NAMES), max_size=4, unique_by=lambda found: found[0].casefold()))
def test_any_name_and_text_is_kept(tmp_path: Path, found: list[tuple[str, str, str]]) -> None:
    path = tmp_path / "any.toml"
    path.unlink(missing_ok=True)
    wanted = tuple(Persona(name, sanitize(system), model) for name, system, model in found)
    file = PersonasFile(path)
    for persona in wanted:
        file.put(persona)
    assert PersonasFile(path).personas == wanted
    if wanted:
        file.put(dataclasses.replace(wanted[0], name="another name"), old=wanted[0].name)
        assert PersonasFile(path).personas == (dataclasses.replace(wanted[0], name="another name"), *wanted[1:])


def test_they_lie_beside_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    assert open_personas().path == tmp_path / "config" / "personas.toml"


# --- values of a chat ----------------------------------------------------------------------------------------------


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
