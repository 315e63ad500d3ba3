"""The file of settings: what a person wrote there stays, and damage is told."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.settings.fields import ItemKind, Setting, SettingError
from app.settings.file import SettingsFile, open_settings
from app.settings.schema import SCHEMA, Settings
from tests.support.random_examples import examples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "settings.toml"


def _values(setting: Setting) -> st.SearchStrategy[Any]:
    match setting.kind:
        case "choice":
            values: st.SearchStrategy[Any] = st.sampled_from([choice.value for choice in setting.choices])
        case "flag":
            values = st.booleans()
        case "integer":
            assert setting.minimum is not None and setting.maximum is not None
            values = st.integers(int(setting.minimum), int(setting.maximum))
        case "number":
            values = st.floats(setting.minimum, setting.maximum)
        case "lines":
            values = st.text()
        case "items":
            assert setting.item is not None
            values = st.lists(_ITEMS[setting.item], max_size=setting.most or 3).map(", ".join)
        case _:
            values = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1).map(str.strip).filter(bool)
    return st.none() | values if setting.optional else values


_NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)


_ITEMS: dict[ItemKind, st.SearchStrategy[str]] = {
    "network": st.integers(0, 255).map(lambda byte: f"10.0.{byte}.0/24"),
    "address": st.tuples(_NAMES, st.integers(1, 65_534)).map(lambda pair: f"{pair[0]}:{pair[1]}"),
    "place": st.integers(0, 65_534).map(lambda port: f"127.0.0.1:{port}"),
    "machine": _NAMES,
    "share": st.tuples(_NAMES, st.integers(0, 99)).map(lambda pair: f"{pair[0]}={pair[1]}"),
}


_CHANGES = st.lists(
    st.sampled_from(SCHEMA).flatmap(lambda setting: st.tuples(st.just(setting.key), _values(setting))), max_size=8
)


def test_no_file_gives_defaults_and_writes_nothing(path: Path) -> None:
    file = open_settings(path)
    assert (file.settings, file.notices, path.exists()) == (Settings(), [], False)


def test_the_file_is_in_the_configuration_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    open_settings().change("beams", 4)
    assert tomllib.loads((tmp_path / "config" / "settings.toml").read_text()) == {"answer": {"beams": 4}}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(20), deadline=None)
@given(changes=_CHANGES)
def test_what_is_changed_is_read_back(tmp_path: Path, changes: list[tuple[str, Any]]) -> None:
    path = tmp_path / "settings.toml"
    path.unlink(missing_ok=True)
    file = open_settings(path)
    expected = Settings()
    for key, value in changes:
        expected = expected.with_value(key, value)
        assert file.change(key, value) == expected
    again = open_settings(path)
    assert (again.settings, again.notices) == (expected, [])


def test_comments_unknown_keys_and_order_are_kept(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('# mine\n[model]\nmodel = "x" # the good one\ncolour = "red"\n\n[extras]\nfoo = [1, 2]\n')
    file = open_settings(path)
    assert file.settings.model == "x"
    assert [notice for notice in file.notices if "colour" in notice and "kept" in notice]
    assert [notice for notice in file.notices if "extras" in notice and "kept" in notice]
    file.change("model", "y")
    file.change("seed", 7)
    text = path.read_text()
    assert text.startswith('# mine\n[model]\nmodel = "y" # the good one\ncolour = "red"\n')
    assert tomllib.loads(text) == {
        "model": {"model": "y", "colour": "red"},
        "extras": {"foo": [1, 2]},
        "answer": {"seed": 7},
    }


def test_a_change_keeps_what_another_process_changed(path: Path) -> None:
    one, other = open_settings(path), open_settings(path)
    one.change("temperature", 0.5)
    other.change("theme", "nord")
    assert open_settings(path).settings == Settings(temperature=0.5, theme="nord")


def test_none_takes_the_key_out(path: Path) -> None:
    file = open_settings(path)
    file.change("seed", 7)
    file.change("seed", None)
    assert "seed" not in path.read_text()
    assert open_settings(path).settings.seed is None


@pytest.mark.parametrize(
    "content",
    [
        b"beams = = 3",
        b"\xff\xfe\x00",
        b"[model\n",
        b"[a]\n[a]\n",
        b"x = " + b"[" * 5000,
        b"\0",
        b"# " + b"x" * (4 << 20),
    ],
)
def test_a_damaged_file_is_kept_aside_and_said(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    file = open_settings(path)
    assert file.settings == Settings()
    (aside,) = path.parent.glob("settings.damaged-*.toml")
    assert aside.read_bytes() == content
    assert len(file.notices) == 1 and aside.name in file.notices[0]
    file.change("beams", 2)
    assert open_settings(path).settings.beams == 2


def test_looking_leaves_a_damaged_file_in_place(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"[")
    file = open_settings(path, look_only=True)
    assert "damaged" in file.notices[0]
    assert [entry.name for entry in path.parent.iterdir()] == ["settings.toml"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("beams = 17", "1 to 16"),
        ("beams = 0", "1 to 16"),
        ("beams = true", "1 to 16"),
        ('beams = "four"', "1 to 16"),
        ("temperature = -1", "0 to 10"),
        ("temperature = nan", "0 to 10"),
        ("top_p = 0", "0.01 to 1"),
        ("max_tokens = 1.5", "whole number"),
    ],
)
def test_a_value_that_is_not_allowed_is_said_and_left_in_the_file(path: Path, line: str, said: str) -> None:
    path.parent.mkdir()
    path.write_text(f"[answer]\nmin_p = 0.1\n{line}\n")
    file = open_settings(path)
    assert file.settings == Settings(min_p=0.1)
    assert len(file.notices) == 1 and said in file.notices[0]
    file.change("theme", "nord")
    assert line in path.read_text()


def test_a_refused_change_changes_nothing(path: Path) -> None:
    file = open_settings(path)
    with pytest.raises(SettingError, match="runtime cannot be 'cuda'; it must be one of auto, native, torch, mlx"):
        file.change("runtime", "cuda")
    with pytest.raises(SettingError, match="no setting 'nope'"):
        file.change("nope", 1)
    assert file.settings == Settings() and not path.exists()


def test_a_folder_that_cannot_be_written_keeps_the_value_in_effect(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = SettingsFile(tmp_path / "file" / "settings.toml")
    with pytest.raises(SettingError, match="in effect but could not be saved"):
        file.change("beams", 3)
    assert file.settings.beams == 3


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.toml"
    real.write_text("")
    link = tmp_path / "settings.toml"
    link.symlink_to(real)
    open_settings(link).change("beams", 2)
    assert link.is_symlink() and "beams = 2" in real.read_text()
