"""Who may import whom: the contracts of pyproject.toml hold, bite when broken, and heavy libraries load late."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("app", "engine", "discovery", "assets")
HEAVY = ("torch", "mlx", "mlx_lm", "transformers", "tokenizers", "grpc", "zeroconf", "huggingface_hub", "safetensors")


def modules_under(*prefixes: str) -> list[str]:
    """Dotted names of all modules whose name is, or lies under, one of ``prefixes``."""
    names = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in names if any(name == p or name.startswith(p + ".") for p in prefixes)]


def loaded_after_importing(modules: list[str], watched: tuple[str, ...]) -> list[str]:
    """Which of ``watched`` a fresh interpreter has in ``sys.modules`` once it has imported ``modules``."""
    program = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(json.dumps([name for name in {list(watched)!r} if name in sys.modules]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    loaded: list[str] = json.loads(result.stdout.splitlines()[-1])
    return loaded


@pytest.mark.parametrize(
    ("prefixes", "forbidden"),
    [
        (("app",), HEAVY),
        (("app.conversations", "app.settings.schema", "app.engine_client"), (*HEAVY, "textual", "app.tui")),
        (("app.plain", "app.chat"), (*HEAVY, "textual", "rich")),
        (("app.commands", "app.chat", "app.engine_client"), ("starlette", "uvicorn", "app.serve")),
        (("app.serve",), (*HEAVY, "textual", "rich", "app.chat", "app.tui", "app.plain")),
        (("engine.ipc.messages", "engine.errors", "engine.moe.timing"), (*HEAVY, "numpy", "textual", "app")),
        (("engine.models",), (*HEAVY, "textual", "app")),
        (("engine.planning",), (*HEAVY, "textual", "app", "subprocess", "socket")),
        (("engine.planning.policy", "engine.planning.balancing"), (*HEAVY, "numpy", "textual", "app")),
        (("engine.host", "engine.session.session", "engine.generation"), (*HEAVY, "textual", "app")),
        (("discovery",), (*HEAVY[:6], "engine", "app", "textual")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_importing_leaves_these_unloaded(prefixes: tuple[str, ...], forbidden: tuple[str, ...]) -> None:
    modules = modules_under(*prefixes)
    assert modules, f"no module matches {prefixes}"
    assert loaded_after_importing(modules, forbidden) == []


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))"
    )
    # A new interpreter with ``folder`` first on its path: an installed copy of the packages must not be looked at.
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {program}"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def copy_of_the_tree(folder: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_the_contracts_hold(tmp_path: Path) -> None:
    result = lint_imports(copy_of_the_tree(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr


INTRUDERS = (
    ("engine/models/intruder.py", "import app.engine_client", "Arrows go down only"),
    ("app/intruder.py", "import engine.session.session", "app -> engine"),
    ("app/chat/intruder.py", "import app.tui.keymap", "app: the command line"),
    ("app/plain/intruder.py", "import rich.text", "The chat in lines"),
    ("app/tui/render/intruder.py", "import app.tui.screens.dialogues", "app.tui: applications"),
    ("app/serve/intruder.py", "import app.chat.words", "app.serve knows nothing of the chat"),
    ("app/lending_intruder.py", "import starlette.routing", "The HTTP server is loaded by"),
    ("app/machine_intruder.py", "from transformers import AutoConfig", "app imports no torch"),
    ("engine/models/formats/intruder.py", "import engine.models.folders.opening", "engine.models: the store"),
    ("engine/planning/intruder.py", "import time", "engine.planning is pure"),
    ("engine/generation/intruder.py", "import torch", "torch and mlx live in"),
    ("engine/models/second_intruder.py", "import grpc", "Sockets between machines"),
    ("app/conversations/intruder.py", "import textual.widgets", "know nothing of the screen"),
)
"""File, its forbidden import, and the beginning of the contract that it breaks."""


@pytest.mark.parametrize(
    "smuggled",
    [
        "def smuggle() -> None:\n    {}\n",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    {}\n",
    ],
    ids=["in a function", "for types"],
)
def test_broken_rules_are_noticed(tmp_path: Path, smuggled: str) -> None:
    """Each intruder breaks its own contract: without it that one would hold."""
    tree = copy_of_the_tree(tmp_path)
    for file, line, _ in INTRUDERS:
        (tree / file).write_text(smuggled.format(line), encoding="utf-8")
    result = lint_imports(tree)
    assert result.returncode == 1, result.stdout + result.stderr
    broken = [text for text in result.stdout.splitlines() if "BROKEN" in text]
    assert len(broken) == len(INTRUDERS), result.stdout
    for file, _, contract in INTRUDERS:
        assert any(contract in text for text in broken), contract
        assert file.removesuffix(".py").replace("/", ".") in result.stdout, file


def test_packaging_holds_no_python_package() -> None:
    """A package of that name would hide the ``packaging`` library."""
    assert not list((ROOT / "packaging").rglob("*.py"))


def test_a_class_has_its_name_for_itself() -> None:
    """Whoever searches for a class finds that one. Messages of a widget are named within it."""
    files: dict[str, list[str]] = {}
    for path in (path for package in ("app", "discovery", "engine") for path in (ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(files) > 500
    assert not {name: found for name, found in files.items() if len(found) > 1}
