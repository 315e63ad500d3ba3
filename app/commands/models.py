"""``privatellm models``: list, pull, prepare, remove."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from app.commands.engine_work import Interruption, do, open_for, run_with_engine
from app.commands.output import ProgressLine, WorkFailed, answer, as_json, notify
from app.engine_client import EngineClient
from app.settings.file import open_settings
from app.text_safety import one_line
from engine.errors import ModelError
from engine.ipc.messages import AnyRequest, Done, Prepare, Pull
from engine.models.folders import model_folder
from engine.models.store import found_elsewhere, local_models
from engine.models.store.catalogue import CatalogueEntry, catalogue, offered_here
from engine.planning.units import byte_size
from engine.system.locations import locate


@dataclass(frozen=True)
class ModelRow:
    """One model as ``models list`` shows it. ``nbytes``: size on disk, or of the download."""

    name: str
    state: str
    nbytes: int
    family: str
    description: str
    path: str = ""
    about: bool = False
    """Whether ``nbytes`` is computed from the number of parameters."""
    program: str = ""
    """The program that holds it, if another one does."""


def rows() -> list[ModelRow]:
    """The models of this machine first, then the others of the catalogue, then those of other programs. Raises
    ModelError."""
    entries = {entry.name: entry for entry in catalogue()}
    elsewhere = found_elsewhere.find_all(found_elsewhere.here())
    held = {model.path for model in elsewhere}
    here = [
        ModelRow(
            model.name,
            "ready, prepared" if model.prepared else "ready",
            model.nbytes,
            model.family,
            _about(model, entries),
            str(model.path),
        )
        for model in local_models.installed()
        if model.linked not in held
    ]
    names = {row.name for row in here}
    begun = [
        ModelRow(name, "unfinished", nbytes, "", "")
        for name, nbytes in local_models.partial_downloads()
        if name not in names
    ]
    names |= {row.name for row in begun}
    begun += [ModelRow(name, "share of a ring", nbytes, "", "") for name, nbytes in local_models.shards()]
    begun += [
        ModelRow(
            name,
            "prepared copy",
            nbytes,
            model_folder.family_of(locate("models") / name),
            "Prepared copy of a model in another folder.",
            str(locate("models") / name),
        )
        for name, nbytes in local_models.prepared_elsewhere()
    ]
    absent = [
        ModelRow(
            entry.name,
            "can be made" if entry.origin == "starter" else "can be pulled",
            int(entry.gigabytes * 1e9),
            entry.family,
            entry.summary,
            about=entry.about,
        )
        for entry in offered_here()
        if entry.name not in names
    ]
    others = [
        ModelRow(model.name, "elsewhere", model.nbytes, "", model.problem, str(model.path), program=model.title)
        for model in elsewhere
    ]
    return here + begun + absent + others


def _about(model: local_models.InstalledModel, known: Mapping[str, CatalogueEntry]) -> str:
    if model.linked is not None:
        return f"Links to {model.linked}."
    return known[model.name].description if model.name in known else ""


def show_models(*, in_json: bool) -> int:
    try:
        found = rows()
    except (ModelError, OSError) as error:
        raise WorkFailed(str(error)) from error
    answer(_json(found) if in_json else _table(found))
    return 0


def _json(found: list[ModelRow]) -> str:
    return as_json([asdict(row) for row in found])


def _table(found: list[ModelRow]) -> str:
    safe = [
        replace(row, name=one_line(row.name), family=one_line(row.family), description=one_line(row.description))
        for row in found
    ]
    own = [row for row in safe if not row.program]
    width, family = max(len(row.name) for row in own), max(len(row.family) for row in own)
    lines = [
        f"{row.name:{width}}  {row.state:15}  {_size(row):>13}  {row.family:{family}}  {row.description}".rstrip()
        for row in own
    ]
    return "\n".join([*lines, *_table_of_others([row for row in safe if row.program])]) + "\n"


def _size(row: ModelRow) -> str:
    return f"about {byte_size(row.nbytes)}" if row.about else byte_size(row.nbytes)


def _table_of_others(rows: list[ModelRow]) -> list[str]:
    if not rows:
        return []
    width = max(len(row.name) for row in rows)
    lines = [
        f"{row.name:{width}}  {byte_size(row.nbytes):>8}  {row.program}, {one_line(row.path)}"
        + (f" ({row.description})" if row.description else "")
        for row in rows
    ]
    return ["", "Held by other programs, and used where they lie:", *lines]


def pull(model: str, *, machines: bool = False) -> int:
    """Download or make a model and print its folder. ``machines``: copy it from a paired machine that is lent, if one
    has it."""
    return _work(model, lambda engine: Pull(id=engine.new_id(), model=model), machines=machines)


def prepare(model: str) -> int:
    """Write a model's prepared copy and print its folder."""
    return _work(model, lambda engine: Prepare(id=engine.new_id(), model=model))


def remove(model: str, *, ask_first: bool) -> int:
    """Delete a model. ``ask_first``: a person at a terminal is asked to confirm; a script is not."""
    try:
        if ask_first and sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty():
            name = local_models.resolve(model).name
            notify(f"Delete {name} from {locate('models')}? [y/N]")
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                notify("Nothing was deleted.")
                return 1
        freed = local_models.remove(model)
    except ModelError as error:
        raise WorkFailed(str(error)) from error
    notify(f"Deleted {model}: {byte_size(freed)} freed.")
    return 0


def _work(model: str, request: Callable[[EngineClient], AnyRequest], *, machines: bool = False) -> int:
    try:
        local_models.resolve(model)
    except ModelError as error:
        raise WorkFailed(str(error)) from error

    async def work(engine: EngineClient, interruption: Interruption) -> int:
        if machines:
            await open_for(engine, open_settings().settings)
        done = await do(engine, request(engine), ProgressLine())
        assert isinstance(done, Done)
        if done.detail:
            notify(done.detail)
        answer(one_line(done.path) + "\n")
        return 0

    return run_with_engine(work)
