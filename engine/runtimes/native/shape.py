"""The shape of a model that the native trunk runs, read with ``config.json`` and the record of its family.

Every family is the same decoder: RMS norm, a mixer of positions, residual, RMS norm, gated feed-forward or routed
experts, residual; some have norms elsewhere, some only one of the two parts in a layer. The mixer is rotary
grouped-query attention, attention over latents, a gated delta-net, a Mamba-2 layer or a short convolution.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from engine.errors import ModelError, damaged, shown
from engine.ipc.messages import Load
from engine.models.architectures.config_values import positive_number, whole_number
from engine.models.architectures.families import (
    FAMILIES,
    completed,
    layer_config,
    layer_kinds,
    shared_width,
    stated_experts_per_token,
)
from engine.models.architectures.layer_rules import NETWORKS, check_kinds
from engine.models.architectures.ngrams import NgramHash, ngram_hashes
from engine.models.architectures.record import (
    AltupSizes,
    BlockChoice,
    DecoderRecord,
    DeltaSizes,
    HeadNorm,
    MambaSizes,
    MoeRecord,
    Norms,
    QueryGrowth,
    RouterRecord,
    Scoring,
    SharedExpert,
    StreamSizes,
    switched,
)
from engine.models.folders.sizes import STATE_COLUMNS
from engine.models.formats.model_files import ModelFiles
from engine.models.formats.number_formats import stored_bytes
from engine.moe.kernels.bindings import Dtype
from engine.moe.kernels.layers import Gate
from engine.runtimes.native import rotary
from engine.runtimes.native.activations import (
    ACTIVATIONS,
    activation_of,
    expert_gates,
    has_kernel,
    limited_gates,
    read_gate,
)
from engine.runtimes.native.bindings import HEAD_KINDS, MOST_STREAMS, MOST_TAPS


@dataclass(frozen=True)
class DeltaShape(DeltaSizes):
    """Gated delta-nets of a model in its ``layers``, or its Mamba-2 layers, a group of which stands for a key head."""

    layers: tuple[int, ...] = ()
    step_limits: tuple[float, float] | None = None
    """Limits of the steps of a Mamba-2 layer; None of a delta-net."""
    biased: bool = False
    """Whether the convolution has a bias."""

    @property
    def kind(self) -> str:
        """One of the kinds that the kernels know."""
        return "mamba" if self.step_limits is not None else "kda" if self.wide_decays else "delta-net"

    @property
    def values(self) -> int:
        return self.value_heads * self.value_width

    @property
    def state_numbers(self) -> int:
        """Numbers that the delta-nets of all layers keep for one row."""
        padded = -(-self.value_width // STATE_COLUMNS) * STATE_COLUMNS
        return len(self.layers) * (self.value_heads * self.key_width * padded + (self.taps - 1) * self.channels)


@dataclass(frozen=True)
class HeadShape:
    """Heads of queries, and of keys and values, in some layers, ``width`` numbers each, values ``value_width``.
    ``rope`` rotates the first ``rotated``."""

    heads: int
    key_value_heads: int
    width: int
    value_width: int
    rotated: int
    rope: dict[str, Any]
    keys_are_values: bool = False
    """Whether values are the keys before normalisation and rotation."""
    sinks: bool = False
    """Whether each has a logit besides those of the keys."""

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of a key, and of a value."""
        return self.width, self.value_width


@dataclass(frozen=True)
class GatedHeads:
    """A projection ``name`` within attention, whose activated result scales what heads have gathered: each number, or
    with ``whole`` each head."""

    name: str
    softplus: bool
    whole: bool


@dataclass(frozen=True)
class ConvolutionShape:
    """Short convolutions over ``taps`` tokens, one for every number of the hidden state in each of ``layers``."""

    layers: tuple[int, ...]
    taps: int


