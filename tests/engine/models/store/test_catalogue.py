"""The catalogue: every entry is whole, and runs here."""

from __future__ import annotations

import importlib.resources
import tomllib
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.models.architectures.families import SUPPORTED
from engine.models.formats.gguf_names import tag_of
from engine.models.store.catalogue import catalogue, for_gpu_instead, offered, parse_catalogue
from tests.support.tiny_gguf import ARCHITECTURES


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "models"


BITS = {"Q4_K_M": 4.8, "Q8_0": 8.5, "4bit": 4.5, "8bit": 8.5}
"""Bits of a weight, by what a tag or a repo's name ends in."""


def test_every_entry_is_whole_and_runs_here() -> None:
    entries = catalogue()
    assert entries[0].name == "starter" and entries[0].origin == "starter" and not entries[0].repo
    for entry in entries:
        assert entry.family in SUPPORTED, f"{entry.name}: {entry.family} is not supported"
        assert entry.licence in {"Apache-2.0", "MIT"}
        if entry.experts:
            assert 0 < entry.active_billion < entry.parameters_billion
            assert 0 < entry.experts_per_token < entry.experts
        else:
            embedded = entry.name.startswith("gemma-e")
            assert (entry.active_billion < entry.parameters_billion) == embedded and not entry.experts_per_token
        assert entry.description.endswith(".") and len(entry.description) <= 110
        assert "/" not in entry.name
        assert entry.gigabytes <= 0.75 * entry.memory_gigabytes or not entry.memory_gigabytes
        if entry.origin == "hub":
            assert entry.repo.count("/") == 1
            bits = entry.gigabytes * 8 / entry.parameters_billion
            if entry.family == "gpt_oss":
                assert 4.25 < bits < 5.3, "4.25 in the experts, more in the trunk"
            elif entry.tag == "UD-Q4_K_XL":
                assert 4.1 < bits < 5.3, "4.5 where a model was trained for Q4_0, more where tensors differ"
            elif entry.family == "gemma4_text":
                assert 4.8 < bits < 5.5, "its experts' rows are no whole blocks of 256, so some are in more bits"
            else:
                assert bits == pytest.approx(BITS.get(entry.tag or entry.repo.rpartition("-")[2], 16), rel=0.06)
        assert (entry.runtime == "native") == bool(entry.tag), (
            "packed files for native are GGUF files, and no others are"
        )
        if entry.tag:
            assert entry.tag == tag_of(entry.tag)
            assert entry.family in ARCHITECTURES, f"{entry.name}: GGUF files of {entry.family} do not run"
    assert [entry.gigabytes for entry in entries] == sorted(entry.gigabytes for entry in entries)


@pytest.mark.parametrize("apple", [False, True])
def test_something_packed_is_offered_for_every_size_of_machine(apple: bool) -> None:
    runtime = "mlx" if apple else "native"
    packed = [entry for entry in offered(apple=apple) if entry.runtime == runtime]
    assert {8, 16, 32, 64, 128} <= {entry.memory_gigabytes for entry in packed}
    assert {entry.runtime for entry in offered(apple=apple)} == {"any", runtime}
    assert len(offered(apple=apple)) <= 28, "a list to choose from"
    assert set(offered(apple=False)) | set(offered(apple=True)) == set(catalogue())


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("qwen3-30b-q4", "qwen3-30b-4bit"),
        ("Qwen3-30B-A3B-Q4_K_M.gguf", "qwen3-30b-4bit"),
        ("qwen3:8b", "qwen3-8b-4bit"),
        ("gpt-oss-20b-mxfp4", "gpt-oss-20b"),
        ("gpt-oss:120b", "gpt-oss-120b"),
        ("qwen3.6-35b-q4", "qwen3.6-35b-4bit"),
        ("mixtral-8x7b-q4", None),
        ("qwen3-coder-30b-q4", None),
        ("", None),
    ],
)
def test_a_gguf_file_has_its_like_for_the_gpu_of_a_mac(name: str, instead: str | None) -> None:
    found = for_gpu_instead(name)
    assert (found.name if found else None) == instead


@pytest.mark.parametrize("change", [{"surprise": 1}, {"gigabytes": "many"}, {"family": None}, {"origin": "elsewhere"}])
def test_a_damaged_catalogue_is_said(change: dict[str, object]) -> None:
    text = importlib.resources.files("assets").joinpath("catalogue.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    data["model"][1].update(change)
    with pytest.raises(ModelError, match="catalogue is damaged"):
        parse_catalogue(data)
    data = tomllib.loads(text)
    data["model"].append(data["model"][0])
    with pytest.raises(ModelError, match="names a model twice"):
        parse_catalogue(data)
