"""Opening a model folder: reading its configuration, refusing what cannot run, and picking the reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.models.bank import JOURNAL, MANIFEST, Bank
from engine.models.checkpoint import Checkpoint
from engine.models.families import check_supported
from engine.models.files import ModelFiles
from engine.models.share_files import part_of
from engine.models.wording import shown

_CONFIG_LIMIT = 20_000_000

_QUANTIZATION_ADVICE = {
    "mxfp4": "use a bfloat16 copy (transformers makes one: Mxfp4Config(dequantize=True), then save_pretrained)",
    "fp8": "use a bfloat16 copy of the model",
}


def open_model(folder: Path) -> ModelFiles:
    """The model in ``folder``: one that :func:`engine.models.prepare.prepare` wrote, or plain safetensors; or the share
    of either that a node of a ring keeps (:mod:`engine.models.share_files`), which hands out only what it holds.

    Reads headers only and maps the files. Raises ModelError, naming the file and what is wrong with it, if the folder
    is damaged, its family is not supported, or it needs what is refused: pickled weights, remote code, quantisation.
    """
    config = read_config(folder)
    family = check_supported(config)
    refuse_quantized(config)
    share = part_of(folder)
    if (folder / MANIFEST).is_file():
        return Bank(folder, config, family, share)
    if (folder / JOURNAL).is_file():
        raise ModelError(f"{folder} is a preparation that was not finished; prepare the model again.")
    return Checkpoint(folder, config, family, share)


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of ``folder``. Raises ModelError if there is none, it is damaged, or it asks for remote code."""
    path = folder / "config.json"
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ModelError(f"{folder} {what}; name a folder with config.json and safetensors files.", "bad-input")
    try:
        if path.stat().st_size > _CONFIG_LIMIT:
            raise ModelError(f"{path} is damaged: it is over {_CONFIG_LIMIT} bytes; fetch the model again.")
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no config.json, so it is not a model; name another folder.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: it is not JSON; fetch the model again.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); check the file.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is damaged: it is not a table of settings; fetch the model again.")
    _refuse_remote_code(path, config)
    return config


def _refuse_remote_code(path: Path, config: Mapping[str, Any]) -> None:
    if "auto_map" in config:
        raise ModelError(
            f"{path} asks for code from its repository (auto_map), which is never run; use a copy of the model in "
            "transformers' own format, or, if the code is only the family's original, delete auto_map from config.json."
        )


def refuse_quantized(config: Mapping[str, Any]) -> None:
    """Raises ModelError naming the method if the weights of ``config`` are quantised."""
    sections = [config, *(config[key] for key in ("text_config",) if isinstance(config.get(key), Mapping))]
    for section in sections:
        for key in ("quantization_config", "quantization", "compression_config"):
            settings = section.get(key)
            if not settings:
                continue
            named = settings.get("quant_method") if isinstance(settings, Mapping) else None
            method = shown(named) if named else "an unnamed method"
            advice = _QUANTIZATION_ADVICE.get(method.lower(), "use a bfloat16 or float16 copy of the model")
            raise ModelError(f"The model's weights are quantised with {method}, which is not supported; {advice}.")
