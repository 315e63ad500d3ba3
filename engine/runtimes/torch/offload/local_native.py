"""The local executor on the native CPU kernels: all experts of a layer in one call, straight from the mapped file."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.models.files import Experts
from engine.moe.kernels.bindings import WEIGHT_DTYPES, KernelChoice, load
from engine.moe.kernels.layers import Gate as KernelGate
from engine.moe.kernels.layers import LayerExperts, layer_experts
from engine.moe.kernels.pool import Pool
from engine.moe.prefetch import ReadAhead
from engine.moe.timing import Recorder
from engine.runtimes.torch.offload.gates import Activation
from engine.runtimes.torch.offload.measured import MeasuredExecutor


class NativeLocalExecutor(MeasuredExecutor):
    """Runs experts with the kernels of ``choice`` on the threads of ``pool``.

    Hidden states may be float32 or bfloat16; inside an expert everything is float32, but for what ``choice`` says of
    its inputs (avx512_bf16 rounds them). ``read_ahead`` is told the routes of a layer before they are run.
    """

    def __init__(
        self,
        experts: Experts,
        activations: Mapping[int, Activation],
        choice: KernelChoice,
        pool: Pool,
        recorder: Recorder,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        super().__init__(experts, recorder)
        self._experts = experts
        self._activations = activations
        self._choice = choice
        self._pool = pool
        self._read_ahead = read_ahead
        self._layers: dict[int, LayerExperts] = {}
        self._last_counts = torch.zeros(experts.count, dtype=torch.int64)

    @property
    def description(self) -> str:
        threads = "1 thread" if self._pool.threads == 1 else f"{self._pool.threads} threads"
        return f"local (native {self._choice.name}, {threads})"

    @property
    def counts(self) -> torch.Tensor:
        return self._last_counts

    def outputs(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, input_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`engine.runtimes.torch.offload.local.CpuExperts`."""
        tokens, k = indices.shape
        rows = _contiguous(hidden, torch.float32)
        routes = _contiguous(indices, torch.int32)
        weights = torch.ones(tokens, k) if input_weights is None else _contiguous(input_weights, torch.float32)
        out = torch.empty(tokens * k, hidden.shape[1])
        self._last_counts = torch.zeros(self._experts.count, dtype=torch.int64)
        if self._read_ahead is not None:
            self._read_ahead.will_need(layer, indices)
        self._layer(layer).run(
            self._pool,
            rows.data_ptr(),
            routes.data_ptr(),
            weights.data_ptr(),
            tokens,
            k,
            sum_to=None,
            outputs_to=out.data_ptr(),
            counts_to=self._last_counts.data_ptr(),
            scale_input=input_weights is not None,
        )
        return out

    result_dtype = torch.float32

    def combined(self, routed: torch.Tensor, tokens: int, weights: torch.Tensor | None) -> torch.Tensor:
        """See :class:`engine.runtimes.torch.offload.local.LocalExecutor`."""
        k = routed.shape[0] // tokens
        shares = torch.ones(tokens, k) if weights is None else _contiguous(weights, torch.float32)
        results = _contiguous(routed, torch.float32)
        out = torch.empty(tokens, routed.shape[1])
        load().pllm_weighted_sum(
            self._pool.handle, self._choice.number, WEIGHT_DTYPES[self._experts.dtype],
            results.data_ptr(), shares.data_ptr(), tokens, k, out.shape[1], out.data_ptr(),
        )  # fmt: skip
        return out

    def _run(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, scale_input: bool
    ) -> torch.Tensor:
        tokens, k = indices.shape
        rows = _contiguous(hidden, torch.float32)
        routes = _contiguous(indices, torch.int32)
        shares = _contiguous(weights, torch.float32)
        out = torch.empty(tokens, hidden.shape[1])
        if self._read_ahead is not None:
            self._read_ahead.will_need(layer, indices)
        self._layer(layer).run(
            self._pool,
            rows.data_ptr(),
            routes.data_ptr(),
            shares.data_ptr(),
            tokens,
            k,
            sum_to=out.data_ptr(),
            counts_to=self._popularity.address(layer),
            scale_input=scale_input,
        )
        return out.to(hidden.dtype)

    def _layer(self, layer: int) -> LayerExperts:
        found = self._layers.get(layer)
        if found is None:
            activation = self._activations[layer]
            gate = KernelGate(activation.kind, activation.alpha, activation.limit)
            held = self._experts.held(layer)
            found = self._layers[layer] = layer_experts(self._experts, layer, gate, self._choice, held)
        return found


def _contiguous(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` as the kernels read it: itself where it is so already."""
    return tensor.to(dtype).contiguous()
