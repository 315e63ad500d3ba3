"""The sizes of a model, from its files' headers and its ``config.json``, without reading weights or using torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine.models.architectures.config_values import whole_number
from engine.models.architectures.families import (
    FAMILIES,
    check_supported,
    completed,
    expert_shape,
    key_layers,
    layer_config,
    layer_count,
    layer_kinds,
    stated_experts_per_token,
)
from engine.models.architectures.layer_rules import NETWORKS
from engine.models.architectures.record import CompressedKeys
from engine.models.folders.weight_layout import WeightLayout
from engine.models.formats.gguf_names import tag_of
from engine.models.formats.model_files import ModelFiles, whole_bytes, whole_weights
from engine.models.formats.number_formats import BLOCKS, in_mlx, is_packed, stored_bytes
from engine.planning.memory import ModelSizes, TrunkSize

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SHARED = frozenset(("shared_expert", "shared_experts", "shared_expert_gate", "shared_mlp"))
"""Parts of the names of shared experts, which a ring computes during the exchange."""
WITHOUT_KEYS = frozenset(("linear_attention", "conv", *NETWORKS))
"""Types of layers that keep no keys and values, and perhaps a state of fixed size."""
_WINDOWED = frozenset(("sliding_attention", "chunked_attention"))
"""Types of layers that see a window, or a chunk."""
_TAKEN_APART_IN_MLX = ".kv_b_proj.weight"
"""End of the names of tensors that mlx-lm takes apart, so that mlx has them unpacked whatever their format."""
STATE_COLUMNS = 32
"""Columns of a delta-net's state that lie together in the native runtime (PLLM_STATE_COLUMNS)."""
_FEW = 2
"""Default experts per token if ``config.json`` gives none, as in the commonest family."""


@dataclass(frozen=True)
class _Trunk:
    """The trunk: its most common dtype, its bytes as stored, and its numbers (None: unknown)."""

    stored: str
    nbytes: TrunkSize
    numbers: TrunkSize | None
    packed: TrunkSize
    """Bytes of packed matrices."""
    plain: TrunkSize
    """Number of values in the matrices that are not packed."""
    mlx_codes: TrunkSize | None
    """Bytes of codes in mlx; None if no matrix is packed in blocks."""
    mlx_plain: TrunkSize
    """Numbers that mlx has beside them, scales and biases included."""
    copied: int = 0
    """Bytes of the trunk that the native runtime copies."""


class _Stored(Protocol):
    """A tensor as described in a file's header."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class _Routed:
    """The routed experts: the layers that have them, experts per layer, bytes of all, the format of most, the number of
    their weights, 0 if that is unknown, the bytes of the largest, 0 if all are alike, and what they take in mlx (see
    :func:`engine.models.formats.number_formats.in_mlx`)."""

    layers: tuple[int, ...]
    count: int
    nbytes: int
    dtype: str
    weights: int = 0
    largest: int = 0
    mlx_codes: int = 0
    mlx_plain: int = 0


def sizes_of(files: ModelFiles, dtype: str = "auto") -> ModelSizes:
    """Raises ModelError if ``config.json`` does not give a size, naming it."""
    experts = files.experts
    routed = None
    if experts is not None:
        parts = [
            in_mlx(matrix.format, math.prod(matrix.shape) * experts.count)
            for layer in experts.layers
            for matrix in experts.place(layer, 0).own
        ]
        routed = _Routed(
            layers=tuple(experts.layers),
            count=experts.count,
            nbytes=whole_bytes(experts),
            dtype=experts.dtype,
            weights=whole_weights(experts),
            largest=max((experts.place(layer, 0).weight_bytes for layer in experts.layers), default=0),
            mlx_codes=sum(codes for codes, _ in parts),
            mlx_plain=sum(plain for _, plain in parts),
        )
    sizes = _sizes(files.config, _trunk(files.trunk(), files.config), routed, dtype)
    return replace(sizes, table_bytes=sum(tensor.nbytes for _, tensor in files.tables()))


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raises ModelError if ``config.json`` does not give a size that :func:`sizes_of` needs, naming it."""
    _sizes(config, _trunk((), config), None, "auto")


