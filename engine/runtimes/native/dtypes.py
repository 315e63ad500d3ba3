"""The dtype in which a model computes: the stored one, unless the person chooses another."""

from __future__ import annotations

from collections.abc import Mapping

from engine.ipc.messages import Load
from engine.models.formats.model_files import ModelFiles
from engine.moe.kernels.bindings import Dtype

NAMES: Mapping[str, Dtype] = {"BF16": "bfloat16", "F32": "float32", "F16": "bfloat16"}
"""What is computed with weights stored as the key, unless a person says otherwise. The cache of a
model in float16 holds bfloat16; what its weights multiply is float32."""


def bulk_dtype(files: ModelFiles) -> str:
    """What most of the weights are stored as, by safetensors' name."""
    if files.experts is not None:
        return files.experts.dtype
    sizes: dict[str, int] = {}
    for _, tensor in files.trunk():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def compute_dtype(files: ModelFiles, request: Load) -> Dtype:
    """What is computed in: as the request says, or as the bulk of the checkpoint is stored; bfloat16 if that is
    packed."""
    return NAMES.get(bulk_dtype(files), "bfloat16") if request.dtype == "auto" else request.dtype
