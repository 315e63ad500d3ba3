"""A model's tensors in the form of the native trunk: addresses into the mapped files, checked against the shape."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.models.files import Change, Experts, ExpertWeights, ModelFiles, StoredTensor
from engine.models.number_formats import is_packed
from engine.moe.kernels.bindings import FORMATS, KernelChoice, Matrix, load
from engine.moe.kernels.layers import LayerExperts, layer_experts, matrix
from engine.moe.popularity import Popularity
from engine.runtimes.native.bindings import HEAD_NORMS, Delta, Trunk, TrunkLayer
from engine.runtimes.native.shape import DeltaShape, Shape


def to_float32(tensor: StoredTensor) -> NDArray[np.float32]:
    """A copy in float32; for what is small (norms, biases). Raises ModelError for another type than BF16, F16
    or F32."""
    if tensor.dtype == "F32":
        return np.array(tensor.words.view(np.float32))
    if tensor.dtype == "F16":
        return tensor.words.view(np.float16).astype(np.float32)
    if tensor.dtype == "BF16":
        return (tensor.words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    raise ModelError(f"A tensor of the trunk is stored as {tensor.dtype}, which the native kernels cannot read.")


def opened(tensor: StoredTensor) -> StoredTensor:
    """A copy in float32 of a packed matrix, for what is small and computed with float32 inputs; another tensor as it
    is."""
    if not is_packed(tensor.dtype):
        return tensor
    described, native = matrix(tensor), load()
    copy = np.empty(tensor.shape, np.float32)
    for row in range(len(copy)):
        native.pllm_open_row(ctypes.addressof(described), row, copy[row].ctypes.data)
    return StoredTensor("F32", copy.view(np.uint32))


class Tensors:
    """The trunk's tensors by name; each may be taken once, and none may be left over."""

    def __init__(self, files: ModelFiles) -> None:
        self._left = dict(files.trunk())
        self.kept: list[Any] = []
        """What the structures point into."""

    def take(self, names: Sequence[str], shape: tuple[int, ...]) -> StoredTensor:
        """The tensor of the first of ``names`` that is there. Raises ModelError if none is, or its shape is another."""
        name = next((name for name in names if name in self._left), None)
        if name is None:
            raise ModelError(f"Tensor {names[0]} is missing from the model's files; fetch the model again.")
        tensor = self._left.pop(name)
        if tensor.shape != shape:
            raise ModelError(
                f"Tensor {name} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}; "
                "the files do not belong together: fetch the model again."
            )
        self.kept.append(tensor)
        return tensor

    def has(self, name: str) -> bool:
        return name in self._left

    def matrix(self, names: Sequence[str], rows: int, columns: int) -> Matrix:
        return matrix(self.take(names, (rows, columns)))

    def exact(self, names: Sequence[str], rows: int, columns: int) -> Matrix:
        """As :meth:`matrix`, of a router or gate."""
        tensor = opened(self.take(names, (rows, columns)))
        self.kept.append(tensor)
        return matrix(tensor)

    def vector(self, name: str, count: int) -> int:
        """The address of a float32 copy."""
        return self.keep(to_float32(self.take([name], (count,))))

    def keep(self, numbers: NDArray[np.float32]) -> int:
        """The address of ``numbers``, which lie one after the other and are kept."""
        self.kept.append(numbers)
        return int(numbers.ctypes.data)

    def check_all_taken(self, family: str) -> None:
        """Raises ModelError naming a tensor that has no place. Frequencies that old versions stored are passed over."""
        for name in self._left:
            if not name.endswith("rotary_emb.inv_freq"):
                raise ModelError(
                    f"Tensor {name} has no place in a {family} model as config.json describes it; "
                    "the files do not belong together: fetch the model again."
                )


def _tiled(files: ModelFiles, delta: DeltaShape) -> bool:
    """Whether value heads are stored as llama.cpp does: the first of every key head, then the second, and so on."""
    name = f"model.layers.{delta.layers[0]}.linear_attn.in_proj_qkv.weight" if delta.layers else ""
    return files.changes.get(name, Change()).rows is not None


