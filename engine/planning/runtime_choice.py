"""The choice of a runtime: which one runs a model, why, and whether it stands in for the machine's default.

Loading, plans, ``doctor`` and the settings screen all decide here, from what they found out; see
:mod:`engine.runtimes.choosing` for what is found out of a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Runtime = Literal["native", "torch", "mlx"]

_DEFAULTS: dict[Runtime, str] = {
    "mlx": "the default on Apple Silicon",
    "native": "the default on a CPU",
    "torch": "the default with a GPU",
}


@dataclass(frozen=True)
class RuntimeChoice:
    """A runtime, and the reason for it in a few words. ``is_fallback``: it replaces the machine's default."""

    name: Runtime
    reason: str
    is_fallback: bool = False


WSL_LIBRARIES = "/usr/lib/wsl/lib"
"""The folder in which Windows puts its driver's libraries and programs for Linux."""
_GPU_DEVICE = re.compile(r"nvidia\d+$|kfd$")


def has_gpu(devices: Collection[str], wsl_libraries: Collection[str], visible: str | None) -> bool:
    """Whether there is a GPU that torch might use.

    ``devices`` are the names in ``/dev``, ``wsl_libraries`` those in :data:`WSL_LIBRARIES`. ``visible`` is the value of
    ``CUDA_VISIBLE_DEVICES``, None if it is not set. Windows shows every maker's GPU as ``dxg``, so NVIDIA's library has
    to be there, too.
    """
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    if any(_GPU_DEVICE.match(name) for name in devices):
        return True
    return "dxg" in devices and any(name.startswith("libcuda.so") for name in wsl_libraries)


def candidates(*, apple_silicon: bool, gpu: bool, partitioning: str = "auto") -> tuple[Runtime, ...]:
    """The runtimes that ``auto`` tries, best first. The last one runs every family.

    ``gpu``: torch would use a GPU. ``partitioning``: the person's choice; with ``cpu`` no GPU is used.
    :func:`ring_choice` decides later whether a ``ring`` runs by torch for the sake of its nodes' GPUs.
    """
    if apple_silicon and partitioning != "cpu":
        return ("mlx", "native", "torch")
    if gpu and partitioning not in ("cpu", "ring"):
        return ("torch",)
    return ("native", "torch")


def first_supported(names: Sequence[Runtime], unsupported: Callable[[Runtime], str | None]) -> RuntimeChoice:
    """The first of ``names``, best first, that runs the model. The last one is taken without asking.

    ``unsupported`` says in a few words why a runtime does not run the model, or None.
    """
    reasons: list[str] = []
    for name in names[:-1]:
        reason = unsupported(name)
        if reason is None:
            return _chosen(name, reasons)
        reasons.append(f"the faster native trunk is not used, because {reason}" if name == "native" else reason)
    return _chosen(names[-1], reasons)


@dataclass(frozen=True)
class RingForecast:
    """Predictions for a ring with one runtime.

    ``fits``: whether a ring is possible. ``step_s``: seconds of its decoding step, None if too little was measured.
    """

    fits: bool
    step_s: float | None = None


def ring_choice(
    choice: RuntimeChoice,
    plain: RingForecast,
    with_gpus: RingForecast,
    gpus: Sequence[str],
    guessed: Sequence[str] = (),
) -> RuntimeChoice:
    """``choice``, which was made without looking at other machines, or torch if the ring's GPUs are worth it.

    ``plain``: the forecast for ``choice``, which uses none of the ``gpus``. ``with_gpus``: the forecast for torch.
    ``gpus`` are in words, such as ``NVIDIA L4 of studio``. The speed of those in ``guessed`` was not measured.
    """
    if not gpus or choice.name != "native" or not with_gpus.fits:
        return choice
    who = " and ".join([", ".join(gpus[:-1]), gpus[-1]] if len(gpus) > 1 else gpus)
    basis = f" ({' and '.join(guessed)}: a guess until `privatellm bench experts` runs there)" if guessed else ""
    if not plain.fits:
        return RuntimeChoice("torch", f"only with {who} is there memory for all experts{basis}")
    before, after = plain.step_s, with_gpus.step_s
    if not before or not after:
        return RuntimeChoice("native", f"{who} would need torch, and too little was measured to compare the two")
    if after < before:
        faster = f"{1 / after:.1f} tokens/s are predicted with {who}, {1 / before:.1f} by native without"
        return RuntimeChoice("torch", faster + basis)
    slower = f"{1 / before:.1f} tokens/s are predicted, {1 / after:.1f} by torch with {who}"
    return RuntimeChoice("native", slower + basis)


def experts_runtime(ring: str, installed: Sequence[str]) -> str:
    """The runtime for the experts of a node with the runtimes ``installed``, best first, in a ring of the runtime
    ``ring``.

    It is ``ring`` if the node has it, so that its bits are the head's.
    """
    if ring in installed:
        return ring
    return "mlx" if installed[:1] == ["mlx"] else "torch" if "torch" in installed else next(iter(installed), "none")


def _chosen(name: Runtime, reasons: Sequence[str]) -> RuntimeChoice:
    return RuntimeChoice(name, "; ".join(reasons) or _DEFAULTS[name], is_fallback=bool(reasons))
