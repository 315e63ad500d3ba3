"""The experts of opened models: that there are some, what they stand for, and that two models have the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from engine.models.folders.opening import open_model
from engine.models.formats.model_files import Experts, ModelFiles, StoredTensor
from engine.runtimes.torch.offload.torch_tensors import numbers


def experts_of(folder: Path) -> Experts:
    """The experts of the model in ``folder``, which has some."""
    experts = open_model(folder).experts
    assert experts is not None
    return experts


def values_of(stored: StoredTensor) -> NDArray[np.float32]:
    """What a tensor stands for."""
    values: NDArray[np.float32] = numbers(stored, torch.float32).numpy()
    return values


def assert_same_values(found: Experts | None, wanted: Experts | None) -> None:
    """The matrices of every expert stand for exactly the same numbers."""
    assert found is not None and wanted is not None
    assert (found.layers, found.count) == (wanted.layers, wanted.count)
    for layer in found.layers:
        for number in range(found.count):
            ours, theirs = found.expert(layer, number), wanted.expert(layer, number)
            for part in ("gate", "up", "down"):
                assert np.array_equal(values_of(getattr(ours, part)), values_of(getattr(theirs, part)))


def assert_all_bytes_counted(folder: Path, opened: ModelFiles) -> None:
    """The place of each expert counts the bytes of its parts, and the model those of its files."""
    experts = opened.experts
    assert experts is not None
    for layer in experts.layers:
        for number in range(experts.count):
            place = experts.place(layer, number)
            parts = experts.expert(layer, number).parts
            assert place.weight_bytes == place.nbytes == sum(part.nbytes for part in parts)
    stored = sum(tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values())
    assert opened.trunk_bytes + experts.nbytes == stored
