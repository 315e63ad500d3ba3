"""Quantised safetensors as DeepSeek and vLLM's tools write them: what their settings say, and what of it does not run.

compressed-tensors names a format for each group of modules; DeepSeek's FP8, AutoAWQ, GPTQModel and ModelOpt have one
for all. Modules that are left out have plain tensors, so that nothing here needs their names.

Files are not trusted: every setting may be of any type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import shown
from engine.models.formats.number_formats import BLOCK_SIDE, NVFP4_GROUP, SMALLEST_GROUP

PACKED, INTEGERS, FP8, NVFP4 = "pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized"
"""compressed-tensors' names of codes in words, of integers of eight bits, of FP8, and of NVFP4, each with its scales
apart."""
NVFP4_OF_MODELOPT = "NVFP4"
"""ModelOpt's name of NVFP4."""

_FP8_BLOCK = [BLOCK_SIDE, BLOCK_SIDE]
_STATIC = "static scales of inputs"

Settings = Mapping[str, Any]
Check = Callable[[Settings], str | None]


@dataclass(frozen=True)
class Scheme:
    """How the weights of some modules are quantised.

    ``kind`` is a format of compressed-tensors, ``AWQ``, ``GPTQ``, or ``NVFP4`` as ModelOpt stores it; ``group`` the
    numbers of a group, None if a row, a block or the matrix has one scale; ``added_to_zeros`` what is added to stored
    zero points; ``rounds_inputs`` whether the settings ask for rounded inputs, too.
    """

    kind: str
    bits: int
    group: int | None = None
    added_to_zeros: int = 0
    rounds_inputs: bool = False


def schemes_of(settings: Settings) -> tuple[Scheme, ...]:
    """The schemes that ``settings`` name, in which :func:`checks_of` finds nothing that does not run."""
    method = _method(settings)
    if method == "fp8":
        return (Scheme(FP8, 8),)
    if method == "compressed-tensors":
        return tuple(map(_of_group, _groups(settings)))
    if method == "modelopt":
        return (Scheme(NVFP4_OF_MODELOPT, 4, NVFP4_GROUP, rounds_inputs=True),)
    group = None if settings["group_size"] == -1 else settings["group_size"]
    if method == "awq":
        return (Scheme("AWQ", settings["bits"], group),)
    return (Scheme("GPTQ", settings["bits"], group, int(_checkpoint_format(settings) == "gptq")),)


def checks_of(settings: Settings) -> Check | None:
    """The function that says what of ``settings`` does not run here, in a few words, and None if all does; None for
    settings of another method."""
    return _CHECKS.get(_method(settings))


def _method(settings: Settings) -> str:
    """The name of the method; empty if that is no text."""
    method = settings.get("quant_method")
    return method.lower() if isinstance(method, str) else ""


# --- compressed-tensors ---------------------------------------------------------------------------------------------


def _groups(settings: Settings) -> Iterator[dict[str, Any]]:
    """The groups of modules, each with its own format."""
    for stored in settings["config_groups"].values():
        group = stored if isinstance(stored, Mapping) else {}
        yield {**group, "format": group.get("format") or settings.get("format")}


def _of_group(group: Settings) -> Scheme:
    weights = group["weights"]
    size = weights.get("group_size") if weights.get("strategy") == "group" else None
    return Scheme(group["format"], weights["num_bits"], size, 0, bool(group.get("input_activations")))


def _unlike_compressed(settings: Settings) -> str | None:
    groups, sparsity = settings.get("config_groups"), settings.get("sparsity_config")
    kinds = (*_OF_KIND, "mixed-precision")
    if settings.get("format") not in kinds:
        return _format(settings.get("format"))
    if settings.get("kv_cache_scheme"):
        return "keys and values that are quantised, too"
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return f"the sparse format {shown(sparsity['format'])}"
    if not isinstance(groups, Mapping) or not groups:
        return "no groups"
    return next(filter(None, map(_unlike_group, _groups(settings))), None)


def _format(kind: Any) -> str:
    return "an unnamed format" if kind is None else f"the format {shown(kind)}"


def _unlike_group(group: Settings) -> str | None:
    weights, inputs = group.get("weights"), group.get("input_activations")
    weights = weights if isinstance(weights, Mapping) else {}
    of_kind = _OF_KIND.get(str(group["format"]))
    if of_kind is None:
        return _format(group["format"])
    found = of_kind(weights)
    if found is None and group["format"] == FP8 and isinstance(inputs, Mapping) and inputs.get("dynamic") is not True:
        return _STATIC
    return found or ("rounded results" if group.get("output_activations") else None)


def _unlike_fp8(weights: Settings) -> str | None:
    strategy = weights.get("strategy")
    if not _numbers(weights, "float", (8,)) or weights.get("symmetric", True) is not True:
        return _other_numbers(weights)
    if strategy == "block" and weights.get("block_structure") != _FP8_BLOCK:
        return f"blocks of {shown(weights.get('block_structure'))}"
    return None if strategy in ("tensor", "channel", "block") else f"a scale for each {shown(strategy)}"


