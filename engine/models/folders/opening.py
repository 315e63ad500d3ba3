"""Opening a model folder: reading its configuration and refusing what cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.models.architectures.composite import language_only
from engine.models.architectures.config_values import check_config
from engine.models.architectures.families import check_supported, renamed
from engine.models.architectures.quantisation import refuse_quantized
from engine.models.folders.checkpoint import OPENING, Checkpoint
from engine.models.folders.model_folder import INDEX, JOURNAL
from engine.models.folders.quantisation_settings import with_quantisation
from engine.models.folders.shard_files import part_of
from engine.models.formats.json_files import SMALL_FILE, read_object

if TYPE_CHECKING:
    from engine.ipc.progress import ProgressCallback


def open_model(folder: Path, progress: ProgressCallback | None = None, as_whole: bool = False) -> Checkpoint:
    """Open the model in ``folder``: safetensors, GGUF files, or a shard of either
    (:mod:`engine.models.folders.shard_files`), which hands out only what it holds.

    ``as_whole``: a shard is opened like the whole model, for reading types, shapes and sizes only. Only headers are
    read, and the files are mapped. ``progress`` is called before each file and may raise Cancelled.

    Raises ModelError, with the file and its defect, if the folder is damaged, its family is not supported, or it needs
    something that is refused: pickled weights, remote code, quantisation.
    """
    if progress is not None:
        progress(OPENING, 0, 0, "")
    config = read_config(folder)
    family = check_supported(config)
    refuse_quantized(config)
    shard = None if as_whole else part_of(folder)
    if (folder / JOURNAL).is_file() and not (folder / INDEX).is_file():
        raise ModelError(f"{folder} is a preparation that was not finished; prepare the model again.")
    return Checkpoint(folder, config, family, shard, progress)


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of ``folder``, with what files beside it say of quantisation; of a model that also sees pictures,
    the part of its language model.

    Raises ModelError if it is missing, damaged, has an invalid setting, or asks for remote code.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ModelError(f"{folder} {what}; name a folder with config.json and safetensors files.", "bad-input")
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json, so it is not a model; name another folder.")
    config = read_object(path, SMALL_FILE)
    check_config(config, str(path))
    return with_quantisation(folder, renamed(language_only(config)))
