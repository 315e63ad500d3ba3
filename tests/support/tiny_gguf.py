"""Writes GGUF files of tiny models the way llama.cpp's converter lays them out, and leaves them damaged on request."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from benchmarks.packed_blocks import random_values
from engine.models.architectures.families import renamed
from engine.models.architectures.gguf_parts import llama3_divisors
from tests.support.tiny_gguf_metadata import DELTA_NETS, KIMI_DELTAS, NEMOTRONS, Layout, write_metadata
from tests.support.tiny_gguf_names import gguf_name

Floats = NDArray[np.float32]
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "granitemoe": "granitemoe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa",
    "glm4_moe": "glm4moe",
    "qwen3_next": "qwen3next",
    "lfm2_moe": "lfm2moe",
    "gemma4_text": "gemma4",
    "gemma4_dense": "gemma4",
    "gemma4_e2b": "gemma4",
    "gemma4_unified_text": "gemma4",
    "gemma3_text": "gemma3",
    "ministral3": "mistral3",
    "phi3": "phi3",
    "minimax_m2": "minimax-m2",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "llama4_text": "llama4",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "glm4": "glm4",
    "ernie4_5": "ernie4_5",
    "granite": "granite",
    "lfm2": "lfm2",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "exaone4": "exaone4",
    "granitemoehybrid": "granitehybrid",
    "granitemoehybrid_dense": "granitehybrid",
    "solar_open": "glm4moe",
    "hy_v3": "hy_v3",
    "granitemoeshared": "granitemoe",
    "nemotron_h": "nemotron_h_moe",
    "nemotron_h_dense": "nemotron_h",
    "nemotron_h_latents": "nemotron_h_moe",
    "kimi_linear": "kimi-linear",
    "bailing_hybrid": "bailingmoe3",
    "glm5_next_text": "glm5-next",
    "deepseek_v4": "deepseek4",
    "gemma2": "gemma2",
    "afmoe": "afmoe",
    "mimo_v2_flash": "mimo2",
    "mistral4": "mistral4",
    "step3p5": "step35",
    "gemma3n_text": "gemma3n",
    "apertus": "apertus",
    "qwen4_exp_text": "qwen4exp",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
}
"""Family in transformers -> architecture of its GGUF files."""

READ_AS = {"gemma4_unified_text": "gemma4_text", "solar_open": "glm4_moe"}
"""Families whose GGUF files are read as those of another, of which they are a kind."""

PRE = {"glm4_moe_lite": "glm4", "glm4_moe": "glm4"}
"""The rule by which texts are split, for families that are told apart by it."""

_INDEXED = ("deepseek_v32", "glm_moe_dsa")
_ONE_ADDED = ("gemma2", "gemma3", "step35")
"""Architectures to whose norms' weights one is added."""
MAMBAS = ("granitehybrid", *NEMOTRONS)
_EXPERT = re.compile(
    r"(?:model|backbone)\.layers\.(\d+)\.(?:mlp|block_sparse_moe|feed_forward|mixer|ffn)\.experts\.(\d+)\.(\w+)\.weight"
)
_SHORT = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


_BETWEEN_FP4 = np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 10], np.float32)
"""Where the codes of MXFP4 change, in twice what they stand for."""


def fp4_codes(doubled: Floats) -> NDArray[np.uint8]:
    """The codes of MXFP4 nearest to half of ``doubled``."""
    codes = np.searchsorted(_BETWEEN_FP4, np.abs(doubled)).astype(np.uint8)
    return codes | ((doubled < 0) & (codes > 0)).astype(np.uint8) << 3


def fp4_exponents(blocks: Floats) -> NDArray[np.uint8]:
    """The exponent of each of ``blocks`` [..., 32] in MXFP4, as gguf chooses it."""
    most = np.maximum(np.abs(blocks).max(axis=-1), np.float32(1e-30))
    return np.clip(np.floor(np.log2(most)) - 2 + 127, 0, 254).astype(np.uint8)


def _mxfp4(values: Floats) -> NDArray[np.uint8]:
    """``values`` packed as MXFP4. The gguf package compares each of them with all sixteen codes."""
    blocks = values.reshape(-1, 32)
    exponents = fp4_exponents(blocks)
    codes = fp4_codes(np.ldexp(blocks, 128 - exponents.astype(np.int32)[:, None]))
    return np.concatenate((exponents[:, None], codes[:, :16] | codes[:, 16:] << 4), axis=1).reshape(1, -1)


