"""Experts of the torch runtime on the native CPU kernels: all of a layer in one call, straight from the mapped file."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.models.formats.model_files import Experts
from engine.moe.kernel_backend import KernelExperts
from engine.moe.kernels.bindings import KernelChoice
from engine.moe.kernels.layers import Gate
from engine.moe.kernels.pool import Pool
from engine.moe.prefetch import ReadAhead
from engine.runtimes.torch.offload.gates import Activation
from engine.runtimes.torch.offload.tensor_backend import TensorBackend


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
        gates = {layer: Gate(each.kind, each.alpha, each.limit) for layer, each in activations.items()}
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
            scale_input,
        )


def _contiguous(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` as the kernels read it: itself where it is so already."""
    return tensor.to(dtype).contiguous()
