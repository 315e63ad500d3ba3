"""The choice of the implementation that runs experts on this machine's CPU, and its reason."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.calibration.reading_rates import notice_beyond_memory
from engine.models.formats.model_files import Experts, first_held
from engine.models.formats.number_formats import is_packed
from engine.moe.kernel_backend import KernelExperts
from engine.moe.kernels.bindings import KernelChoice, choose
from engine.moe.kernels.layers import Gate, unsupported_reason
from engine.moe.kernels.pool import Pool, physical_cores, shared_pool
from engine.runtimes.torch.offload.gates import Activation, FamilyGate
from engine.runtimes.torch.offload.local_torch import TorchBackend
from engine.runtimes.torch.offload.tensor_backend import ReadAhead, TensorBackend
from engine.runtimes.torch.offload.torch_tensors import NAMES, stored_dtype
from engine.system.free_memory import available_bytes


def make_cpu_backend(
    experts: Experts,
    gates: Mapping[int, FamilyGate],
    dtype: torch.dtype,
    cpu_threads: int | None = None,
    trunk_bytes: int = 0,
) -> tuple[TensorBackend, tuple[str, ...]]:
    """The fastest backend that can run ``experts`` on the CPU in ``dtype``, and a line with the reason for each
    fallback.

    ``gates[layer]``: result of :func:`engine.runtimes.torch.experts_module.gate_of` for the layer. ``cpu_threads``
    None: one per physical core. ``trunk_bytes``: memory still to be taken, which decides whether the experts stay in
    memory. Raises ModelError if PRIVATELLM_KERNELS asks for what this CPU lacks.
    """
    notices = []
    files = getattr(experts, "mapped_files", ())
    beyond = notice_beyond_memory("experts", experts.nbytes, files, max(0, available_bytes() - trunk_bytes))
    if beyond is not None:
        notices.append(beyond)
    read_ahead = None if beyond is None else ReadAhead(experts)
    choice = _kernels(dtype)
    reason = choice.reason if not choice.native else _unsuitable(experts, gates)
    if reason is not None:
        notices.append(f"The experts run in torch, not in the native kernels: {reason}.")
        notices += _slow_in_torch(experts, dtype)
        return TorchBackend(experts, gates, dtype, read_ahead), tuple(notices)
    pool = shared_pool(cpu_threads or physical_cores())
    activations = {layer: gate.activation for layer, gate in gates.items() if gate.activation is not None}
    return TorchKernelBackend(experts, activations, dtype, choice, pool, read_ahead), tuple(notices)


def _kernels(dtype: torch.dtype) -> KernelChoice:
    if dtype == torch.bfloat16:
        return choose("bfloat16")
    if dtype == torch.float32:
        return choose("float32")
    return KernelChoice("none", f"they compute in bfloat16 or float32, not in {NAMES[dtype]}")


def _unsuitable(experts: Experts, gates: Mapping[int, FamilyGate]) -> str | None:
    """Why the native kernels cannot run these experts, or None."""
    for layer in experts.layers:
        if gates[layer].activation is None:
            return f"they do not know the activation of layer {layer}'s experts"
        reason = next((unsupported_reason(experts.expert(layer, number)) for number in experts.held(layer)[:1]), None)
        if reason is not None:
            return f"they cannot read the weights of layer {layer}, because {reason}"
    return None


def _slow_in_torch(experts: Experts, dtype: torch.dtype) -> list[str]:
    """Reasons why these experts are slow in torch, and what to do about them."""
    if is_packed(experts.dtype):
        return [
            f"The experts are stored as {experts.dtype} and unpacked each time they are used, which is slow on a CPU."
        ]
    lines = []
    stored = stored_dtype(experts.dtype)
    if stored != dtype:
        lines.append(
            f"The experts are stored as {NAMES[stored]} and converted to {NAMES[dtype]} each time "
            "they are used, which is slow; choose dtype auto to run them as they are."
        )
    first = first_held(experts)
    if first is not None and not experts.expert(*first).down.words.flags.c_contiguous:
        lines.append(
            "The experts are stored transposed, which is several times slower on a CPU; "
            "`privatellm models prepare` writes them the other way round."
        )
    return lines


# --- experts on the native kernels -----------------------------------------------------------------------------------


class TorchKernelBackend(TensorBackend):
    """Runs experts with the kernels of ``choice`` on the threads of ``pool``.

    Hidden states may be float32 or bfloat16; inside an expert everything is float32, but for what ``choice`` says of
    its inputs (avx512_bf16 rounds them). ``read_ahead`` gets the routes of a layer before they are run.
    """

    result_dtype = torch.float32

    def __init__(
        self,
        experts: Experts,
        activations: Mapping[int, Activation],
        dtype: torch.dtype,
        choice: KernelChoice,
        pool: Pool,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        super().__init__(experts, dtype)
        gates = {layer: Gate(each.kind, each.alpha, each.limit, each.beta) for layer, each in activations.items()}
        self._kernels = KernelExperts(experts, gates.__getitem__, choice, pool)
        self._read_ahead = read_ahead

    @property
    def description(self) -> str:
        return f"local ({self._kernels.description})"

    def outputs(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, input_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`engine.runtimes.torch.offload.tensor_backend.TensorBackend`."""
        out = torch.empty(indices.numel(), hidden.shape[1])
        weights = torch.ones(indices.shape) if input_weights is None else input_weights
        self._call(layer, hidden, indices, weights, input_weights is not None, outputs_to=out.data_ptr())
        return out

    def combined(self, routed: torch.Tensor, tokens: int, weights: torch.Tensor | None) -> torch.Tensor:
        """See :class:`engine.runtimes.torch.offload.tensor_backend.TensorBackend`."""
        k = routed.shape[0] // tokens
        shares = torch.ones(tokens, k) if weights is None else _contiguous(weights, torch.float32)
        results = _contiguous(routed, torch.float32)
        out = torch.empty(tokens, routed.shape[1])
        self._kernels.weighted_sum(results.data_ptr(), shares.data_ptr(), tokens, k, out.shape[1], out.data_ptr())
        return out

    def run(
        self,
        layer: int,
        hidden: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        scale_input: bool = False,
    ) -> torch.Tensor:
        out = torch.empty(hidden.shape)
        counts = self.popularity.address(layer)
        self._call(layer, hidden, indices, weights, scale_input, sum_to=out.data_ptr(), counts_to=counts)
        return out.to(hidden.dtype)

    def _call(
        self,
        layer: int,
        hidden: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        scale_input: bool,
        outputs_to: int | None = None,
        sum_to: int | None = None,
        counts_to: int | None = None,
    ) -> None:
        tokens, k = indices.shape
        rows = _contiguous(hidden, torch.float32)
        routes = _contiguous(indices, torch.int32)
        shares = _contiguous(weights, torch.float32)
        if self._read_ahead is not None:
            self._read_ahead.will_need(layer, indices)
        self._kernels.run(
            layer,
            rows.data_ptr(),
            routes.data_ptr(),
            shares.data_ptr(),
            tokens,
            k,
            hidden.shape[1],
            outputs_to,
            sum_to,
            counts_to,
            scale_input=scale_input,
        )


def _contiguous(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` as the kernels read it: itself if possible, else a copy."""
    return tensor.to(dtype).contiguous()
