"""Quantised safetensors: what ``config.json`` and the tensors' names say of the method, and the refusal of those that
do not run.

Those run that mlx-lm quantised in 2, 3, 4, 5, 6 or 8 bits, gpt-oss in MXFP4 as it is published, and FP8, NVFP4 and
integers of four and eight bits as :mod:`engine.models.architectures.schemes` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError, damaged, shown
from engine.models.architectures.families import FAMILIES
from engine.models.architectures.schemes import FP8, Scheme, checks_of, schemes_of
from engine.models.formats.number_formats import NVFP4_GROUP

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
_UNNAMED = "an unnamed method"

_ENDINGS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (".qweight", "GPTQ or AWQ", ("quantize_config.json", "quant_config.json")),
    (".qzeros", "GPTQ or AWQ", ("quantize_config.json", "quant_config.json")),
    (".weight_packed", "compressed-tensors", ()),
    (".weight_scale_2", "ModelOpt", ("hf_quant_config.json",)),
    (".weight_scale", "compressed-tensors or ModelOpt", ("hf_quant_config.json",)),
    (".weight_scale_inv", "FP8", ()),
)
"""Ends of names that only tensors quantised with methods that run have, the method, and the files beside
``config.json`` that may have its settings."""

_FOREIGN = (".weight.absmax", ".weight.quant_map", ".SCB")
"""Ends of names that only tensors quantised with bitsandbytes have."""

FAMILIES_OF_MLX = tuple(
    name for name, family in FAMILIES.items() if family.mlx is not None and family.mlx.read_elsewhere
)
"""Families that run quantised by mlx-lm without mlx: where it stores tensors otherwise than transformers does,
:mod:`engine.models.architectures.mlx_layout` knows how."""

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
"""Bits of a code, and numbers of a group, of mlx's affine quantisation that run."""

QUANTISATION_KEYS = ("quantization_config", "quantization", "compression_config")
"""Settings of ``config.json`` that describe how weights are quantised."""


def method_of(config: Mapping[str, Any]) -> str | None:
    """The name of the method with which the weights of ``config`` are quantised; None if they are not."""
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, Mapping) else {}):
        for key in QUANTISATION_KEYS:
            if section.get(key):
                return _named(section[key])
    return None


@dataclass(frozen=True)
class Groups:
    """How one tensor is quantised: bits of a code, numbers of a group, and ``affine``, ``mxfp4`` or ``nvfp4``."""

    bits: int
    size: int
    mode: str


def groups_of(config: Mapping[str, Any], module: str) -> Groups | None:
    """How mlx-lm quantised the weight of ``module``; None if ``config`` is not of a model that mlx-lm quantised in a
    way that runs."""
    settings = _of_mlx(config)
    if settings is None:
        return None
    own = settings.get(module)
    return _groups(own if isinstance(own, Mapping) else settings)


def refuse_quantized(config: Mapping[str, Any]) -> None:
    """Raises ModelError naming the method if the weights of ``config`` are quantised with one that does not run."""
    method = method_of(config)
    family = FAMILIES.get(str(config.get("model_type")))
    published = family is not None and family.moe is not None and family.moe.published_mxfp4
    if method is None or (method == _METHODS["mxfp4"] and published):
        return
    if family is None:
        raise refused(f"{method} in the family {shown(config.get('model_type'))}")
    if schemes(config):
        return
    settings = _of_mlx(config)
    if settings is None:
        raise refused(_described_other(config, method))
    for each in (settings, *(own for own in settings.values() if isinstance(own, Mapping))):
        if _groups(each) is None:
            raise refused(_described(each))
    if config.get("model_type") not in FAMILIES_OF_MLX:
        raise refused(f"{method} as mlx-lm stores the family {shown(config.get('model_type'))}")


def has_fp8(config: Mapping[str, Any]) -> bool:
    """Whether weights of ``config`` are FP8 numbers (E4M3) that run."""
    return any(scheme.kind == FP8 for scheme in schemes(config))


