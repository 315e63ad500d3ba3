"""The tensors of a GGUF file under the names that a checkpoint of transformers gives them, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine.errors import ModelError, shown
from engine.models.architectures import gguf_latent
from engine.models.architectures.families import (
    ExpertLayers,
    expert_shape,
    key_layers,
    layer_config,
    layer_kinds,
    shared_width,
)
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor, Shape, projections, tensor_of
from engine.models.architectures.layer_rules import NETWORKS
from engine.models.architectures.record import LATENTS, DecoderRecord, Family, GgufRecord, MoeRecord, renamed, switched
from engine.models.formats.gguf_file import GgufFile, GgufTensor, UnreadableFormat
from engine.models.formats.number_formats import GGML_TYPES, stored_bytes
from engine.models.formats.safetensors_files import TensorEntry

_IGNORED = frozenset({"rope_freqs.weight"})
"""Tensors whose content is in the configuration."""
_MOST_AHEAD = 8
"""Maximum blocks that predict several tokens; models have one."""


def entries_of(
    gguf: GgufFile, architecture: tuple[Family, GgufRecord], config: Mapping[str, Any]
) -> dict[str, dict[str, TensorEntry]]:
    """The checkpoint's tensors by file name, in the order of the architecture.

    Raises ModelError naming the first tensor that is missing, unknown, of a wrong shape, or in a format that cannot be
    read.
    """
    entries: dict[str, dict[str, TensorEntry]] = {path.name: {} for path in gguf.paths}
    ignored = _keys_of_others(config)
    left = {
        name
        for name in gguf.tensors
        if name not in _IGNORED and not name.startswith(ignored) and not _predicts_ahead(gguf, name, config)
    }
    for wanted in named_tensors(gguf, architecture, config):
        # The first missing tensor ends this, as a file may claim any number of layers.
        tensor = gguf.lists.get(wanted.source) or tensor_of(gguf, wanted.source)
        if _without_ones(tensor.shape) != _without_ones(wanted.stored):
            raise ModelError(
                f"{gguf.path} is damaged: its tensor {wanted.source} has the shape {list(tensor.shape)}, not "
                f"{list(wanted.stored)}; download it again."
            )
        entries[gguf.paths[tensor.part].name][wanted.name] = _entry(gguf, tensor, wanted)
        left.discard(wanted.source)
    if left:
        raise ModelError(
            f"{gguf.path} holds the tensor {shown(min(left))}, which no {architecture[0].model_type} model known here "
            "has; use another file of this model."
        )
    return entries


def _without_ones(shape: Shape) -> Shape:
    """``shape`` without the outermost dimensions of one, of which files have any number: ggml's tensors all have four
    dimensions, and writers differ in how many they name."""
    return next((shape[place:] for place, size in enumerate(shape) if size != 1), ())


def unread_entries(gguf: GgufFile) -> Iterator[tuple[str, str, TensorEntry]]:
    """Name, file name and place of the tensors whose content is in the configuration. No runtime reads them, but a copy
    of the file has them."""
    for name in sorted(_IGNORED & gguf.tensors.keys()):
        tensor = gguf.tensors[name]
        stop = tensor.offset + tensor.nbytes
        yield name, gguf.paths[tensor.part].name, TensorEntry(tensor.format, tensor.shape, tensor.offset, stop)


def _predicts_ahead(gguf: GgufFile, name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor is of the blocks after the last layer, which predict several tokens and are not used."""
    if not Metadata(gguf).get("nextn_predict_layers"):
        return False
    return any(name.startswith(f"blk.{config['num_hidden_layers'] + extra}.") for extra in range(_MOST_AHEAD))