def _unlike_packed(weights: Settings) -> str | None:
    if not _numbers(weights, "int", (4, 8)):
        return _other_numbers(weights)
    if weights.get("actorder") in (True, "group", "dynamic"):
        return "columns in the order of activations (actorder)"
    if weights.get("strategy") == "group":
        return _unlike_size(weights.get("group_size"))
    return None if weights.get("strategy") == "channel" else f"a scale for each {shown(weights.get('strategy'))}"


def _unlike_integers(weights: Settings) -> str | None:
    if not _numbers(weights, "int", (8,)):
        return _other_numbers(weights)
    strategy = weights.get("strategy")
    return None if strategy in ("tensor", "channel") else f"a scale for each {shown(strategy)}"


def _unlike_nvfp4(weights: Settings) -> str | None:
    if not _numbers(weights, "float", (4,)):
        return _other_numbers(weights)
    size = weights.get("group_size")
    return None if size == NVFP4_GROUP else f"groups of {shown(size)}"


def _numbers(weights: Settings, kind: str, bits: tuple[int, ...]) -> bool:
    return weights.get("type") == kind and type(weights.get("num_bits")) is int and weights["num_bits"] in bits


def _other_numbers(weights: Settings) -> str:
    return f"numbers of {shown(weights.get('num_bits'))} bits and the type {shown(weights.get('type'))}"


_OF_KIND: Mapping[str, Check] = {
    FP8: _unlike_fp8, PACKED: _unlike_packed, INTEGERS: _unlike_integers, NVFP4: _unlike_nvfp4
}  # fmt: skip


# --- DeepSeek, ModelOpt, AutoAWQ and GPTQModel ----------------------------------------------------------------------


def _unlike_deepseek(settings: Settings) -> str | None:
    block, inputs = settings.get("weight_block_size"), settings.get("activation_scheme", "dynamic")
    if settings.get("fmt", "e4m3") != "e4m3":
        return f"numbers of the kind {shown(settings['fmt'])}"
    if block not in (None, _FP8_BLOCK):
        return f"blocks of {shown(block)}"
    return None if inputs == "dynamic" else f"{shown(inputs)} scales of inputs"


def _unlike_modelopt(settings: Settings) -> str | None:
    method, size = settings.get("quant_algo"), settings.get("group_size")
    if method == "FP8":
        return f"FP8 and {_STATIC}"
    if method != NVFP4_OF_MODELOPT:
        return f"the method {shown(method)}"
    if size not in (None, NVFP4_GROUP):
        return f"groups of {shown(size)}"
    groups = settings.get("config_groups")
    each = groups.values() if isinstance(groups, Mapping) else ()
    weights = (group.get("weights") for group in each if isinstance(group, Mapping))
    return next(filter(None, (_unlike_nvfp4(own) for own in weights if isinstance(own, Mapping))), None)


def _unlike_awq(settings: Settings) -> str | None:
    if type(settings.get("bits")) is not int or settings["bits"] != 4:
        return f"{shown(settings.get('bits'))} bits"
    if str(settings.get("version", "gemm")).lower() != "gemm":
        return f"the packing {shown(settings['version'])}"
    return _unlike_size(settings.get("group_size"))


def _unlike_gptq(settings: Settings) -> str | None:
    if type(settings.get("bits")) is not int or settings["bits"] not in (4, 8):
        return f"{shown(settings.get('bits'))} bits"
    if _checkpoint_format(settings) not in ("gptq", "gptq_v2"):
        return f"the packing {shown(_checkpoint_format(settings))}"
    if settings.get("desc_act") and settings.get("group_size") != -1:
        return "rows in the order of activations (desc_act)"
    overrides = settings.get("dynamic")
    if isinstance(overrides, Mapping) and any(isinstance(own, Mapping) and own for own in overrides.values()):
        return "settings of their own for some modules (dynamic)"
    return _unlike_size(settings.get("group_size"))


def _checkpoint_format(settings: Settings) -> Any:
    return "marlin" if settings.get("is_marlin_format") else settings.get("checkpoint_format") or "gptq"


def _unlike_size(size: Any) -> str | None:
    whole = type(size) is int and (size == -1 or (size > 0 and size % SMALLEST_GROUP == 0))
    return None if whole else f"groups of {shown(size)}"


_CHECKS: Mapping[str, Check] = {
    "fp8": _unlike_deepseek, "compressed-tensors": _unlike_compressed, "awq": _unlike_awq, "gptq": _unlike_gptq,
    "modelopt": _unlike_modelopt,
}  # fmt: skip
"""What is unlike in each method, by its name in ``quant_method``."""
