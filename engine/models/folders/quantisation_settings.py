"""Settings of quantised weights as the rest of the program reads them: in ``quantization_config``, with one name each.

AutoGPTQ, AutoAWQ and older versions of ModelOpt wrote them into a file of their own beside ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.models.architectures.quantisation import method_of
from engine.models.formats.json_files import SMALL_FILE, check_values, read_object

FILES: Mapping[str, str] = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files beside ``config.json`` with settings of quantised weights, and the method of those that name none."""

_RENAMED = {"w_bit": "bits", "q_group_size": "group_size"}
"""AutoAWQ's older names of settings, and the usual ones."""


def with_quantisation(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """``config`` of the model in ``folder``, with the settings of a file beside it if it has none of its own.

    Raises ModelError if that file is damaged.
    """
    stored = config.get("quantization_config") or config.get("compression_config")
    if method_of(config) is None:
        stored = _beside(folder)
    if not isinstance(stored, Mapping):
        return config
    settings = {_RENAMED.get(key, key): value for key, value in stored.items()}
    if not settings.get("quant_method") and settings.get("quant_algo"):
        settings["quant_method"] = "modelopt"
    return config | {"quantization_config": settings}


def _beside(folder: Path) -> dict[str, Any] | None:
    """The settings in the first of :data:`FILES` that has some of weights."""
    for name, method in FILES.items():
        path = folder / name
        settings = read_object(path, SMALL_FILE)
        check_values(settings, str(path))
        inner = settings.get("quantization")  # ModelOpt has a table of that name
        settings = {"quant_method": method} | (inner if isinstance(inner, dict) else settings)
        quantised = settings.get("quant_algo") is not None if method == "modelopt" else path.is_file()
        if quantised:
            return settings
    return None
