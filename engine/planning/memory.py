"""The size of a model, and what beams cost: memory of keys and values, and time of one step. Pure.

Decoding is bound by the bytes read per step, so the time of a step is taken as proportional to them:

    bytes(W) = trunk + experts(W) * bytes per expert + W * context * key/value bytes per token

where experts(W) is the expected number of distinct experts that W beams use, summed over the MoE layers, if each
beam's ``k`` experts were drawn evenly: per layer E * (1 - (1 - k/E)**W). Beams that resemble one another use fewer, so
this errs on the side of saying too much. All memory is in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.ipc.messages import Load, ModelFacts
from engine.planning.placement import ExpertGrid

CUT_BACK_TOKENS = 1024
"""Tokens before the last prefill chunk to which a row can always be cut back. An answer is kept whole until the next
prompt is prefilled, because a template may drop the thoughts at its beginning. Tokens that no window reaches from there
may be forgotten."""

_NOT_YET_DROPPED = 256
"""Tokens outside the window that a row still keeps: dropping so few is not worth copying the others."""
USUAL_CONTEXT = 4096
"""Tokens of a conversation for which memory is planned if nobody chose a limit."""


@dataclass(frozen=True)
class TrunkSize:
    """Bytes, or numbers, of the trunk; of those, an embedding that is not the head, and shared experts."""

    total: int = 0
    embedding: int = 0
    shared: int = 0


@dataclass(frozen=True)
class ModelSizes:
    """The size of a model, and of what it keeps while it runs.

    Bytes are for computing in ``dtype``; packed weights and experts stay as stored. :meth:`for_runtime` is exact for
    one runtime.
    """

    layers: int
    moe_layers: int
    experts: int
    experts_per_token: int
    hidden: int
    trunk_bytes: int
    expert_bytes: int
    """Bytes of all routed experts of all MoE layers."""
    key_value_bytes_per_token: int
    state_bytes: int = 0
    """Bytes of a row's states of delta-nets, which every pass replaces and which do not depend on the row's length."""
    name: str = ""
    """The model's name as commands take it."""
    family: str = ""
    dtype: str = "bfloat16"
    """The format that is computed with: the requested one, else that of most of the stored model."""
    stored: str = "bfloat16"
    """Dtype or packed format of most of the stored model."""
    ffn: int = 0
    """Inner size of a routed expert, or of the dense layers."""
    vocabulary: int = 0
    context_limit: int = USUAL_CONTEXT
    expert_layers: tuple[int, ...] = ()
    """Decoder layers with routed experts, ascending; empty: the first ``moe_layers``."""
    embedding_bytes: int = 0
    """Bytes of an embedding that is not also the head. It is part of the trunk, and a token reads one row of it."""
    shared_bytes: int = 0
    """Bytes of the shared experts of all MoE layers. They are part of the trunk, and every token runs them."""
    expert_weights: int = 0
    """Number of weights of all routed experts, whatever their format; 0: as many as ``expert_bytes`` hold of
    ``dtype``."""
    experts_are_packed: bool = False
    """Whether an expert is unpacked to ``dtype`` each time it runs, where the native kernels do not run it."""
    largest_expert_bytes: int = 0
    """Bytes of the largest routed expert, as layers' formats may differ; 0: all experts are equally large."""
    padded_state_bytes: int = 0
    """``state_bytes``, padded to the native runtime's blocks of columns."""
    key_value_bytes_packed: tuple[tuple[str, int], ...] = ()
    """``key_value_bytes_per_token`` in each packed form of them; none if heads do not fit those."""
    windowed_bytes_per_token: int = 0
    """Part of ``key_value_bytes_per_token`` in layers with a sliding window, which mlx and native drop in part."""
    window: int = 0
    """Width of the sliding window, in tokens."""
    windowed_tokens: int = 0
    """Maximum tokens that layers with a sliding window keep; 0: all."""
    trunk_stored: TrunkSize = TrunkSize()
    """Bytes of the trunk in the files."""
    trunk_numbers: TrunkSize | None = None
    """Numbers of the trunk; None if the runtime for these files never converts it."""
    trunk_packed: TrunkSize = TrunkSize()
    """Bytes of the trunk's packed matrices."""
    trunk_plain: TrunkSize = TrunkSize()
    """Numbers of the trunk's other tensors."""
    table_bytes: int = 0
    """Bytes of tables of which a token needs few rows. They are read from their files, and no memory is kept for
    them."""
    native_copies: int = 0
    """Bytes of the trunk's matrices that native copies because of the order in which they are stored."""
    mlx_codes: TrunkSize | None = None
    """Bytes of the trunk's codes in mlx; None if it keeps the trunk as it is stored."""
    mlx_plain: TrunkSize = TrunkSize()
    """Numbers of the trunk that mlx has beside them, scales and biases included."""
    mlx_expert_codes: int = 0
    """``mlx_codes`` of the routed experts."""
    mlx_expert_plain: int = 0
    """``mlx_plain`` of the routed experts."""
    trunk_is_mapped: bool = False
    """Whether the trunk is read from the mapped files, as the experts are, so that it need not fit in memory."""
    context_tokens: int = USUAL_CONTEXT
    """Tokens of keys and values for which memory is planned."""
    prefill_chunk: int = 512
    """Tokens of a forward pass over a prompt."""

    @classmethod
    def of_loaded(cls, facts: ModelFacts, prefill_chunk: int) -> ModelSizes:
        """The sizes of a loaded model that prefills by ``prefill_chunk``."""
        sizes = cls(
            layers=facts.layers,
            moe_layers=len(facts.moe_layers),
            experts=facts.experts,
            experts_per_token=facts.experts_per_token,
            hidden=facts.hidden,
            trunk_bytes=facts.trunk_bytes,
            expert_bytes=facts.expert_bytes,
            key_value_bytes_per_token=facts.key_value_bytes_per_token,
            state_bytes=facts.state_bytes,
            windowed_bytes_per_token=facts.windowed_bytes_per_token,
            window=facts.window,
        )
        return sizes.with_windows(prefill_chunk)

    # --- how it is loaded ---

    def for_runtime(self, runtime: str, on_gpu: bool = False, key_values: str = "auto") -> ModelSizes:
        """These sizes with weights, states, keys and values as ``runtime`` keeps them. ``key_values`` as in
        :class:`engine.ipc.messages.LoadOptions`: only native keeps them in 8 or 4 bits.

        The trunk: native reads it where it is stored, and computes in
        bfloat16 with weights stored as float16. torch converts it to ``dtype``, but for packed tensors of a trunk that
        computes in bfloat16 on a CPU. mlx lays packed weights out for its kernels, the experts' too, or unpacks
        them."""
        sizes = self
        if runtime == "mlx" and self.mlx_codes is not None:
            return self._in_mlx(self.mlx_codes)
        if runtime == "native" and (nbytes := dict(self.key_value_bytes_packed).get(key_values)):
            windowed = self.windowed_bytes_per_token * nbytes // self.key_value_bytes_per_token
            sizes = replace(self, key_value_bytes_per_token=nbytes, windowed_bytes_per_token=windowed)
        if self.trunk_numbers is None or runtime not in ("native", "torch"):
            return sizes
        trunk, width, packed, dtype = self.trunk_numbers, self.width, TrunkSize(), self.dtype
        if runtime == "native":
            trunk, width = self.trunk_stored, 1
            dtype = "bfloat16" if dtype == "float16" else dtype
        elif dtype == "bfloat16" and not on_gpu:
            trunk, packed = self.trunk_plain, self.trunk_packed
        return replace(
            sizes,
            dtype=dtype,
            trunk_bytes=packed.total + trunk.total * width + (self.native_copies if runtime == "native" else 0),
            embedding_bytes=packed.embedding + trunk.embedding * width,
            shared_bytes=packed.shared + trunk.shared * width,
            state_bytes=self.padded_state_bytes if runtime == "native" else self.state_bytes,
            trunk_is_mapped=runtime == "native",
        )

    def _in_mlx(self, codes: TrunkSize) -> ModelSizes:
        width, plain = self.width, self.mlx_plain
        return replace(
            self,
            trunk_bytes=codes.total + plain.total * width,
            embedding_bytes=codes.embedding + plain.embedding * width,
            shared_bytes=codes.shared + plain.shared * width,
            expert_bytes=self.mlx_expert_codes + self.mlx_expert_plain * width,
            largest_expert_bytes=0,
        )

    def as_loaded(self, load: Load, runtime: str, on_gpu: bool = False) -> ModelSizes:
        """These sizes as ``runtime`` keeps them for the request ``load``."""
        return replace(
            self.for_runtime(runtime, on_gpu, load.key_values),
            name=load.model,
            context_tokens=min(self.context_limit, load.context_limit or USUAL_CONTEXT),
            prefill_chunk=load.prefill_chunk,
        )

    def with_windows(self, prefill_chunk: int) -> ModelSizes:
        """These sizes for a runtime that drops tokens outside the windows, and prefills by ``prefill_chunk``."""
        return replace(self, windowed_tokens=windowed_tokens(self.window, prefill_chunk), prefill_chunk=prefill_chunk)

    def experts_only(self) -> ModelSizes:
        """These sizes as a GPU in a ring sees them. Trunk, keys and values stay on the CPU, so that their bits are
        equal on all machines."""
        return replace(
            self,
            trunk_bytes=0,
            trunk_numbers=None,
            trunk_stored=TrunkSize(),
            table_bytes=0,
            shared_bytes=0,
            embedding_bytes=0,
            trunk_is_mapped=False,
            key_value_bytes_per_token=0,
            state_bytes=0,
        )

    # --- what follows from them ---

    @property
    def width(self) -> int:
        """Bytes of one number in ``dtype``."""
        return 4 if self.dtype == "float32" else 2

    def dropped_bytes(self, tokens: int) -> int:
        """Bytes of keys and values of a row of ``tokens`` that it drops because no window reaches them."""
        beyond = max(0, tokens - self.windowed_tokens) if self.windowed_tokens else 0
        return self.windowed_bytes_per_token * beyond

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the cache of a row of ``tokens``. States are counted twice, as a pass keeps those of before and
        after it."""
        return tokens * self.key_value_bytes_per_token - self.dropped_bytes(tokens) + 2 * self.state_bytes

    @property
    def planned_cache_bytes(self) -> int:
        """Bytes of the cache of a row of ``context_tokens``."""
        return self.cache_bytes(self.context_tokens)

    @property
    def trunk_read_bytes(self) -> int:
        """Bytes of the trunk that every pass reads."""
        return self.trunk_bytes - self.embedding_bytes

    @property
    def trunk_file_bytes(self) -> int:
        """Bytes of the trunk on the disk, and when it is sent to another machine."""
        return (self.trunk_stored.total or self.trunk_bytes) + self.table_bytes

    @property
    def weights_per_trunk_byte(self) -> float:
        """Mean number of weights per byte of the trunk."""
        numbers = 0 if self.trunk_numbers is None else self.trunk_numbers.total
        return numbers / self.trunk_bytes if numbers and self.trunk_bytes else 1.0 / self.width

    @property
    def slabs(self) -> int:
        """Number of routed experts in all layers."""
        return self.experts * self.moe_layers

    @property
    def slab_bytes(self) -> int:
        """Mean bytes of a routed expert, rounded up; 0 for a dense model."""
        return -(-self.expert_bytes // self.slabs) if self.slabs else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of GPU memory that hold any one routed expert."""
        return max(self.slab_bytes, self.largest_expert_bytes)

    @property
    def slab_weights(self) -> float:
        """Number of weights of one routed expert; 0 for a dense model."""
        if not self.expert_weights:
            return self.slab_bytes / self.width
        return self.expert_weights / self.slabs if self.slabs else 0.0

    @property
    def unpacked_slab_bytes(self) -> int:
        """Bytes of a routed expert's unpacked weights, which a GPU needs beside the slab; 0 if it computes with the
        slab itself."""
        return round(self.slab_weights * self.width) if self.experts_are_packed else 0

    @property
    def grid(self) -> ExpertGrid:
        """The routed experts by layer."""
        layers = self.expert_layers or tuple(range(self.moe_layers))
        return ExpertGrid(layers, self.experts, self.experts_per_token, self.slab_bytes)


