"""A node's experts without a trunk, for central mode, on any backend."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import ModelError
from engine.models.formats.byte_map import FileMapping
from engine.models.formats.model_files import Experts
from engine.moe.backend import Array, ExpertBackend
from engine.moe.expert_parallel import FLOAT32, Floats, HostRows, Indices, Routes
from engine.moe.kernels.file_guard import FileGuard
from engine.runtimes.protocol import LoadedWeights


class NodeExperts(LoadedWeights):
    """See :class:`engine.cluster.central.ExpertRunner`. One thread at a time.

    ``width``: numbers of what the experts read of a token; ``notices``: what the person should know of how they were
    loaded; ``experts``: where they lie, if in mapped files.
    """

    def __init__(
        self,
        backend: ExpertBackend[Array],
        width: int,
        description: str,
        experts: Experts | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        self.width = width
        self.description = description
        self.notices: list[str] = list(notices)
        self.count = backend.held
        """(layer, expert) pairs held."""
        self._backend: ExpertBackend[Array] | None = backend
        self._experts = experts
        self._guard = FileGuard(self.mapped_files)

    @property
    def mapped_files(self) -> tuple[FileMapping, ...]:
        return () if self._backend is None else tuple(getattr(self._experts, "mapped_files", ()))

    def run_experts(
        self,
        layer: int,
        hidden: Floats,
        indices: Indices,
        weights: Floats,
        extra: Sequence[int] = (),
        scale: bool = False,
        reads: bool = False,
    ) -> Floats:
        """Every route's un-weighted result [tokens * k, width]; what rows of -1 hold does not matter.

        ``hidden`` [tokens, width]; ``indices``, ``weights`` [tokens, k]; ``scale``: the inputs are multiplied by the
        weights. ``extra`` experts are run on the first token as well, for nothing. ``reads``: see
        :class:`engine.moe.expert_parallel.HostRows`. The next call may overwrite the results. Raises ModelError if the
        shapes do not fit together, an expert is not held here, or the files were changed.
        """
        backend = self._backend
        if backend is None:
            raise ModelError("The experts are closed; load them again.", kind="internal")
        if hidden.ndim != 2 or indices.shape != weights.shape or indices.ndim != 2:
            raise ModelError(f"Hidden states {hidden.shape} and routes {indices.shape} do not fit together.")
        if hidden.shape != (len(indices), self.width):
            raise ModelError(f"Hidden states {hidden.shape} came for {len(indices)} tokens of {self.width} numbers.")
        call = backend.begin_on_host(layer, HostRows(hidden, scale, reads), Routes(indices, weights))
        found = backend.results(call, indices, call.routes.weights, extra, FLOAT32)
        if self._experts is not None:
            self._experts.check_unchanged(layer)
        self._guard.check()
        return found

    def close(self) -> None:
        """Give memory and mappings back. Nothing runs afterwards."""
        if self._backend is not None:
            self._backend.close()
        self._backend = None
        self._guard.close()
        self._experts = None
