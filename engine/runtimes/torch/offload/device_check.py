"""Checks that a device computes what the CPU computes: when a model is loaded, each expert on the device runs once on
both.

A GPU runs kernels compiled a moment ago, on weights copied past the CPU, with an unknown driver. An error there would
give wrong answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.ipc.progress import ProgressCallback
from engine.runtimes.torch.offload.devices import CopyFailed, ExpertDevice, OutOfDeviceMemory, ResidentExpert
from engine.runtimes.torch.offload.gates import FamilyGate
from engine.runtimes.torch.offload.host_memory import HostExperts
from engine.runtimes.torch.offload.slab_cache import SlabCache
from engine.runtimes.torch.offload.tensor_backend import TensorBackend
from engine.system.free_memory import available_bytes

MOST_APART = 0.1
"""Maximum relative difference between the results of GPU and CPU for one expert's input. The CPU may round inputs to
eight bits, which makes a hundredth. Another expert's result differs by about its own size."""
SEVERAL, MANY = 9, 256
"""Tokens of one expert of each layer, and of one of the first layer. Other kernels run several or many tokens."""
MEMORY_SHARE = 0.5
"""Maximum share of the available memory for the compared experts. Reading more might mean reading the disk."""


class DeviceCheck:
    """See the module. ``cache`` tells which experts of ``host`` are on ``device``; ``cpu`` runs the same experts."""

    def __init__(
        self,
        host: HostExperts,
        device: ExpertDevice,
        cpu: TensorBackend,
        gates: Mapping[int, FamilyGate],
        cache: SlabCache,
        dtype: torch.dtype,
    ) -> None:
        self._host = host
        self._device = device
        self._cpu = cpu
        self._gates = gates
        self._cache = cache
        self._dtype = dtype

    def run(self, whole_layer: Callable[[int], Any], progress: ProgressCallback) -> tuple[bool, list[str]]:
        """Whether the device may run experts, and lines for the person about errors.

        An expert that differs is copied once more, which repairs a damaged copy. ``whole_layer`` gives the argument of
        :meth:`engine.runtimes.torch.offload.devices.ExpertDevice.run_routes` for a layer, or None. If the device has no
        room to compute, the comparison ends. Raises DeviceLost.
        """
        layers = self._host.experts.layers
        room, mended = MEMORY_SHARE * available_bytes(), 0
        for number, layer in enumerate(layers):
            held = self._cache.resident(layer)
            room -= len(held) * self._host.layout(layer).size
            if room < 0:
                break
            if not held:
                continue
            progress("comparing GPU and CPU", number, len(layers), "layers")
            try:
                differing = self._differing(layer, held, whole_layer(layer))
                self._copy_again(layer, differing)
                if differing and self._differing(layer, differing, whole_layer(layer)):
                    return False, [self._said(layer, differing)]
            except OutOfDeviceMemory:
                break
            except CopyFailed:
                return False, [self._said(layer, held)]
            mended += len(differing)
        if not mended:
            return True, []
        return True, [f"{mended} experts had arrived damaged on {self._device.name} and were copied again."]

    def _differing(self, layer: int, experts: list[int], whole: Any) -> list[int]:
        """The members of ``experts``, all on the device, whose results differ from the CPU's."""
        device, layout, gate = self._device, self._host.layout(layer), self._gates[layer]
        first = layer == self._host.experts.layers[0]
        tokens = [1] * len(experts)
        tokens[0] = SEVERAL
        tokens[-1] = MANY if first else tokens[-1]
        starts = [sum(tokens[:place]) for place in range(len(tokens))]
        width = layout.matrices["down"].shape[0]
        rows = torch.randn(sum(tokens), width, generator=torch.Generator().manual_seed(layer)).to(self._dtype)
        of_row = torch.tensor(experts).repeat_interleave(torch.tensor(tokens))
        slots = [self._cache.slot_of(layer, expert) for expert in experts]
        work = [
            ResidentExpert(slot, start, start + count)
            for slot, start, count in zip(slots, starts, tokens, strict=True)
            if slot is not None
        ]
        there = device.upload(rows)
        out = device.upload(torch.zeros(rows.shape))
        device.begin()
        device.run(work, layout, gate, there, out)
        device.end()
        (found,) = device.download(out)
        wanted = self._cpu.outputs(layer, rows, of_row[:, None]).float()
        near = _near(found, wanted)
        if whole is not None:
            one = torch.tensor(starts)
            chosen = device.upload(torch.tensor(experts)[:, None])
            routed, _ = device.run_routes(whole, layout, gate, device.upload(rows[one].contiguous()), chosen)
            near[one] &= _near(device.download(routed)[0], wanted[one])
        wrong = set(of_row[~near].tolist())
        return [expert for expert in experts if expert in wrong]

    def _copy_again(self, layer: int, experts: list[int]) -> None:
        for expert in experts:
            slot = self._cache.slot_of(layer, expert)
            if slot is not None:
                self._device.copy(slot, self._host.pieces(layer, expert))
        if experts:
            self._device.synchronize()

    def _said(self, layer: int, experts: list[int]) -> str:
        which = f"expert {experts[0]} of layer {layer}" + (
            f" and {len(experts) - 1} others" if len(experts) > 1 else ""
        )
        return f"What {self._device.name} computes for {which} is not what the CPU does, so all experts run on the CPU."


def _near(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Whether each row is close enough. Rows that are not numbers on both sides count as close."""
    close = (found - wanted).norm(dim=1) <= MOST_APART * wanted.norm(dim=1)
    return close | ~(found.isfinite().all(dim=1) | wanted.isfinite().all(dim=1))
