"""GGUF files of Qwen3.8-Flash-Next (qwen4exp): several residual streams, chosen blocks, and one table of n-grams.

Its delta-nets are those of Qwen 3.5. All norms have one added. What queries and the key that choose blocks read is in
two tensors where the checkpoint has one, and the table in one where it has many. The numbers of the table's hash are in
the metadata; here they follow from the settings, as in transformers, and a file with other numbers is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import ModelError, shown
from engine.models.architectures import gguf_delta_net
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor
from engine.models.architectures.ngrams import ngram_hashes
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.model_files import Change

TABLE = "per_layer_token_embd.weight"
_HASH = ("layer_multipliers", "head_vocab_sizes", "head_offsets")
"""Metadata with the numbers of the hash."""


def settings(metadata: Metadata) -> dict[str, Any]:
    """The part of ``config.json`` that is of this kind. Raises ModelError for a number that is missing or
    impossible."""
    experts = gguf_delta_net.expert_settings(metadata)
    return {
        **experts,
        "output_gate_type": "sigmoid",
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        "hc_count": metadata.number("hyper_connection.count"),
        "hc_lowrank": metadata.number("hyper_connection.low_rank"),
        "indexer_n_heads": metadata.number("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": metadata.number("attention.indexer.key_length"),
        "indexer_budget": metadata.number("attention.indexer.top_k"),
        "indexer_compress_ratio": _ratio(metadata, experts["layer_types"]),
        **_ngrams(metadata),
    }


def _ratio(metadata: Metadata, kinds: list[str]) -> int:
    """Tokens of a block, which are the same in all layers with attention."""
    ratios = metadata.each_layer("attention.compress_ratios")
    own = {ratio for ratio, kind in zip(ratios, kinds, strict=False) if kind == "full_attention"}
    if len(own) != 1 or min(own) < 1:
        raise ModelError(
            f"{metadata.file.path} has attention to blocks of {shown(sorted(own))} tokens, and one size of all layers "
            "runs; use another file."
        )
    return own.pop()


def _ngrams(metadata: Metadata) -> dict[str, Any]:
    layers, file = metadata.get("ple.layers"), metadata.file
    if layers is None:
        return {"ple_layer_ids": []}
    tensor = file.tensors.get(TABLE)
    if tensor is None or not isinstance(layers, list) or len(layers) != 1 or type(layers[0]) is not int:
        raise ModelError(
            f"{file.path} adds embeddings of n-grams in the layers {shown(layers)}, and one layer with a tensor "
            f"{TABLE} runs; use another file."
        )
    stated = {name: metadata.get(f"ple.{name}") for name in _HASH}
    sizes = stated["head_vocab_sizes"]
    first = sizes[0] if isinstance(sizes, list) and sizes else None
    end, also = metadata.number("ple.eos_token_id", 0), file.metadata.get("tokenizer.ggml.eos_token_id")
    heads_each, tokens = metadata.number("ple.heads_per_ngram"), metadata.number("ple.ngram_size")
    ngrams = {
        "ple_layer_ids": [layers[0] + 1],
        "ple_conv_kernel_size": metadata.number("ple.conv_kernel"),
        "ple_embed_dim": metadata.number("embedding_length_per_layer_input") * heads_each * (tokens - 1),
        "ngram_size": tokens,
        "heads_per_ngram": heads_each,
        "ngram_vocab_size_base": first,
        # One divisor that gives the table its rows.
        "make_ngram_vocab_size_divisible_by": tensor.rows,
        "split_ngram_parts": 1,
        "seed": 1234,
        # The first one ends n-grams, and a text ends with each.
        "eos_token_id": [end, also] if isinstance(also, int) and also != end else end,
    }
    words = file.tensors.get("token_embd.weight")
    own = ngram_hashes(ngrams | {"vocab_size": 0 if words is None else words.rows})[0]
    for name, numbers in zip(_HASH, (own.multipliers, own.sizes, own.offsets), strict=True):
        if stated[name] != list(numbers):
            raise ModelError(
                f"{file.path} has {shown(stated[name])} for ple.{name}, other numbers than its sizes give; use its "
                "safetensors folder."
            )
    return ngrams


def tensors(gguf: GgufFile, config: Mapping[str, Any]) -> Iterator[NamedTensor]:
    """The tensors of streams, indexers and n-grams."""
    streams, rank, hidden = config["hc_count"], config["hc_lowrank"], config["hidden_size"]
    wide = streams * hidden

    def mixer(source: str, name: str) -> Iterator[NamedTensor]:
        yield NamedTensor.whole(f"{source}_norm.weight", f"{name}.hc_norm.weight", (wide,))
        yield NamedTensor.whole(f"{source}_down.weight", f"{name}.input_mix_weight_down.weight", (rank, wide))
        yield NamedTensor.whole(f"{source}_up.weight", f"{name}.input_mix_weight_up.weight", (wide, rank))

    for layer, kind in enumerate(config["layer_types"]):
        here, target = f"blk.{layer}.", f"model.layers.{layer}."
        for short, part in (("attn", "attn"), ("ffn", "mlp")):
            name = f"{target}{part}_hyper_connection"
            yield from mixer(f"{here}hc_{short}", name)
            yield NamedTensor.whole(
                f"{here}hc_{short}_inject.weight", f"{name}.block_inject_weight.weight", (streams, wide)
            )
        if kind == "full_attention":
            yield from _indexer(config, here, target + "self_attn.indexer.")
        if layer + 1 in config["ple_layer_ids"]:
            yield from _lexical(config, here, target + "ple.", wide)
    yield from mixer("output_hc", "model.hyper_connection_mixer")


def _indexer(config: Mapping[str, Any], here: str, prefix: str) -> Iterator[NamedTensor]:
    width, hidden = config["indexer_head_dim"], config["hidden_size"]
    for short, rows in (("q", config["indexer_n_heads"] * width), ("k", width)):
        yield NamedTensor.whole(
            f"{here}indexer.{short}_proj.weight", f"{prefix}index_qk_proj.{short}.weight", (rows, hidden)
        )
        yield NamedTensor.whole(f"{here}indexer.{short}_norm.weight", f"{prefix}{short}_layernorm.weight", (width,))


def _lexical(config: Mapping[str, Any], here: str, prefix: str, wide: int) -> Iterator[NamedTensor]:
    width, taps = config["ple_embed_dim"], config["ple_conv_kernel_size"]
    heads = (config["ngram_size"] - 1) * config["heads_per_ngram"]
    yield NamedTensor.whole(here + "ple_key.weight", prefix + "key_proj.weight", (wide, width))
    yield NamedTensor.whole(here + "ple_value.weight", prefix + "value_proj.weight", (config["hidden_size"], width))
    for norm in ("key", "query", "conv"):
        yield NamedTensor.whole(f"{here}ple_norm_{norm}.weight", f"{prefix}norm_{norm}.weight", (wide,))
    yield NamedTensor(here + "ple_conv1d.weight", prefix + "conv1d.weight", (wide, 1, taps), (wide, taps))
    rows = config["make_ngram_vocab_size_divisible_by"]
    yield NamedTensor.whole(TABLE, prefix + "ple_embedding.ngram_embedding.weight", (rows, width // heads))


def changes(config: Mapping[str, Any]) -> dict[str, Change]:
    """What undoes llama.cpp's storage, by the checkpoint's name of the tensor."""
    less_one = Change(subtracted=1.0)
    undone = gguf_delta_net.changes(config) | {"model.hyper_connection_mixer.hc_norm.weight": less_one}
    for layer, kind in enumerate(config["layer_types"]):
        target = f"model.layers.{layer}."
        norms = ["attn_hyper_connection.hc_norm", "mlp_hyper_connection.hc_norm"]
        if kind == "full_attention":
            norms += [f"self_attn.indexer.{short}_layernorm" for short in "qk"]
        if layer + 1 in config["ple_layer_ids"]:
            norms += [f"ple.norm_{norm}" for norm in ("key", "query", "conv")]
        undone |= {f"{target}{norm}.weight": less_one for norm in norms}
    return undone
