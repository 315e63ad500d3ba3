"""The identity of all that the bits of a prompt's keys and values depend on, besides its tokens and passes."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from engine.ipc.messages import Load, ModelFacts
from engine.moe.kernels.bindings import path as kernels_path
from engine.runtimes.model_headers import weight_stamps

_LIBRARIES = ("privatellm", "torch", "transformers", "mlx", "mlx-lm")
"""Packages whose versions count."""


def prefix_identity(folder: Path, request: Load, facts: ModelFacts) -> str:
    """64 hexadecimal digits that are others if the weights in ``folder``, this program, this machine, or how the model
    was loaded are.

    Weights are known by the names, sizes and times of their files, and by the contents of the configuration.
    """
    how = (
        facts.runtime,
        facts.device,
        facts.dtype,
        facts.trunk,
        facts.vocabulary,
        facts.key_value_bytes_per_token,
        facts.state_bytes,
        facts.policy is not None,
        request.key_values,
        request.context_limit,
    )
    kernels = kernels_path()
    digest = hashlib.blake2b(digest_size=32)
    for part in (
        how,
        (platform.node(), platform.machine(), platform.processor()),
        [(name, _version(name)) for name in _LIBRARIES],
        None if kernels is None else hashlib.blake2b(kernels.read_bytes()).hexdigest(),
        weight_stamps(folder),
        hashlib.blake2b((folder / "config.json").read_bytes()).hexdigest(),
    ):
        digest.update(msgspec.msgpack.encode(part) + b"\0")
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