@dataclass(frozen=True)
class BeamCost:
    """``relative_step_time`` is the predicted time of one step, with one beam as 1.0."""

    width: int
    memory_bytes: int
    fits: bool
    relative_step_time: float


def windowed_tokens(window: int, chunk: int) -> int:
    """Maximum tokens of a prompt, prefilled by ``chunk``, that a layer with a ``window`` keeps."""
    return window + CUT_BACK_TOKENS + chunk + _NOT_YET_DROPPED


def beam_memory(
    width: int, prompt_tokens: int, new_tokens: int, key_value_bytes_per_token: int, state_bytes: int = 0
) -> int:
    """Bytes of keys, values and ``state_bytes`` per row, while ``width`` beams grow to ``new_tokens`` each.

    Beams have rows of their own. The prompt's row stays beside them, so that the next question can start from it. At
    the end the winner's row is copied and replaces the prompt's row.
    """
    rows = 1 if width == 1 else width + 1
    return rows * ((prompt_tokens + new_tokens) * key_value_bytes_per_token + state_bytes)


def extra_beam_memory(
    width: int,
    prompt_tokens: int,
    new_tokens: int,
    key_value_bytes_per_token: int,
    cached_tokens: int,
    state_bytes: int = 0,
) -> int:
    """Additional bytes that the beams need if ``cached_tokens`` of the prompt are in the cache already."""
    whole = beam_memory(width, prompt_tokens, new_tokens, key_value_bytes_per_token, state_bytes)
    return max(0, whole - cached_tokens * key_value_bytes_per_token - (state_bytes if cached_tokens else 0))


