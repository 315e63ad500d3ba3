"""Builds a model of transformers around the trunk's tensors, without its routed experts.

The module tree is made on the ``meta`` device, where tensors have no memory. Then each trunk tensor is put in its
place. So nothing is initialised in vain, and the experts' parameters never exist.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.errors import ModelError, shown
from engine.ipc.progress import ProgressCallback
from engine.models.architectures.config_values import setting, without_implementations
from engine.models.architectures.families import FAMILIES
from engine.models.architectures.quantisation import QUANTISATION_KEYS
from engine.models.formats.model_files import ModelFiles, StoredTensor
from engine.moe.kernels.bindings import KernelChoice
from engine.runtimes.torch.language_models import register_language_model
from engine.runtimes.torch.offload.torch_tensors import numbers_on
from engine.runtimes.torch.packed_modules import PackedEmbedding, PackedLinear, kernels_for, map_tables, packed_module
from engine.runtimes.torch.trunk_modules import piece_name

BUILDING = threading.Lock()
"""Lock held while transformers builds a model, because it then replaces methods of its classes for all threads."""

_LAYER = re.compile(r"\.(?:layers|blocks)\.(\d+)\.")
_TABLE = ".tid2eid"
"""End of the names of tables that choose experts by the token (deepseek_v4)."""


def read_config(folder: Path, stored: dict[str, Any]) -> Any:
    """transformers' configuration of the text model in ``folder``, whose ``config.json`` is ``stored``.

    Raises ModelError if transformers finds a setting that it cannot use."""
    from transformers import CONFIG_MAPPING

    try:
        wanted = {key: value for key, value in without_implementations(stored).items() if key not in QUANTISATION_KEYS}
        family = CONFIG_MAPPING[stored["model_type"]]
        # JSON has no infinity, which transformers therefore writes as {"__float__": "Infinity"}.
        config = family.from_dict(family._decode_special_floats(wanted))
    except Exception as error:  # whatever transformers raises for settings it did not expect
        raise ModelError(f"{folder / 'config.json'} cannot be used: {in_one_line(error)}") from error
    text = config.get_text_config(decoder=True)
    _keep_rotary_base(stored, text)
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = False
    padding = getattr(text, "pad_token_id", None)
    if padding is not None and padding >= text.vocab_size:
        # The library's default for a family, where the file names none. Nothing is padded here.
        text.pad_token_id = None
    return text


def _keep_rotary_base(stored: dict[str, Any], config: Any) -> None:
    """Set the rotary base to that of ``stored`` where the family's authors have another setting for it.

    transformers 5.23 reads dbrx's at the top level only, where published checkpoints do not have it, and silently uses
    10000. They were trained with the 500000 of their ``attn_config``.
    """
    family = FAMILIES.get(config.model_type)
    base = setting(stored, family.decoder.rope_theta_key) if family is not None else None
    if base is not None and "rope_parameters" not in stored and "rope_theta" not in stored:
        config.rope_parameters = {**config.rope_parameters, "rope_theta": float(base)}


def build_skeleton(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model of ``config`` on the meta device. Raises ModelError if its numbers do not fit together."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    register_language_model(config)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention_of(config)}
    if hasattr(config, "_experts_implementation"):
        options["experts_implementation"] = "eager"
    try:
        with BUILDING, torch.device("meta"), no_init_weights():
            model: nn.Module = AutoModelForCausalLM.from_config(config, **options)
    except Exception as error:  # as above: the numbers of a damaged config.json fail anywhere
        what = f"config.json does not describe a {config.model_type} model that can be built"
        raise ModelError(f"{what}: {in_one_line(error)}") from error
    return model.eval().requires_grad_(False)


def attention_of(config: Any) -> str:
    """torch's own attention if the family, which is registered, supports it, else plain products. A name in a file is
    never used, because it may stand for code from a repository."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    family = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return "sdpa" if getattr(family, "_supports_sdpa", False) else "eager"


def in_one_line(error: Exception) -> str:
    """The last line of the error's text, where libraries that wrap errors put the cause. It may quote the file."""
    lines = str(error).strip().splitlines()
    return shown(lines[-1].strip(), 300) if lines else type(error).__name__


def fill_trunk(
    model: Any, files: ModelFiles, dtype: torch.dtype, device: torch.device, progress: ProgressCallback
) -> None:
    """Copy every trunk tensor of ``files`` into ``model`` (a skeleton whose experts have been replaced).

    Packed tensors stay where they lie (:mod:`engine.runtimes.torch.packed_modules`) or are unpacked. Raises ModelError
    naming the first tensor that is missing, unexpected, of the wrong shape or duplicate.
    """
    filled = map_tables(model, files, dtype, device)
    expected: dict[str, torch.Tensor] = model.state_dict()
    kernels = kernels_for(device, dtype)
    keep_float32 = _keep_float32(model, dtype)
    done, total = 0, files.trunk_bytes
    for stored_name, name, tensor in _renamed(model, files, expected):
        if name in filled:
            raise ModelError(f"Tensor {stored_name} is in the model's files twice; fetch or prepare the model again.")
        place = expected[name]
        if tensor.shape != place.shape:
            raise ModelError(
                f"Tensor {stored_name} has shape {list(tensor.shape)}, but config.json asks for {list(place.shape)}; "
                "the files do not belong together: fetch the model again."
            )
        wanted = torch.float32 if keep_float32 is not None and keep_float32.search(name) else place.dtype
        change, owner = files.changes.get(stored_name), name.rpartition(".")[0]
        packed = None
        if kernels is not None and wanted == dtype and name.endswith(".weight"):
            packed = packed_module(model.get_submodule(owner), tensor, change, kernels, dtype)
        if packed is None:
            numbers = numbers_on(device, tensor, wanted, change)
            if name.endswith(_TABLE):
                _check_table(stored_name, numbers, model.config.num_local_experts)
            put(model, name, numbers)
        else:
            _replace(model, owner, packed)
        filled.add(name)
        done += tensor.nbytes
        progress("reading the trunk", min(done, total), total, "bytes")
    _tie(model, expected.keys() - filled, kernels)
    fill_buffers(model, device)


