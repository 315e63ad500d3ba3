"""What is known of a family of models: the record that runtimes, readers of files, plans and refusals are made from.

A family is one :class:`Family` in a file of :mod:`engine.models.architectures.records`, composed of the parts below.
Names of tensors are those of transformers' checkpoints; names of settings are those of ``config.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from engine.models.architectures.config_values import whole_number
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.model_files import Change

Config = Mapping[str, Any]

# --- routed experts ---------------------------------------------------------------------------------------------------

Part = Literal["gate", "up", "down", "gate_bias", "up_bias", "down_bias"]
PARTS: tuple[Part, ...] = get_args(Part)
"""All parts, in the order in which an expert's bytes are listed."""
Stacking = Literal["separate", "stacked", "rows"]
"""``separate``: one tensor per expert. ``stacked``: [experts, ...]. ``rows``: [experts * rows, columns]."""

ActivationKind = Literal["gated", "clamped", "squared"]
"""``gated``: act(gate) * up with the configuration's act. ``clamped``: gpt-oss's, with limits, (up + 1) * glu(gate).
``squared``: networks and experts have no gate, and the square of relu(up) (nemotron_h). Their first matrix is called
``gate``, and stands for both."""
Scoring = Literal["softmax", "sigmoid"]
"""What a router makes of the experts' logits."""
SharedExpert = Literal["none", "gated", "plain", "network"]
"""An expert that runs for all tokens: none; scaled by a gate of its own (qwen2_moe); as it is (deepseek_v3); the
layer's usual feed-forward network, with norms of its own before and after it (gemma4)."""


@dataclass(frozen=True)
class ExpertTensor:
    """The layout of one kind of checkpoint tensor with routed experts.

    ``template`` is its name with ``{layer}`` and, if there is one tensor per expert, ``{expert}``. ``parts`` are its
    contents, one below the other, or alternating by row if ``interleaved``. ``transposed``: stored [in, out].
    """

    template: str
    parts: tuple[Part, ...]
    stacking: Stacking = "separate"
    transposed: bool = False
    interleaved: bool = False

    @property
    def strided(self) -> bool:
        """Whether an expert's matrices are not contiguous rows in the file."""
        return self.transposed or self.interleaved


Layout = tuple[ExpertTensor, ...]


LATENTS = ("mlp.fc1_latent_proj.weight", "mlp.fc2_latent_proj.weight")
"""Names within a layer of the projections of the hidden state to the latents that experts read, and back."""

Number = Callable[[Config], float]
"""A number that settings give."""


def one(config: Config) -> float:
    """1, whatever the settings are."""
    return 1.0


Limit = Callable[[Config, int], float]
"""Limit of what SiLU gives within a layer, and of what it multiplies, from the settings and the layer; 0: none."""


def unlimited(config: Config, layer: int) -> float:
    """No layer has a limit."""
    return 0.0


@dataclass(frozen=True)
class RouterRecord:
    """How a layer chooses and weighs a token's experts."""

    names: tuple[str, ...]
    """Names that a checkpoint may use for its matrix within a layer, the usual one first."""
    bias: bool = False
    """Whether it has a bias, and so the matrices of the experts."""
    scoring: Scoring = "softmax"
    scoring_setting: str = ""
    """Setting that may name another scoring; empty: none."""
    normalise: bool | str | Callable[[Config], bool] = False
    """Whether the chosen experts' weights are divided by their sum: never, always, or as this setting or rule says."""
    added_to_sum: float = 0.0
    """What is added to that sum, as transformers does with scores that may all be 0."""
    least_sum: str = ""
    """Setting of the least that the sum of a softmax's weights is taken to be; empty: there is none."""
    correction: str = ""
    """Name of what is added to the experts' scores where they are compared, not where they are weighed."""
    correction_of_one_row: bool = False
    """Whether that is a matrix of one row, not a vector (ernie4_5_moe)."""
    correction_setting: str = ""
    """Setting that must not be false for it; empty: none."""
    groups: Literal[0, 1, 2] = 0
    """Experts by which groups of experts are compared, of which only the best are used: their best one, or best two
    together; 0: experts are in no groups."""
    scales_input: bool = False
    """Whether the weights of chosen experts multiply their inputs, not their outputs (llama4)."""
    scale: Number = one
    """Factor of the weights of chosen experts."""
    norm: str = ""
    """Name of the weights of a norm in front of it, whose result is divided by the root of its width (gemma4)."""
    expert_scale: str = ""
    """Name of factors of the weights of chosen experts, one for each expert (gemma4)."""


