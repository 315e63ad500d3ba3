"""Quantised safetensors: what ``config.json``, the files beside it and the tensors' names say of the method, and the
refusal of those that do not run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.models.json_files import SMALL_FILE, read_object
from engine.models.wording import shown

SETTINGS: Mapping[str, str] = {
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
    "hf_quant_config.json": "ModelOpt",
}
"""Files beside ``config.json`` that some tools write, and the method that wrote them if they do not say it."""

_METHODS: Mapping[str, str] = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "EETQ",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fbgemm_fp8": "FBGEMM FP8",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""Names of methods as their authors write them, by ``quant_method``."""

_ENDINGS: tuple[tuple[str, str], ...] = (
    (".qweight", "GPTQ or AWQ"),
    (".qzeros", "GPTQ or AWQ"),
    (".weight_packed", "compressed-tensors"),
    (".weight.absmax", "bitsandbytes"),
    (".weight.quant_map", "bitsandbytes"),
    (".SCB", "bitsandbytes"),
    ("_proj_blocks", "MXFP4"),
    (".weight_scale_inv", "FP8"),
)
"""Ends of names that only quantised tensors have, and the method."""

_KEYS = ("quantization_config", "quantization", "compression_config")


def method_of(config: Mapping[str, Any]) -> str | None:
    """The name of the method with which the weights of ``config`` are quantised; None if they are not."""
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, Mapping) else {}):
        for key in _KEYS:
            if section.get(key):
                return _named(section[key])
    return None


def refuse_quantized(config: Mapping[str, Any]) -> None:
    """Raises ModelError naming the method if the weights of ``config`` are quantised."""
    method = method_of(config)
    if method is not None:
        raise _refused(method)


def refuse_settings(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError naming the method if ``config`` does not say that the weights are quantised, but a file beside
    it does."""
    if method_of(config) is not None:
        return
    for name, method in SETTINGS.items():
        path = folder / name
        if path.is_file():
            settings = read_object(path, SMALL_FILE)
            named = settings.get("quantization")  # ModelOpt has a table of that name
            raise _refused(_named(named if isinstance(named, Mapping) else settings, method))


def refuse_names(names: Iterable[str]) -> None:
    """Raises ModelError naming the method if one of the tensors ``names`` is of quantised weights."""
    for name in names:
        for ending, method in _ENDINGS:
            if name.endswith(ending):
                raise _refused(method)


def _named(settings: Any, otherwise: str = "an unnamed method") -> str:
    if not isinstance(settings, Mapping):
        return otherwise
    method = settings.get("quant_method") or settings.get("quant_algo")
    if method:
        return _METHODS.get(str(method).lower(), shown(method))
    if any(key.endswith(("load_in_4bit", "load_in_8bit")) for key in _texts(settings)):
        return _METHODS["bitsandbytes"]
    if "bits" in settings and "group_size" in settings and "desc_act" not in settings:
        return "mlx's affine method" if otherwise == "an unnamed method" else otherwise
    return otherwise


def _texts(settings: Mapping[Any, Any]) -> Iterator[str]:
    return (key for key in settings if isinstance(key, str))


def _refused(method: str) -> ModelError:
    return ModelError(
        f"The model's weights are quantised with {method}, which does not run here; take a GGUF file of the same model "
        "(privatellm models pull OWNER/REPOSITORY:Q4_K_M) or a bfloat16 copy of it."
    )
