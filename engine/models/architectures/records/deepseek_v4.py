"""DeepSeek V4: attention to a window and to compressed keys of all before it, residual streams that are mixed by doubly
stochastic matrices, and first layers whose experts a table of tokens chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from engine.errors import ModelError, damaged, shown
from engine.models.architectures import gguf_parts
from engine.models.architectures.config_values import setting, whole_number
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor
from engine.models.architectures.layer_rules import check_kinds
from engine.models.architectures.parts import BY_NAME, FUSED_MLP, GGUF, MLP_EXPERTS, per_expert
from engine.models.architectures.record import CompressedKeys, Config, DecoderRecord, Family, GgufRecord, MoeRecord
from engine.models.formats.gguf_file import GgufFile

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SLIDING: 0, _SPARSE: 4, _HEAVY: 128}
"""Kinds of layers, and the tokens that a compressed key of each stands for, unless the settings say it."""
_HASHED = "hash_moe"
_SQRT_SOFTPLUS = 4
"""llama.cpp's number of the function by which routers score."""


def _renamed(config: Config) -> dict[str, Any]:
    """Published files give the tokens of a compressed key for each layer, and may do so for those of multi-token
    prediction, too."""
    ratios = config.get("compress_ratios")
    if ratios is None or config.get("layer_types") is not None:
        return {}
    if not isinstance(ratios, list):
        raise damaged(f"config.json gives {shown(ratios)} for compress_ratios, which must be a list")
    return {"layer_types": _kinds(ratios[: whole_number(config, "num_hidden_layers")], "config.json")}


def _kinds(ratios: Sequence[object], source: object) -> list[str]:
    """The kinds of layers with these tokens of a compressed key. Raises ModelError, naming ``source``."""
    kinds: dict[object, str] = {rate: kind for kind, rate in _RATES.items()}
    wrong = [ratio for ratio in ratios if type(ratio) is not int or ratio not in kinds]
    if wrong:
        known = ", ".join(map(str, kinds))
        raise damaged(f"{source} gives {shown(wrong[0])} for the compress ratio of a layer, which must be {known}")
    return [kinds[ratio] for ratio in ratios]


def _kind(config: Config, layer: int) -> str:
    return _SPARSE if layer > 1 and layer % 2 else _HEAVY


def _compressed(config: Config, layers: int) -> list[CompressedKeys]:
    named = config.get("layer_types") or [_kind(config, layer) for layer in range(layers)]
    width, index = whole_number(config, "head_dim"), whole_number(config, "index_head_dim")
    keys = []
    for kind in check_kinds(named, layers, tuple(_RATES)):
        stated = setting(config, f"compress_rates.{kind}")
        rate = whole_number(config, f"compress_rates.{kind}") if stated is not None else _RATES[kind]
        keys.append(CompressedKeys(rate if kind != _SLIDING else 0, width, index if kind == _SPARSE else 0))
    return keys


def _settings(metadata: Metadata) -> dict[str, Any]:
    """Raises ModelError for a number that is missing or impossible, for several limits of networks, and for routers
    that transformers does not compute."""
    layers = metadata.number("block_count") - metadata.number("nextn_predict_layers", 0)
    scored, normalised = metadata.get("expert_gating_func"), metadata.get("expert_weights_norm")
    if scored != _SQRT_SOFTPLUS or normalised is not True:
        raise ModelError(
            f"{metadata.file.path} routes by the function {shown(scored)} with weights "
            f"{'' if normalised else 'not '}divided by their sum, which is not supported; use another file."
        )
    ratios, hashed = metadata.each_layer("attention.compress_ratios"), metadata.number("hash_layer_count", 0)
    rotated, width = metadata.number("rope.dimension_count"), metadata.head_width()
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "qk_rope_head_dim": rotated,
        "partial_rotary_factor": rotated / width,
        "q_lora_rank": metadata.number("attention.q_lora_rank"),
        "o_groups": metadata.number("attention.output_group_count"),
        "o_lora_rank": metadata.number("attention.output_lora_rank"),
        "sliding_window": metadata.number("attention.sliding_window"),
        "layer_types": _kinds(ratios[:layers], metadata.file.path),
        "compress_rates": {kind: rate for kind, rate in _RATES.items() if rate},
        "compress_rope_theta": metadata.real("attention.compress_rope_freq_base", 160_000.0),
        "mlp_layer_types": [_HASHED if layer < hashed else "moe" for layer in range(layers)],
        **gguf_parts.experts("n_routed_experts")(metadata),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "n_shared_experts": metadata.number("expert_shared_count"),
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": metadata.short_real("expert_weights_scale", 1.0),
        "swiglu_limit": gguf_parts.one_limit(metadata, layers),
        "index_n_heads": metadata.number("attention.indexer.head_count"),
        "index_head_dim": metadata.number("attention.indexer.key_length"),
        "index_topk": metadata.number("attention.indexer.top_k"),
        **gguf_parts.stream_settings(metadata),
    }