@dataclass(frozen=True)
class LexicalShape:
    """Embeddings of n-grams, ``width`` numbers for a token, that ``layers`` add to the residual streams: a convolution
    of ``channels`` over ``taps`` tokens, as far apart as the longest n-gram has tokens. ``hashes``: how each layer
    finds rows of its table."""

    layers: tuple[int, ...]
    hashes: tuple[NgramHash, ...]
    width: int
    taps: int
    channels: int

    @property
    def apart(self) -> int:
        return self.hashes[0].tokens

    @property
    def context(self) -> int:
        """Tokens before a token that its n-grams reach back to."""
        return self.apart - 1

    @property
    def state_numbers(self) -> int:
        """Numbers that are kept for one row: the last inputs of the convolutions, and the last tokens."""
        return len(self.layers) * (self.taps - 1) * self.apart * self.channels + self.context


@dataclass(frozen=True)
class IndexShape:
    """Indexers of attention over latents: ``heads`` queries of ``width`` numbers, and one key of each position.

    A query sees the ``top`` positions that score highest. ``layers`` have an indexer, and in others queries see what
    those of the one before them have chosen.
    """

    heads: int
    width: int
    top: int
    interleaved: bool
    """Whether a rotation turns neighbouring numbers."""
    layers: tuple[int, ...]


@dataclass(frozen=True)
class LatentShape:
    """Attention over latents: a position caches ``latents`` numbers, and one rotated key for all heads.

    Each head's query has ``plain`` numbers that are not rotated, and its values have ``values`` numbers.
    ``query_rank``: inner size of the two matrices that make queries; 0: a single matrix makes them.
    """

    latents: int
    rotated: int
    plain: int
    values: int
    query_rank: int
    epsilon: float
    """Epsilon of the norms of latents and of queries' inner vectors."""
    interleaved: bool
    """Whether a rotation turns neighbouring numbers (DeepSeek's order), not numbers half the rotated part apart."""
    index: IndexShape | None


