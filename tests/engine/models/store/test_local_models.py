"""What a model's name means, and which models are here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.models.folders import model_folder
from engine.models.store import local_models
from engine.models.store.catalogue import find
from engine.models.store.local_models import installed, partial_downloads, remove, resolve
from tests.support.random_examples import examples


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "models"


def make_model(folder: Path, family: str = "mixtral", size: int = 1000, index: bool = False) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(size))
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    if index:
        (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def test_a_packed_entry_is_one_file_of_its_repo(models: Path) -> None:
    model = resolve("qwen3-30b-q4")
    assert (model.repo, model.tag) == ("unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF", "Q4_K_M")
    assert resolve("unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF:q4_k_m") == model
    assert resolve("unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF:Q6_K").entry is None
    make_model(models / "unsloth--Qwen3-30B-A3B-Instruct-2507-GGUF--Q4_K_M")
    assert [item.name for item in installed()] == ["qwen3-30b-q4"]


def test_a_name_and_its_repo_are_the_same_model(models: Path, tmp_path: Path) -> None:
    by_name, by_repo = resolve("mixtral-8x7b"), resolve("mistralai/Mixtral-8x7B-Instruct-v0.1")
    assert by_name == by_repo == resolve("MIXTRAL-8X7B")
    assert by_name.plain_folder == models / "mistralai--Mixtral-8x7B-Instruct-v0.1"
    assert by_name.kind == "hub" and by_name.name == "mixtral-8x7b" and by_name.folder is None
    assert find("nothing-like-it") is None
    with pytest.raises(ModelError, match="is not on this machine; run: privatellm models pull mixtral-8x7b"):
        by_name.require_folder()
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=r"empty is no model: it lacks config\.json"):
        resolve(str(empty)).require_folder()


def test_any_repo_id_is_a_model(models: Path) -> None:
    model = resolve("some.one/A-Model_v0.1")
    assert (model.kind, model.repo, model.name) == ("hub", "some.one/A-Model_v0.1", "some.one/A-Model_v0.1")
    assert model.plain_folder == models / "some.one--A-Model_v0.1"


@pytest.mark.parametrize(
    ("text", "tag", "folder"),
    [
        ("owner/M-GGUF:Q4_K_M", "Q4_K_M", "owner--M-GGUF--Q4_K_M"),
        ("owner/M-GGUF:ud-q4_k_xl", "ud-q4_k_xl", "owner--M-GGUF--UD-Q4_K_XL"),
        ("hf.co/owner/M-GGUF:Q8_0", "Q8_0", "owner--M-GGUF--Q8_0"),
        ("https://huggingface.co/owner/M-GGUF", "", "owner--M-GGUF"),
        ("owner/M-GGUF:M-Q8_0.gguf", "M-Q8_0.gguf", "owner--M-GGUF--Q8_0"),
        ("owner/M-GGUF:Q8_0/M-Q8_0-00001-of-00002.gguf", "Q8_0/M-Q8_0-00001-of-00002.gguf", "owner--M-GGUF--Q8_0"),
    ],
)
def test_one_file_of_a_repo_is_a_model(models: Path, text: str, tag: str, folder: str) -> None:
    model = resolve(text)
    assert (model.kind, model.repo, model.tag, model.plain_folder) == ("hub", "owner/M-GGUF", tag, models / folder)
    with pytest.raises(ModelError, match="run: privatellm models pull owner/M-GGUF"):
        model.require_folder()


def make_gguf_model(models: Path, tag: str, *names: str) -> Path:
    folder = models / f"owner--M-GGUF--{tag}"
    folder.mkdir(parents=True)
    for name in ("config.json", *names):
        (folder / name).write_text("{}")
    return folder


def test_a_downloaded_file_is_found_by_whatever_names_it(models: Path) -> None:
    four = make_gguf_model(models, "UD-Q4_K_XL", "M-UD-Q4_K_XL-00001-of-00002.gguf", "M-UD-Q4_K_XL-00002-of-00002.gguf")
    for name in ("", ":UD-Q4_K_XL", ":q4_k_xl", ":M-UD-Q4_K_XL-00001-of-00002.gguf", ":m-ud-q4_k_xl"):
        model = resolve(f"owner/M-GGUF{name}")
        assert (model.folder, model.name) == (four, "owner/M-GGUF:UD-Q4_K_XL"), name
    assert [item.name for item in installed()] == ["owner/M-GGUF:UD-Q4_K_XL"]
    assert resolve(str(four)).name == "owner/M-GGUF:UD-Q4_K_XL"
    assert resolve("owner/M-GGUF:Q8_0").folder is None
    eight = make_gguf_model(models, "Q8_0", "M-Q8_0.gguf")
    assert resolve("owner/M-GGUF:Q8_0").folder == eight
    assert resolve("owner/M-GGUF").folder is None, "either could be meant"
    assert remove("owner/M-GGUF:q4_k_xl") > 0 and not four.exists() and eight.exists()


@pytest.mark.parametrize("last", ["model.safetensors.index.json", "bank.json"])
def test_the_prepared_copy_is_opened_where_there_is_one(models: Path, last: str) -> None:
    """``last`` is what is written last into it, now or by an earlier version."""
    plain = make_model(models / "owner--name")
    assert resolve("owner/name").folder == plain and not resolve("owner/name").prepared
    prepared = make_model(models / "owner--name.prepared", size=500)
    (prepared / last).write_text("{}")
    assert resolve("owner/name").folder == prepared and resolve("owner/name").prepared
    os.utime(plain / "model.safetensors", ns=(0, (prepared / last).stat().st_mtime_ns + 10**9))
    assert resolve("owner/name").folder == plain, "weights changed since: the copy is out of date"


def test_local_folders_are_models(tmp_path: Path, models: Path) -> None:
    folder = make_model(tmp_path / "elsewhere" / "mine")
    for text in (str(folder), "elsewhere/mine", "./elsewhere/mine"):
        model = resolve(text)
        assert (model.kind, model.name, model.folder) == ("folder", "mine", folder)
        assert model.prepared_folder.parent == models and model.prepared_folder.name.startswith("local--mine--")
    prepared = make_model(model.prepared_folder, index=True)
    assert resolve(str(folder)).folder == prepared
    assert remove(str(folder)) > 0
    assert resolve(str(folder)).folder == folder and folder.exists(), "a person's own folder is never deleted"
    with pytest.raises(ModelError, match="Nothing of mine"):
        remove(str(folder))


def test_a_folder_in_the_models_folder_by_its_path(models: Path) -> None:
    plain = make_model(models / "owner--name")
    prepared = make_model(models / "owner--name.prepared", index=True)
    assert resolve(str(prepared)).plain_folder == plain
    assert resolve(str(plain)).prepared_folder == prepared


NO_MODELS = [
    "",
    "  ",
    "a\0b",
    "mixtrall-8x7b",
    "a/b/c",
    "../x",
    "~/absent",
    "~nobody-of-that-name",
    "owner/na me",
    "/\x1b[2J",
    "a\ud800",
    "owner/name:",
    "owner/name:../x",
    "owner/name:a b",
    "owner:Q4_K_M",
    "ollama:",
    "lmstudio:a/b:c",
    "huggingface:\x1b[2J",
]


@pytest.mark.parametrize("text", [*NO_MODELS, "x" * 5000, "/" + "x" * 5000], ids=lambda text: ascii(text[:20]))
def test_other_names_are_an_error_in_one_line(text: str) -> None:
    with pytest.raises(ModelError) as raised:
        resolve(text)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 500
    assert raised.value.kind == "bad-input"


def test_near_names_are_suggested(models: Path) -> None:
    with pytest.raises(ModelError, match=r"did you mean mixtral-8x7b"):
        resolve("mixtral8x7b")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match=r"neither a folder .* nor a \.gguf file"):
        resolve("./model.bin")


def test_unfinished_is_not_a_model(models: Path, tmp_path: Path) -> None:
    make_model(models / "owner--name.partial")
    (models / "owner--empty").mkdir()
    assert installed() == []
    assert resolve("owner/name").folder is None and resolve("owner/empty").folder is None
    assert [name for name, _ in partial_downloads()] == ["owner/name"]
    with pytest.raises(ModelError, match="unfinished"):
        resolve(str(models / "owner--name.partial"))
    assert remove("owner/name") > 0
    assert partial_downloads() == []


def test_what_is_installed(models: Path) -> None:
    assert installed() == []
    make_model(models / "mistralai--Mixtral-8x7B-Instruct-v0.1")
    make_model(models / "mistralai--Mixtral-8x7B-Instruct-v0.1.prepared", index=True)
    make_model(models / "owner--name.prepared", family="olmoe", index=True)
    make_model(models / "starter")
    make_model(models / "local--mine--0123456789abcdef.prepared", index=True)
    broken = make_model(models / "owner--broken")
    (broken / "config.json").write_text("{")
    found = {model.name: model for model in installed()}
    assert sorted(found) == ["mixtral-8x7b", "owner/broken", "owner/name", "starter"]
    assert found["mixtral-8x7b"].prepared and found["mixtral-8x7b"].nbytes > 2000
    assert found["owner/name"].prepared and found["owner/name"].family == "olmoe"
    assert not found["starter"].prepared and found["owner/broken"].family == ""
    assert all(resolve(name).folder is not None for name in found)


def test_removing(models: Path) -> None:
    make_model(models / "owner--name", size=10_000)
    make_model(models / "owner--name.prepared", size=20_000, index=True)
    make_model(models / "owner--name.partial", size=30_000)
    make_model(models / "owner--name2")
    assert remove("owner/name") > 60_000
    assert [path.name for path in models.iterdir()] == ["owner--name2"]
    with pytest.raises(ModelError, match="Nothing of owner/name"):
        remove("owner/name")


def test_one_writer_at_a_time(models: Path) -> None:
    second = model_folder.exclusive(models / "a")
    with (
        model_folder.exclusive(models / "a"),
        model_folder.exclusive(models / "b"),
        pytest.raises(ModelError, match="already working on a"),
    ):
        second.__enter__()
    with model_folder.exclusive(models / "a"):
        assert (models / ".a.lock").exists()


@settings(max_examples=examples(40), deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_is_a_model_or_a_model_error(text: str) -> None:
    try:
        model = resolve(text)
    except ModelError as error:
        assert str(error)
    else:
        models_folder = local_models.locate("models")
        assert model.prepared_folder.parent == models_folder, "nothing is ever written outside the models folder"