def schemes(config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """How the weights of ``config`` are quantised by a tool other than mlx-lm; none if they are not, or in a way that
    does not run."""
    settings = _of_others(config)
    checks = checks_of(settings)
    return schemes_of(settings) if checks is not None and checks(settings) is None else ()


def readable_quantised(config: Mapping[str, Any]) -> bool:
    """Whether the native and the torch runtime read the weights of ``config``, as far as their quantisation goes."""
    try:
        refuse_quantized(config)
    except ModelError:
        return False
    return True


def _of_others(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of other tools than mlx-lm; empty if there are none."""
    settings = config.get("quantization_config")
    return settings if isinstance(settings, Mapping) else {}


def _of_mlx(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The settings of mlx-lm's quantisation, which name no method; None if there are none."""
    settings = config.get("quantization") or config.get("quantization_config")
    named = isinstance(settings, Mapping) and (settings.get("quant_method") or settings.get("quant_algo"))
    if not isinstance(settings, Mapping) or named or "bits" not in settings or "group_size" not in settings:
        return None
    return settings


def _groups(settings: Mapping[str, Any]) -> Groups | None:
    """None for what does not run."""
    bits, size, mode = settings.get("bits"), settings.get("group_size"), settings.get("mode", "affine")
    if mode == "mxfp4" and (bits, size) == (4, 32):
        return Groups(4, 32, "mxfp4")
    if mode == "nvfp4" and (bits, size) == (4, NVFP4_GROUP):
        return Groups(4, NVFP4_GROUP, "nvfp4")
    if mode != "affine" or type(bits) is not int or type(size) is not int or bits not in _BITS or size not in _GROUPS:
        return None
    return Groups(bits, size, "affine")


def _described(settings: Mapping[str, Any]) -> str:
    bits, size = shown(settings.get("bits")), shown(settings.get("group_size"))
    return f"mlx's method {shown(settings.get('mode', 'affine'))} in {bits} bits and groups of {size}"


def _described_other(config: Mapping[str, Any], method: str) -> str:
    settings = _of_others(config)
    checks = checks_of(settings)
    return method if checks is None else f"{method} with {checks(settings)}"


def refuse_names(names: Iterable[str], config: Mapping[str, Any]) -> None:
    """Raises ModelError if one of the tensors ``names`` is of quantised weights that no reader took: naming the method
    if it does not run, the tensor if the settings describe others, or where there are no settings."""
    for name in names:
        if name.endswith(_FOREIGN):
            raise refused(_METHODS["bitsandbytes"])
        ending = next((row for row in _ENDINGS if name.endswith(row[0])), None)
        if ending is None:
            continue
        if method_of(config) is not None:
            raise damaged(f"Tensor {name} is of no weight that is quantised as the model's settings describe it")
        _, method, files = ending
        says = "does not say" if not files else f"does not say, and neither does {' or '.join(files)} beside it,"
        raise damaged(f"Tensor {name} is quantised with {method}, but config.json {says} how (quantization_config)")


def _named(settings: Any) -> str:
    if not isinstance(settings, Mapping):
        return _UNNAMED
    method = settings.get("quant_method") or settings.get("quant_algo")
    if method:
        return _METHODS.get(str(method).lower(), shown(method))
    if any(key.endswith(("load_in_4bit", "load_in_8bit")) for key in _texts(settings)):
        return _METHODS["bitsandbytes"]
    return "mlx's affine method" if "bits" in settings and "group_size" in settings else _UNNAMED


def _texts(settings: Mapping[Any, Any]) -> Iterator[str]:
    return (key for key in settings if isinstance(key, str))


def refused(method: str) -> ModelError:
    """The error about weights that are quantised with a ``method`` that does not run."""
    return ModelError(
        f"The model's weights are quantised with {method}, which does not run here; take a GGUF file of the same model "
        "(privatellm models pull OWNER/REPOSITORY:Q4_K_M) or a bfloat16 copy of it."
    )