@dataclass(frozen=True)
class Routing:
    """The rule by which a token's experts are chosen and weighted.

    Experts are scored by ``scoring`` of the logits and chosen from the best ``kept_groups`` of ``groups``. With
    ``normalise``, the weights are divided by their sum plus ``added_to_sum``, or by ``least_sum`` if that is more. Then
    they are multiplied by ``scale``. No router has both numbers.
    """

    scoring: Scoring = "softmax"
    scales_input: bool = False
    """Whether weights multiply the inputs of experts, not their outputs."""
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1
    """Experts by which groups are compared: their best one, or their best two."""
    normalise: bool = False
    added_to_sum: float = 0.0
    least_sum: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class Shape:
    """One model of the common decoder shape. Sizes are in numbers, ``windows`` in tokens (0: all)."""

    family: str
    hidden: int
    layers: int
    heads: int
    kinds: tuple[HeadShape, ...]
    """Kinds of key and value heads in the model's layers. Those of layers with a sliding window and those of others are
    of two kinds."""
    kind_of: tuple[int, ...]
    """The kind of each layer's heads."""
    keys_of: tuple[int, ...]
    """For each layer the one whose keys and values it attends to."""
    networks: tuple[int, ...]
    """Layers that are a feed-forward network, or experts, alone."""
    ffns: tuple[int, ...]
    """Width of each layer's dense network, also of one beside experts; 0: none. The experts' width follows from their
    matrices."""
    vocabulary: int
    context: int
    epsilon: float
    gate: Gate
    network_gates: tuple[Gate, ...]
    """Gates of each layer's networks that all tokens pass, which may have limits."""
    expert_gates: tuple[Gate, ...]
    """Gates of each layer's routed experts."""
    has_gates: bool
    """Whether networks and experts have gates, or their first matrix stands for both."""
    windows: tuple[int, ...]
    chunked: bool
    """Whether a layer with a window sees the tokens from the last multiple of its size on."""
    moe_layers: tuple[int, ...]
    latents: int
    """Width of what routed experts read in place of the hidden state; 0: that."""
    top_k: int
    routing: Routing
    head_norm: HeadNorm
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    merged_attention: bool
    merged_ffn: bool
    rotated_first: bool
    """Whether heads are normed after they are rotated, not before."""
    paired_rotary: bool
    """Whether checkpoints have the values that a rotation turns together side by side."""
    query_growth: QueryGrowth | None
    gate_heads: GatedHeads | None
    tied: bool
    routers: tuple[str, ...]
    router_bias: bool
    router_norm: str
    expert_scale: str
    correction: str
    correction_of_one_row: bool
    shared_expert: SharedExpert
    shared_ffn: int
    clip: float
    """Limit of the absolute values of queries, keys and values; 0: none."""
    embedding_scale: float
    attention_scale: float
    residual_scale: float
    logits_divisor: float
    logits_cap: float
    """Limit of logits; 0: none."""
    scores_cap: float
    """Limit of the scores of attention; 0: none."""
    value_scale: float
    """Factor on values as attention adds them up."""
    shared_scale: float
    """Factor on what a plain shared expert gives."""
    norms: Norms
    centred_norms: bool
    """Whether norms of the hidden state take the mean from it."""
    offset_norms: bool
    """Whether norms multiply by one more than their weights."""
    layer_scale: bool
    value_norm: bool
    own_width: int
    """Width of an embedding that each layer has of its own; 0: none."""
    own_vocabulary: int
    """Tokens that have such embeddings. Others have that of token 0."""
    altup: AltupSizes | None
    """Residual streams that layers update by running on the first one; None: there are none."""
    deviations: tuple[float | None, ...]
    """Standard deviations by which gates of each layer's network must exceed their mean to count; None: all count."""
    delta: DeltaShape | None
    latent: LatentShape | None
    convolution: ConvolutionShape | None
    streams: StreamSizes | None
    """Residual streams in place of norms; None: there is one stream."""
    lexical: LexicalShape | None
    blocks: BlockChoice | None
    """The choice of the blocks that attention sees; None: it sees all."""
    names: Mapping[str, str]
    """Parts of the usual names of tensors, and their replacements in this model."""

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with attention."""
        others = {layer for kind in (self.delta, self.convolution) if kind is not None for layer in kind.layers}
        others.update(self.networks)
        return tuple(layer for layer in range(self.layers) if layer not in others)

    @property
    def state_numbers(self) -> int:
        """Numbers that layers without keys and values keep for one row."""
        if self.convolution is not None:
            return len(self.convolution.layers) * (self.convolution.taps - 1) * self.hidden
        nets = 0 if self.delta is None else self.delta.state_numbers
        return nets if self.lexical is None else nets + self.lexical.state_numbers

    def layers_of(self, kind: int) -> tuple[int, ...]:
        """The layers that keep keys and values of heads of ``kind``. The second kind beside latents is of indexers."""
        if kind and self.latent is not None:
            return () if self.latent.index is None else self.latent.index.layers
        kept = (layer for layer in self.attention_layers if self.keys_of[layer] == layer)
        return tuple(layer for layer in kept if self.kind_of[layer] == kind)

    def window_of(self, kind: int) -> int:
        """The widest window of the layers that keep keys and values of heads of ``kind``; 0 if one of them sees
        everything."""
        windows = [self.windows[layer] for layer in self.layers_of(kind)]
        return max(windows, default=0) if all(windows) else 0

    def key_value_bytes(self, number_format: str, windowed: bool = False) -> int:
        """Bytes that one token adds to the cache, or to that of layers with a sliding window alone. With latents, keys
        are also the values; keys by which blocks are chosen are never packed."""
        chosen = 0
        if self.blocks is not None and not windowed:
            plain = "F32" if number_format == "F32" else "BF16"
            chosen = len(self.attention_layers) * stored_bytes(plain, (self.blocks.width,))
        return chosen + sum(
            len(self.layers_of(kind)) * heads.key_value_heads * stored_bytes(number_format, (width,))
            for kind, heads in enumerate(self.kinds)
            for width in (heads.widths if self.latent is None else heads.widths[:1])
            if not windowed or self.window_of(kind)
        )


def read_shape(config: Mapping[str, Any], moe_layers: tuple[int, ...]) -> Shape:
    """The shape of a model of a supported family. Raises ModelError naming a setting that is missing or impossible."""
    family, config = FAMILIES[config["model_type"]], completed(config)
    decoder, moe = family.decoder, family.moe
    router = None if moe is None else moe.router
    hidden, heads, layers = (
        whole_number(config, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    latent = _read_latent(config, decoder, layers) if decoder.latents else None
    kinds, kind_of = _read_heads(config, decoder, layers, latent)
    shared: SharedExpert = "none" if moe is None or not moe_layers else moe.shared
    shared_ffn = 0 if moe is None or shared == "none" else shared_width(config, moe)
    if shared == "plain" and not shared_ffn:
        shared = "none"
    networks = _networks(config, decoder, layers)
    dense = frozenset(range(layers)) if decoder.norms != "single" else frozenset(networks)
    dense = dense if shared == "network" else dense.difference(moe_layers)

    return Shape(
        family=family.model_type,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kinds=kinds,
        kind_of=kind_of,
        keys_of=tuple(decoder.keys_of(config, layers)),
        networks=networks,
        ffns=tuple(decoder.ffn(config, layer) if layer in dense else 0 for layer in range(layers)),
        vocabulary=whole_number(config, "vocab_size"),
        context=whole_number(config, "max_position_embeddings"),
        epsilon=positive_number(config, decoder.epsilon_setting, 1e-6),
        gate=read_gate(config),
        network_gates=limited_gates(config, decoder.limit),
        expert_gates=expert_gates(config),
        has_gates=family.has_gates,
        windows=tuple(decoder.windows(config, layers)),
        chunked=decoder.chunked,
        moe_layers=moe_layers,
        latents=_read_latents(config, moe) if moe_layers else 0,
        top_k=_top_k(config) if moe_layers else 0,
        routing=_read_routing(config, router) if moe_layers and router is not None else Routing(),
        head_norm=decoder.head_norm if switched(decoder.head_norm_setting or True, config) else "none",
        qkv_bias=switched(decoder.qkv_bias, config),
        output_bias=switched(decoder.output_bias, config),
        mlp_bias=switched(decoder.mlp_bias, config),
        merged_attention=decoder.merged_attention,
        merged_ffn=decoder.merged_ffn,
        rotated_first=decoder.rotated_first,
        paired_rotary=decoder.paired_rotary,
        query_growth=decoder.query_growth(config),
        gate_heads=_read_gate_of_heads(config, decoder),
        tied=bool(config.get("tie_embedding", config.get("tie_word_embeddings"))),
        routers=() if router is None else router.names,
        router_bias=router is not None and router.bias,
        router_norm="" if router is None else router.norm,
        expert_scale="" if router is None else router.expert_scale,
        correction="" if router is None or config.get(router.correction_setting) is False else router.correction,
        correction_of_one_row=router is not None and router.correction_of_one_row,
        shared_expert=shared,
        shared_ffn=shared_ffn,
        clip=positive_number(config, "clip_qkv", 0.0) if decoder.clip else 0.0,
        embedding_scale=decoder.embedding_scale(config),
        attention_scale=_attention_scale(config, decoder, kinds[0], latent),
        residual_scale=decoder.residual_scale(config),
        logits_divisor=decoder.logits_divisor(config),
        logits_cap=positive_number(config, decoder.logits_cap, 0.0) if decoder.logits_cap else 0.0,
        scores_cap=positive_number(config, decoder.scores_cap, 0.0) if decoder.scores_cap else 0.0,
        value_scale=decoder.value_scale(config),
        shared_scale=1.0 if moe is None else moe.shared_scale(config),
        norms=decoder.norms,
        centred_norms=decoder.centred_norms(config),
        offset_norms=decoder.offset_norms,
        layer_scale=decoder.layer_scale,
        value_norm=decoder.value_norm,
        own_width=_own_width(config, decoder, hidden),
        own_vocabulary=whole_number(config, "vocab_size_per_layer_input", "vocab_size"),
        altup=None if decoder.altup is None else decoder.altup(config),
        deviations=tuple(_deviations(decoder.sparsity(config, layer)) for layer in range(layers)),
        delta=_read_delta(config, decoder, layers) if decoder.mixer in ("delta-net", "mamba") else None,
        latent=latent,
        convolution=_read_convolution(config, layers) if decoder.mixer == "convolution" else None,
        streams=None if decoder.streams is None else decoder.streams(config),
        lexical=_read_lexical(config, decoder, layers),
        blocks=None if decoder.blocks is None else decoder.blocks(config),
        names=decoder.names,
    )


def _deviations(share: float) -> float | None:
    return NormalDist().inv_cdf(share) if share else None


def _read_latents(config: Mapping[str, Any], moe: MoeRecord | None) -> int:
    if moe is None or config.get(moe.latent_key) is None:
        return 0
    return whole_number(config, moe.latent_key)


def _top_k(config: Mapping[str, Any]) -> int:
    """Number of experts per token. Raises ModelError if neither ``config.json`` nor the family gives it."""
    found = stated_experts_per_token(config)
    if not found:
        raise damaged("config.json does not say how many experts a token goes to")
    return found


def _read_gate_of_heads(config: Mapping[str, Any], decoder: DecoderRecord) -> GatedHeads | None:
    gate = decoder.head_gate
    return None if gate is None else GatedHeads(gate.name, gate.softplus, gate.whole(config))


def _own_width(config: Mapping[str, Any], decoder: DecoderRecord, hidden: int) -> int:
    if not decoder.own_input or not config.get(decoder.own_input):
        return 0
    return whole_number(config, decoder.own_input, maximum=hidden)


def _attention_scale(
    config: Mapping[str, Any], decoder: DecoderRecord, heads: HeadShape, latent: LatentShape | None
) -> float:
    """Factor on the scores of attention."""
    if latent is None:
        return decoder.score_scale(config, heads.width)
    rope = heads.rope
    stretched = rope and rope["rope_type"] != "default" and rope.get("mscale_all_dim")
    factor = 1.0
    if stretched:
        factor = rotary.attention_scale(
            positive_number(rope, "factor", 1.0), positive_number(rope, "mscale_all_dim", 1.0)
        )
    return float((latent.plain + latent.rotated) ** -0.5 * factor * factor)


def _read_latent(config: Mapping[str, Any], decoder: DecoderRecord, layers: int) -> LatentShape:
    return LatentShape(
        latents=_even(config, "kv_lora_rank"),
        rotated=_even(config, "qk_rope_head_dim"),
        plain=whole_number(config, "qk_nope_head_dim"),
        values=whole_number(config, "v_head_dim"),
        query_rank=0 if config.get("q_lora_rank") is None else whole_number(config, "q_lora_rank"),
        # transformers gives these norms no epsilon of the configuration.
        epsilon=1e-6,
        interleaved=switched(decoder.interleaving_setting or True, config),
        index=_read_index(config, decoder, layers) if decoder.index_width else None,
    )


def _read_index(config: Mapping[str, Any], decoder: DecoderRecord, layers: int) -> IndexShape:
    index = IndexShape(
        heads=whole_number(config, "index_n_heads"),
        width=_even(config, decoder.index_width),
        top=whole_number(config, "index_topk"),
        interleaved=decoder.index_interleaved,
        layers=tuple(decoder.index_layers(config, layers)),
    )
    rotated = _even(config, "qk_rope_head_dim")
    if index.width < rotated:
        raise damaged(f"config.json rotates {rotated} numbers of an indexer's {index.width}, which do not fit together")
    return index


def _layers_of_kind(config: Mapping[str, Any], layers: int, kind: str, others: tuple[str, ...] = ()) -> tuple[int, ...]:
    """The layers of the ``kind`` that the family has beside attention and ``others``."""
    kinds = check_kinds(layer_kinds(config), layers, ("full_attention", kind, *others))
    return tuple(layer for layer, each in enumerate(kinds) if each == kind)


def _networks(config: Mapping[str, Any], decoder: DecoderRecord, layers: int) -> tuple[int, ...]:
    kinds = layer_kinds(config) if decoder.norms == "single" else ()
    return tuple(layer for layer, kind in enumerate(kinds) if kind in NETWORKS)


def _read_convolution(config: Mapping[str, Any], layers: int) -> ConvolutionShape:
    return ConvolutionShape(_layers_of_kind(config, layers, "conv"), whole_number(config, "conv_L_cache"))


def _read_lexical(config: Mapping[str, Any], decoder: DecoderRecord, layers: int) -> LexicalShape | None:
    sizes = decoder.lexical(config)
    if sizes is None:
        return None
    others = set(sizes.layers).difference(_layers_of_kind(config, layers, "linear_attention"))
    if others:
        raise damaged(f"config.json adds embeddings of n-grams to layer {min(others) + 1}, which has no delta-net")
    hashes = ngram_hashes(config)
    if sizes.width % len(hashes[0].sizes):
        raise damaged(
            f"config.json gives {sizes.width} numbers of {len(hashes[0].sizes)} heads for ple_embed_dim, which do not "
            "fit together"
        )
    return LexicalShape(sizes.layers, hashes, sizes.width, sizes.taps, sizes.channels)


def _even(config: Mapping[str, Any], key: str) -> int:
    value = whole_number(config, key)
    if value % 2:
        raise damaged(f"config.json gives {value} for {key}, which must be even")
    return value


def _read_routing(config: Mapping[str, Any], router: RouterRecord) -> Routing:
    grouped = router.groups and (router.groups > 1 or config["topk_method"] != "greedy")
    groups, kept_groups = (whole_number(config, key) if grouped else 1 for key in ("n_group", "topk_group"))
    return Routing(
        scoring=config.get(router.scoring_setting) or router.scoring,
        scales_input=router.scales_input,
        groups=groups,
        kept_groups=kept_groups,
        group_best=max(router.groups, 1),
        normalise=switched(router.normalise, config),
        added_to_sum=router.added_to_sum,
        least_sum=positive_number(config, router.least_sum) if router.least_sum else 0.0,
        scale=router.scale(config),
    )


def _read_heads(
    config: Mapping[str, Any], decoder: DecoderRecord, layers: int, latent: LatentShape | None
) -> tuple[tuple[HeadShape, ...], tuple[int, ...]]:
    """The kinds of heads, and the kind of each layer."""
    if latent is not None:
        kind = "" if decoder.head_kinds is None else decoder.head_kinds(config, layers)[0]
        rope, count = rope_of_kind(config, decoder, kind), whole_number(config, "num_attention_heads")
        width, index = latent.rotated + latent.latents, latent.index
        heads = HeadShape(count, 1, width, width, latent.rotated, rope)
        if index is None:
            return (heads,), (0,) * layers
        indexers = replace(heads, heads=index.heads, width=index.width, value_width=index.width)
        return (heads, indexers), (0,) * layers
    if decoder.head_kinds is None:
        alike, windows = _read_kind(config, decoder, ""), decoder.windows(config, layers)
        if any(windows) and not all(windows):
            return (alike, alike), tuple(int(window == 0) for window in windows)
        return (alike,), (0,) * layers
    names = decoder.head_kinds(config, layers)
    present = sorted(set(names), reverse=True)
    kinds = []
    for name in present:
        kinds.append(_read_kind(layer_config(config, names.index(name), name), decoder, name))
    return tuple(kinds), tuple(present.index(name) for name in names)


def rope_of_kind(config: Mapping[str, Any], decoder: DecoderRecord, kind: str) -> dict[str, Any]:
    """The rotary settings of heads of ``kind``; empty where nothing is rotated."""
    if kind and kind == decoder.unrotated:
        return {}
    if decoder.kind_rope is None:
        return rotary.rope_settings(config, decoder.rope_theta, decoder.rope)
    own = decoder.kind_rope(config, kind)
    longest = config.get("max_position_embeddings")
    return rotary.rope_settings({"rope_parameters": own, "max_position_embeddings": longest}, decoder.rope_theta, {})


def _read_kind(config: Mapping[str, Any], decoder: DecoderRecord, kind: str) -> HeadShape:
    rope = rope_of_kind(config, decoder, kind)
    hidden, heads = whole_number(config, "hidden_size"), whole_number(config, "num_attention_heads")
    width = whole_number(config, "head_dim", default=hidden // heads)
    key_value_heads = whole_number(config, "num_key_value_heads", default=heads)
    values = whole_number(config, decoder.value_width) if decoder.value_width else width
    if heads % key_value_heads or width % 2 or values % 2:
        also = f" (values {values})" if decoder.value_width else ""
        raise damaged(
            f"config.json gives {heads} heads of {width}{also} over {key_value_heads} key/value heads, which do not "
            "fit together"
        )
    return HeadShape(
        heads,
        key_value_heads,
        width,
        values,
        _rotated(rope, decoder, width) if rope else 0,
        rope,
        decoder.keys_are_values(config, kind),
        decoder.sinks(config, kind),
    )


def _rotated(rope: Mapping[str, Any], decoder: DecoderRecord, width: int) -> int:
    share = rope.get("partial_rotary_factor")
    if decoder.rotated is None:
        return width
    part = decoder.rotated if share is None else share
    rotated = int(width * part) if 0 <= part <= 1 else 0
    if rotated % 2 or not 2 <= rotated <= width:
        raise damaged(
            f"config.json rotates {rotated} numbers of heads of {width} (partial_rotary_factor {shown(share)}), which "
            "must be an even number of them"
        )
    return rotated


def _read_delta(config: Mapping[str, Any], decoder: DecoderRecord, layers: int) -> DeltaShape:
    kinds = _layers_of_kind(config, layers, "linear_attention", NETWORKS if decoder.norms == "single" else ())
    if decoder.mamba is not None:
        sizes = decoder.mamba(config)
        if sizes.heads % sizes.groups:
            raise damaged(f"config.json gives {sizes.heads} heads of Mamba-2 layers in {sizes.groups} groups")
        limits, biased = _step_limits(config), sizes.biased
        widths = sizes.groups, sizes.heads, sizes.states, sizes.width, sizes.taps
        return DeltaShape(*widths, layers=kinds, step_limits=limits, biased=biased)
    shape = DeltaShape(**vars(decoder.delta(config)), layers=kinds)
    if shape.value_heads % shape.key_heads:
        raise damaged(
            f"config.json gives {shape.value_heads} value heads over {shape.key_heads} key heads of delta-nets, which "
            "do not fit together"
        )
    return shape


def _step_limits(config: Mapping[str, Any]) -> tuple[float, float]:
    """Limits of the steps of Mamba-2 layers. JSON has no infinity, which transformers writes as a table."""
    stated = config.get("time_step_limit")
    if stated is None:
        return 0.0, math.inf
    try:
        least, most = (float(each["__float__"] if isinstance(each, Mapping) else each) for each in stated)
    except (TypeError, ValueError, KeyError):
        least, most = math.nan, math.nan
    if not 0 <= least <= most:
        raise damaged(f"config.json gives {shown(stated)} for time_step_limit, which must be two numbers from 0 on")
    return least, most


def unsupported_shape(config: Mapping[str, Any]) -> str | None:
    """Why a model with this configuration does not have the common shape, in a few words; None if it has."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not family.native:
        return f"it does not run the family {shown(config.get('model_type'))!r}"
    config = completed(config)
    decoder, activation = family.decoder, activation_of(config)
    if not has_kernel(family, activation):
        return f"the activation {shown(activation)} has no kernel"
    if family.moe is not None and config.get(family.moe.latent_key) is not None and config.get("mlp_bias"):
        return "the projections of the latents that its experts read have biases"
    if reason := _unsupported_mixer(config, decoder, activation):
        return reason
    if reason := _too_many_kinds(config, decoder):
        return reason
    if config.get("moe_router_logit_softcapping"):
        return "the logits of its routers have a limit"
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        return "its attention looks ahead"
    for settings in _rotated_kinds(config, decoder):
        if decoder.kind_rope is None or settings["rope_type"] != "proportional":
            reason = rotary.unsupported_reason(settings, decoder.rotated is not None, decoder.stretched_base)
            if reason is not None:
                return reason
    return None