def longest_answer(
    width: int,
    prompt_tokens: int,
    available_bytes: int,
    key_value_bytes_per_token: int,
    cached_tokens: int,
    state_bytes: int = 0,
) -> int:
    """The largest number of new tokens per beam for which :func:`extra_beam_memory` is within ``available_bytes``.

    -1 if not even the prompt's copies fit.
    """
    rows = 1 if width == 1 else width + 1
    available_bytes -= state_bytes * (rows - (1 if cached_tokens else 0))
    if available_bytes < 0:
        return -1
    if key_value_bytes_per_token <= 0:
        return 2**62
    tokens = available_bytes // key_value_bytes_per_token + cached_tokens
    return max(-1, tokens // rows - prompt_tokens)


def expected_distinct_experts(experts: int, per_token: int, rows: int) -> float:
    """Expected number of ``experts`` that ``rows`` tokens use, if each uses ``per_token`` different experts."""
    if experts == 0:
        return 0.0
    share = min(per_token, experts) / experts
    return experts * (1.0 - (1.0 - share) ** rows)


def step_bytes(model: ModelSizes, width: int, context_tokens: int) -> float:
    """Bytes read in one step of ``width`` beams, each with ``context_tokens`` tokens in the cache."""
    per_expert = model.expert_bytes / model.slabs if model.slabs else 0.0
    distinct = expected_distinct_experts(model.experts, model.experts_per_token, width)
    return model.trunk_bytes + model.moe_layers * distinct * per_expert + width * model.cache_bytes(context_tokens)


def estimate_beams(
    model: ModelSizes, widths: Iterable[int], context_tokens: int, cached_tokens: int, available_bytes: int
) -> list[BeamCost]:
    """The cost of each width for beams of ``context_tokens`` tokens, the conversation's included, of which
    ``cached_tokens`` are in memory now."""
    one_beam = step_bytes(model, 1, context_tokens)
    per_token, state = model.key_value_bytes_per_token, model.state_bytes - model.dropped_bytes(context_tokens)
    estimates = []
    for width in widths:
        extra = extra_beam_memory(width, context_tokens, 0, per_token, cached_tokens, state)
        estimates.append(
            BeamCost(
                width=width,
                memory_bytes=beam_memory(width, context_tokens, 0, per_token, state),
                fits=extra <= available_bytes,
                relative_step_time=step_bytes(model, width, context_tokens) / one_beam if one_beam else 1.0,
            )
        )
    return estimates