class TrunkWeights:
    """The C structure of a whole trunk; everything it points to is kept alive here."""

    def __init__(
        self,
        files: ModelFiles,
        shape: Shape,
        choice: KernelChoice,
        exact: KernelChoice,
        cache_dtype: str,
        popularity: Popularity | None,
        in_ring: bool = False,
    ) -> None:
        """``choice`` are the kernels of projections and experts, ``exact`` those that keep activations in float32.
        ``in_ring``: the routed experts are run elsewhere.

        Raises ModelError naming the first tensor that is missing, unexpected or of the wrong shape.
        """
        self._shape = shape
        self._choice = choice
        self._popularity = popularity
        self._in_ring = in_ring
        self._changes = files.changes
        self._tensors = tensors = Tensors(files)
        delta = shape.delta
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
            final_norm=self._norm("model.norm.weight", shape.hidden),
            layer_count=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            key_value_heads=shape.key_value_heads,
            width=shape.width,
            top_k=shape.top_k,
            rotated=shape.rotated,
            delta_layers=0 if delta is None else len(delta.layers),
            delta_key_heads=0 if delta is None else delta.key_heads,
            delta_value_heads=0 if delta is None else delta.value_heads,
            delta_key_width=0 if delta is None else delta.key_width,
            delta_value_width=0 if delta is None else delta.value_width,
            delta_taps=0 if delta is None else delta.taps,
            set=choice.number,
            exact_set=exact.number,
            cache_dtype=FORMATS[cache_dtype],
            head_norm=HEAD_NORMS[shape.head_norm],
            normalise=shape.normalise,
            paired_rotary=int(files.paired_rotary),
            gated_queries=int(delta is not None),
            tiled_heads=int(delta is not None and _tiled(files, delta)),
            epsilon=shape.epsilon,
            clip=shape.clip,
            embedding_scale=shape.embedding_scale,
            attention_scale=shape.attention_scale,
            residual_scale=shape.residual_scale,
            logits_divisor=shape.logits_divisor,
        )
        tensors.check_all_taken(shape.family)
        self.address = ctypes.addressof(self.trunk)
        self.shared_layers = frozenset(i for i in range(shape.layers) if self._layers[i].shared)

    def read_ahead(self, experts: Experts) -> None:
        """From now on tell the system of the experts' pages as soon as a step's routes are known."""
        for index in self._shape.moe_layers:
            ranges = [experts.place(index, expert).page_ranges() for expert in range(experts.count)]
            pages = np.array([each for of_expert in ranges for each in of_expert], dtype=np.uintp)
            places = np.cumsum([0, *map(len, ranges)], dtype=np.int64)
            self._tensors.kept += [pages, places]
            self._layers[index].ahead, self._layers[index].ahead_from = pages.ctypes.data, places.ctypes.data

    def _fill_layer(self, index: int, layer: TrunkLayer, experts: Experts | None) -> None:
        shape, prefix = self._shape, f"model.layers.{index}."
        if shape.delta is not None and index in shape.delta.layers:
            self._fill_delta(index, layer, shape.delta)
        else:
            self._fill_attention(index, layer)
        layer.attention_norm = self._norm(prefix + "input_layernorm.weight", shape.hidden)
        layer.ffn_norm = self._norm(prefix + "post_attention_layernorm.weight", shape.hidden)
        if experts is not None and index in shape.moe_layers:
            self._fill_moe(index, layer, experts)
        else:
            layer.experts = self._dense(prefix + "mlp.", shape.ffn, shape.mlp_bias)

    def _fill_attention(self, index: int, layer: TrunkLayer) -> None:
        shape, tensors, prefix = self._shape, self._tensors, f"model.layers.{index}."
        queries, keys = shape.heads * shape.width, shape.key_value_heads * shape.width
        attention = prefix + "self_attn."
        # A gate of every query may lie beside it.
        projected = queries if shape.delta is None else 2 * queries
        layer.query = tensors.matrix([attention + "q_proj.weight"], projected, shape.hidden)
        layer.key = tensors.matrix([attention + "k_proj.weight"], keys, shape.hidden)
        layer.value = tensors.matrix([attention + "v_proj.weight"], keys, shape.hidden)
        layer.output = tensors.matrix([attention + "o_proj.weight"], shape.hidden, queries)
        if shape.qkv_bias:
            layer.query_bias = tensors.vector(attention + "q_proj.bias", queries)
            layer.key_bias = tensors.vector(attention + "k_proj.bias", keys)
            layer.value_bias = tensors.vector(attention + "v_proj.bias", keys)
        if shape.output_bias:
            layer.output_bias = tensors.vector(attention + "o_proj.bias", shape.hidden)
        if shape.sinks:
            layer.sinks = tensors.vector(attention + "sinks", shape.heads)
        if shape.head_norm != "none":
            whole = shape.head_norm == "whole"
            layer.query_norm = self._norm(attention + "q_norm.weight", queries if whole else shape.width)
            layer.key_norm = self._norm(attention + "k_norm.weight", keys if whole else shape.width)
        layer.window = shape.windows[index]
        layer.place = shape.attention_layers.index(index)

    def _fill_delta(self, index: int, layer: TrunkLayer, delta: DeltaShape) -> None:
        shape, tensors, prefix = self._shape, self._tensors, f"model.layers.{index}.linear_attn."
        layer.place = delta.layers.index(index)
        layer.output = tensors.matrix([prefix + "out_proj.weight"], shape.hidden, delta.values)
        filled = self._deltas[layer.place]
        filled.input = tensors.matrix([prefix + "in_proj_qkv.weight"], delta.channels, shape.hidden)
        filled.gate = tensors.matrix([prefix + "in_proj_z.weight"], delta.values, shape.hidden)
        filled.decay = tensors.matrix([prefix + "in_proj_a.weight"], delta.value_heads, shape.hidden)
        filled.rate = tensors.matrix([prefix + "in_proj_b.weight"], delta.value_heads, shape.hidden)
        kernel = to_float32(tensors.take([prefix + "conv1d.weight"], (delta.channels, 1, delta.taps)))
        filled.kernel = tensors.keep(np.ascontiguousarray(kernel[:, 0].T))
        decays = to_float32(tensors.take([prefix + "A_log"], (delta.value_heads,)))
        stored = self._changes.get(prefix + "A_log", Change())
        if not stored.log_of_negative:  # in float64, as numpy's float32 routines differ by CPU
            decays = -np.exp(decays.astype(np.float64)).astype(np.float32)
        filled.decay_scale = tensors.keep(decays)
        filled.decay_bias = tensors.vector(prefix + "dt_bias", delta.value_heads)
        filled.norm = tensors.vector(prefix + "norm.weight", delta.value_width)
        layer.delta = ctypes.pointer(filled)

    def _norm(self, name: str, count: int) -> int:
        """The address of what a norm multiplies by, in float32."""
        weight = to_float32(self._tensors.take([name], (count,)))
        if self._shape.delta is not None:
            weight += np.float32(1 - self._changes.get(name, Change()).subtracted)
        return self._tensors.keep(weight)

    def _fill_moe(self, index: int, layer: TrunkLayer, experts: Experts) -> None:
        shape, prefix = self._shape, f"model.layers.{index}."
        if shape.top_k > experts.count:
            raise ModelError(
                f"config.json sends every token to {shape.top_k} experts, but there are {experts.count}; "
                "fetch the model again."
            )
        names = [prefix + name for name in shape.routers]
        layer.router = self._tensors.exact(names, experts.count, shape.hidden)
        if shape.router_bias:
            layer.router_bias = self._tensors.vector(names[0].removesuffix("weight") + "bias", experts.count)
        if not self._in_ring:
            routed = layer_experts(experts, index, shape.gate, self._choice)
            self._experts.append(routed)
            layer.experts = routed.address
        if self._popularity is not None:
            layer.counts = self._popularity.address(index)
        if shape.shared_ffn:
            layer.shared = self._dense(prefix + "mlp.shared_expert.", shape.shared_ffn, bias=False)
            layer.shared_gate = self._tensors.exact([prefix + "mlp.shared_expert_gate.weight"], 1, shape.hidden)

    def _dense(self, prefix: str, ffn: int, bias: bool) -> int:
        """A feed-forward network as a layer of one expert; its address."""
        tensors, hidden = self._tensors, self._shape.hidden
        one = ExpertWeights(
            gate=tensors.take([prefix + "gate_proj.weight"], (ffn, hidden)),
            up=tensors.take([prefix + "up_proj.weight"], (ffn, hidden)),
            down=tensors.take([prefix + "down_proj.weight"], (hidden, ffn)),
            gate_bias=tensors.take([prefix + "gate_proj.bias"], (ffn,)) if bias else None,
            up_bias=tensors.take([prefix + "up_proj.bias"], (ffn,)) if bias else None,
            down_bias=tensors.take([prefix + "down_proj.bias"], (hidden,)) if bias else None,
        )
        layer = LayerExperts({0: one}, 1, self._shape.gate, self._choice)
        self._experts.append(layer)
        return layer.address