@dataclass(frozen=True)
class MoeRecord:
    """The routed experts of a family's layers."""

    layouts: tuple[Layout, ...]
    """Ways in which checkpoints store them."""
    router: RouterRecord | None = None
    """None: only libraries route."""
    setting: str = ""
    """Setting that is true in models of the family that have experts; empty: all have."""
    shared: SharedExpert = "none"
    shared_ffn: Callable[[Config], int] = lambda config: (
        whole_number(config, "moe_intermediate_size") * whole_number(config, "n_shared_experts")
    )
    """Width of a plain shared expert. Several are stored as one."""
    shared_scale: Number = one
    """Factor on what a plain shared expert gives."""
    activation: ActivationKind = "gated"
    limit: Limit = unlimited
    """Limit within the routed experts of a layer (step3p5)."""
    layers: Callable[[Config, int], list[int]] = lambda config, layers: list(range(layers))
    """Layers with experts, from the configuration and the number of layers."""
    count_key: str = "num_local_experts"
    """Setting of the number of experts."""
    per_token_key: str = "num_experts_per_tok"
    """Setting of how many experts a token goes to."""
    ffn_key: str = "intermediate_size"
    """Setting of the inner size of an expert."""
    latent_key: str = ""
    """Setting of the width of latents that experts read in place of the hidden state, null without; empty: none
    (nemotron_h)."""
    published_mxfp4: bool = False
    """Whether its authors publish the experts in MXFP4."""


# --- the decoder ------------------------------------------------------------------------------------------------------

HeadNorm = Literal["none", "per-head", "whole", "rotated"]
"""Norms of queries and keys: none; each head by itself (qwen3); the whole projection (olmoe); each head that is
rotated, without weights (llama4)."""
Mixer = Literal["none", "delta-net", "mamba", "convolution", "lightning"]
"""What most layers have in place of attention: nothing else; a gated delta-net (qwen3_5); a Mamba-2 layer
(granitemoehybrid); a short convolution (lfm2_moe); attention that keeps one matrix of state (minimax)."""


Norms = Literal["before", "around", "after", "beside", "single", "streams"]
"""Places of the norms of attention and of the feed-forward network: before them; before and after (gemma4); after
(olmo2); one before both, which run beside each other (cohere2); one before the only part of the layer, as its kind says
(nemotron_h); none but those of several residual streams (qwen4_exp).

The norms after are ``post_attention_layernorm`` and ``post_feedforward_layernorm``; then the one before the network is
``pre_feedforward_layernorm``."""


@dataclass(frozen=True)
class QueryGrowth:
    """The factor 1 + ``by`` * log(1 + floor((p + ``ahead``) / ``step``)) of the query at position p."""

    by: float
    step: float
    ahead: int = 0
    unrotated: bool = False
    """Whether only heads that are not rotated have it."""


@dataclass(frozen=True)
class HeadGate:
    """A projection of what attention reads: its result, activated by the sigmoid or ``softplus``, scales what heads
    have gathered."""

    name: str
    """Name of its matrix within attention."""
    softplus: bool = False
    whole: Callable[[Config], bool] = lambda config: False
    """Whether it has one number for each head, not one for each of a head's."""


