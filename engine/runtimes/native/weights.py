"""A model's tensors in the form of the native trunk: addresses into the mapped files, checked against the shape."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError, damaged
from engine.models.architectures.ngrams import NgramHash
from engine.models.architectures.record import LATENTS, AltupSizes, BlockChoice, StreamSizes, renamed
from engine.models.formats.model_files import Change, Experts, ExpertWeights, ModelFiles, StoredTensor
from engine.models.formats.number_formats import fp8_side, is_packed
from engine.moe.kernels.bindings import FORMATS, KernelChoice, Matrix, load
from engine.moe.kernels.layers import Gate, LayerExperts, layer_experts, matrix
from engine.moe.popularity import Popularity
from engine.runtimes.native.bindings import (
    DELTA_KINDS,
    HEAD_NORMS,
    SCORINGS,
    Altup,
    Blocks,
    Convolution,
    Delta,
    Heads,
    Indexer,
    Latent,
    Lexical,
    Norms,
    OwnInput,
    Sparse,
    Streams,
    Trunk,
    TrunkLayer,
)
from engine.runtimes.native.shape import ConvolutionShape, DeltaShape, IndexShape, LatentShape, LexicalShape, Shape


def to_float32(tensor: StoredTensor) -> NDArray[np.float32]:
    """A float32 copy of a tensor in any format that the kernels read, for small tensors (norms, biases)."""
    if tensor.dtype == "F32":
        return np.array(tensor.words.view(np.float32))
    if tensor.dtype == "F16":
        return tensor.words.view(np.float16).astype(np.float32)
    if tensor.dtype == "BF16":
        return (tensor.words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    rows = StoredTensor(tensor.dtype, np.atleast_2d(tensor.words), tensor.scales, tensor.biases)
    described, native = matrix(rows), load()
    copy = np.empty(rows.shape, np.float32)
    for row in range(len(copy)):
        native.pllm_open_row(ctypes.addressof(described), row, copy[row].ctypes.data)
    return copy.reshape(tensor.shape)


def opened(tensor: StoredTensor) -> StoredTensor:
    """A float32 copy of a packed matrix that is small and has float32 inputs; any other tensor unchanged."""
    return StoredTensor("F32", to_float32(tensor).view(np.uint32)) if is_packed(tensor.dtype) else tensor


def heads_of(stacked: StoredTensor) -> list[StoredTensor]:
    """The matrices of a tensor [heads, rows, columns], in place."""
    parts = [part for part in (stacked.scales, stacked.biases) if part is not None]
    return [
        StoredTensor(stacked.dtype, words, *(StoredTensor(part.dtype, part.words[head]) for part in parts))
        for head, words in enumerate(stacked.words)
    ]


class Tensors:
    """The trunk's tensors by name. Each may be taken once, and none may be left over."""

    def __init__(self, files: ModelFiles, names: Mapping[str, str]) -> None:
        """``names``: parts of the usual names, and their replacements in these files."""
        self._left = dict(files.trunk())
        self._names = names
        self.kept: list[Any] = []
        """Objects to which the structures point."""

    def take(self, names: Sequence[str], shape: tuple[int, ...]) -> StoredTensor:
        """The tensor of the first of ``names`` that exists. Raises ModelError if none does, or its shape differs."""
        names = [self.named(name) for name in names]
        name = next((name for name in names if name in self._left), None)
        if name is None:
            raise damaged(f"Tensor {names[0]} is missing from the model's files")
        tensor = self._left.pop(name)
        if tensor.shape != shape:
            raise ModelError(
                f"Tensor {name} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}; "
                "the files do not belong together: fetch the model again."
            )
        self.kept.append(tensor)
        return tensor

    def named(self, name: str) -> str:
        """The name in these files of a tensor with the usual name ``name``."""
        return renamed(name, self._names)

    def has(self, name: str) -> bool:
        return self.named(name) in self._left

    def matrix(self, names: Sequence[str], rows: int, columns: int) -> Matrix:
        return matrix(self.take(names, (rows, columns)))

    def parts(self, name: str, rows: Sequence[int], columns: int) -> list[StoredTensor]:
        """The matrices of so many ``rows`` each that lie one below the other in a tensor, in place. Raises ModelError
        if a block of FP8 has rows of two of them."""
        whole = self.take([name], (sum(rows), columns))
        matrices, first = [], 0
        # Rows that share scales; 0: all of them do.
        step = 1
        if whole.dtype == "BLOCK_FP8" and whole.scales is not None:
            step = fp8_side(whole.shape, whole.scales.shape) or 0
        for count in rows:
            if step > 1 and first % step:
                raise ModelError(f"Tensor {self.named(name)} holds matrices that do not end with their blocks of FP8.")
            places = slice(first // step, -(-(first + count) // step)) if step else slice(None)
            beside = [part and StoredTensor(part.dtype, part.words[places]) for part in (whole.scales, whole.biases)]
            if whole.dtype == "GROUPED_NVFP4":
                beside[1] = whole.biases
            matrices.append(StoredTensor(whole.dtype, whole.words[first : first + count], *beside))
            first += count
        self.kept += matrices
        return matrices

    def exact(self, names: Sequence[str], rows: int, columns: int) -> Matrix:
        """The matrix of a router or gate, in float32 if it is stored packed."""
        tensor = opened(self.take(names, (rows, columns)))
        self.kept.append(tensor)
        return matrix(tensor)

    def each_head(self, stacked: StoredTensor) -> Any:
        """The matrices of a tensor [heads, rows, columns] as a C array. The tensor is kept alive."""
        self.kept.append(stacked)
        heads = heads_of(stacked)
        found = (Matrix * len(heads))(*map(matrix, heads))
        self.kept.append(found)
        return found

    def vector(self, name: str, count: int) -> int:
        """Address of a float32 copy of a vector."""
        return self.keep(to_float32(self.take([name], (count,))))

    def taps(self, names: Sequence[str], channels: Sequence[int], taps: int) -> int:
        """Address of a convolution's kernel [taps, all channels], a float32 copy of all tensors of these ``names``."""
        named = zip(names, channels, strict=True)
        kernels = [to_float32(self.take([name], (count, 1, taps)))[:, 0] for name, count in named]
        return self.keep(np.ascontiguousarray(np.concatenate(kernels).T))

    def keep(self, numbers: NDArray[np.float32]) -> int:
        """Address of ``numbers``, which are contiguous and kept alive."""
        self.kept.append(numbers)
        return int(numbers.ctypes.data)

    def check_all_taken(self, family: str) -> None:
        """Raises ModelError naming an unexpected tensor. Frequencies stored by old versions are ignored."""
        for name in self._left:
            if not name.endswith("rotary_emb.inv_freq"):
                raise ModelError(
                    f"Tensor {name} has no place in a {family} model as config.json describes it; "
                    "the files do not belong together: fetch the model again."
                )


def _plain(numbers: NDArray[np.float32], stored: str) -> StoredTensor:
    """``numbers`` that were ``stored`` in a number format: in bfloat16 if that was it, else in float32, without
    loss."""
    if stored == "BF16":
        return StoredTensor("BF16", (numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16))
    return StoredTensor("F32", numbers.view(np.uint32))


def _apart(stored: StoredTensor, sizes: Sequence[int], parts: Sequence[Sequence[int]]) -> list[StoredTensor]:
    """Copies of the rows of a matrix that consists, head by head, of pieces of ``sizes`` rows.

    Each of ``parts`` gets some of the pieces: the first one of all heads, then the next one of all heads.
    """
    places = np.arange(stored.shape[0]).reshape(-1, sum(sizes))
    pieces = [piece.reshape(-1) for piece in np.split(places, np.cumsum(sizes)[:-1], axis=1)]
    return [Change(rows=np.concatenate([pieces[i] for i in part])).in_rows(stored) for part in parts]


def _tiled(files: ModelFiles, delta: DeltaShape) -> bool:
    """Whether value heads are stored in llama.cpp's order: the first of every key head, then the second, and so on."""
    name = f"model.layers.{delta.layers[0]}.linear_attn.in_proj_qkv.weight" if delta.layers else ""
    return files.changes.get(name, Change()).rows is not None


class TrunkWeights:
    """The C structure of a whole trunk. Everything it points to is kept alive here."""

    def __init__(
        self,
        files: ModelFiles,
        shape: Shape,
        choice: KernelChoice,
        exact: KernelChoice,
        cache_dtype: str,
        popularity: Popularity | None,
        in_ring: bool = False,
        checking: bool = False,
    ) -> None:
        """``choice``: kernels of projections and experts. ``exact``: kernels that keep activations in float32.

        ``in_ring``: the routed experts are run elsewhere. ``checking``: only names and shapes are checked, and large
        matrices that would have to be copied are left out, so nothing can be run. Raises ModelError naming the first
        tensor that is missing, unexpected or of the wrong shape.
        """
        self._shape = shape
        self._choice = choice
        self._popularity = popularity
        self._in_ring = in_ring
        self._checking = checking
        self._changes = files.changes
        self._tensors = tensors = Tensors(files, shape.names)
        delta, latent, convolution, routing = shape.delta, shape.latent, shape.convolution, shape.routing
        streams = shape.streams or shape.altup
        self._deltas = (Delta * (0 if delta is None else len(delta.layers)))()
        self._experts: list[LayerExperts] = []
        self._layers = (TrunkLayer * shape.layers)()
        embedding = tensors.take(["model.embed_tokens.weight"], (shape.vocabulary, shape.hidden))
        tied = shape.tied and not tensors.has("lm_head.weight")
        head = embedding if tied else tensors.take(["lm_head.weight"], (shape.vocabulary, shape.hidden))
        for index in range(shape.layers):
            self._fill_layer(index, self._layers[index], files.experts)
        self.trunk = Trunk(
            layers=self._layers,
            embedding=matrix(embedding),
            head=matrix(head),
            final_norm=None if shape.streams is not None else self._norm("model.norm.weight", shape.hidden),
            final_streams=None
            if shape.streams is None
            else self._mixer("model.hyper_connection_mixer.", shape.streams),
            layer_count=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            kinds=tuple(Heads(kind.heads, kind.key_value_heads, *kind.widths, kind.rotated) for kind in shape.kinds),
            kind_count=len(shape.kinds),
            top_k=shape.top_k,
            delta_layers=0 if delta is None else len(delta.layers),
            delta_key_heads=0 if delta is None else delta.key_heads,
            delta_value_heads=0 if delta is None else delta.value_heads,
            delta_key_width=0 if delta is None else delta.key_width,
            delta_value_width=0 if delta is None else delta.value_width,
            delta_taps=0 if delta is None else delta.taps,
            delta_ranks=0 if delta is None else 2 * delta.rank,
            convolution_layers=0 if convolution is None else len(convolution.layers),
            convolution_taps=0 if convolution is None else convolution.taps,
            streams=1 if streams is None else streams.count,
            stream_rank=0 if shape.streams is None else shape.streams.rank,
            laurel_rank=0 if shape.altup is None else shape.altup.rank,
            sparse_width=max((shape.ffns[i] for i, one in enumerate(shape.deviations) if one is not None), default=0),
            block_heads=0 if shape.blocks is None else shape.blocks.heads,
            block_width=0 if shape.blocks is None else shape.blocks.width,
            block_size=0 if shape.blocks is None else shape.blocks.size,
            block_budget=0 if shape.blocks is None else shape.blocks.budget,
            lexical_width=0 if shape.lexical is None else shape.lexical.width,
            lexical_taps=0 if shape.lexical is None else shape.lexical.taps,
            lexical_apart=0 if shape.lexical is None else shape.lexical.apart,
            latent_plain=0 if latent is None else latent.plain,
            latent_values=0 if latent is None else latent.values,
            latent_rank=0 if latent is None else latent.query_rank,
            index_top=0 if latent is None or latent.index is None else latent.index.top,
            expert_groups=routing.groups,
            kept_groups=routing.kept_groups,
            set=choice.number,
            exact_set=exact.number,
            cache_dtype=FORMATS[cache_dtype],
            head_norm=HEAD_NORMS[shape.head_norm],
            normalise=routing.normalise,
            scoring=SCORINGS[routing.scoring],
            rotated_first=shape.rotated_first,
            paired_rotary=int(files.paired_rotary or shape.paired_rotary if latent is None else latent.interleaved),
            group_best=routing.group_best,
            softplus_gates=int(shape.gate_heads is not None and shape.gate_heads.softplus),
            gated_queries=int(delta is not None and delta.kind == "delta-net"),
            sigmoid_gates=int(delta is not None and delta.sigmoid_gates),
            delta_kind=0 if delta is None else DELTA_KINDS[delta.kind],
            tiled_heads=int(delta is not None and _tiled(files, delta)),
            parallel=int(shape.norms == "beside"),
            centred=int(shape.centred_norms),
            paired_index=int(latent is not None and latent.index is not None and latent.index.interleaved),
            scale_input=int(routing.scales_input),
            epsilon=shape.epsilon,
            clip=shape.clip,
            embedding_scale=shape.embedding_scale,
            attention_scale=shape.attention_scale,
            residual_scale=shape.residual_scale,
            logits_divisor=shape.logits_divisor,
            logits_cap=shape.logits_cap,
            scores_cap=shape.scores_cap,
            value_scale=shape.value_scale,
            shared_scale=shape.shared_scale,
            routed_scale=routing.scale,
            least_sum=routing.added_to_sum if routing.scoring == "sigmoid" else routing.least_sum,
            latent_epsilon=0 if latent is None else latent.epsilon,
            step_least=0 if delta is None or delta.step_limits is None else delta.step_limits[0],
            step_most=0 if delta is None or delta.step_limits is None else delta.step_limits[1],
            decay_least=0 if delta is None else delta.least_decay,
        )
        if shape.own_width:
            self._fill_own_embedding()
        if shape.altup is not None:
            self.trunk.spread, self.trunk.gather = map(self._others, ("altup", "altup_unembed"))
        tensors.check_all_taken(shape.family)
        self.address = ctypes.addressof(self.trunk)
        self.shared_layers = frozenset(i for i in range(shape.layers) if self._layers[i].shared)

    def read_ahead(self, experts: Experts) -> None:
        """Announce the experts' pages to the system as soon as a step's routes are known, from now on."""
        for index in self._shape.moe_layers:
            ranges = [experts.place(index, expert).page_ranges() for expert in range(experts.count)]
            pages = np.array([each for of_expert in ranges for each in of_expert], dtype=np.uintp)
            places = np.cumsum([0, *map(len, ranges)], dtype=np.int64)
            self._tensors.kept += [pages, places]
            self._layers[index].ahead, self._layers[index].ahead_from = pages.ctypes.data, places.ctypes.data

    def _fill_layer(self, index: int, layer: TrunkLayer, experts: Experts | None) -> None:
        shape, prefix = self._shape, f"model.layers.{index}."
        if index in shape.networks:
            pass
        elif shape.delta is not None and index in shape.delta.layers:
            fill = {"mamba": self._fill_mamba, "kda": self._fill_kda}.get(shape.delta.kind, self._fill_delta)
            fill(index, layer, shape.delta)
        elif shape.convolution is not None and index in shape.convolution.layers:
            self._fill_convolution(index, layer, shape.convolution)
        elif shape.latent is not None:
            self._fill_latent(index, layer, shape.latent)
        else:
            self._fill_attention(index, layer)
        if shape.streams is not None:
            layer.attention_streams = self._mixer(prefix + "attn_hyper_connection.", shape.streams, injects=True)
            layer.ffn_streams = self._mixer(prefix + "mlp_hyper_connection.", shape.streams, injects=True)
        if shape.lexical is not None and index in shape.lexical.layers:
            self._fill_lexical(prefix + "ple.", layer, shape.lexical, index)
        if shape.norms not in ("after", "streams"):
            layer.attention_norm = self._norm(prefix + "input_layernorm.weight", shape.hidden)
        if shape.norms == "before":
            layer.ffn_norm = self._norm(prefix + "post_attention_layernorm.weight", shape.hidden)
        elif shape.norms not in ("beside", "single", "streams"):
            self._fill_norms(index, layer)
        if shape.own_width:
            self._fill_own_input(prefix, layer)
        if shape.altup is not None:
            self._fill_altup(prefix, layer, shape.altup)
        deviations = shape.deviations[index]
        if experts is not None and index in shape.moe_layers:
            self._fill_moe(index, layer, experts)
        elif deviations is not None:
            self._fill_sparse(prefix + "mlp.", layer, shape.ffns[index], deviations)
        elif shape.norms != "single" or index in shape.networks:
            layer.experts = self._dense(index, "mlp.", shape.ffns[index], shape.mlp_bias)

    def _fill_attention(self, index: int, layer: TrunkLayer) -> None:
        shape, tensors, attention = self._shape, self._tensors, f"model.layers.{index}.self_attn."
        layer.kind = shape.kind_of[index]
        heads = shape.kinds[layer.kind]
        queries, keys = heads.heads * heads.width, heads.key_value_heads * heads.width
        values, gathered = heads.key_value_heads * heads.value_width, heads.heads * heads.value_width
        own = shape.keys_of[index] == index
        # A gate of every query may lie beside it.
        projected = 2 * queries if shape.delta is not None and shape.delta.kind == "delta-net" else queries
        if shape.merged_attention:
            merged = tensors.parts(attention + "qkv_proj.weight", (projected, keys, values), shape.hidden)
            layer.query, layer.key, layer.value = map(matrix, merged)
        else:
            layer.query = tensors.matrix([attention + "q_proj.weight"], projected, shape.hidden)
            if own:
                layer.key = tensors.matrix([attention + "k_proj.weight"], keys, shape.hidden)
            if own and not heads.keys_are_values:
                layer.value = tensors.matrix([attention + "v_proj.weight"], values, shape.hidden)
        layer.output = tensors.matrix([attention + "o_proj.weight"], shape.hidden, gathered)
        if shape.gate_heads is not None:
            rows = heads.heads if shape.gate_heads.whole else gathered
            layer.gate = tensors.matrix([f"{attention}{shape.gate_heads.name}.weight"], rows, shape.hidden)
        if shape.qkv_bias:
            layer.query_bias = tensors.vector(attention + "q_proj.bias", queries)
        if shape.qkv_bias and own:
            layer.key_bias = layer.value_bias = tensors.vector(attention + "k_proj.bias", keys)
            if not heads.keys_are_values:
                layer.value_bias = tensors.vector(attention + "v_proj.bias", values)
        if shape.output_bias:
            layer.output_bias = tensors.vector(attention + "o_proj.bias", shape.hidden)
        if heads.sinks:
            layer.sinks = tensors.vector(attention + "sinks", heads.heads)
        growth = shape.query_growth
        layer.grown = int(growth is not None and not (growth.unrotated and heads.rotated))
        layer.chunked = int(shape.chunked)
        if shape.head_norm == "rotated":
            if heads.rotated:
                layer.query_norm = layer.key_norm = tensors.keep(np.ones(heads.width, np.float32))
        elif shape.head_norm != "none":
            whole = shape.head_norm == "whole"
            layer.query_norm = self._norm(attention + "q_norm.weight", queries if whole else heads.width)
            if own:
                layer.key_norm = self._norm(attention + "k_norm.weight", keys if whole else heads.width)
        if shape.value_norm:
            layer.value_norm = tensors.keep(np.ones(heads.value_width, np.float32))
        if shape.blocks is not None:
            layer.blocks = self._blocks(attention + "indexer.", shape.blocks)
        layer.window = shape.windows[index]
        layer.place = shape.layers_of(layer.kind).index(shape.keys_of[index])

    def _blocks(self, prefix: str, blocks: BlockChoice) -> Any:
        """What chooses the blocks that a layer's attention sees."""
        tensors, hidden, queries = self._tensors, self._shape.hidden, blocks.heads * blocks.width
        name = prefix + "index_qk_proj.{}weight"
        rows = (queries, blocks.width)
        if tensors.has(name.format("q.")):
            query, key = (
                tensors.take([name.format(f"{part}.")], (count, hidden)) for part, count in zip("qk", rows, strict=True)
            )
        else:
            query, key = tensors.parts(name.format(""), rows, hidden)
        filled = Blocks(
            query=matrix(query),
            key=matrix(key),
            query_norm=self._norm(prefix + "q_layernorm.weight", blocks.width),
            key_norm=self._norm(prefix + "k_layernorm.weight", blocks.width),
        )
        tensors.kept.append(filled)
        return ctypes.pointer(filled)

    def _mixer(self, prefix: str, streams: StreamSizes, injects: bool = False) -> Any:
        """How residual streams are read, and with ``injects`` added to."""
        tensors, columns = self._tensors, streams.count * self._shape.hidden
        filled = Streams(
            down=tensors.matrix([prefix + "input_mix_weight_down.weight"], streams.rank, columns),
            up=tensors.matrix([prefix + "input_mix_weight_up.weight"], columns, streams.rank),
            norm=self._norm(prefix + "hc_norm.weight", columns),
        )
        if injects:
            filled.inject = tensors.matrix([prefix + "block_inject_weight.weight"], streams.count, columns)
        tensors.kept.append(filled)
        return ctypes.pointer(filled)

    def _fill_lexical(self, prefix: str, layer: TrunkLayer, lexical: LexicalShape, index: int) -> None:
        """What a layer makes of embeddings of n-grams."""
        tensors, columns = self._tensors, lexical.channels
        layer.lexical_place = lexical.layers.index(index)
        self._check_hash(prefix + "ple_embedding.", lexical.hashes[layer.lexical_place])
        filled = Lexical(
            key=tensors.matrix([prefix + "key_proj.weight"], columns, lexical.width),
            value=tensors.matrix([prefix + "value_proj.weight"], self._shape.hidden, lexical.width),
            key_norm=self._norm(prefix + "norm_key.weight", columns),
            query_norm=self._norm(prefix + "norm_query.weight", columns),
            input_norm=self._norm(prefix + "norm_conv.weight", columns),
            kernel=tensors.taps([prefix + "conv1d.weight"], [columns], lexical.taps),
        )
        tensors.kept.append(filled)
        layer.lexical = ctypes.pointer(filled)

    def _check_hash(self, prefix: str, own: NgramHash) -> None:
        """Raises ModelError if the files have other numbers of a table's hash than follow from the settings."""
        for name, numbers in (
            ("layer_multipliers", own.multipliers),
            ("ngram_heads_vocab_sizes", own.sizes),
            ("ngram_heads_offsets", own.offsets),
        ):
            if not self._tensors.has(prefix + name):
                continue
            stored = self._tensors.take([prefix + name], (len(numbers),))
            if stored.words.view(np.int64).tolist() != list(numbers):
                raise ModelError(
                    f"Tensor {prefix}{name} has other numbers than config.json's seed and sizes of tables give; the "
                    "files do not belong together: fetch the model again."
                )

    def _fill_norms(self, index: int, layer: TrunkLayer) -> None:
        """The norms of what a layer's parts give."""
        shape, tensors, prefix = self._shape, self._tensors, f"model.layers.{index}."

        def norm(name: str) -> int:
            return self._norm(f"{prefix}{name}.weight", shape.hidden)

        if shape.norms == "around":
            layer.ffn_norm = norm("pre_feedforward_layernorm")
        filled = Norms(attention=norm("post_attention_layernorm"), after=norm("post_feedforward_layernorm"), scale=1.0)
        if shape.layer_scale:
            filled.scale = float(to_float32(tensors.take([prefix + "layer_scalar"], (1,)))[0])
        if shape.shared_expert == "network":
            router = to_float32(tensors.take([prefix + shape.router_norm], (shape.hidden,)))
            filled.router = tensors.keep(router * np.float32(shape.hidden**-0.5))
            filled.experts = norm("pre_feedforward_layernorm_2")
            filled.shared_after = norm("post_feedforward_layernorm_1")
            filled.experts_after = norm("post_feedforward_layernorm_2")
        tensors.kept.append(filled)
        layer.norms = ctypes.pointer(filled)

    def _fill_own_embedding(self) -> None:
        """The embeddings that layers have of their own."""
        shape, tensors, trunk = self._shape, self._tensors, self.trunk
        columns = shape.layers * shape.own_width
        trunk.own_width = shape.own_width
        trunk.own_embedding = tensors.matrix(["model.embed_tokens_per_layer.weight"], shape.own_vocabulary, columns)
        trunk.own_projection = tensors.matrix(["model.per_layer_model_projection.weight"], columns, shape.hidden)
        trunk.own_norm = self._norm("model.per_layer_projection_norm.weight", shape.own_width)
        trunk.own_activation = shape.gate.native

    def _fill_own_input(self, prefix: str, layer: TrunkLayer) -> None:
        shape, tensors = self._shape, self._tensors
        filled = OwnInput(
            gate=tensors.matrix([prefix + "per_layer_input_gate.weight"], shape.own_width, shape.hidden),
            projection=tensors.matrix([prefix + "per_layer_projection.weight"], shape.hidden, shape.own_width),
            norm=self._norm(prefix + "post_per_layer_input_norm.weight", shape.hidden),
        )
        tensors.kept.append(filled)
        layer.own_input = ctypes.pointer(filled)

    def _others(self, kind: str) -> Any:
        """Matrices of all residual streams but the first."""
        tensors, hidden, sizes = self._tensors, self._shape.hidden, self._shape.altup
        assert sizes is not None
        names = [f"model.{kind}_projections.{stream}.weight" for stream in range(sizes.count - 1)]
        found = (Matrix * len(names))(*(tensors.matrix([name], hidden, hidden) for name in names))
        tensors.kept.append(found)
        return found

    def _fill_altup(self, prefix: str, layer: TrunkLayer, sizes: AltupSizes) -> None:
        tensors, hidden, count = self._tensors, self._shape.hidden, sizes.count

        def factors(name: str, rows: int) -> int:
            matrix = tensors.take([f"{prefix}altup.{name}_coefs.weight"], (rows, count))
            return tensors.keep(np.ascontiguousarray(to_float32(matrix)))

        scale = tensors.vector(prefix + "altup.correct_output_scale", hidden)
        filled = Altup(
            router=tensors.exact([prefix + "altup.modality_router.weight"], count, hidden),
            down=tensors.matrix([prefix + "laurel.linear_left.weight"], sizes.rank, hidden),
            up=tensors.matrix([prefix + "laurel.linear_right.weight"], hidden, sizes.rank),
            router_norm=self._norm(prefix + "altup.router_norm.weight", hidden),
            prediction=factors("prediction", count * count),
            correction=factors("correction", count),
            norm=self._norm(prefix + "laurel.post_laurel_norm.weight", hidden),
            scale=scale if sizes.scaled else None,
        )
        tensors.kept.append(filled)
        layer.altup = ctypes.pointer(filled)

    def _fill_sparse(self, prefix: str, layer: TrunkLayer, ffn: int, deviations: float) -> None:
        """A network of whose gates few count."""
        tensors, hidden = self._tensors, self._shape.hidden
        filled = Sparse(
            gate=tensors.matrix([prefix + "gate_proj.weight"], ffn, hidden),
            up=tensors.matrix([prefix + "up_proj.weight"], ffn, hidden),
            down=tensors.matrix([prefix + "down_proj.weight"], hidden, ffn),
            deviations=deviations,
        )
        tensors.kept.append(filled)
        layer.sparse = ctypes.pointer(filled)

    def _fill_convolution(self, index: int, layer: TrunkLayer, convolution: ConvolutionShape) -> None:
        shape, tensors, prefix = self._shape, self._tensors, f"model.layers.{index}.conv."
        layer.place = convolution.layers.index(index)
        layer.output = tensors.matrix([prefix + "out_proj.weight"], shape.hidden, shape.hidden)
        filled = Convolution(input=tensors.matrix([prefix + "in_proj.weight"], 3 * shape.hidden, shape.hidden))
        filled.kernel = tensors.taps([prefix + "conv.weight"], [shape.hidden], convolution.taps)
        tensors.kept.append(filled)
        layer.convolution = ctypes.pointer(filled)

    def _fill_latent(self, index: int, layer: TrunkLayer, latent: LatentShape) -> None:
        shape, tensors, prefix = self._shape, self._tensors, f"model.layers.{index}.self_attn."
        rows = shape.heads * (latent.plain + latent.rotated)
        filled = Latent()
        if latent.query_rank:
            filled.query_down = tensors.matrix([prefix + "q_a_proj.weight"], latent.query_rank, shape.hidden)
            filled.query_norm = tensors.vector(prefix + "q_a_layernorm.weight", latent.query_rank)
            filled.query = tensors.matrix([prefix + "q_b_proj.weight"], rows, latent.query_rank)
        else:
            filled.query = tensors.matrix([prefix + "q_proj.weight"], rows, shape.hidden)
        filled.down = tensors.matrix([prefix + "kv_a_proj_with_mqa.weight"], shape.kinds[0].width, shape.hidden)
        filled.norm = tensors.vector(prefix + "kv_a_layernorm.weight", latent.latents)
        heads = self._latent_heads(prefix, latent)
        if heads is not None:
            filled.keys, filled.values = map(tensors.each_head, heads)
        layer.output = tensors.matrix([prefix + "o_proj.weight"], shape.hidden, shape.heads * latent.values)
        if shape.gate_heads is not None:
            layer.gate = tensors.matrix([f"{prefix}{shape.gate_heads.name}.weight"], shape.heads, shape.hidden)
        if latent.index is not None and index in latent.index.layers:
            filled.indexer = ctypes.pointer(self._indexer(index, latent.index, latent.query_rank))
        layer.place = shape.layers_of(0).index(index)
        layer.grown = int(shape.query_growth is not None)
        tensors.kept.append(filled)
        layer.latent = ctypes.pointer(filled)

    def _indexer(self, layer: int, index: IndexShape, rank: int) -> Indexer:
        shape, tensors, prefix = self._shape, self._tensors, f"model.layers.{layer}.self_attn.indexer."
        filled = Indexer(
            query=tensors.matrix([prefix + "wq_b.weight"], index.heads * index.width, rank),
            key=tensors.matrix([prefix + "wk.weight"], index.width, shape.hidden),
            weights=tensors.matrix([prefix + "weights_proj.weight"], index.heads, shape.hidden),
            norm=tensors.vector(prefix + "k_norm.weight", index.width),
            norm_bias=tensors.vector(prefix + "k_norm.bias", index.width),
            place=index.layers.index(layer),
        )
        tensors.kept.append(filled)
        return filled

    def _latent_heads(self, prefix: str, latent: LatentShape) -> tuple[StoredTensor, StoredTensor] | None:
        """The heads' matrices for keys [heads, latents, plain] and values [heads, values, latents].

        Newer GGUF files store them so, and they are used in place. Other files have one projection, whose rows for keys
        must be transposed: a copy is made, or None is returned while checking.
        """
        heads, tensors = self._shape.heads, self._tensors
        shapes = (heads, latent.latents, latent.plain), (heads, latent.values, latent.latents)
        if tensors.has(prefix + "k_b_proj.weight"):
            keys, values = (tensors.take([f"{prefix}{n}_b_proj.weight"], s) for n, s in zip("kv", shapes, strict=True))
            return keys, values
        both = tensors.take([prefix + "kv_b_proj.weight"], (heads * (latent.plain + latent.values), latent.latents))
        if self._checking:
            return None
        rows = to_float32(both).reshape(heads, latent.plain + latent.values, latent.latents)
        turned = np.ascontiguousarray(rows[:, : latent.plain].swapaxes(1, 2))
        gathered = np.ascontiguousarray(rows[:, latent.plain :])
        return _plain(turned, both.dtype), _plain(gathered, both.dtype)

    def _fill_delta(self, index: int, layer: TrunkLayer, delta: DeltaShape) -> None:
        shape, tensors, prefix = self._shape, self._tensors, f"model.layers.{index}.linear_attn."
        layer.place = delta.layers.index(index)
        layer.output = tensors.matrix([prefix + "out_proj.weight"], shape.hidden, delta.values)
        filled = self._deltas[layer.place]
        inputs = self._delta_inputs(prefix, delta)
        if inputs is not None:
            filled.input, filled.gate, filled.decay, filled.rate = map(matrix, inputs)
        filled.norm = tensors.vector(prefix + "norm.weight", delta.value_width)
        self._fill_recurrence(prefix, filled, delta)
        layer.delta = ctypes.pointer(filled)

    def _fill_mamba(self, index: int, layer: TrunkLayer, delta: DeltaShape) -> None:
        shape, tensors, prefix = self._shape, self._tensors, f"model.layers.{index}.mamba."
        layer.place = delta.layers.index(index)
        layer.output = tensors.matrix([prefix + "out_proj.weight"], shape.hidden, delta.values)
        filled = self._deltas[layer.place]
        rows = (delta.values, delta.channels, delta.value_heads)
        inputs = tensors.parts(prefix + "in_proj.weight", rows, shape.hidden)
        filled.gate, filled.input, filled.decay = map(matrix, inputs)
        if delta.biased:
            filled.kernel_bias = tensors.vector(prefix + "conv1d.bias", delta.channels)
        filled.skip = tensors.vector(prefix + "D", delta.value_heads)
        filled.norm = tensors.vector(prefix + "norm.weight", delta.values)
        self._fill_recurrence(prefix, filled, delta)
        layer.delta = ctypes.pointer(filled)

    def _fill_kda(self, index: int, layer: TrunkLayer, delta: DeltaShape) -> None:
        shape, tensors, prefix = self._shape, self._tensors, f"model.layers.{index}.self_attn."
        keys, hidden = delta.key_heads * delta.key_width, shape.hidden
        layer.place = delta.layers.index(index)
        layer.output = tensors.matrix([prefix + "o_proj.weight"], hidden, delta.values)
        filled = self._deltas[layer.place]

        def read(name: str, rows: int, columns: int = hidden) -> Matrix:
            return tensors.matrix([f"{prefix}{name}_proj.weight"], rows, columns)

        filled.input, filled.key, filled.value = read("q", keys), read("k", keys), read("v", delta.values)
        filled.rate = read("b", delta.value_heads)
        if delta.rank:
            filled.decay_down, filled.gate_down = read("f_a", delta.rank), read("g_a", delta.rank)
            filled.decay, filled.gate = read("f_b", keys, delta.rank), read("g_b", delta.values, delta.rank)
        else:
            filled.decay, filled.gate = read("f", keys), read("g", delta.values)
        filled.norm = tensors.vector(prefix + "o_norm.weight", delta.value_width)
        self._fill_recurrence(prefix, filled, delta)
        layer.delta = ctypes.pointer(filled)

    def _fill_recurrence(self, prefix: str, filled: Delta, delta: DeltaShape) -> None:
        """The convolution and the decays."""
        tensors, keys, values = self._tensors, delta.key_heads * delta.key_width, delta.values
        parts = {"q_": keys, "k_": keys, "v_": values} if delta.wide_decays else {"": delta.channels}
        names = [f"{prefix}{part}conv1d.weight" for part in parts]
        filled.kernel = tensors.taps(names, list(parts.values()), delta.taps)
        heads, name = delta.value_heads, tensors.named(prefix + "A_log")
        # Kimi's files have further dimensions of one.
        decays = to_float32(tensors.take([name], (1, 1, heads, 1) if delta.rank else (heads,))).reshape(-1)
        stored = self._changes.get(name, Change())
        if stored.log_of:
            decays = decays * np.float32(-stored.log_of)
        else:  # in float64, as numpy's float32 routines differ by CPU
            decays = -np.exp(decays.astype(np.float64)).astype(np.float32)
        filled.decay_scale = tensors.keep(decays)
        filled.decay_bias = tensors.vector(prefix + "dt_bias", keys if delta.wide_decays else heads)

    def _delta_inputs(self, prefix: str, delta: DeltaShape) -> list[StoredTensor] | None:
        """The projections of a delta-net: queries, keys and values; gates; decays; rates.

        Qwen3-Next stores the first two in one matrix by key head, and the other two likewise. They are separated in
        copies, except in GGUF files that store the first two apart. None while checking, if a copy would be needed.
        """
        hidden, tensors, heads = self._shape.hidden, self._tensors, delta.value_heads
        if tensors.has(prefix + "in_proj_qkv.weight"):
            rows = {"qkv": delta.channels, "z": delta.values, "a": heads, "b": heads}
            return [tensors.take([f"{prefix}in_proj_{n}.weight"], (count, hidden)) for n, count in rows.items()]
        heads_per_key, keys = heads // delta.key_heads, delta.key_width
        both = tensors.take([prefix + "in_proj_ba.weight"], (2 * heads, hidden))
        if tensors.has(prefix + "in_proj_qkvz.qkv.weight"):
            rows = {"qkv": delta.channels, "z": delta.values}
            first = [tensors.take([f"{prefix}in_proj_qkvz.{n}.weight"], (count, hidden)) for n, count in rows.items()]
        else:
            whole = tensors.take([prefix + "in_proj_qkvz.weight"], (delta.channels + delta.values, hidden))
            if self._checking:
                return None
            values = heads_per_key * delta.value_width
            first = list(_apart(whole, [keys, keys, values, values], [[0, 1, 2], [3]]))
        rates, decays = _apart(both, [heads_per_key, heads_per_key], [[0], [1]])
        tensors.kept += [*first, decays, rates]
        return [*first, decays, rates]

    def _norm(self, name: str, count: int) -> int:
        """Address of a norm's weights in float32."""
        weight = to_float32(self._tensors.take([name], (count,)))
        if self._shape.offset_norms:
            weight += np.float32(1 - self._changes.get(name, Change()).subtracted)
        return self._tensors.keep(weight)

    def _fill_moe(self, index: int, layer: TrunkLayer, experts: Experts) -> None:
        shape, prefix = self._shape, f"model.layers.{index}."
        if shape.top_k > experts.count:
            raise damaged(f"config.json sends every token to {shape.top_k} experts, but there are {experts.count}")
        routing = shape.routing
        if experts.count % routing.groups or experts.count // routing.groups * routing.kept_groups < shape.top_k:
            raise damaged(
                f"config.json chooses {shape.top_k} of {experts.count} experts from {routing.kept_groups} of "
                f"{routing.groups} groups, which do not fit together"
            )
        names = [prefix + name for name in shape.routers]
        layer.router = self._tensors.exact(names, experts.count, shape.hidden)
        if shape.router_bias:
            layer.router_bias = self._tensors.vector(names[0].removesuffix("weight") + "bias", experts.count)
        if shape.latents:
            narrow, widen = (prefix + name for name in LATENTS)
            layer.narrow = self._tensors.matrix([narrow], shape.latents, shape.hidden)
            layer.widen = self._tensors.matrix([widen], shape.hidden, shape.latents)
        if not self._in_ring:
            routed = layer_experts(experts, index, shape.expert_gates[index], self._choice)
            self._experts.append(routed)
            layer.experts = routed.address
        if self._popularity is not None:
            layer.counts = self._popularity.address(index)
        if shape.expert_scale:
            layer.expert_scale = self._tensors.vector(prefix + shape.expert_scale, experts.count)
        if shape.correction:
            rows = (1,) if shape.correction_of_one_row else ()
            correction = self._tensors.take([prefix + shape.correction], (*rows, experts.count))
            layer.correction = self._tensors.keep(to_float32(correction))
        if shape.shared_expert == "network":
            layer.shared = self._dense(index, "mlp.", shape.ffns[index], shape.mlp_bias)
        elif shape.shared_expert == "plain":
            layer.shared = self._dense(index, "mlp.shared_experts.", shape.shared_ffn, shape.mlp_bias)
        elif shape.shared_expert == "gated":
            layer.shared = self._dense(index, "mlp.shared_expert.", shape.shared_ffn, bias=False)
            layer.shared_gate = self._tensors.exact([prefix + "mlp.shared_expert_gate.weight"], 1, shape.hidden)

    def _gate(self, index: int, prefix: str) -> Gate:
        """The function within a layer's network, with the numbers that it has learned (apertus)."""
        gate = self._shape.network_gates[index]
        if gate.kind != "xielu":
            return gate

        def number(name: str, shape: tuple[int, ...]) -> float:
            return float(to_float32(self._tensors.take([f"{prefix}act_fn.{name}"], shape)).reshape(()))

        beta = number("beta", ())
        above, below = (math.log1p(math.exp(number(name, (1,)))) for name in ("alpha_p", "alpha_n"))
        return Gate("xielu", alpha=above, limit=beta + below, beta=beta, epsilon=number("eps", ()))

    def _dense(self, index: int, name: str, ffn: int, bias: bool) -> int:
        """Address of the feed-forward network ``name`` within a layer, as a layer of one expert."""
        tensors, hidden, prefix = self._tensors, self._shape.hidden, f"model.layers.{index}.{name}"

        def added(name: str, count: int) -> StoredTensor | None:
            """A bias in float32, because the three may be stored in different formats."""
            return (
                StoredTensor("F32", to_float32(tensors.take([prefix + name], (count,))).view(np.uint32))
                if bias
                else None
            )

        if not self._shape.has_gates:
            gate = up = tensors.take([prefix + "up_proj.weight"], (ffn, hidden))
        elif self._shape.merged_ffn and not tensors.has(prefix + "gate_up_proj.gate.weight"):
            gate, up = tensors.parts(prefix + "gate_up_proj.weight", (ffn, ffn), hidden)
        else:
            name = prefix + ("gate_up_proj.{}.weight" if self._shape.merged_ffn else "{}_proj.weight")
            gate, up = (tensors.take([name.format(part)], (ffn, hidden)) for part in ("gate", "up"))
        up_bias = added("up_proj.bias", ffn)
        expert = ExpertWeights(
            gate=gate,
            up=up,
            down=tensors.take([prefix + "down_proj.weight"], (hidden, ffn)),
            gate_bias=added("gate_proj.bias", ffn) if self._shape.has_gates else up_bias,
            up_bias=up_bias,
            down_bias=added("down_proj.bias", hidden),
        )
        layer = LayerExperts({0: expert}, 1, self._gate(index, prefix), self._choice)
        self._experts.append(layer)
        return layer.address