def _too_many_kinds(config: Mapping[str, Any], decoder: DecoderRecord) -> str | None:
    if decoder.head_kinds is None:
        return None
    with contextlib.suppress(ModelError):  # reading the shape says what is damaged
        kinds = len(set(decoder.head_kinds(config, whole_number(config, "num_hidden_layers"))))
        if kinds > HEAD_KINDS:
            return f"its heads are of {kinds} kinds, and the most is {HEAD_KINDS}"
    return None


def _unsupported_mixer(config: Mapping[str, Any], decoder: DecoderRecord, activation: str) -> str | None:
    if decoder.altup is not None and config.get("altup_active_idx"):
        return "its layers run on another residual stream than the first"
    if decoder.altup is not None and decoder.altup(config).count > MOST_STREAMS:
        return f"it has more than {MOST_STREAMS} residual streams"
    if decoder.mixer == "delta-net" and ACTIVATIONS[activation] != "silu":
        return f"its delta-nets have the activation {shown(activation)}, and only silu has a kernel there"
    if config.get("attention_bias") and (decoder.mixer == "delta-net" or decoder.latents):
        return f"its {'attention over latents' if decoder.latents else 'gated attention'} has biases"
    if decoder.centred_norms(config) and config.get("use_qk_norm"):
        return "norms of its queries and keys take the mean from them"
    if decoder.mamba is not None:
        with contextlib.suppress(ModelError):  # reading the shape says which setting is missing
            return _unsupported_mamba(config, decoder.mamba(config), activation)
    if decoder.mixer == "convolution" and (config.get("conv_bias") or config["conv_L_cache"] == 1):
        return f"its convolutions {'have biases' if config.get('conv_bias') else 'are over one token'}"
    if decoder.mixer == "delta-net":
        with contextlib.suppress(ModelError):
            lexical = decoder.lexical(config)
            return _too_many_taps(max(decoder.delta(config).taps, 0 if lexical is None else lexical.taps))
    return None


