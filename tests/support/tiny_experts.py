"""Experts of a layer in one tensor, as transformers has them, and each in tensors of its own, as tools that quantise
modules write them."""

from __future__ import annotations

import torch

from engine.models.architectures.record import Family

Tensors = dict[str, torch.Tensor]


def stored_by_columns(family: Family) -> bool:
    """Whether the tensors of all experts of a layer have a matrix's columns as its rows."""
    return any(tensor.transposed for layout in family.layouts[:1] for tensor in layout)


def experts_apart(tensors: Tensors, transposed: bool) -> tuple[Tensors, list[str]]:
    """``tensors`` with those of all experts of a layer taken apart, as llm-compressor does, and the beginnings of their
    names. ``transposed``: they are stored by columns."""
    apart: Tensors = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".")
        if not prefix.endswith(".experts") or part not in ("gate_up_proj", "down_proj"):
            apart[name] = tensor
            continue
        for number, expert in enumerate(tensor.mT if transposed else tensor):
            parts = zip(("gate", "up"), expert.chunk(2), strict=True) if part != "down_proj" else [("down", expert)]
            apart |= {f"{prefix}.{number}.{own}_proj.weight": matrix.contiguous() for own, matrix in parts}
    return apart, sorted({name.rpartition(".")[0] for name in tensors.keys() - apart.keys()})


def experts_together(tensors: Tensors, merged: list[str], transposed: bool) -> Tensors:
    """The opposite of :func:`experts_apart`."""
    whole = {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(merged))}
    for prefix in merged:
        count = sum(name.startswith(f"{prefix}.") and name.endswith(".down_proj.weight") for name in tensors)
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{number}.{part}_proj.weight"] for number in range(count)])
            for part in ("gate", "up", "down")
        )
        for name, tensor in ((f"{prefix}.gate_up_proj", torch.cat((gate, up), 1)), (f"{prefix}.down_proj", down)):
            whole[name] = (tensor.mT if transposed else tensor).contiguous()
    return whole
