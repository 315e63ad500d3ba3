"""A node's experts without a trunk, by torch or the native kernels: what it is in central mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.files import Experts, FileMapping
from engine.models.opening import open_model
from engine.moe.expert_parallel import Indices
from engine.moe.held import held_by
from engine.moe.kernels.file_guard import FileGuard
from engine.moe.rank_context import RankContext
from engine.moe.timing import Recorder
from engine.runtimes.protocol import LoadedExperts
from engine.runtimes.torch.experts_module import find_experts, gate_of
from engine.runtimes.torch.loading import build_skeleton, read_config
from engine.runtimes.torch.offload.local import LocalExecutor, make_local_executor
from engine.runtimes.torch.runtime import pick_dtype


class TorchExperts(LoadedExperts):
    """See :class:`engine.runtimes.protocol.LoadedExperts`. ``width``: numbers of a hidden state."""

    def __init__(self, local: LocalExecutor, experts: Experts, width: int, dtype: torch.dtype) -> None:
        self._local: LocalExecutor | None = local
        self._experts = experts
        self._guard = FileGuard(getattr(experts, "mapped_files", ()))
        self._dtype = dtype
        self.width = width
        self.description = local.description

    @property
    def mapped_files(self) -> tuple[FileMapping, ...]:
        return getattr(self._experts, "mapped_files", ())

    def run_experts(
        self,
        layer: int,
        hidden: NDArray[np.float32],
        indices: Indices,
        weights: NDArray[np.float32],
        extra: Sequence[int],
        scale: bool,
    ) -> NDArray[np.float32]:
        """See :class:`engine.cluster.central.ExpertRunner`. Raises ModelError if the files were changed."""
        if self._local is None:
            raise ModelError("The experts are closed; load them again.", kind="internal")
        with torch.inference_mode():
            rows = torch.from_numpy(hidden).to(self._dtype)
            shares = torch.from_numpy(weights).to(self._dtype)
            if extra:
                self._local.outputs(layer, rows[:1], torch.tensor([list(extra)], dtype=torch.int32))
            found = self._local.outputs(layer, rows, torch.from_numpy(indices), shares if scale else None)
        self._experts.check_unchanged(layer)
        self._guard.check()
        out: NDArray[np.float32] = found.numpy()
        return out

    def close(self) -> None:
        """Drop the mappings of the files."""
        self._local = None
        self._guard.close()


def load_experts(folder: Path, request: Load, context: RankContext) -> TorchExperts:
    """The experts of ``context`` from the model, or the share of one, in ``folder``.

    Raises ModelError if the family is not supported, or they are not here.
    """
    files = open_model(folder)
    if files.experts is None:
        raise ModelError(f"{request.model} has no experts to share; it runs on one machine.", kind="bad-input")
    config: Any = read_config(folder, files.config)
    dtype = pick_dtype(files, request)
    places = find_experts(build_skeleton(config, dtype))
    held = held_by(files.experts, context.placement, context.rank)
    recorder = Recorder(config.num_hidden_layers, held.layers, held.count)
    gates = {place.layer: gate_of(place.experts) for place in places}
    local = make_local_executor(held, gates, dtype, torch.device("cpu"), recorder, request.cpu_threads)
    return TorchExperts(local.executor, held, int(config.hidden_size), dtype)