def _too_many_taps(taps: int) -> str | None:
    return f"its convolutions are over {taps} tokens, and the most is {MOST_TAPS}" if taps > MOST_TAPS else None


def _unsupported_mamba(config: Mapping[str, Any], sizes: MambaSizes, activation: str) -> str | None:
    if config.get("mamba_proj_bias") or config.get("use_bias"):
        return "the projections of its Mamba-2 layers have biases"
    if (config.get("mamba_hidden_act") or activation) not in ("silu", "swish"):
        return "its Mamba-2 layers have another activation than silu"
    return _too_many_taps(sizes.taps)


def _rotated_kinds(config: Mapping[str, Any], decoder: DecoderRecord) -> list[dict[str, Any]]:
    """The rotary settings of each kind of heads that is rotated; none if some are missing."""
    with contextlib.suppress(ModelError):
        layers = whole_number(config, "num_hidden_layers")
        kinds = [""] if decoder.head_kinds is None else sorted(set(decoder.head_kinds(config, layers)))
        return [settings for kind in kinds if (settings := rope_of_kind(config, decoder, kind))]
    return []


# --- the dtype of a model --------------------------------------------------------------------------------------------


NAMES: Mapping[str, Dtype] = {"BF16": "bfloat16", "F32": "float32", "F16": "bfloat16"}
"""The dtype to compute in for each stored format, unless a person chooses another one. The cache of a float16 model
holds bfloat16; its weights are multiplied in float32."""


def bulk_dtype(files: ModelFiles) -> str:
    """The format of most of the weights, by safetensors' name."""
    if files.experts is not None:
        return files.experts.dtype
    sizes: dict[str, int] = {}
    for _, tensor in files.trunk():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def compute_dtype(files: ModelFiles, request: Load) -> Dtype:
    """The dtype to compute in: as requested, or that of most stored weights; bfloat16 if they are packed."""
    return NAMES.get(bulk_dtype(files), "bfloat16") if request.dtype == "auto" else request.dtype