def _check_table(name: str, table: torch.Tensor, experts: int) -> None:
    """Raises ModelError if ``table`` names an expert that there is not."""
    least, largest = (int(number) for number in table.aminmax())
    if least < 0 or largest >= experts:
        raise ModelError(
            f"Tensor {name} names the expert {least if least < 0 else largest} of {experts}; fetch the model again."
        )


def _renamed(
    model: Any, files: ModelFiles, expected: dict[str, torch.Tensor]
) -> Iterator[tuple[str, str, StoredTensor]]:
    """(name in the checkpoint, name in the model, tensor) of every trunk tensor that the model uses.

    transformers' own rules for old checkpoint names are applied. Raises ModelError for an unexpected tensor.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    for stored_name, stored in files.trunk():
        name, pattern = rename_source_key(stored_name, renamings, converters, model.base_model_prefix, expected)
        if pattern is not None and piece_name(stored_name) in expected:
            name, pattern = piece_name(stored_name), None
        if name not in expected and stored_name in expected:
            name = stored_name
        if name in expected and pattern is None:
            yield stored_name, name, stored
        elif not may_be_ignored(name, ignored, model.config.num_hidden_layers):
            raise ModelError(
                f"Tensor {stored_name} has no place in a {model.config.model_type} model as config.json describes it; "
                "the files do not belong together: fetch the model again."
            )


def may_be_ignored(name: str, ignored: list[re.Pattern[str]], layers: int) -> bool:
    """Whether a tensor may be ignored: layers after the last (for predicting several tokens), buffers that old versions
    stored, and what transformers itself ignores."""
    layer = _LAYER.search(name)
    return (
        (layer is not None and int(layer[1]) >= layers)
        or name.endswith("rotary_emb.inv_freq")
        or any(pattern.search(name) for pattern in ignored)
    )


def _keep_float32(model: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Pattern of the names of tensors that transformers keeps in float32 whatever the model's dtype."""
    kept = [pattern for pattern, wanted in model._get_dtype_plan(dtype).items() if wanted == torch.float32]
    if not kept:
        return None
    return re.compile("|".join(rf"(?:^|\.){pattern}(?:\.|$)" for pattern in kept))


def put(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Make ``tensor`` the parameter or buffer ``name`` of ``model``."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if child in parent._buffers:
        parent._buffers[child] = tensor
    else:
        parent._parameters[child] = nn.Parameter(tensor, requires_grad=False)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _tie(model: Any, missing: set[str], kernels: KernelChoice | None) -> None:
    """Share the tensors that the family shares (head and embedding). Raises ModelError if a tensor is still missing."""
    for target, source in model.all_tied_weights_keys.items():
        shared = model.get_submodule(source.rpartition(".")[0])
        if target in missing and isinstance(shared, PackedEmbedding) and kernels is not None:
            owner = target.rpartition(".")[0]
            _replace(model, owner, PackedLinear(shared.stored, None, None, kernels))
            missing = missing - {target}
        elif target in missing and source not in missing:
            model.get_submodule(target.rpartition(".")[0])._parameters[target.rpartition(".")[2]] = model.get_parameter(
                source
            )
            missing = missing - {target}
    if missing:
        first, others = min(missing), len(missing) - 1
        raise ModelError(
            f"Tensor {first} is missing from the model's files"
            + (f", and {others} more" if others else "")
            + "; fetch the model again."
        )


def fill_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies), by the modules that own them."""
    absent = {name: each for name, each in model.named_non_persistent_buffers() if each.device.type == "meta"}
    for name, buffer in absent.items():
        # Whole numbers are positions, so -1 is one that was not computed.
        put(model, name, torch.full_like(buffer, float("nan") if buffer.is_floating_point() else -1, device=device))
    for parameter in model.parameters():
        # transformers' mark of what is not to be overwritten: gemma4's embedding has a buffer and a weight.
        parameter._is_hf_initialized = True
    for module in model.modules():
        if module._non_persistent_buffers_set:
            # A model within one computes with numbers of its own (gemma3n).
            owner = module if hasattr(module, "_init_weights") else model
            owner._init_weights(module)
    for name, buffer in model.named_buffers():
        left = name in absent and not buffer.is_floating_point() and (buffer == -1).any()
        if left or buffer.device.type == "meta" or (buffer.is_floating_point() and buffer.isnan().any()):
            raise ModelError(f"Buffer {name} cannot be computed by this version of transformers.", kind="internal")