def sizes_in_library(layout: WeightLayout, dtype: str = "auto") -> ModelSizes:
    """The sizes of a folder that mlx-lm wrote. Quantised weights stay as stored.

    Raises ModelError.
    """
    entries = [(name, entry) for piece in layout.trunk for name, _, entry in piece]
    trunk = _trunk(entries, layout.config)
    # Norms are never quantised: the library computes in their dtype.
    norm = next((entry.dtype for name, entry in entries if name.endswith("norm.weight")), "BF16")
    nbytes = layout.expert_bytes * len(layout.experts)
    routed = _Routed(tuple(layout.layers), layout.count, nbytes, norm) if layout.experts else None
    if trunk.stored not in _WIDTHS:
        dtype = _NAMES.get(norm, norm)
        return _sizes(layout.config, replace(trunk, stored=dtype, numbers=None), routed, dtype)
    return _sizes(layout.config, trunk, routed, dtype)


def _sizes(whole: Mapping[str, Any], trunk: _Trunk, experts: _Routed | None, dtype: str) -> ModelSizes:
    family = check_supported(whole)
    config = completed(whole)
    stored = trunk.stored if experts is None else _NAMES.get(experts.dtype, experts.dtype)
    chosen = dtype
    if dtype == "auto":
        chosen = stored if stored in _WIDTHS else "bfloat16"
    shape = expert_shape(whole, family)
    # Whoever runs it converts a plain trunk; packed weights and experts are read as they are.
    scale = 1.0 if is_packed(trunk.stored) else _WIDTHS.get(chosen, 2) / _WIDTHS.get(trunk.stored, 2)
    hidden = whole_number(config, "hidden_size", "d_model")
    numbers, head = key_value_numbers(config), _head_width(config)
    choosing = _choosing_numbers(config)
    fits = head > 0 and not any(count % BLOCKS["Q8_0"][0] for count in (head, numbers - choosing))
    packed = tuple(
        (name, stored_bytes(name.upper(), (numbers - choosing,)) + 2 * choosing) for name in ("q8_0", "q4_0") if fits
    )
    return ModelSizes(
        family=family.model_type,
        dtype=chosen,
        stored=stored,
        layers=layer_count(whole, family),
        moe_layers=0 if experts is None else len(experts.layers),
        expert_layers=() if experts is None else experts.layers,
        experts=0 if experts is None else experts.count,
        experts_per_token=0 if experts is None else experts_per_token(config),
        hidden=hidden,
        ffn=shape.ffn if shape is not None else whole_number(config, "intermediate_size", default=4 * hidden),
        vocabulary=whole_number(config, "vocab_size"),
        context_limit=whole_number(config, "max_position_embeddings", "max_seq_len", default=4096),
        trunk_bytes=round(trunk.nbytes.total * scale),
        embedding_bytes=round(trunk.nbytes.embedding * scale),
        shared_bytes=round(trunk.nbytes.shared * scale),
        expert_bytes=0 if experts is None else experts.nbytes,
        expert_weights=_expert_weights(experts, hidden, 0 if shape is None else shape.ffn),
        key_value_bytes_per_token=numbers * _WIDTHS.get(chosen, 2),
        state_bytes=state_bytes(config),
        padded_state_bytes=state_bytes(config, STATE_COLUMNS),
        windowed_bytes_per_token=windowed_numbers(config) * _WIDTHS.get(chosen, 2),
        window=_window(config),
        key_value_bytes_packed=packed,
        experts_are_packed=experts is not None and is_packed(experts.dtype),
        largest_expert_bytes=0 if experts is None else experts.largest,
        trunk_stored=trunk.nbytes,
        trunk_numbers=trunk.numbers,
        trunk_packed=trunk.packed,
        trunk_plain=trunk.plain,
        native_copies=trunk.copied,
        mlx_codes=trunk.mlx_codes,
        mlx_plain=trunk.mlx_plain,
        mlx_expert_codes=0 if experts is None else experts.mlx_codes,
        mlx_expert_plain=0 if experts is None else experts.mlx_plain,
    )