@dataclass(frozen=True)
class MambaSizes:
    """Sizes of a Mamba-2 layer: each of ``heads`` has a state [``width``, ``states``]. Heads of a group have the same
    inputs to and outputs of their states. A convolution over ``taps`` tokens comes before."""

    heads: int
    width: int
    groups: int
    states: int
    taps: int
    biased: bool = True
    """Whether the convolution has a bias."""

    @property
    def values(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Width of the convolution."""
        return self.values + 2 * self.groups * self.states


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a gated delta-net: each of ``value_heads`` has a state [``key_width``, ``value_width``]. A convolution
    over ``taps`` tokens comes before."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    wide_decays: bool = False
    """Whether each row of a state decays by itself (kimi_linear)."""
    sigmoid_gates: bool = False
    """Whether gates are activated by the sigmoid, not by SiLU."""
    rank: int = 0
    """Inner size of the two matrices that give decays, and of those that give gates; 0: a single matrix gives them."""
    least_decay: float = 0.0
    """The least logarithm of a decay, which a sigmoid leads to; 0: there is none (bailing_hybrid)."""

    @property
    def channels(self) -> int:
        """Width of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width


def delta_sizes(config: Config) -> DeltaSizes:
    """Sizes of a delta-net as Qwen's settings name them."""
    return DeltaSizes(
        key_heads=whole_number(config, "linear_num_key_heads"),
        value_heads=whole_number(config, "linear_num_value_heads"),
        key_width=whole_number(config, "linear_key_head_dim"),
        value_width=whole_number(config, "linear_value_head_dim"),
        taps=whole_number(config, "linear_conv_kernel_dim"),
    )


@dataclass(frozen=True)
class LexicalSizes:
    """What the ``layers`` that add embeddings of n-grams keep of the text (qwen4_exp): the last ``tokens`` - 1 tokens,
    and the last inputs of a convolution of ``channels`` over ``taps`` tokens that are ``tokens`` apart. ``width``:
    numbers of the embeddings of a token."""

    layers: tuple[int, ...]
    tokens: int
    taps: int
    channels: int
    width: int

    @property
    def kept(self) -> int:
        """Tokens whose inputs the convolution needs again."""
        return (self.taps - 1) * self.tokens


@dataclass(frozen=True)
class StreamSizes:
    """Residual streams in place of norms (qwen4_exp): ``count`` of them, mixed by matrices of ``rank``."""

    count: int
    rank: int


@dataclass(frozen=True)
class AltupSizes:
    """Alternating updates of ``count`` residual streams (gemma3n), with matrices of ``rank`` beside attention.
    ``scaled``: whether what layers' own inputs read is scaled."""

    count: int
    rank: int
    scaled: bool


@dataclass(frozen=True)
class BlockChoice:
    """The choice of what attention sees (qwen4_exp): of the blocks of ``size`` tokens those that suit a token best, as
    many as have ``budget`` tokens, and the tokens behind the last whole block. ``heads`` queries of ``width`` numbers
    choose."""

    heads: int
    width: int
    size: int
    budget: int
    gated: bool = False
    """Whether a block's key is the sum of its tokens' keys by gates, and a token weighs the heads (glm5_next); else it
    is their mean."""


@dataclass(frozen=True)
class CompressedKeys:
    """What a layer keeps of the tokens behind its window (deepseek_v4): for every ``rate`` tokens a key of ``width``
    numbers, which is the value, too; 0: nothing. ``index``: numbers of another one by which keys are chosen, 0 if all
    are seen; chosen keys stand for the tokens before theirs, too."""

    rate: int
    width: int
    index: int

    @property
    def numbers(self) -> int:
        """Numbers that a token adds to the cache, rounded up."""
        return -(-(self.width + self.index) // self.rate) if self.rate else 0

    @property
    def waiting(self) -> int:
        """Numbers of tokens that wait until a key is whole: keys and gates, of chosen ones those of the key before,
        too."""
        return self.rate * (self.width + self.index) * (6 if self.index else 2)


def no_windows(config: Config, layers: int) -> list[int]:
    """No layer has a sliding window."""
    return [0] * layers


def by_width(config: Config, width: int) -> float:
    """The usual factor on the scores of attention with heads of ``width``."""
    return float(width**-0.5)


def own_keys(config: Config, layers: int) -> list[int]:
    """Every layer has keys and values of its own."""
    return list(range(layers))


def same_width(config: Config, layer: int) -> int:
    """The dense feed-forward networks of all layers have ``intermediate_size``."""
    return whole_number(config, "intermediate_size")


@dataclass(frozen=True)
class DecoderRecord:
    """What distinguishes a family's layers from the common ones: RMS norm, rotary grouped-query attention, residual,
    RMS norm, gated feed-forward or routed experts, residual."""

    mixer: Mixer = "none"
    delta: Callable[[Config], DeltaSizes] = delta_sizes
    """Sizes of gated delta-nets, where they are the mixer."""
    mamba: Callable[[Config], MambaSizes] | None = None
    """Sizes of Mamba-2 layers; None: the family has none."""
    layer_kind: Callable[[Config, int], str] = lambda config, layer: "full_attention"
    """Kind of a layer where ``layer_types`` does not say it."""
    latents: bool = False
    """Whether attention is over latents (deepseek_v2)."""
    interleaving_setting: str = ""
    """Setting that is false if the rotated numbers of queries over latents are not in pairs; empty: they always are."""
    norms: Norms = "before"
    layer_scale: bool = False
    """Whether a number of its own (``layer_scalar``) scales the hidden state after each layer (gemma4)."""
    index_width: str = ""
    """Setting of the width of a further key of each token, by which attention chooses tokens, or blocks of them; empty:
    none (qwen4_exp)."""
    index_vectors: int = 1
    """Vectors of that width that are kept of each token: the key alone, or with it how much each of its numbers counts
    in its block (glm5_next)."""
    index_layers: Callable[[Config, int], list[int]] = own_keys
    """The layers with attention over latents that have such keys; others see what the one before them has chosen."""
    index_interleaved: bool = False
    """Whether a rotation of these keys turns neighbouring numbers, where attention is over latents (glm_moe_dsa)."""
    lexical: Callable[[Config], LexicalSizes | None] = lambda config: None
    """The embeddings of n-grams that layers add to the hidden state; None: there are none."""
    streams: Callable[[Config], StreamSizes] | None = None
    """The residual streams where their norms are the only ones; None: there is one."""
    altup: Callable[[Config], AltupSizes] | None = None
    """The residual streams of which layers run on the first one, and update all; None: there is one."""
    sparsity: Callable[[Config, int], float] = lambda config, layer: 0.0
    """Share of the gates of a layer's network that would not count if they were normally distributed; 0: all count
    (gemma3n)."""
    blocks: Callable[[Config], BlockChoice] | None = None
    """The choice of the blocks that attention sees; None: it sees all."""
    compressed: Callable[[Config, int], list[CompressedKeys]] | None = None
    """The compressed keys of each layer, which sees no others behind its window; None: keys are those of tokens."""
    own_input: str = ""
    """Setting of the width of an embedding that each layer has of its own, 0 without; empty: none (gemma4)."""
    head_kinds: Callable[[Config, int], list[str]] | None = None
    """The kind of each layer's heads, of two at most; None: all are alike."""
    unrotated: str = ""
    """The kind of heads that are not rotated; empty: none."""
    kind_rope: Callable[[Config, str], Config] | None = None
    """Rotary settings of the heads of a kind; None: the same for all kinds."""
    centred_norms: Callable[[Config], bool] = lambda config: False
    """Whether norms of the hidden state take the mean from it (cohere2)."""
    offset_norms: bool = False
    """Whether norms multiply by one more than their weights (gemma3, qwen3_5)."""
    keys_are_values: Callable[[Config, str], bool] = lambda config, kind: False
    """Whether the heads of a kind have the keys, before they are normed and rotated, as values."""
    keys_of: Callable[[Config, int], list[int]] = own_keys
    """For each layer the one whose keys and values it attends to."""
    value_norm: bool = False
    """Whether each head's values are normed, without weights (gemma4)."""
    ffn: Callable[[Config, int], int] = same_width
    """Width of the dense feed-forward network of a layer."""
    limit: Limit = unlimited
    """Limit within the networks of a layer that all tokens pass, also within shared experts (step3p5)."""
    windows: Callable[[Config, int], list[int]] = no_windows
    """Tokens that each layer sees; 0: all."""
    chunked: bool = False
    """Whether a layer sees the tokens from the last multiple of that number on (llama4)."""
    head_norm: HeadNorm = "none"
    head_norm_setting: str = ""
    """Setting that has to be true for ``head_norm``; empty: always."""
    qkv_bias: bool | str = False
    """A bias of queries, keys and values: never, always, or as this setting says."""
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    merged_attention: bool = False
    """Whether the projections of queries, keys and values are one matrix, one below the other (phi3)."""
    merged_ffn: bool = False
    """Whether gate and up of networks that all tokens pass are one matrix, one below the other (phi3, glm4)."""
    rotated_first: bool = False
    """Whether heads are normed after they are rotated, not before (hunyuan)."""
    paired_rotary: bool = False
    """Whether a rotation turns neighbouring values of a head, not values half a head apart (ernie4_5)."""
    query_growth: Callable[[Config], QueryGrowth | None] = lambda config: None
    """How queries grow with their positions (ministral3); None: they do not."""
    sinks: Callable[[Config, str], bool] = lambda config, kind: False
    """Whether every head of a kind has a logit besides those of the keys, which takes a share of the attention
    (gpt_oss)."""
    value_width: str = ""
    """Setting of the width of a head's values; empty: that of its keys (mimo_v2_flash)."""
    value_scale: Number = one
    """Factor on values as attention adds them up."""
    ungated: bool = False
    """Whether networks have no gate: what their first matrix gives is activated (apertus)."""
    clip: bool = False
    """Whether ``clip_qkv`` limits queries, keys and values (olmoe)."""
    embedding_scale: Number = one
    score_scale: Callable[[Config, int], float] = by_width
    """Factor on the scores of attention, from the settings and the width of a head."""
    residual_scale: Number = one
    """Factor on what each part of a layer gives."""
    logits_divisor: Number = one
    logits_cap: str = ""
    """Setting of the limit to which logits are bent; empty: none."""
    scores_cap: str = ""
    """Setting of the limit to which the scores of attention are bent; empty: none (gemma2)."""
    head_gate: HeadGate | None = None
    """What scales heads' results; None: nothing."""
    rotated: float | None = None
    """Share of each head that is rotated if ``config.json`` does not say it; None: all of it, and no other share is
    known."""
    stretched_base: bool = False
    """Whether rotary settings of the type ``dynamic`` have an ``alpha`` that stretches the base (hunyuan)."""
    rope_theta: float = 10_000.0
    """Base of the rotary embeddings if ``config.json`` gives none."""
    rope: Config = field(default_factory=dict)
    """Rotary settings if ``config.json`` has none."""
    rope_theta_key: str = ""
    """Setting of the base where the family's authors have another than transformers; dots lead into sections."""
    epsilon_setting: str = "rms_norm_eps"
    activation_setting: str = "hidden_act"
    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of the usual names of tensors, and what stands there in this family's."""
    kind_settings: Callable[[Config, str], Config] = lambda config, kind: {}
    """Settings that differ in layers of a kind."""


def renamed(name: str, parts: Mapping[str, str]) -> str:
    """``name`` with what ``parts`` has in the place of each part of names."""
    for part, instead in parts.items():
        name = name.replace(part, instead)
    return name


def switched(word: bool | str | Callable[[Config], bool], config: Config) -> bool:
    """``word``, or what the rule says, or, if it names a setting, that of ``config``, false if it is missing."""
    if callable(word):
        return word(config)
    return word if isinstance(word, bool) else bool(config.get(word))


# --- GGUF files -------------------------------------------------------------------------------------------------------

Settings = Callable[[Metadata], dict[str, Any]]
FurtherTensors = Callable[[GgufFile, Config], Iterator[NamedTensor]]
MixerTensors = Callable[[GgufFile, Config, str, str], Iterator[NamedTensor]]
"""The tensors of what a layer has in place of attention, given the prefixes of its names in the file and in the
checkpoint."""


@dataclass(frozen=True)
class GgufRecord:
    """How llama.cpp stores a family."""

    name: str
    """``general.architecture``."""
    class_name: str
    """transformers' class of the model."""
    also: tuple[str, ...] = ()
    """Other names of it."""
    when: Callable[[Metadata], bool] | None = None
    """Whether a file of this ``name`` is of this family; None: any that no other family claims."""
    settings: Settings = lambda metadata: {}
    """Settings of ``config.json`` beyond those that all have."""
    paired_rotary: bool = False
    """Whether the two values that a rotation turns together lie side by side in queries and keys, instead of half a
    head apart, which is transformers' order."""
    own_heads: bool = False
    """Whether ``settings`` says which of a head's values are rotated; otherwise all of them must be."""
    yarn: Settings = lambda metadata: {}
    """Settings of yarn that not all have."""
    mixer: MixerTensors | None = None
    further: FurtherTensors = lambda gguf, config: iter(())
    """Tensors beside those that all have."""
    mixed_layers: str = ""
    """The layer type (``layer_types`` of the configuration) whose attention ``mixer`` stands for; empty: of all."""
    sliding_rope: Settings | None = None
    """Rotary settings of layers with a sliding window, where they have some of their own."""
    listed: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Lists in the metadata with a number for each layer: the tensor within a layer that each stands for, and its
    shape."""
    final_norm: str = "output_norm.weight"
    """Name of the norm after the last layer."""
    changes: Callable[[Config], dict[str, Change]] = lambda config: {}
    """What undoes llama.cpp's storage, by the checkpoint's name of the tensor."""


# --- mlx --------------------------------------------------------------------------------------------------------------

SCALED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary position types of most definitions that scale positions at all."""
MlxCheck = Callable[[Config], str | None]
"""Function that returns what is wrong with a configuration, or None."""


@dataclass(frozen=True)
class MlxRecord:
    """How mlx-lm runs a family, and what it ignores of a configuration."""

    module: str
    """Module of mlx_lm.models that defines it."""
    classes: tuple[str, str] = ("Model", "ModelArgs")
    """The model and its arguments in that module."""
    backbone: str = "model"
    """Attribute of the decoder without the head."""
    block: str = "mlp"
    """Attribute of a layer's MoE block."""
    experts: str = "switch_mlp"
    """Attribute of the routed experts in the block."""
    route: str = ""
    """Name of the block's routing, a key of :data:`engine.runtimes.mlx.routing.ROUTES`; empty for a dense family."""
    rope_types: frozenset[str] = frozenset({"default"})
    """Rotary position types that the definition honours."""
    partial_rotary: bool = False
    """Whether it honours ``partial_rotary_factor``."""
    partial_windows: bool = False
    """Whether it does in layers with a window, too."""
    nested_rotary: bool = False
    """Whether it reads ``rope_parameters`` as transformers 5 writes them."""
    windowed: bool = False
    """Whether it honours sliding windows; otherwise the context is limited to the window."""
    honours: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: {"hidden_act": ("silu",)})
    """The values of settings that it honours and does not read, a missing setting's first."""
    checks: tuple[MlxCheck, ...] = ()
    """What finds other settings that it ignores."""
    translate: Callable[[Config], Config] = lambda config: {}
    """Settings as its arguments name them, from a complete configuration."""
    read_elsewhere: bool = True
    """Whether the other runtimes read what mlx-lm quantised."""
    stored_names: tuple[tuple[str, str], ...] = ()
    """Parts of names in checkpoints that mlx-lm wrote, and what stands there in the family's own."""
    adds_one: bool = False
    """Whether weights of norms that multiply by one more than those of the family's own checkpoints have it added."""
    renames: bool = False
    """Whether mlx-lm itself gives tensors of the family's own checkpoints its names."""


# --- the family -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """One architecture, by its name in transformers."""

    model_type: str
    whole: str = ""
    """``model_type`` of the model that also sees pictures, of which this is the language model."""
    defaults: Config = field(default_factory=dict)
    """Settings that ``config.json`` may leave out."""
    renamed: Callable[[Config], Config] = lambda config: {}
    """Settings of older files as transformers names them now, from ``config.json``."""
    layers_prefix: str = "model.layers."
    stored_starts: tuple[tuple[str, str], ...] = ()
    """Beginnings of the names of tensors in checkpoints, and what transformers has there. The first that fits is
    replaced."""
    stored_names: tuple[tuple[str, str], ...] = ()
    """Parts of the names of tensors in checkpoints, and what transformers has there. All are replaced, in order."""
    decoder: DecoderRecord = DecoderRecord()
    moe: MoeRecord | None = None
    """None for a dense family."""
    extra_layers: bool = False
    """Whether checkpoints may have further layers for multi-token prediction, which are not used."""
    unused: tuple[str, ...] = ()
    """Beginnings of the names of other tensors that checkpoints may have and that are not used."""
    tables: tuple[str, ...] = ()
    """Parts of the names of tensors of which a token needs few rows, so large that they are read from their files."""
    native: bool = True
    """Whether the native trunk runs it."""
    gguf: GgufRecord | None = None
    """None: no GGUF file of it runs."""
    mlx: MlxRecord | None = None
    """None: mlx does not run it."""
    tokenizer_class: str = ""
    """transformers' registered class of tokenizer; empty without one."""
    tokenizer_overridden: tuple[str, ...] = ()
    """Which of ``model_type`` and ``whole`` publish folders that name a class that transformers overrides."""
    keeps_llama_tokenizer: bool = False
    """Whether a folder's ``LlamaTokenizer`` is that, also with a vocabulary of bytes."""

    def has_models(self, with_experts: bool) -> bool:
        """Whether some of its models have experts, or have none."""
        return self.moe is not None if with_experts else self.moe is None or bool(self.moe.setting)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Ways in which checkpoints store the routed experts; none for a dense family."""
        return () if self.moe is None else self.moe.layouts

    @property
    def separate_experts(self) -> bool:
        """Whether each expert may have tensors of its own, as AWQ, GPTQ, compressed-tensors and ModelOpt need them."""
        return any(tensor.stacking == "separate" for layout in self.layouts for tensor in layout)

    @property
    def has_gates(self) -> bool:
        """Whether networks and experts have gates."""
        return self.activation != "squared" and not self.decoder.ungated

    @property
    def activation(self) -> ActivationKind:
        return "gated" if self.moe is None else self.moe.activation
