"""The documents name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("app", "engine", "discovery", "assets", "packaging", "benchmarks", "tests", "docs")
OF_PEOPLE = {"settings.toml", "personas.toml", "keymap.toml", "config.toml"}
"""Files on a person's machine."""


@pytest.fixture(scope="module")
def files() -> list[str]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return ["/" + path.relative_to(ROOT).as_posix() for path in [*found, *ROOT.glob("*.*")]]


@pytest.mark.parametrize("document", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_every_file_that_is_named_exists(document: str, files: list[str]) -> None:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.(?:py|c|h|toml|sql|svg)\b", text)) - OF_PEOPLE
    missing = sorted(name for name in named if not any(path.endswith("/" + name.lstrip("/")) for path in files))
    assert missing == []


def test_the_architecture_takes_two_pages() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 120