def _mixer(gguf: GgufFile, config: Config, here: str, target: str) -> Iterator[NamedTensor]:
    """The tensors of a layer's attention, and of what compresses keys for it."""
    hidden, rank, width = config["hidden_size"], config["q_lora_rank"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["o_groups"]
    gathered = groups * config["o_lora_rank"]
    kind, prefix = config["layer_types"][int(here.split(".")[1])], target + "self_attn."
    for stored, name, shape in (
        ("attn_q_a", "q_a_proj.weight", (rank, hidden)),
        ("attn_q_a_norm", "q_a_norm.weight", (rank,)),
        ("attn_q_b", "q_b_proj.weight", (heads * width, rank)),
        ("attn_kv", "kv_proj.weight", (width, hidden)),
        ("attn_kv_a_norm", "kv_norm.weight", (width,)),
        ("attn_sinks", "sinks", (heads,)),
        ("attn_output_a", "o_a_proj.weight", (gathered, heads * width // groups)),
        ("attn_output_b", "o_b_proj.weight", (hidden, gathered)),
    ):
        yield NamedTensor.whole(f"{here}{stored}.weight", prefix + name, shape)
    if kind == _SLIDING:
        return
    yield from _compressor(config, f"{here}attn_compressor_", prefix + "compressor.", _RATES[kind], width, kind)
    if kind == _SPARSE:
        index, prefix = config["index_head_dim"], prefix + "compressor.indexer."
        yield from _compressor(config, f"{here}indexer_compressor_", prefix, _RATES[kind], index, kind)
        count = config["index_n_heads"]
        yield NamedTensor.whole(here + "indexer.attn_q_b.weight", prefix + "q_b_proj.weight", (count * index, rank))
        yield NamedTensor.whole(here + "indexer.proj.weight", prefix + "scorer.weights_proj.weight", (count, hidden))


def _compressor(config: Config, stored: str, prefix: str, rate: int, width: int, kind: str) -> Iterator[NamedTensor]:
    # Compressed keys of sparse attention overlap: each token is part of two.
    rows = 2 * width if kind == _SPARSE else width
    for short, name, shape in (
        ("kv", "kv_proj.weight", (rows, config["hidden_size"])),
        ("gate", "gate_proj.weight", (rows, config["hidden_size"])),
        ("ape", "position_bias", (rate, rows)),
        ("norm", "kv_norm.weight", (width,)),
    ):
        yield NamedTensor.whole(f"{stored}{short}.weight", prefix + name, shape)


def _further(gguf: GgufFile, config: Config) -> Iterator[NamedTensor]:
    """The tensors that mix residual streams, and those of routers."""
    count, hidden, experts = config["hc_mult"], config["hidden_size"], config["n_routed_experts"]
    yield from gguf_parts.stream_tensors(config, "{}_hc.{}")
    for name, shape in (("fn", (count, count * hidden)), ("base", (count,)), ("scale", (1,))):
        yield NamedTensor.whole(f"output_hc_{name}.weight", f"model.hc_head.hc_{name}", shape)
    for layer, kind in enumerate(config["mlp_layer_types"]):
        here, gate = f"blk.{layer}.", f"model.layers.{layer}.mlp.gate."
        yield NamedTensor.whole(here + "ffn_gate_inp.weight", gate + "weight", (experts, hidden))
        if kind == _HASHED:
            table = (config["vocab_size"], config["num_experts_per_tok"])
            yield NamedTensor.whole(here + "ffn_gate_tid2eid.weight", gate + "tid2eid", table, whole_numbers=True)
        else:
            yield NamedTensor.whole(here + "exp_probs_b.bias", gate + "e_score_correction_bias", (experts,))


FAMILIES = (
    Family(
        "deepseek_v4",
        defaults={
            "head_dim": 512,
            "q_lora_rank": 1024,
            "num_key_value_heads": 1,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "sliding_window": 128,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "index_topk": 512,
            "max_position_embeddings": 1048576,
        },
        renamed=_renamed,
        stored_starts=(
            ("layers.", "model.layers."),
            ("embed.", "model.embed_tokens."),
            ("head.", "lm_head."),
            ("norm.", "model.norm."),
            ("hc_head_", "model.hc_head.hc_"),
        ),
        stored_names=(
            (".attn.norm.", ".attn.kv_norm."),
            (".attn.q_norm.", ".attn.q_a_norm."),
            (".attn.attn_sink", ".attn.sinks"),
            (".attn.indexer.compressor.", ".attn.compressor.indexer."),
            (".attn.indexer.weights_proj.", ".attn.compressor.indexer.scorer.weights_proj."),
            (".attn.indexer.wq_b.", ".attn.compressor.indexer.q_b_proj."),
            (".compressor.norm.", ".compressor.kv_norm."),
            (".compressor.indexer.norm.", ".compressor.indexer.kv_norm."),
            (".ape", ".position_bias"),
            (".wq_a.", ".q_a_proj."),
            (".wq_b.", ".q_b_proj."),
            (".wkv.", ".kv_proj."),
            (".wgate.", ".gate_proj."),
            (".wo_a.", ".o_a_proj."),
            (".wo_b.", ".o_b_proj."),
            (".ffn.gate.bias", ".ffn.gate.e_score_correction_bias"),
            (".shared_experts.w1.", ".shared_experts.gate_proj."),
            (".shared_experts.w2.", ".shared_experts.down_proj."),
            (".shared_experts.w3.", ".shared_experts.up_proj."),
            (".attn_norm.", ".input_layernorm."),
            (".ffn_norm.", ".post_attention_layernorm."),
            (".hc_attn_", ".attn_hc."),
            (".hc_ffn_", ".ffn_hc."),
            (".attn.", ".self_attn."),
            (".ffn.", ".mlp."),
        ),
        decoder=DecoderRecord(layer_kind=_kind, compressed=_compressed),
        moe=MoeRecord(
            (per_expert(MLP_EXPERTS, "w1", "w3", "w2"), BY_NAME, FUSED_MLP, *GGUF),
            shared="plain",
            count_key="n_routed_experts",
            ffn_key="moe_intermediate_size",
        ),
        extra_layers=True,
        unused=("mtp.",),
        native=False,
        gguf=GgufRecord(
            "deepseek4",
            "DeepseekV4ForCausalLM",
            settings=_settings,
            own_heads=True,
            mixer=_mixer,
            further=_further,
        ),
    ),
)
