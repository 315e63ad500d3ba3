"""Getting a model onto this machine: downloading it from the hub, or building it.

A download is in ``owner--name.partial`` until every file has the digest that the hub states; then it gets its name.
Of a GGUF file, the folder is called ``owner--name--Q4_K_M``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.models.architectures.families import check_supported
from engine.models.architectures.quantisation import refuse_quantized
from engine.models.folders import model_folder
from engine.models.folders.opening import read_config
from engine.models.folders.quantisation_settings import FILES
from engine.models.folders.sizes import check_sizes
from engine.models.store import local_models
from engine.models.store.downloading import Download, StopCheck, disk_error, write_json
from engine.system.durable_files import flush_folder
from engine.system.locations import ensure

if TYPE_CHECKING:
    from engine.ipc.progress import ProgressCallback
    from engine.models.store.hub import Repository
    from engine.models.store.local_models import ResolvedModel

_ORIGIN = "origin.json"

Refuse = Callable[[Mapping[str, Any], int], None]
"""Function of config.json and the bytes of all weights, 0 while they are not known. Raises ModelError if no runtime on
this machine can run the model."""


def _refuse_quantised(config: Mapping[str, Any], nbytes: int) -> None:
    refuse_quantized(config)


def pull(
    model: str, progress: ProgressCallback, should_stop: StopCheck = None, refuse: Refuse = _refuse_quantised
) -> Path:
    """Get ``model`` onto this machine. Returns its folder. Present files are not fetched again.

    The starter is built, a GGUF file gets a folder that links to it, a hub repo or one GGUF file of it is downloaded,
    and a local folder is returned unchanged. ``refuse`` is called before the weights are fetched. A partial download is
    kept and resumed the next time. Raises ModelError (network, disk, bad-input, model), or Cancelled.
    """
    resolved = local_models.resolve(model)
    if resolved.folder is not None:
        return resolved.folder
    if resolved.kind == "starter":
        from engine.models.store.starter import build_starter

        return build_starter(progress, should_stop)
    if resolved.kind == "gguf":
        from engine.models.store.gguf_folder import open_gguf

        return open_gguf(resolved.source, progress, should_stop, resolved.plain_folder)
    if resolved.kind == "folder" or resolved.repo is None:
        raise ModelError(
            f"{resolved.source} has no config.json, so it is not a model; name another folder.", "bad-input"
        )
    return _download(resolved, resolved.repo, progress, should_stop, refuse)


def _download(
    model: ResolvedModel, repo: str, progress: ProgressCallback, should_stop: StopCheck, refuse: Refuse
) -> Path:
    """Download the hub repo ``repo``: one GGUF file, or config, tokenizer and safetensors, and nothing else."""
    from engine.models.store import hub
    from engine.models.store.gguf_fetching import choose, fetch_gguf

    folder = model.plain_folder
    ensure("models")
    with contextlib.ExitStack() as held:
        held.enter_context(model_folder.exclusive(folder))
        client = held.enter_context(hub.new_client())
        if model_folder.is_complete(folder):
            return folder
        local_models.check_name_is_free(folder)
        progress("asking the hub", 0, 0, "")
        repository = hub.list_repository(client, repo)
        choice = choose(repository, model.tag)
        if choice is not None and folder.name != local_models.repo_folder_name(repo, choice.tag):
            folder = folder.with_name(local_models.repo_folder_name(repo, choice.tag))
            held.enter_context(model_folder.exclusive(folder))
            if model_folder.is_complete(folder):
                return folder
            local_models.check_name_is_free(folder)
        partial = folder.with_name(folder.name + model_folder.PARTIAL)
        paths = {PurePosixPath(path).name: path for path in choice.paths} if choice is not None else {}
        task = Download(
            client,
            repo,
            lambda name: hub.file_url(repository, paths.get(name, name)),
            lambda response: hub.raise_for_status(response, repo),
            partial,
            progress,
            should_stop,
            unlock=lambda response: hub.unlock(client, response),
        )
        origin = {"repo": repo, "revision": repository.revision}
        try:
            partial.mkdir(exist_ok=True)
            if choice is None:
                wanted = _fetch_safetensors(task, repository, refuse)
            else:
                wanted = fetch_gguf(task, repository, choice, refuse)
                origin["file"] = choice.paths[0]
            _finish(partial, folder, origin, wanted)
        except OSError as error:
            raise disk_error(error, partial) from error
    return folder


def _fetch_safetensors(task: Download, repository: Repository, refuse: Refuse) -> set[str]:
    """Fetch config, tokenizer and safetensors into the task's folder. Returns their names."""
    from engine.models.store import hub

    small = hub.small_files(repository)
    first = [file for file in small if file.name == "config.json" or file.name in FILES]
    task.fetch(first, hub.total_bytes(first))
    config = read_config(task.folder)
    check_supported(config)
    refuse(config, 0)
    check_sizes(config)
    task.fetch(small, hub.total_bytes(small))
    index = task.folder / hub.WEIGHT_INDEX
    weights = hub.weight_files(repository, index if index.is_file() else None)
    # Checked before gigabytes are fetched.
    refuse(config, hub.total_bytes(weights))
    task.fetch([*small, *weights], hub.total_bytes([*small, *weights]))
    return {file.name for file in [*small, *weights]}


def _finish(partial: Path, folder: Path, origin: dict[str, str], wanted: set[str]) -> None:
    for path in partial.iterdir():
        if path.name not in wanted:  # journal, parts of an earlier revision
            path.unlink()
    write_json(partial / _ORIGIN, origin)
    partial.rename(folder)
    flush_folder(folder.parent)
