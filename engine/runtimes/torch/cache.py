"""The KV cache: transformers' cache interface on buffers that grow in blocks and can be cut back at no cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from transformers.cache_utils import Cache, DynamicLayer, get_layer_types_and_kwargs
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from engine.models.architectures.families import FAMILIES
from engine.models.architectures.record import Family
from engine.models.folders.sizes import WITHOUT_KEYS
from engine.runtimes.protocol import Bytes, Fill, RowArray, RowPart

BLOCK = 128
"""Minimum number of positions by which a buffer grows."""


class Position:
    """The number of tokens per row in the cache, shared by all layers.

    It changes only after a complete forward pass, so a failed pass has no effect.
    """

    def __init__(self, length: int = 0) -> None:
        self.length = length


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer in buffers [rows, heads, capacity, width]; the first ``position.length`` count.

    A layer with a sliding window keeps all positions, so that cutting back stays correct at any length, but shows
    attention only those the window can reach.
    """

    def __init__(self, position: Position, window: int | None = None) -> None:
        super().__init__()
        self.position = position
        self.window = window
        self.is_sliding = window is not None
        self.key_buffer: torch.Tensor | None = None
        self.value_buffer: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [rows, heads, tokens, width]; returns the keys and values in reach, as views."""
        start = self.position.length
        end = start + key_states.shape[2]
        keys = self.key_buffer = _with_room(self.key_buffer, key_states, start, end)
        values = self.value_buffer = _with_room(self.value_buffer, value_states, start, end)
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        first = self._first_in_reach()
        return keys[:, :, first:end], values[:, :, first:end]

    def _first_in_reach(self) -> int:
        """The first position to which the next token can attend."""
        return 0 if self.window is None else max(0, self.position.length - self.window + 1)

    def get_seq_length(self) -> int:
        return self.position.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first_in_reach()
        return self.position.length + query_length - first, first

    def buffers(self) -> dict[str, torch.Tensor]:
        """What there is of the buffers, by the kinds of their contents."""
        found = {kind: getattr(self, attribute) for kind, attribute in _BUFFERS.items() if hasattr(self, attribute)}
        return {kind: buffer for kind, buffer in found.items() if buffer is not None}

    def rows_copied(self, position: Position, rows: int) -> Self:
        """A new layer of ``rows`` rows, each a copy of this one's only row."""
        copy = type(self)(position, self.window)
        for kind, buffer in self.buffers().items():
            setattr(copy, _BUFFERS[kind], _repeated(buffer, rows, position.length))
        return copy

    def move(self, rows: torch.Tensor, parents: torch.Tensor, start: int) -> int:
        """Copy the contents from position ``start`` on of each row ``parents[i]`` to row ``rows[i]``. Returns the bytes
        moved."""
        moved = 0
        for buffer in self.buffers().values():
            part = buffer[:, :, start : self.position.length]
            taken = part.index_select(0, parents)
            part.index_copy_(0, rows, taken)
            moved += taken.nbytes
        return moved

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers().values())


_BUFFERS = {"keys": "key_buffer", "values": "value_buffer", "index": "index_buffer"}
"""Attributes of a layer's buffers by the kinds of their contents."""