def plain_types(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType.F32


def rotated(weight: Floats, heads: int) -> Floats:
    """As llama.cpp stores q and k of the llama architecture: the two halves of each head interleaved."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def unrotated(weight: Floats, heads: int) -> Floats:
    """Undoes :func:`rotated`."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def stored(name: str, values: Floats, config: dict[str, Any], architecture: str) -> Floats:
    """As llama.cpp stores a tensor of an architecture with convolutions."""
    if architecture in KIMI_DELTAS:
        sign = np.float32(1 if architecture == "bailingmoe3" else -1)
        shape = (-1,) if architecture == "glm5-next" else (-1, 1)
        return sign * np.exp(values).reshape(shape) if name.endswith("A_log") else values
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        values = values[:, 0]
    if architecture in MAMBAS:
        return mamba_stored(name, values, config)
    if architecture in _ONE_ADDED and name.endswith("norm.weight"):
        return values + np.float32(1)
    return delta_net_stored(name, values, config, architecture) if architecture in DELTA_NETS else values


def restored(name: str, values: Floats, config: dict[str, Any], architecture: str) -> Floats:
    """Undoes :func:`stored`."""
    if architecture in _ONE_ADDED and name.endswith("norm.weight"):
        return values - np.float32(1)
    if architecture in KIMI_DELTAS:
        if not name.endswith("A_log"):
            return values
        logarithms = np.log(values if architecture == "bailingmoe3" else -values)
        return logarithms.reshape((1, 1, -1, 1) if architecture == "kimi-linear" else (-1,))
    if architecture in MAMBAS and name.endswith(("A_log", ".D", "mamba.norm.weight", "mixer.norm.weight")):
        return np.log(-values).reshape(-1) if name.endswith("A_log") else values.reshape(-1)
    if architecture in DELTA_NETS:
        values = delta_net_restored(name, values, config, architecture)
    return values[:, None] if name.endswith(("conv1d.weight", "conv.conv.weight")) else values


def mamba_stored(name: str, values: Floats, config: dict[str, Any]) -> Floats:
    """As llama.cpp stores Mamba-2 layers: decays as they are used, vectors with a further dimension."""
    if name.endswith("A_log"):
        return -np.exp(values)[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return values.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    return values[:, None] if name.endswith(".D") else values


def _is_offset(name: str) -> bool:
    """Whether a tensor is the weights of a norm that multiplies by one more."""
    return ("norm.weight" in name or ".ple.norm_" in name) and "linear_attn" not in name


def delta_net_stored(name: str, values: Floats, config: dict[str, Any], architecture: str) -> Floats:
    """As llama.cpp stores Qwen 3.5 and Qwen3-Next: norms with one added, decays as they are used, value heads of the
    first in tiles."""
    if _is_offset(name):
        return values + np.float32(1)
    if name.endswith("A_log"):
        values = -np.exp(values)
    return values if architecture == "qwen3next" else _moved_heads(name, values, config, back=False)


def delta_net_restored(name: str, values: Floats, config: dict[str, Any], architecture: str) -> Floats:
    """Undoes :func:`delta_net_stored`."""
    if _is_offset(name):
        return values - np.float32(1)
    if architecture != "qwen3next":
        values = _moved_heads(name, values, config, back=True)
    return np.log(-values) if name.endswith("A_log") else values


def _moved_heads(name: str, values: Floats, config: dict[str, Any], back: bool) -> Floats:
    if "linear_attn" not in name:
        return values
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width, keys = config["linear_value_head_dim"], 2 * groups * config["linear_key_head_dim"]
    sizes = (heads // groups, groups) if back else (groups, heads // groups)

    def moved(rows: Floats, each: int) -> Floats:
        return np.ascontiguousarray(rows.reshape(*sizes, each, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape))

    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate([values[:keys], moved(values[keys:], width)])
    if name.endswith("in_proj_z.weight"):
        return moved(values, width)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return moved(values, 1)
    if name.endswith("out_proj.weight"):
        return np.ascontiguousarray(moved(np.ascontiguousarray(values.T), width).T)
    return values


def write_tiny_gguf(
    path: Path,
    source: Path,
    architecture: str,
    *,
    quantised: GGMLQuantizationType | Callable[[str], GGMLQuantizationType] = GGMLQuantizationType.F32,
    extra: dict[str, Any] | None = None,
    extra_tensors: dict[str, Floats] | None = None,
    leave_out: str = "",
    split: str = "gpt-2",
    layout: Layout = "stacked",
    merged: bool = False,
    parts: int = 1,
    truth: Path | None = None,
    dimensions: int | None = None,
) -> Path:
    """The model in the Hugging Face folder ``source`` as a GGUF. Returns its path, of the first part if it is in more.

    ``quantised``: the type of every matrix, or a function of its name in the GGUF. ``extra``: metadata, architecture
    put before. ``merged``: queries, keys and values are one tensor in layers that have all three. ``dimensions``: how
    many each tensor has, the outermost of one; 0: none of these (None: as llama.cpp's converter has it). ``truth``: a
    copy of ``source`` is written there whose weights are what the packed ones stand for.
    """
    config = renamed(json.loads((source / "config.json").read_text()))
    pack = _Packing(quantised if callable(quantised) else (lambda name: quantised))
    paired = architecture in ("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "mistral3")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    written: list[tuple[str, NDArray[Any], GGMLQuantizationType]] = []
    true: dict[str, Floats] = {}
    extra_lists: dict[str, dict[int, float]] = {}
    experts: dict[tuple[int, str], dict[int, tuple[str, Floats]]] = {}
    tables: dict[str, Floats] = {}
    streams: dict[str, dict[str, Floats]] = {}
    for name, tensor in _tensors(source).items():
        if tensor.dtype == np.int64:
            true[name] = tensor  # type: ignore[assignment]
            if architecture == "deepseek4":  # others follow from the metadata
                table = tensor.astype(np.int32)
                written.append((gguf_name(name, architecture), table, GGMLQuantizationType.I32))
            continue
        values = tensor.astype(np.float32)
        if ".ngram_embedding." in name:
            tables[name] = values
            continue
        if name.startswith("model.altup_"):
            short = "altup_unembd_proj" if "unembed" in name else "altup_proj"
            streams.setdefault(f"{short}.weight", {})[name] = values
            continue
        found = _EXPERT.fullmatch(name)
        if found is not None:
            experts.setdefault((int(found[1]), _SHORT[found[3]]), {})[int(found[2])] = (name, values)
            continue
        if name.endswith(("input_linear.weight", "output_linear.weight")):
            true[name] = _granite(name, values, written, pack, has_experts=bool(config["num_local_experts"]))
            continue
        if ".experts." in name and architecture in ("gemma4", "mistral4", "step35", "qwen3vlmoe"):
            true[name] = _gemma(name, values, written, pack, layout)
            continue
        if ".feed_forward.experts." in name and architecture == "llama4":
            true[name] = _llama4(name, values, written, pack)
            continue
        if ".mlp.experts." in name:
            true[name] = _gpt_oss(name, values, written, pack)
            continue
        if ".act_fn." in name:
            true[name] = values
            extra_lists.setdefault(f"xielu.{name.rpartition('.')[2]}", {})[int(name.split(".")[2])] = values.item()
            continue
        known = gguf_name(name, architecture)
        if name.endswith("index_qk_proj.weight"):
            true[name] = _split_choosing(known, values, config, written, pack)
            continue
        if architecture == "bailingmoe3" and len(values) > config["num_attention_heads"]:
            known = known.replace("attn_gate", "ssm_g_a")
        if name.endswith("kv_b_proj.weight") and layout != "separate":
            true[name] = _split_latents(known, values, config, written, pack)
            continue
        if name.endswith("in_proj_qkvz.weight") and layout != "separate":
            true[name] = _split_by_kind(known, values, config, written, pack)
            continue
        if architecture in ("gpt-oss", *DELTA_NETS, "glm4moe"):
            known = known.replace(".ffn_norm", ".post_attention_norm")
        short = next((short for short in heads if f".{short}." in known), None) if paired else None
        values = rotated(values, heads[short]) if short is not None else stored(name, values, config, architecture)
        words, kind, back = pack(known, values)
        written.append((known, words, kind))
        back = unrotated(back, heads[short]) if short is not None else restored(name, back, config, architecture)
        true[name] = back
    _add_experts(experts, layout, pack, written, true)
    if tables:
        _add_table(tables, pack, written, true)
    for known, found in streams.items():
        words, kind, back = pack(known, np.stack([found[name] for name in sorted(found)]))
        written.append((known, words, kind))
        true |= dict(zip(sorted(found), back, strict=True))
    if merged:
        written = _merged(written)
    if architecture == "gemma4":
        written.append(("rope_freqs.weight", gemma_divisors(config), GGMLQuantizationType.F32))
    rope = config.get("rope_parameters") or {}
    if architecture == "apertus" and rope["rope_type"] == "llama3":
        width = config["hidden_size"] // config["num_attention_heads"]
        divisors = llama3_divisors(rope, width).astype(np.float32)
        written.append(("rope_freqs.weight", divisors, GGMLQuantizationType.F32))
    for name, values in (extra_tensors or {}).items():
        written.append((name, values, GGMLQuantizationType.F32))
    written = [entry for entry in written if entry[0] != leave_out]
    size = {"split_max_tensors": -(-len(written) // parts)} if parts > 1 else {}
    writer = GGUFWriter(path, architecture, **size)
    write_metadata(writer, config, architecture, extra or {}, PRE.get(config["model_type"], split), layout)
    for key, numbers in extra_lists.items():
        writer.add_array(key, [numbers[layer] for layer in sorted(numbers)])
    for name, words, kind in written:
        writer.add_tensor(name, words if dimensions is None else _of(dimensions, words), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if truth is not None:
        _write_truth(source, truth, true)
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def _of(dimensions: int, words: NDArray[Any]) -> NDArray[Any]:
    """``words`` with so many dimensions, or as many as it needs."""
    first = next((place for place, size in enumerate(words.shape) if size != 1), words.ndim - 1)
    return words.reshape((1,) * (dimensions - words.ndim + first) + words.shape[first:])


_PLAIN = (
    *("ffn_gate_inp", "exp_probs_b", "conv1d", "shortconv.conv", "ssm_norm", "_coef"),
    *("compressor_ape", "hc_attn_fn", "hc_ffn_fn", "output_hc_fn"),
)
_PLAIN_VECTORS = (".ssm_a", ".ssm_d")
"""Parts of the names of tensors that the converter never packs though they have several dimensions."""


class _Packing:
    """Packs values as a type of ``kinds``. Types that the gguf package cannot pack get random weights instead."""

    def __init__(self, kinds: Callable[[str], GGMLQuantizationType]) -> None:
        self._kinds = kinds

    def __call__(self, name: str, values: Floats) -> tuple[NDArray[Any], GGMLQuantizationType, Floats]:
        """What is stored of ``values``, its type, and the values it stands for."""
        kept = values.ndim == 1 or any(part in name for part in _PLAIN) or name.endswith(_PLAIN_VECTORS)
        kind = GGMLQuantizationType.F32 if kept else self._kinds(name)
        if not kept and values.shape[-1] % GGML_QUANT_SIZES[kind][0]:  # as llama.cpp's own tool has it
            kind = GGMLQuantizationType.Q8_0
        if kind == GGMLQuantizationType.F32:
            return values, kind, values
        flat = values.reshape(-1, values.shape[-1])
        try:
            # As one long row: gguf takes a few rows at a time, which costs more than packing them.
            row = flat.reshape(1, -1)
            words = _mxfp4(row) if kind == GGMLQuantizationType.MXFP4 else quantize(row, kind)
            back = dequantize(words, kind)
        except NotImplementedError:
            words, back = random_values(kind.name, *flat.shape, seed=zlib.crc32(name.encode()))
        return words.reshape(*values.shape[:-1], -1), kind, back.astype(np.float32).reshape(values.shape)


def gemma_divisors(config: dict[str, Any]) -> Floats:
    """By what the rotary frequencies of layers with full attention are divided; most are not to turn at all."""
    half = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
    turned = round(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * half)
    return np.array([1.0] * turned + [1e30] * (half - turned), np.float32)


def _tensors(source: Path) -> dict[str, NDArray[Any]]:
    from safetensors.numpy import load_file

    return dict(load_file(source / "model.safetensors"))


def _granite(
    name: str,
    values: Floats,
    written: list[tuple[str, NDArray[Any], GGMLQuantizationType]],
    pack: _Packing,
    has_experts: bool,
) -> Floats:
    """granite's experts come stacked, with gate and up in one, and so does the network that all tokens pass."""
    layer = name.split(".")[2]
    shared = "shared_mlp" in name
    kind_of = ("_shexp" if has_experts else "") if shared else "_exps"
    values = values[None] if shared else values
    if name.endswith("output_linear.weight"):
        pieces = {"down": values}
    else:
        half = values.shape[1] // 2
        pieces = {"gate": values[:, :half], "up": values[:, half:]}
    back = []
    for short, piece in pieces.items():
        known = f"blk.{layer}.ffn_{short}{kind_of}.weight"
        words, kind, true = pack(known, np.ascontiguousarray(piece))
        written.append((known, words[0] if shared else words, kind))
        back.append(true)
    whole = np.concatenate(back, axis=1)
    return whole[0] if shared else whole


def _gemma(
    name: str,
    values: Floats,
    written: list[tuple[str, NDArray[Any], GGMLQuantizationType]],
    pack: _Packing,
    layout: Layout,
) -> Floats:
    """Experts that come stacked, with gate and up in one, and are mostly stored so."""
    half = values.shape[1] // 2
    pieces = {"down": values} if name.endswith("down_proj") else {"gate_up": values}
    if "gate_up" in pieces and layout == "stacked":
        pieces = {"gate": values[:, :half], "up": values[:, half:]}
    back = []
    for short, piece in pieces.items():
        known = f"blk.{name.split('.')[2]}.ffn_{short}_exps.weight"
        words, kind, true = pack(known, np.ascontiguousarray(piece))
        written.append((known, words, kind))
        back.append(true)
    return np.concatenate(back, axis=1)


def _llama4(
    name: str,
    values: Floats,
    written: list[tuple[str, NDArray[Any], GGMLQuantizationType]],
    pack: _Packing,
) -> Floats:
    """llama4's experts come stacked and transposed, with gate and up in one."""
    rows = values.swapaxes(1, 2)
    shorts = ("down",) if name.endswith("down_proj") else ("gate", "up")
    back = []
    for short, piece in zip(shorts, np.split(rows, len(shorts), axis=1), strict=True):
        known = f"blk.{name.split('.')[2]}.ffn_{short}_exps.weight"
        words, kind, true = pack(known, np.ascontiguousarray(piece))
        written.append((known, words, kind))
        back.append(true)
    return np.ascontiguousarray(np.concatenate(back, axis=1).swapaxes(1, 2))


def _gpt_oss(
    name: str,
    values: Floats,
    written: list[tuple[str, NDArray[Any], GGMLQuantizationType]],
    pack: _Packing,
) -> Floats:
    """gpt-oss's experts come stacked and transposed, the rows of gate and up in turns."""
    bias = name.endswith("_bias")
    stem = f"blk.{name.split('.')[2]}.ffn_{{}}_exps." + ("bias" if bias else "weight")
    rows = values if bias else values.swapaxes(1, 2)
    shorts = ("down",) if ".down_proj" in name else ("gate", "up")
    back = np.empty_like(rows)
    for first, short in enumerate(shorts):
        piece = np.ascontiguousarray(rows[:, first :: len(shorts)])
        words, kind, true = (piece, GGMLQuantizationType.F32, piece) if bias else pack(stem.format(short), piece)
        written.append((stem.format(short), words, kind))
        back[:, first :: len(shorts)] = true
    return back if bias else np.ascontiguousarray(back.swapaxes(1, 2))


def _split_by_kind(
    known: str,
    values: Floats,
    config: dict[str, Any],
    written: list[tuple[str, NDArray[Any], GGMLQuantizationType]],
    pack: _Packing,
) -> Floats:
    """Qwen3-Next's projection of queries, keys, values and gates, by key head, as two tensors: the gates are in the
    second."""
    groups, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
    each = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    ends = np.cumsum([keys, keys, each])
    by_head = np.split(values.reshape(groups, -1, values.shape[-1]), ends, axis=1)
    pieces = [part.reshape(-1, values.shape[-1]) for part in by_head]
    found = []
    for short, rows in (("attn_qkv", np.concatenate(pieces[:3])), ("attn_gate", pieces[3])):
        name = known.replace("ssm_in", short)
        words, kind, true = pack(name, rows)
        written.append((name, words, kind))
        found.append(true)
    back = np.split(np.concatenate(found), np.cumsum([len(piece) for piece in pieces[:3]]))
    rows = [part.reshape(groups, -1, values.shape[-1]) for part in back]
    return np.ascontiguousarray(np.concatenate(rows, axis=1).reshape(values.shape))


def _split_choosing(
    known: str,
    values: Floats,
    config: dict[str, Any],
    written: list[tuple[str, NDArray[Any], GGMLQuantizationType]],
    pack: _Packing,
) -> Floats:
    """What an indexer's queries and key read as two tensors."""
    back = []
    for short, rows in zip("qk", np.split(values, [-config["indexer_head_dim"]]), strict=True):
        name = known.replace("qk_proj", f"{short}_proj")
        words, kind, true = pack(name, rows)
        written.append((name, words, kind))
        back.append(true)
    return np.concatenate(back)


def _add_table(
    tables: dict[str, Floats],
    pack: _Packing,
    written: list[tuple[str, NDArray[Any], GGMLQuantizationType]],
    true: dict[str, Floats],
) -> None:
    """The parts of the one table of n-grams as one tensor."""
    names = sorted(tables, key=lambda name: int(name.split(".shard_")[1].split(".")[0]))
    words, kind, back = pack("per_layer_token_embd.weight", np.concatenate([tables[name] for name in names]))
    written.append(("per_layer_token_embd.weight", words, kind))
    ends = np.cumsum([len(tables[name]) for name in names])[:-1]
    true |= dict(zip(names, np.split(back, ends), strict=True))


def _split_latents(
    known: str,
    values: Floats,
    config: dict[str, Any],
    written: list[tuple[str, NDArray[Any], GGMLQuantizationType]],
    pack: _Packing,
) -> Floats:
    """Latents' projection as two tensors of a matrix for each head, that of the keys transposed."""
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    each = values.reshape(heads, -1, values.shape[-1])
    back = np.empty_like(each)
    for short, rows, turned in (("attn_k_b", slice(None, plain), True), ("attn_v_b", slice(plain, None), False)):
        piece = each[:, rows].swapaxes(1, 2) if turned else each[:, rows]
        name = known.replace("attn_kv_b", short)
        words, kind, true = pack(name, np.ascontiguousarray(piece))
        written.append((name, words, kind))
        back[:, rows] = true.swapaxes(1, 2) if turned else true
    return back.reshape(values.shape)


def _add_experts(
    experts: dict[tuple[int, str], dict[int, tuple[str, Floats]]],
    layout: Layout,
    pack: _Packing,
    written: list[tuple[str, NDArray[Any], GGMLQuantizationType]],
    true: dict[str, Floats],
) -> None:
    for layer in sorted({layer for layer, _ in experts}):
        packed: dict[str, list[tuple[NDArray[Any], GGMLQuantizationType]]] = {}
        # Files with a tensor for each expert are older than experts without gates.
        separate = layout == "separate" and (layer, "gate") in experts
        for short in (each for each in ("gate", "up", "down") if (layer, each) in experts):
            for expert, (name, values) in sorted(experts[layer, short].items()):
                known = f"blk.{layer}.ffn_{short}.{expert}.weight"
                asked = known if separate else f"blk.{layer}.ffn_{short}_exps.weight"
                words, kind, true[name] = pack(asked, values)
                packed.setdefault(short, []).append((words, kind))
                if separate:
                    written.append((known, words, kind))
        if separate:
            continue
        stacks = {short: np.stack([words for words, _ in found]) for short, found in packed.items()}
        kinds = {short: found[0][1] for short, found in packed.items()}
        if layout == "fused" and "gate" in stacks:
            stacks["gate_up"] = np.concatenate([stacks.pop("gate"), stacks.pop("up")], axis=1)
            kinds["gate_up"] = kinds["gate"]
        for short, words in stacks.items():
            written.append((f"blk.{layer}.ffn_{short}_exps.weight", words, kinds[short]))


def _merged(
    written: list[tuple[str, NDArray[Any], GGMLQuantizationType]],
) -> list[tuple[str, NDArray[Any], GGMLQuantizationType]]:
    found = {name: (words, kind) for name, words, kind in written}
    for name in [name for name in found if ".attn_q." in name]:
        if not all(name.replace("attn_q", f"attn_{short}") in found for short in "kv"):
            continue
        pieces = [found.pop(name.replace("attn_q", f"attn_{short}")) for short in "qkv"]
        found[name.replace("attn_q", "attn_qkv")] = (np.concatenate([words for words, _ in pieces]), pieces[0][1])
    return [(name, words, kind) for name, (words, kind) in found.items()]


def _write_truth(source: Path, truth: Path, tensors: dict[str, Floats]) -> None:
    from safetensors.numpy import save_file

    shutil.copytree(source, truth, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, truth / "model.safetensors", metadata={"format": "pt"})


def whole_blocks(family: str) -> dict[str, Any]:
    """Sizes of a tiny model of ``family`` of which every row is whole blocks, whatever the format, and that has experts
    in every layer if it has any."""
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"intermediate_size": 512, "num_hidden_layers": 2}
    if family in ("olmoe", "dots1"):
        sizes["num_key_value_heads"] = 8  # llama.cpp knows no other
    if family in ("mixtral", "granitemoe", "granitemoeshared", "gpt_oss", "granitemoehybrid"):
        sizes["num_local_experts"] = 4
    if family.startswith("granitemoehybrid"):
        del sizes["num_hidden_layers"], sizes["head_dim"]
        sizes |= {"shared_intermediate_size": 256, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32}
        sizes["residual_multiplier"] = 0.3
    if family in ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "olmoe", "hunyuan_v1_moe"):
        sizes["num_experts"] = 4
    if family in ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"):
        sizes |= {"mlp_only_layers": [], "moe_intermediate_size": 256}
    if family == "qwen3_vl_moe_text":  # not square, as shapes say whether experts are transposed
        sizes["moe_intermediate_size"] = 512
    if family in ("qwen2_moe", "qwen3_5_moe_text"):
        sizes["shared_expert_intermediate_size"] = 256
    if family.startswith("qwen3_5"):
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
        sizes |= {"num_hidden_layers": 4, "rope_parameters": rope, "linear_num_value_heads": 4}
        sizes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    if family == "llama4_text":
        del sizes["num_hidden_layers"]
        sizes |= {"intermediate_size_mlp": 512, "intermediate_size": 256}
        sizes |= {"attention_chunk_size": 8192, "floor_scale": 8192}  # llama.cpp knows no other
    if family == "solar_open":
        sizes |= {"n_routed_experts": 8, "moe_intermediate_size": 256}
    if family == "granitemoeshared":
        sizes["shared_intermediate_size"] = 256
    if family in ("exaone_moe", "hy_v3", "afmoe"):
        sizes |= {"num_experts": 8, "moe_intermediate_size": 256}
    if family == "ernie4_5_moe":
        sizes |= {"moe_num_experts": 4, "moe_intermediate_size": 256}
    if family == "minimax_m2":
        sizes["num_local_experts"] = 4
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "glm4_moe", "dots1", *_INDEXED):
        sizes |= {"n_routed_experts": 8, "moe_intermediate_size": 256, "first_k_dense_replace": 1}
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", *_INDEXED):
        del sizes["head_dim"]
        sizes |= {"num_key_value_heads": 8, "kv_lora_rank": 256, "v_head_dim": 64, "qk_nope_head_dim": 256}
        sizes |= {"q_lora_rank": None if family == "deepseek_v2" else 256}
    if family in ("kimi_linear", "bailing_hybrid", "glm5_next_text"):
        del sizes["num_hidden_layers"], sizes["head_dim"]
        sizes |= {"num_key_value_heads": 8, "kv_lora_rank": 256, "v_head_dim": 64, "qk_nope_head_dim": 256}
        sizes["moe_intermediate_size"] = 256
    if family == "kimi_linear":
        sizes |= {"linear_num_heads": 8, "linear_head_dim": 256}
    if family == "bailing_hybrid":
        sizes["head_dim"] = 256
    if family == "glm5_next_text":
        sizes |= {"linear_num_heads": 8, "linear_head_dim": 256, "q_lora_rank": 256, "index_head_dim": 128}
        sizes |= {"index_topk": 64}
    if family == "deepseek_v4":
        del sizes["num_hidden_layers"]
        sizes |= {"num_key_value_heads": 1, "head_dim": 64, "partial_rotary_factor": 0.5, "q_lora_rank": 256}
        sizes |= {"o_groups": 2, "o_lora_rank": 128, "index_head_dim": 128, "index_topk": 64}
        sizes |= {"intermediate_size": 256, "hc_mult": 4}
        # llama.cpp knows no other.
        sizes["compress_rates"] = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    if family in _INDEXED:
        # Indexers choose all positions of short texts: whose rounding of packed weights chose better would be chance.
        sizes |= {"index_head_dim": 128, "index_topk": 64}
    if family == "glm_moe_dsa":
        sizes["indexer_types"] = ["full", "shared"]
    if family == "qwen3_next":
        del sizes["num_hidden_layers"]
        sizes |= {"linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
        sizes["shared_expert_intermediate_size"] = 256
    if family == "qwen4_exp_text":
        del sizes["num_hidden_layers"]
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
        sizes |= {"rope_parameters": rope, "linear_num_value_heads": 4, "num_experts": 4}
        sizes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "moe_intermediate_size": 256}
        sizes |= {"shared_expert_intermediate_size": 256, "hc_lowrank": 256}
        sizes |= {"ple_embed_dim": 256, "indexer_head_dim": 32}
    if family in ("lfm2", "lfm2_moe"):
        del sizes["num_hidden_layers"], sizes["head_dim"]
    if family == "lfm2_moe":
        sizes |= {"num_experts": 8, "moe_intermediate_size": 256}
    if family == "lfm2":
        sizes["block_multiple_of"] = 256
    if family in ("gemma2", "gemma3_text", "olmo3", "exaone4", "exaone_moe", "smollm3", "cohere2", "afmoe"):
        del sizes["num_hidden_layers"]
    if family in ("gemma2", "gemma3_text"):
        sizes["query_pre_attn_scalar"] = 32
    if family in ("granite", "olmo2", "olmo3", "smollm3", "phi3", "cohere", "cohere2", "apertus"):
        del sizes["head_dim"]
    if family.startswith("gemma4"):
        del sizes["num_hidden_layers"]
        sizes |= {"global_head_dim": 64, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
    if family == "gemma4_text":
        sizes |= {"num_experts": 4, "moe_intermediate_size": 256}
    if family == "gemma4_e2b":
        sizes["hidden_size_per_layer_input"] = 256
    if family.startswith("nemotron_h"):
        sizes |= {"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 32}
    if family in ("nemotron_h", "nemotron_h_latents"):  # whose files have networks or experts
        sizes["layer_types"] = ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]
        sizes |= {"n_routed_experts": 8, "moe_shared_expert_intermediate_size": 256}
        sizes |= {"moe_intermediate_size": 256, "intermediate_size": 256}
    if family in ("qwen3_vl_text", "qwen3_vl_moe_text"):  # llama.cpp rotates what sections hold alone
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
        sizes["rope_parameters"] = rope
    if family == "mimo_v2_flash":
        del sizes["num_hidden_layers"]
        sizes |= {"head_dim": 48, "v_head_dim": 32, "n_routed_experts": 16, "moe_intermediate_size": 256}
    if family == "gemma3n_text":  # the numbers that llama.cpp takes for granted
        sizes |= {
            "num_hidden_layers": 6,
            "layer_types": [*["sliding_attention"] * 4, "full_attention", "sliding_attention"],
        }
        sizes |= {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 160, "num_kv_shared_layers": 0}
        sizes |= {"laurel_rank": 64, "activation_sparsity_pattern": [0.95] * 6}
    if family == "step3p5":
        del sizes["num_hidden_layers"]
        sizes |= {"num_attention_heads": 4, "num_sliding_attention_heads": 8}
        sizes |= {"moe_intermediate_size": 256, "share_expert_dim": 512, "moe_router_scaling_factor": 1.0}
        sizes |= {"swiglu_limits": [0.0, 0.0, 0.0, 0.25, 0.5], "swiglu_limits_shared": [0.0, 0.5, 0.0, 0.0, 0.5]}
    if family == "nemotron_h_latents":
        sizes["moe_latent_size"] = 256
    if family in ("qwen3_5_moe_text", "qwen3_next"):
        sizes |= {"num_experts": 4, "moe_intermediate_size": 256}
    return sizes
