"""What settings say of quantised weights: methods that run, those that are refused, and settings of any type."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.errors import ModelError
from engine.models.architectures.quantisation import (
    groups_of,
    has_fp8,
    method_of,
    readable_quantised,
    refuse_names,
    refuse_quantized,
    schemes,
)
from engine.models.architectures.schemes import Scheme
from engine.runtimes.choosing import refuse_download
from tests.support.tiny_fp8 import of_compressed_tensors
from tests.support.tiny_zero_points import Form

DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
RUN: dict[str, dict[str, Any]] = {
    "FP8": DEEPSEEK,
    "FP8 in rows": of_compressed_tensors("channel"),
    "packed": Form("pack-quantized").settings([]),
    "integers": Form("int-quantized", bits=8, group=-1).settings([]),
    "AWQ": Form("awq").settings([]),
    "GPTQ": Form("gptq").settings([]),
    "NVFP4": Form("nvfp4-pack-quantized").settings([]),
    "ModelOpt": Form("modelopt").settings([]),
    "mlx": {"bits": 4, "group_size": 64, "mode": "affine", "model.norm": {"bits": 8, "group_size": 32}},
}
JUNK: tuple[Any, ...] = ([], {}, [4], {"a": {}}, 7, -1, 0, 4.5, 2**62, True, None, "", "\x1b[2J", "int", [[128], {}])


def config_of(settings: Any) -> dict[str, Any]:
    return {"model_type": "qwen3_moe", "quantization_config": settings}


@pytest.mark.parametrize("name", RUN)
def test_what_runs_is_not_refused(name: str) -> None:
    config = config_of(RUN[name])
    refuse_quantized(config)
    assert readable_quantised(config) and method_of(config) is not None
    assert bool(schemes(config)) == (name != "mlx") and has_fp8(config) == name.startswith("FP8")


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to everything in ``value``."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from places(inner, (*at, key))


@pytest.mark.parametrize("name", RUN)
def test_settings_of_any_type_are_refused_in_one_sentence_or_run(name: str) -> None:
    asked: tuple[Callable[[dict[str, Any]], object], ...] = (
        refuse_quantized, schemes, has_fp8, method_of,
        lambda config: groups_of(config, "model.norm"), lambda config: refuse_names(["a.qweight"], config),
        lambda config: refuse_download(config, 1),
    )  # fmt: skip
    for at in places({"quantization_config": RUN[name]}):
        for junk in JUNK:
            config = {"model_type": "qwen3_moe", "quantization_config": copy.deepcopy(RUN[name])}
            inner: Any = config
            for key in at[:-1]:
                inner = inner[key]
            if at:
                inner[at[-1]] = junk
            for ask in asked:
                try:
                    ask(config)
                except ModelError as error:
                    assert str(error).isprintable() and str(error).isascii(), (at, junk)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "ModelOpt with FP8 and static scales of inputs"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "ModelOpt with groups of 32"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "GPTQ with the packing marlin"),
        ({"quant_method": []}, "an unnamed method"),
        ({"quant_method": ["awq"]}, r"\['awq'\]"),
        ({"quant_method": 4}, "4"),
    ],
)  # fmt: skip
def test_what_does_not_run_is_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=f"quantised with {text}, which does not run here"):
        refuse_quantized(config_of(settings))


def test_static_scales_of_inputs_are_named_for_compressed_tensors_too() -> None:
    settings = of_compressed_tensors("tensor")
    settings["config_groups"]["group_0"]["input_activations"]["dynamic"] = False
    with pytest.raises(ModelError, match="compressed-tensors with static scales of inputs, which"):
        refuse_quantized(config_of(settings))


def test_the_method_may_be_written_in_capitals() -> None:
    assert schemes(config_of(RUN["AWQ"] | {"quant_method": "AWQ"})) == (Scheme("AWQ", 4, 32),)


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (".qweight", "GPTQ or AWQ, .* neither does quantize_config.json or quant_config.json beside it, how"),
        (".weight_scale_2", "ModelOpt, .* neither does hf_quant_config.json beside it, how"),
        (".weight_packed", r"compressed-tensors, but config.json does not say how \(quantization_config\); fetch"),
        (".weight_scale_inv", "FP8, but config.json does not say how"),
    ],
)
def test_tensors_without_settings_name_the_file_that_is_missing(ending: str, text: str) -> None:
    with pytest.raises(ModelError, match=f"Tensor model.layers.0.mlp.up_proj{ending} is quantised with {text}"):
        refuse_names(["model.norm.weight", "model.layers.0.mlp.up_proj" + ending], {"model_type": "llama"})


@pytest.mark.parametrize("name", RUN)
def test_a_tensor_of_another_method_is_not_said_to_be_of_one_that_does_not_run(name: str) -> None:
    with pytest.raises(
        ModelError, match=r"Tensor a\.qweight is of no weight that is quantised as the model's settings"
    ):
        refuse_names(["a.weight", "a.qweight"], config_of(RUN[name]))
    with pytest.raises(ModelError, match="quantised with bitsandbytes, which does not run"):
        refuse_names(["a.weight.absmax"], config_of(RUN[name]))
