"""Personas in their file."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.settings.fields import SettingError
from app.settings.personas import LONGEST_NAME, Persona, PersonasFile, open_personas
from app.text_safety import sanitize
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
