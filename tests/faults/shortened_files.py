"""A process that answers with a model whose files are shortened meanwhile."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.formats.mapped_file import MappedFile
from engine.moe.kernels import file_guard
from engine.runtimes import runtime_named


def run_loading(folder: str, runtime: str, files: str, noticed: bool) -> NoReturn:
    """The files are shortened when they were opened, and before anything of them was read but headers."""
    module: Any = import_module(f"engine.runtimes.{runtime}.runtime")
    open_model = module.open_model

    def opened(*arguments: Any) -> Any:
        found = open_model(*arguments)
        for file in Path(folder).glob(files):
            os.truncate(file, 0)
        return found

    module.open_model = opened
    if not noticed:
        MappedFile.check_unchanged = lambda self: None  # type: ignore[method-assign]
    try:
        runtime_named(runtime).load(Path(folder), Load(id=1, model="m", cpu_threads=2), lambda *_: None)  # type: ignore[arg-type]
    except ModelError as error:
        print(error.kind, error)
    print("alive", flush=True)
    raise SystemExit(0)


def run(folder: str, runtime: str, files: str, guarded: bool, noticed: bool) -> NoReturn:
    """Not ``guarded``: as if the native library was not there. Not ``noticed``: the files look the same."""
    if not guarded:
        file_guard.path = lambda: None
    model = runtime_named(runtime).load(Path(folder), Load(id=1, model="m", cpu_threads=2), lambda *_: None)
    rows = model.start()
    rows.extend(list(range(3, 20)))
    passed: list[int] = []

    def shorten() -> None:
        passed.append(0)
        if len(passed) == 2:
            for file in Path(folder).glob(files):
                os.truncate(file, 0)

    if not noticed:
        MappedFile.check_unchanged = lambda self: None  # type: ignore[method-assign]
    model.between_layers = shorten
    try:
        rows.extend(list(range(20, 40)))
    except ModelError as error:
        print(error.kind, error, rows.length)
    model.close()
    print("alive", flush=True)
    raise SystemExit(0)
