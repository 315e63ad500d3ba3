"""The choice of a runtime: which one runs a model, why, and whether it stands in for the machine's default.

Loading, plans, ``doctor`` and the settings screen all decide here, from what they found out; see
:mod:`engine.runtimes.choosing` for what is found out of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A runtime, and in a few words why it is this one. ``is_fallback``: it stands in for the machine's default."""

    name: Runtime
    reason: str
    is_fallback: bool = False


def candidates(*, apple_silicon: bool, gpu: bool, partitioning: str = "auto") -> tuple[Runtime, ...]:
    """What ``auto`` tries on a machine, the best first; the last one runs every family.

    ``gpu``: torch would use a GPU. ``partitioning``: what the person chose; a GPU is not used with ``cpu``, nor by
    torch in a ``ring``.
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


def _chosen(name: Runtime, reasons: Sequence[str]) -> RuntimeChoice:
    return RuntimeChoice(name, "; ".join(reasons) or _DEFAULTS[name], is_fallback=bool(reasons))
