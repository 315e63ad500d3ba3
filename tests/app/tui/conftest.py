"""Every test of this folder has the fixtures of a screen."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from textual.app import App

from tests.support.kept_screens import Before, CheckScreen, differing


@pytest.fixture(autouse=True)
def _screens(screens: None) -> None:
    """They are those of ``tests/app/conftest.py``."""


@pytest.fixture
def check_screen(request: pytest.FixtureRequest, tmp_path: Path) -> CheckScreen:
    """Compare a screen with the file of the test's name in `__screens__`, which `pytest --update-screens` writes."""
    file = request.path.parent / "__screens__" / request.path.stem / f"{request.node.name}.txt"

    def check(app: App[int], size: tuple[int, int], before: Before) -> None:
        kept = file.read_text(encoding="utf-8") if file.exists() else ""
        found = differing(app, size, before, kept)
        if found is None:
            return
        text, picture = found
        if request.config.getoption("update_screens"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return
        (tmp_path / "drawn.svg").write_text(picture, encoding="utf-8")
        lines = difflib.unified_diff(kept.splitlines(), text.splitlines(), str(file), "drawn", n=1, lineterm="")
        pytest.fail("\n".join([f"another screen than was kept ({tmp_path / 'drawn.svg'}):", *lines]), pytrace=False)

    return check