def _expert_weights(experts: _Routed | None, hidden: int, ffn: int) -> int:
    if experts is None:
        return 0
    return experts.weights or 3 * hidden * ffn * experts.count * len(experts.layers)


def experts_per_token(config: Mapping[str, Any]) -> int:
    """The number of experts per token, from whichever setting the family uses."""
    return stated_experts_per_token(config) or _FEW


def _head_width(config: Mapping[str, Any]) -> int:
    """Numbers of a head's key. Latent attention has one head, whose keys are values, too."""
    if config.get("kv_lora_rank"):
        return whole_number(config, "kv_lora_rank") + whole_number(config, "qk_rope_head_dim", minimum=0)
    heads = whole_number(config, "num_attention_heads", "n_heads")
    return int(config.get("head_dim") or whole_number(config, "hidden_size", "d_model") // heads)


def key_value_numbers(config: Mapping[str, Any]) -> int:
    """Numbers that one token adds to the cache: keys and values of every layer that keeps them.

    Latent attention (deepseek) caches the latents and the rotated part; recurrent layers keep a state of fixed size.
    """
    if config.get("kv_lora_rank"):
        layers = sum(kind not in WITHOUT_KEYS for kind in layer_kinds(config))
        return layers * _head_width(config) + _index_width(config) * len(_with_indexers(config))
    compressed = _compressed(config)
    if compressed:
        return sum(keys.numbers for keys in compressed)
    kinds = _kinds_with_keys(config)
    return sum(_width(layer_config(config, layer, kind)) for layer, kind in kinds if kind not in WITHOUT_KEYS)


def _compressed(config: Mapping[str, Any]) -> list[CompressedKeys]:
    """The compressed keys of each layer; empty where keys are those of tokens."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or family.decoder.compressed is None:
        return []
    return family.decoder.compressed(completed(config), layer_count(config, family))


def _with_indexers(config: Mapping[str, Any]) -> list[int]:
    """The layers with attention over latents that have an indexer."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not family.decoder.index_width:
        return []
    return family.decoder.index_layers(completed(config), layer_count(config, family))


def _choosing_numbers(config: Mapping[str, Any]) -> int:
    """Part of :func:`key_value_numbers` by which blocks of tokens are chosen."""
    if config.get("kv_lora_rank"):
        family = FAMILIES.get(str(config.get("model_type")))
        blocks = family is not None and family.decoder.blocks is not None
        return _index_width(config) * len(_with_indexers(config)) if blocks else 0
    kinds = (kind for _, kind in _kinds_with_keys(config) if kind not in WITHOUT_KEYS)
    return _index_width(config) * sum(1 for _ in kinds)


def windowed_numbers(config: Mapping[str, Any]) -> int:
    """Part of :func:`key_value_numbers` in layers with a window or a chunk, by ``layer_types``."""
    kinds = _kinds_with_keys(config) if _window(config) and not _compressed(config) else ()
    return sum(_width(layer_config(config, layer, kind)) for layer, kind in kinds if kind in _WINDOWED)


def _kinds_with_keys(config: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Number and kind of the layers that do not attend to another one's keys."""
    kinds, sources = layer_kinds(config), key_layers(config)
    return [(layer, kind) for layer, kind in enumerate(kinds) if sources[layer] == layer]


def _window(config: Mapping[str, Any]) -> int:
    """Tokens that a layer with a window or a chunk sees, at most; 0 if ``config`` does not say."""
    family = FAMILIES.get(str(config.get("model_type")))
    window = config.get("attention_chunk_size" if family and family.decoder.chunked else "sliding_window")
    return window if isinstance(window, int) and window > 0 else 0


def _width(config: Mapping[str, Any]) -> int:
    """Numbers of a token's keys and values in a layer, and of the key by which blocks are chosen."""
    family = FAMILIES.get(str(config.get("model_type")))
    heads = whole_number(config, "num_attention_heads", "n_heads")
    inner = config.get("attn_config")
    grouped = config.get("num_key_value_heads") or (inner.get("kv_n_heads") if isinstance(inner, Mapping) else None)
    width = config.get("head_dim") or whole_number(config, "hidden_size", "d_model") // heads
    of_values = whole_number(config, family.decoder.value_width) if family and family.decoder.value_width else width
    return int(grouped or heads) * (int(width) + int(of_values)) + _index_width(config)


def _index_width(config: Mapping[str, Any]) -> int:
    """Numbers of a token by which tokens or blocks of them are chosen; 0 without any."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not family.decoder.index_width:
        return 0
    return whole_number(config, family.decoder.index_width) * family.decoder.index_vectors


def state_bytes(config: Mapping[str, Any], columns: int = 1) -> int:
    """Bytes of the states that layers keep for a row, in float32: delta-nets and Mamba-2 layers one of each head, and,
    as short convolutions do, the last inputs of their convolution, layers with compressed keys those of the window. 0
    for a model with none of them. ``columns``: the
    columns of a head's state take memory for a multiple of so many, as in the native runtime, which keeps no input of
    the latest token."""
    family = FAMILIES.get(str(config.get("model_type")))
    mixer = "none" if family is None else family.decoder.mixer
    config = completed(config)
    if mixer == "convolution":
        taps = whole_number(config, "conv_L_cache") - (columns > 1)
        return 4 * layer_kinds(config).count("conv") * taps * whole_number(config, "hidden_size")
    if family is not None and family.decoder.mamba is not None:
        mamba, layers = family.decoder.mamba(config), layer_kinds(config).count("linear_attention")
        width, taps = -(-mamba.width // columns) * columns, mamba.taps - (columns > 1)
        return 4 * layers * (mamba.heads * width * mamba.states + taps * mamba.channels)
    if compressed := _compressed(config):
        return 4 * sum(_window(config) * keys.width + keys.waiting for keys in compressed)
    if family is None or mixer != "delta-net":
        return 0
    delta, layers = family.decoder.delta(config), layer_kinds(config).count("linear_attention")
    padded = delta.value_heads * -(-delta.value_width // columns) * columns
    nets = 4 * layers * (padded * delta.key_width + (delta.taps - 1) * delta.channels)
    lexical = family.decoder.lexical(config)
    if lexical is None:
        return nets
    # The native runtime keeps the last tokens once, transformers for each layer and in 64 bits.
    tokens = lexical.tokens - 1 if columns > 1 else 2 * len(lexical.layers) * (lexical.tokens - 1)
    return nets + 4 * (len(lexical.layers) * lexical.kept * lexical.channels + tokens)


def native_copies(tensors: Iterable[tuple[str, _Stored]]) -> int:
    """Bytes of the copies that the native runtime makes because rows are stored in another order than it reads them:
    of latents' projections in one tensor, and of delta-nets' projections by key head."""
    nbytes = 0
    for name, tensor in tensors:
        if name.endswith(".kv_b_proj.weight"):
            nbytes += math.prod(tensor.shape) * (2 if tensor.dtype == "BF16" else 4)
        elif name.endswith((".in_proj_qkvz.weight", ".in_proj_ba.weight")):
            nbytes += tensor.nbytes
    return nbytes


def is_plain_in_mlx(name: str, number_format: str) -> bool:
    """Whether a tensor of the trunk is unpacked though mlx's kernels may take its format: mlx-lm takes it apart, or it
    is an embedding in MXFP4, whose rows mlx unpacks to bfloat16 whatever it computes with."""
    return name.endswith(_TAKEN_APART_IN_MLX) or (number_format == "MXFP4" and name.endswith("embed_tokens.weight"))


def _trunk(tensors: Iterable[tuple[str, _Stored]], config: Mapping[str, Any]) -> _Trunk:
    by_dtype: dict[str, int] = {}
    tensors = list(tensors)
    copied = native_copies(tensors)
    nbytes, numbers, packed, plain, mlx_codes, mlx_plain = (_TrunkCount() for _ in range(6))
    for name, tensor in tensors:
        by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.nbytes
        nbytes.add(name, tensor.nbytes)
        numbers.add(name, math.prod(tensor.shape))
        # Of more dimensions are the heads' matrices of latent attention, which are always unpacked.
        kept = is_packed(tensor.dtype) and len(tensor.shape) == 2
        packed.add(name, tensor.nbytes if kept else 0)
        plain.add(name, 0 if kept else math.prod(tensor.shape))
        plain_in_mlx = is_plain_in_mlx(name, tensor.dtype)
        in_memory = in_mlx("F32" if plain_in_mlx else tensor.dtype, math.prod(tensor.shape))
        mlx_codes.add(name, in_memory[0])
        mlx_plain.add(name, in_memory[1])
    dtype = max(by_dtype, key=lambda stored: by_dtype[stored], default="BF16")
    tied = bool(config.get("tie_word_embeddings", False))
    stored = _NAMES.get(dtype, dtype)
    return _Trunk(
        stored,
        nbytes.size(tied),
        numbers.size(tied),
        packed.size(tied),
        plain.size(tied),
        None if by_dtype.keys().isdisjoint(BLOCKS) else mlx_codes.size(tied),
        mlx_plain.size(tied),
        copied,
    )


class _TrunkCount:
    """A :class:`TrunkSize` while its tensors are counted."""

    def __init__(self) -> None:
        self._total = self._embedding = self._read_by_row = self._shared = 0
        self._has_head = False

    def add(self, name: str, count: int) -> None:
        self._total += count
        self._has_head = self._has_head or name.endswith("lm_head.weight")
        if name.rpartition(".")[0].endswith(("embed_tokens", "wte", "model.embeddings")):
            self._embedding += count
        elif name.rpartition(".")[0].endswith("embed_tokens_per_layer"):
            self._read_by_row += count
        elif not _SHARED.isdisjoint(name.split(".")):
            self._shared += count

    def size(self, tied: bool) -> TrunkSize:
        if tied and self._has_head:  # stored twice, kept once
            return TrunkSize(self._total - self._embedding, self._read_by_row, self._shared)
        embedding = self._embedding if self._has_head else 0
        return TrunkSize(self._total, embedding + self._read_by_row, self._shared)


# --- the number format in one word -----------------------------------------------------------------------------------


_WORDS = {
    "BF16": "bf16", "F16": "f16", "F32": "f32", "F64": "f64", "F8_E4M3": "FP8", "F8_E5M2": "FP8",
    "AFFINE2": "2-bit", "AFFINE3": "3-bit", "AFFINE4": "4-bit", "AFFINE5": "5-bit", "AFFINE6": "6-bit",
    "AFFINE8": "8-bit", "OCP_MXFP4": "MXFP4", "GROUPED_NVFP4": "NVFP4",
}  # fmt: skip


def weights_name(files: ModelFiles) -> str:
    """The format that most bytes of the experts have, of a dense model those of all weights.

    Of a GGUF file it is the file's own name for its mixture if its name has one.
    """
    counts = _bytes_by_format(files)
    if not counts:
        return ""
    most = counts.most_common(1)[0][0]
    if most in BLOCKS:
        return _mixture(files, most)
    return _WORDS.get(most, most)


def _bytes_by_format(files: ModelFiles) -> Counter[str]:
    counts: Counter[str] = Counter()
    experts = files.experts
    if experts is None:
        for _, tensor in files.trunk():
            counts[tensor.dtype] += tensor.words.nbytes
        return counts
    for layer in experts.layers:
        for held in experts.held(layer)[:1]:
            for matrix in experts.place(layer, held).own:
                counts[matrix.format] += matrix.nbytes
    return counts


def _mixture(files: ModelFiles, most: str) -> str:
    """The tag in the name of one of the GGUF files, if it is of the kind of ``most``; otherwise ``most``."""
    for path in sorted(files.folder.glob("*.gguf")):
        tag = tag_of(path.name)
        if tag.removeprefix("UD-").startswith(most):
            return tag
    return most