class IndexedLayer(GrowingLayer):
    """A layer that chooses tokens, or blocks of them, by a further key of each token, [rows, 1, capacity, width].

    transformers asks the first of them for the positions of the tokens so far, which are their places in the row.
    """

    def __init__(self, position: Position, window: int | None = None) -> None:
        super().__init__(position, window)
        self.index_buffer: torch.Tensor | None = None
        self._placed: torch.Tensor | None = None

    def update_indexer(self, keys: torch.Tensor) -> torch.Tensor:
        """Append ``keys`` [rows, tokens, width]; returns those of all tokens, as a view."""
        start = self.position.length
        end = start + keys.shape[1]
        buffer = self.index_buffer = _with_room(self.index_buffer, keys[:, None], start, end)
        buffer[:, 0, start:end] = keys
        return buffer[:, 0, :end]

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions [3, rows, tokens]; None before the first token."""
        buffer = self.index_buffer
        if buffer is None or not self.position.length:
            return None
        return torch.arange(self.position.length, device=buffer.device).expand(3, buffer.shape[0], -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        """Nothing is kept: transformers sets the positions that it got, and those of the pass, before the pass has
        succeeded."""


class PooledLayer(IndexedLayer):
    """A layer whose indexer asks after the pass's keys are in it how many positions there are (glm5_next)."""

    def update_indexer(self, keys: torch.Tensor) -> torch.Tensor:
        """Append ``keys``, whose last number says whether the token is one of the text: all are, and it is not kept."""
        found = super().update_indexer(keys[..., :-1])
        return torch.cat([found, found.new_ones((*found.shape[:-1], 1))], dim=-1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().update(key_states, value_states)
        self.keys = found[0]
        return found

    def get_seq_length(self) -> int:
        return self.position.length if self.keys is None else int(self.keys.shape[2])


def _with_room(buffer: torch.Tensor | None, states: torch.Tensor, length: int, needed: int) -> torch.Tensor:
    """``buffer`` if ``needed`` positions fit, else a larger one with its first ``length`` positions."""
    if buffer is not None and needed <= buffer.shape[2]:
        return buffer
    rows, heads, _, width = states.shape
    grown = states.new_empty((rows, heads, room_for(needed), width))
    if buffer is not None:
        grown[:, :, :length] = buffer[:, :, :length]
    return grown


def _repeated(buffer: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    _, heads, _, width = buffer.shape
    repeated = buffer.new_empty((rows, heads, room_for(length), width))
    repeated[:, :, :length] = buffer[:, :, :length]
    return repeated


def room_for(needed: int) -> int:
    """Positions of a buffer for ``needed`` ones: a tenth more, in whole blocks.

    A growing buffer then copies each position about ten times, whatever its length.
    """
    return -(-(needed + needed // 10) // BLOCK) * BLOCK


class KeyValueCache(Cache):  # type: ignore[misc]
    """The cache of every family without recurrent state."""

    can_truncate = True

    def __init__(self, layers: list[GrowingLayer], position: Position) -> None:
        super().__init__(layers=layers)
        self.position = position

    def commit(self, tokens: int) -> None:
        """Record a successful forward pass over ``tokens`` positions."""
        self.position.length += tokens

    def rows_copied(self, rows: int) -> KeyValueCache:
        """A new cache of ``rows`` rows, each a copy of the only row."""
        position = Position(self.position.length)
        return KeyValueCache([layer.rows_copied(position, rows) for layer in self.layers], position)

    def move(self, rows: torch.Tensor, parents: torch.Tensor, start: int) -> int:
        """See :meth:`GrowingLayer.move`; for all layers."""
        return sum(layer.move(rows, parents, start) for layer in self.layers)


class _States:
    """The states of layers that keep one of fixed size instead of keys and values, [rows, ...] each.

    A state cannot be taken back, so such a cache cannot be cut back. New states count only after the pass has
    succeeded.
    """

    can_truncate = False
    layers: list[GrowingLayer]

    def __init__(self, layers: list[GrowingLayer], position: Position) -> None:
        self.layers = layers
        self.states: dict[tuple[int, str], torch.Tensor] = {}
        self.pending: dict[tuple[int, str], torch.Tensor] = {}
        self.position = position

    def commit(self, tokens: int) -> None:
        """Record a successful forward pass over ``tokens`` positions."""
        self.position.length += tokens
        self.states |= self.pending
        self.pending = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.position.length

    def rows_copied(self, rows: int) -> Self:
        """A new cache of ``rows`` rows, each a copy of the only row."""
        position = Position(self.position.length)
        copy = type(self)([layer.rows_copied(position, rows) for layer in self.layers], position)
        copy.states = {key: state.repeat_interleave(rows, 0) for key, state in self.states.items()}
        return copy

    def move(self, rows: torch.Tensor, parents: torch.Tensor, start: int) -> int:
        """See :meth:`GrowingLayer.move`. A state moves as a whole."""
        moved = sum(layer.move(rows, parents, start) for layer in self.layers)
        for state in self.states.values():
            taken = state.index_select(0, parents)
            state.index_copy_(0, rows, taken)
            moved += taken.nbytes
        return moved


class LightningCache(_States, MiniMaxCache):  # type: ignore[misc]
    """The cache of minimax, some of whose layers keep one state [rows, heads, width, width]."""

    def __init__(self, layers: list[GrowingLayer], position: Position) -> None:
        MiniMaxCache.__init__(self)
        self.layer_class_to_replicate = None
        _States.__init__(self, layers, position)

    def __len__(self) -> int:
        return len(self.layers)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.states.get((layer_idx, "linear"))

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.pending[layer_idx, "linear"] = linear_cache


_CONVOLVED = ("convolution", "lexical", "tokens")
"""Kinds of the states that transformers numbers: the last inputs of a layer's convolution, those of the one of its
embeddings of n-grams, and the last tokens of the text (qwen4_exp)."""


class ConvolutionCache(_States, Cache):  # type: ignore[misc]
    """The cache of families whose convolving layers keep their last inputs [rows, channels, kernel].

    Gated delta-nets (qwen3_5, qwen3_next) keep a state [rows, heads, key width, value width] besides, Mamba-2 layers
    (granitemoehybrid) one [rows, heads, width, states], short convolutions (lfm2_moe) none.
    """

    def __init__(self, layers: list[GrowingLayer], position: Position) -> None:
        Cache.__init__(self, layers=layers)
        _States.__init__(self, layers, position)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        key = layer_idx, _CONVOLVED[state_idx]
        state = self.states.get(key)
        if state is None:
            return None
        # A step writes into what it gets.
        changed = self.pending[key] = state.clone()
        return changed

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get((layer_idx, "recurrent"))

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return bool(self.states)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **options: Any
    ) -> torch.Tensor:
        """Append ``conv_states`` [rows, channels, tokens] to the earlier ones, and keep the last
        ``conv_kernel_size``."""
        key = layer_idx, _CONVOLVED[state_idx]
        before = self.states.get(key)
        whole = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        missing = max(0, conv_kernel_size - whole.shape[-1])
        whole = torch.nn.functional.pad(whole, (missing, 0))
        kept = whole[..., -conv_kernel_size:]
        # In this order, as torch's convolution of other strides is hundreds of times slower.
        self.pending[key] = kept.clone(memory_format=torch.contiguous_format)
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> torch.Tensor:
        self.pending[layer_idx, "recurrent"] = recurrent_states
        return recurrent_states


_COMPRESSED = ("window", *(f"{name} {part}" for name in ("compressor", "indexer") for part in (
    "waiting keys", "waiting gates", "keys", "keys before", "gates before"
)))  # fmt: skip
"""Kinds of the states of layers with compressed keys (deepseek_v4), for attention and for the choice of what it sees:
the keys of tokens in the window; tokens whose compressed key is not whole; compressed keys; and of the last whole one
those of its tokens that count in the next one."""


class CompressedLayer(GrowingLayer):
    """A layer whose attention sees the keys of a window, which are the values, too, and compressed keys, each of
    ``rate`` tokens. What it keeps is in the states of its cache. transformers computes, and asks for what was kept."""

    def __init__(self, position: Position, window: int, rate: int) -> None:
        super().__init__(position, window)
        self.rate = rate
        self.states: dict[tuple[int, str], torch.Tensor] = {}
        self.pending: dict[tuple[int, str], torch.Tensor] = {}
        self.index = 0

    def rows_copied(self, position: Position, rows: int) -> CompressedLayer:
        assert self.window is not None
        return CompressedLayer(position, self.window, self.rate)

    def _swapped(self, kind: str, state: torch.Tensor) -> torch.Tensor | None:
        """What was kept as ``kind``. ``state`` is kept in its place once the pass has succeeded."""
        self.pending[self.index, kind] = state
        return self.states.get((self.index, kind))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [rows, 1, tokens, width]; returns the keys in reach, twice."""
        assert self.window is not None
        # A pass that failed may have left what this one does not replace.
        for kind in _COMPRESSED:
            self.pending.pop((self.index, kind), None)
        before = self.states.get((self.index, "window"))
        keys = key_states if before is None else torch.cat([before, key_states], dim=2)
        self.pending[self.index, "window"] = keys[:, :, max(0, keys.shape[2] - self.window + 1) :].clone()
        return keys, keys

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Append keys and gates [rows, tokens, width]; returns those of whole groups of tokens, and the position of the
        first of them."""
        waiting = self.position.length % self.rate
        whole = []
        for kind, new in (("keys", kv), ("gates", gate)):
            before = self.states.get((self.index, f"{name} waiting {kind}"))
            every = new if before is None else torch.cat([before[:, self.rate - waiting :], new], dim=1)
            usable = every.shape[1] // self.rate * self.rate
            left = every[:, usable:]
            # Padded, so that there is something to keep after a whole group.
            padding = left.new_zeros((left.shape[0], self.rate - left.shape[1], left.shape[2]))
            self.pending[self.index, f"{name} waiting {kind}"] = torch.cat([padding, left], dim=1)
            whole.append(every[:, :usable])
        return whole[0], whole[1], self.position.length - waiting

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Append compressed keys [rows, keys, width]; returns all of them."""
        before = self.states.get((self.index, f"{name} keys"))
        every = compressed if before is None else torch.cat([before, compressed], dim=1)
        if compressed.shape[1]:
            self.pending[self.index, f"{name} keys"] = every
        return every

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What counts in the next key of the group before these [rows, groups, rate, 2 * ``head_dim``]; of the last one
        it is kept."""
        keys, gates = (chunk[:, -1, :, :head_dim].clone() for chunk in (chunk_kv, chunk_gate))
        return self._swapped(f"{name} keys before", keys), self._swapped(f"{name} gates before", gates)


class CompressedCache(_States, Cache):  # type: ignore[misc]
    """The cache of families whose layers are :class:`CompressedLayer`. Keys of tokens that have left the window are
    dropped, so that it cannot be cut back."""

    def __init__(self, layers: list[GrowingLayer], position: Position) -> None:
        Cache.__init__(self, layers=layers)
        _States.__init__(self, layers, position)
        self._share()

    def _share(self) -> None:
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, CompressedLayer)
            layer.index, layer.states, layer.pending = index, self.states, self.pending

    def commit(self, tokens: int) -> None:
        super().commit(tokens)
        self._share()

    def rows_copied(self, rows: int) -> CompressedCache:
        copy = super().rows_copied(rows)
        copy._share()
        return copy


class WritingCache(ConvolutionCache):
    """The cache of families whose layers write into a recurrent state that they get, as Mamba-2's do in a step, or may
    do so."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        state = super().get_recurrent_state(layer_idx, state_idx)
        if state is None:
            return None
        changed = self.pending[layer_idx, "recurrent"] = state.clone()
        return changed


def _layer_of(family: Family | None) -> type[GrowingLayer]:
    if family is None or not family.decoder.index_width:
        return GrowingLayer
    return PooledLayer if family.decoder.latents and family.decoder.blocks is not None else IndexedLayer


AnyCache = KeyValueCache | LightningCache | ConvolutionCache | CompressedCache


def empty_cache(config: Any) -> AnyCache:
    """The empty cache for a model of ``config``."""
    position = Position()
    family = FAMILIES.get(config.model_type)
    layer = _layer_of(family)
    if family is not None and family.decoder.compressed is not None:
        keys = family.decoder.compressed(config.to_dict(), config.num_hidden_layers)
        window = config.sliding_window
        return CompressedCache([CompressedLayer(position, window, each.rate) for each in keys], position)
    if family is not None and family.decoder.mixer == "lightning":
        return LightningCache([GrowingLayer(position) for _ in range(config.num_hidden_layers)], position)
    if not WITHOUT_KEYS.isdisjoint(getattr(config, "layer_types", None) or ()):
        delta_nets = family is not None and family.decoder.mixer == "delta-net"
        kind = ConvolutionCache if delta_nets else WritingCache
        return kind([layer(position) for _ in range(config.num_hidden_layers)], position)
    _, options = get_layer_types_and_kwargs(config)
    return KeyValueCache([layer(position, option.get("sliding_window")) for option in options], position)


# --- contents of a row as bytes --------------------------------------------------------------------------------------


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int64": torch.int64}


def contents_of(cache: AnyCache) -> list[RowArray]:
    """The filled positions of each buffer, and the states."""
    length = cache.position.length
    arrays = []
    for index, layer in enumerate(cache.layers):
        for kind, buffer in layer.buffers().items():
            arrays.append(RowArray.of(f"{index} {kind}", buffer[:, :, :length], _bytes_of))
    states: dict[tuple[int, str], torch.Tensor] = getattr(cache, "states", {})
    return arrays + [RowArray.of(f"{index} {kind}", state, _bytes_of) for (index, kind), state in states.items()]


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    with torch.inference_mode():
        here: Bytes = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return here


def fill_cache(cache: AnyCache, length: int, parts: Sequence[RowPart], fill: Fill, device: torch.device) -> None:
    """Fill the empty ``cache`` with ``length`` tokens of the contents ``parts``, whose bytes ``fill`` writes.

    Raises ValueError if ``parts`` are not those of such a cache, and what ``fill`` raises.
    """
    slots = [_slot(cache, part, length) for part in parts]
    if len(set(slots)) != len(slots) or not slots:
        raise ValueError("parts of a row are there twice, or none is there")
    if {kind for _, kind in slots} & {"keys", "values"} and not all(
        ((layer, "keys") in slots) == ((layer, "values") in slots) for layer, _ in slots
    ):
        raise ValueError("a layer has keys without values")
    with torch.inference_mode():
        for (layer, kind), part in zip(slots, parts, strict=True):
            content = torch.empty(part.shape, dtype=_DTYPES[part.numbers])
            fill(content.reshape(-1).view(torch.uint8).numpy())
            if kind not in _BUFFERS:
                assert not isinstance(cache, KeyValueCache)
                cache.states[layer, kind] = content.to(device)
                continue
            rows, heads, _, width = part.shape
            buffer = torch.empty((rows, heads, room_for(length), width), dtype=content.dtype, device=device)
            buffer[:, :, :length] = content
            setattr(cache.layers[layer], _BUFFERS[kind], buffer)
    cache.position.length = length


def _slot(cache: AnyCache, part: RowPart, length: int) -> tuple[int, str]:
    """The layer and the kind of ``part``. Raises ValueError if a cache of ``length`` tokens has no such part."""
    index, _, kind = part.name.partition(" ")
    kinds: tuple[str, ...] = tuple(_BUFFERS)
    if not cache.can_truncate:
        kinds += ("linear", "recurrent", *_CONVOLVED, *_COMPRESSED)
    known = index.isdecimal() and len(index) < 6 and int(index) < len(cache.layers) and kind in kinds
    shape: Any = part.shape
    if not known or part.numbers not in _DTYPES or not 2 <= len(shape) <= 4 or shape[0] != 1:
        raise ValueError(f"the model has no {part.name} of the shape {shape}")
    if kind in _BUFFERS and (len(shape) != 4 or shape[2] != length):
        raise ValueError(f"{part.name} of the shape {shape} are not those of {length} tokens")
    return int(index), kind
