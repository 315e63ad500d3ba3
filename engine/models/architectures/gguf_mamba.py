"""Mamba-2 layers in GGUF files: their settings, their tensors, and what undoes llama.cpp's storage.

llama.cpp stores the decays as they are used, and reshapes some vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.errors import ModelError
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor
from engine.models.architectures.record import Config, MambaSizes, MixerTensors
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.model_files import Change

_BIAS = "ssm_conv1d.bias"


def sizes(metadata: Metadata) -> MambaSizes:
    """Raises ModelError for a number that is missing or impossible, or does not fit the others."""
    heads, groups = metadata.number("ssm.time_step_rank"), metadata.number("ssm.group_count", 1)
    values = metadata.number("ssm.inner_size")
    if values % heads or heads % groups:
        raise ModelError(
            f"{metadata.file.path} is damaged: its Mamba-2 layers have {heads} heads of {values} values in all in "
            f"{groups} groups, which do not fit together; download it again."
        )
    states, taps = metadata.number("ssm.state_size"), metadata.number("ssm.conv_kernel")
    biased = any(name.endswith(_BIAS) for name in metadata.file.tensors)
    return MambaSizes(heads, values // heads, groups, states, taps, biased)


def tensors(sizes_of: Callable[[Config], MambaSizes]) -> MixerTensors:
    """The tensors of a layer, its norm left out."""

    def named(gguf: GgufFile, config: Mapping[str, Any], here: str, there: str) -> Iterator[NamedTensor]:
        sizes, hidden, prefix = sizes_of(config), config["hidden_size"], there + "mamba."
        heads, values, channels = sizes.heads, sizes.values, sizes.channels
        for stored, name, shape, as_stored in (
            ("ssm_in.weight", "in_proj.weight", (values + channels + heads, hidden), None),
            ("ssm_conv1d.weight", "conv1d.weight", (channels, 1, sizes.taps), (channels, sizes.taps)),
            (_BIAS, "conv1d.bias", (channels,), None),
            ("ssm_dt.bias", "dt_bias", (heads,), None),
            ("ssm_a", "A_log", (heads,), (heads, 1)),
            ("ssm_d", "D", (heads,), (heads, 1)),
            ("ssm_norm.weight", "norm.weight", (values,), (sizes.groups, values // sizes.groups)),
            ("ssm_out.weight", "out_proj.weight", (hidden, values), None),
        ):
            if stored != _BIAS or sizes.biased:
                yield NamedTensor(here + stored, prefix + name, shape, as_stored or shape)

    return named


def changes(config: Mapping[str, Any], module: str = "mamba") -> dict[str, Change]:
    """What undoes llama.cpp's storage, by the checkpoint's name of the tensor."""
    logarithm = Change(log_of=-1)
    kinds = enumerate(config["layer_types"])
    return {f"model.layers.{layer}.{module}.A_log": logarithm for layer, kind in kinds if kind == "linear_attention"}