def _keys_of_others(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Beginnings of the names of keys and values in layers that attend to another one's, which are not used."""
    others = [layer for layer, source in enumerate(key_layers(config)) if layer != source]
    return tuple(f"blk.{layer}.attn_{name}" for layer in others for name in ("k.", "v.", "k_norm."))


def _entry(gguf: GgufFile, tensor: GgufTensor, wanted: NamedTensor) -> TensorEntry:
    number_format = tensor.format
    if number_format not in (("I32",) if wanted.whole_numbers else GGML_TYPES.values()):
        raise UnreadableFormat(gguf.path, tensor.name, number_format)
    start = tensor.offset + stored_bytes(number_format, (wanted.first, *wanted.shape[1:]))
    return TensorEntry(number_format, wanted.shape, start, start + stored_bytes(number_format, wanted.shape))


def named_tensors(
    gguf: GgufFile, architecture: tuple[Family, GgufRecord], config: Mapping[str, Any]
) -> Iterator[NamedTensor]:
    """The tensors that a model of ``architecture`` has, in the layout that ``gguf`` has chosen for each."""
    family, record = architecture
    for tensor in _usually_named(gguf, family, record, config):
        yield replace(tensor, name=renamed(tensor.name, family.decoder.names))


def _usually_named(
    gguf: GgufFile, family: Family, record: GgufRecord, config: Mapping[str, Any]
) -> Iterator[NamedTensor]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield NamedTensor.whole("token_embd.weight", "model.embed_tokens.weight", (vocabulary, hidden))
    routed, decoder = expert_shape(config, family), family.decoder
    layers_with_experts = frozenset(() if routed is None else routed.layers)
    own_input = config.get(decoder.own_input) or 0
    if own_input:
        yield from _own_inputs(config["num_hidden_layers"] * own_input, own_input, hidden, vocabulary)
    for layer in range(config["num_hidden_layers"]):
        here, target = f"blk.{layer}.", f"model.layers.{layer}."
        if decoder.norms not in ("after", "streams"):
            yield NamedTensor.whole(here + "attn_norm.weight", target + "input_layernorm.weight", (hidden,))
        mixed = not record.mixed_layers or config["layer_types"][layer] == record.mixed_layers
        alone = decoder.norms == "single" and config["layer_types"][layer] in NETWORKS
        if record.mixer is not None and mixed:
            yield from record.mixer(gguf, config, here, target)
        elif decoder.latents:
            yield from gguf_latent.attention_shapes(gguf, config, here, target)
            yield from _head_gate(decoder, config, here, target + "self_attn.", config["v_head_dim"])
        elif not alone:
            yield from _attention(gguf, decoder, config, layer)
        for source, name in _norms(gguf, decoder, here):
            yield NamedTensor.whole(f"{here}{source}.weight", f"{target}{name}.weight", (hidden,))
        if family.moe is not None and routed is not None and layer in layers_with_experts:
            yield from _experts(gguf, family, family.moe, routed, config, here, target)
        dense = layer not in layers_with_experts and (decoder.norms != "single" or alone)
        if dense or (family.moe is not None and family.moe.shared == "network"):
            ffn = decoder.ffn(config, layer)
            yield from _feed_forward(gguf, family, here + "ffn_{}.weight", target + "mlp.", ffn, hidden)
        for key, (name, shape) in record.listed.items():
            stored = (config["num_hidden_layers"],)
            yield NamedTensor(key, target + name, shape, stored, layer, 1)
        if own_input:
            for source, name, shape in (
                ("inp_gate", "per_layer_input_gate", (own_input, hidden)),
                ("proj", "per_layer_projection", (hidden, own_input)),
                ("post_norm", "post_per_layer_input_norm", (hidden,)),
            ):
                yield NamedTensor.whole(f"{here}{source}.weight", f"{target}{name}.weight", shape)
        if decoder.layer_scale:
            yield NamedTensor.whole(here + "layer_output_scale.weight", target + "layer_scalar", (1,))
    if decoder.norms != "streams":
        yield NamedTensor.whole(record.final_norm, "model.norm.weight", (hidden,))
    yield from record.further(gguf, config)
    if not config["tie_word_embeddings"]:
        yield NamedTensor.whole("output.weight", "lm_head.weight", (vocabulary, hidden))


def _own_inputs(columns: int, width: int, hidden: int, vocabulary: int) -> Iterator[NamedTensor]:
    """The embeddings that layers have of their own, ``width`` numbers each, ``columns`` in all."""
    for source, name, shape in (
        ("token_embd", "embed_tokens_per_layer", (vocabulary, columns)),
        ("model_proj", "per_layer_model_projection", (columns, hidden)),
        ("proj_norm", "per_layer_projection_norm", (width,)),
    ):
        yield NamedTensor.whole(f"per_layer_{source}.weight", f"model.{name}.weight", shape)


def _norms(gguf: GgufFile, decoder: DecoderRecord, here: str) -> Iterator[tuple[str, str]]:
    """Names of a layer's norms behind its attention in the file and in the checkpoint."""
    if decoder.norms == "before":
        newer = here + "post_attention_norm.weight" in gguf.tensors
        yield "post_attention_norm" if newer else "ffn_norm", "post_attention_layernorm"
        return
    if decoder.norms in ("beside", "single", "streams"):
        return
    yield "post_attention_norm", "post_attention_layernorm"
    yield "post_ffw_norm", "post_feedforward_layernorm"
    if decoder.norms == "around":
        yield "ffn_norm", "pre_feedforward_layernorm"


def _attention(gguf: GgufFile, decoder: DecoderRecord, config: Mapping[str, Any], layer: int) -> Iterator[NamedTensor]:
    here, attention = f"blk.{layer}.", f"model.layers.{layer}.self_attn."
    kind = layer_kinds(config)[layer]
    own = layer_config(config, layer, kind)
    hidden, size = config["hidden_size"], own["head_dim"]
    queries, keys = own["num_attention_heads"] * size, own["num_key_value_heads"] * size
    width = own[decoder.value_width] if decoder.value_width else size
    values, gathered = own["num_key_value_heads"] * width, own["num_attention_heads"] * width
    rows = {"q": 2 * queries if decoder.mixer == "delta-net" else queries}
    if key_layers(config)[layer] == layer:
        rows |= {"k": keys} | ({} if decoder.keys_are_values(config, kind) else {"v": values})
    for part, columns in (("weight", (hidden,)), ("bias", ())):
        if part == "bias" and not switched(decoder.qkv_bias, config):
            continue
        if decoder.merged_attention:
            shape = (sum(rows.values()), *columns)
            yield NamedTensor.whole(f"{here}attn_qkv.{part}", f"{attention}qkv_proj.{part}", shape)
            continue
        each = ((f"{here}attn_{short}.{part}", f"{attention}{short}_proj.{part}", rows[short]) for short in rows)
        yield from projections(gguf, f"{here}attn_qkv.{part}", each, columns)
    if decoder.head_norm in ("per-head", "whole") and switched(decoder.head_norm_setting or True, config):
        for short, total in (("q", queries), ("k", keys)):
            if short in rows:
                shape = (total if decoder.head_norm == "whole" else size,)
                yield NamedTensor.whole(f"{here}attn_{short}_norm.weight", f"{attention}{short}_norm.weight", shape)
    yield NamedTensor.whole(here + "attn_output.weight", attention + "o_proj.weight", (hidden, gathered))
    yield from _head_gate(decoder, own, here, attention, width)
    if switched(decoder.output_bias, config):
        yield NamedTensor.whole(here + "attn_output.bias", attention + "o_proj.bias", (hidden,))
    if decoder.sinks(config, kind):
        yield NamedTensor.whole(here + "attn_sinks.weight", attention + "sinks", (own["num_attention_heads"],))


def _head_gate(
    decoder: DecoderRecord, config: Mapping[str, Any], here: str, attention: str, width: int
) -> Iterator[NamedTensor]:
    """What scales the results of heads, which are ``width`` wide."""
    if decoder.head_gate is None:
        return
    each = 1 if decoder.head_gate.whole(config) else width
    shape = (config["num_attention_heads"] * each, config["hidden_size"])
    yield NamedTensor.whole(here + "attn_gate.weight", f"{attention}{decoder.head_gate.name}.weight", shape)


def _feed_forward(
    gguf: GgufFile, family: Family, source: str, prefix: str, ffn: int, hidden: int
) -> Iterator[NamedTensor]:
    """A network that all tokens pass. Two matrices that are one in the checkpoint may be apart in the file."""
    decoder = family.decoder
    merged = decoder.merged_ffn and source.format("gate") not in gguf.tensors
    for short in ("up",) if merged or not family.has_gates else ("gate", "up"):
        name = f"gate_up_proj.{short}" if decoder.merged_ffn else f"{short}_proj"
        name, rows = ("gate_up_proj", 2 * ffn) if merged else (name, ffn)
        yield NamedTensor.whole(source.format(short), f"{prefix}{name}.weight", (rows, hidden))
    yield NamedTensor.whole(source.format("down"), f"{prefix}down_proj.weight", (hidden, ffn))


def _router(
    gguf: GgufFile, moe: MoeRecord, config: Mapping[str, Any], count: int, here: str, target: str
) -> Iterator[NamedTensor]:
    """What chooses from ``count`` experts and weighs them, without its bias, and the latents that they read."""
    assert moe.router is not None
    hidden = config["hidden_size"]
    yield NamedTensor.whole(here + "ffn_gate_inp.weight", target + moe.router.names[0], (count, hidden))
    if moe.router.correction:
        shape = (1, count) if moe.router.correction_of_one_row else (count,)
        name = here + "exp_probs_b" if here + "exp_probs_b" in gguf.tensors else here + "exp_probs_b.bias"
        yield NamedTensor.whole(name, target + moe.router.correction, shape)
    if moe.router.norm:
        yield NamedTensor.whole(here + "ffn_gate_inp.scale", target + moe.router.norm, (hidden,))
    if moe.router.expert_scale:
        yield NamedTensor.whole(here + "ffn_down_exps.scale", target + moe.router.expert_scale, (count,))
    width = config.get(moe.latent_key)
    if width is not None:
        for short, name, shape in zip(("down", "up"), LATENTS, ((width, hidden), (hidden, width)), strict=True):
            yield NamedTensor.whole(f"{here}ffn_latent_{short}.weight", target + name, shape)


def _experts(
    gguf: GgufFile,
    family: Family,
    moe: MoeRecord,
    routed: ExpertLayers,
    config: Mapping[str, Any],
    here: str,
    target: str,
) -> Iterator[NamedTensor]:
    hidden, width, count, ffn = config["hidden_size"], routed.hidden, routed.count, routed.ffn
    if moe.router is not None:
        yield from _router(gguf, moe, config, count, here, target)
    if moe.shared == "network":
        for source, name in (
            ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
            ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
            ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
        ):
            yield NamedTensor.whole(f"{here}{source}.weight", f"{target}{name}.weight", (hidden,))
    shapes = {"gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)}
    if family.activation == "squared":
        del shapes["gate"]
    if here + "ffn_gate.0.weight" in gguf.tensors:  # files of before 2024 have one tensor for each expert
        for expert in range(count):
            for short, shape in shapes.items():
                name = f"{target}mlp.experts.{expert}.{short}_proj.weight"
                yield NamedTensor.whole(f"{here}ffn_{short}.{expert}.weight", name, shape)
    else:
        fused = here + "ffn_gate_up_exps.weight" in gguf.tensors
        stacked = {"gate_up": (2 * ffn, width), "down": shapes["down"]} if fused else shapes
        for short, shape in stacked.items():
            name = f"ffn_{short}_exps.weight"
            yield NamedTensor.whole(here + name, target + name, (count, *shape))
    if moe.router is not None and moe.router.bias:
        bias = target + moe.router.names[0].removesuffix("weight") + "bias"
        yield NamedTensor.whole(here + "ffn_gate_inp.bias", bias, (count,))
        for short, (rows, _) in shapes.items():
            name = f"ffn_{short}_exps.bias"
            yield NamedTensor.whole(here + name, target + name, (count, rows))
    if moe.shared == "plain" and shared_width(config, moe):
        prefix = target + "mlp.shared_experts."
        yield from _feed_forward(gguf, family, here + "ffn_{}_shexp.weight", prefix, shared_width(config, moe), hidden)
    if moe.shared == "gated":
        yield NamedTensor.whole(
            here + "ffn_gate_inp_shexp.weight", target + "mlp.shared_expert_gate.weight", (1, hidden)
        )
        prefix = target + "mlp.shared_expert."
        yield from _feed_forward(gguf, family, here + "ffn_{}_shexp.weight", prefix, shared_width(config, moe), hidden)
