"""Conversion of a dense Llama-like GGUF file to a plain folder of bfloat16 safetensors, which every runtime can load.

The reading half (:func:`dense_config`, :func:`dense_plan`, :func:`write_tensors`) also makes the starter model.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import Cancelled, ModelError
from engine.models import store
from engine.models.config_values import LARGEST, check_config
from engine.models.durable_files import flush, new_file
from engine.models.families import MOST_LAYERS
from engine.models.gguf_file import GgufFile
from engine.models.gguf_tokenizer import check_tokenizer, write_tokenizer
from engine.models.locations import ensure
from engine.models.wording import shown

if TYPE_CHECKING:
    from engine.ipc.progress import ProgressCallback

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF architecture -> family in transformers. Mistral's GGUF files call themselves llama."""

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_LARGEST = {"block_count": MOST_LAYERS}
"""Largest values of numbers whose limit differs from the general one."""

StopCheck = Callable[[], bool] | None
Order = NDArray[np.int64]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write: its source in the GGUF, and the order of its rows and columns.

    ``values`` (float32) replace a tensor that the GGUF does not contain.
    """

    name: str
    shape: tuple[int, ...]
    source: str = ""
    row_order: Order | None = None
    column_order: Order | None = None
    values: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes as bfloat16."""
        return 2 * int(np.prod(self.shape))


def convert_gguf(path: Path, progress: ProgressCallback, should_stop: StopCheck = None) -> Path:
    """Convert ``path`` into the models folder, unless that has been done; returns the folder.

    Memory stays bounded by a few blocks of 32 MB, whatever the model. Raises ModelError if the file is damaged, not a
    dense model of :data:`ARCHITECTURES`, or does not fit on the disk; Cancelled if ``should_stop`` says so.
    """
    folder = store.resolve(str(path.absolute())).plain_folder
    if store.is_complete(folder):
        return folder
    ensure("models")
    with store.exclusive(folder), GgufFile(path) as gguf:
        if store.is_complete(folder):
            return folder
        store.check_name_is_free(folder)
        config, plan = dense_config(gguf), list(dense_plan(gguf))
        store.check_space(folder, sum(tensor.nbytes for tensor in plan), f"Converting {path.name}")
        partial = fresh_partial(folder)
        try:
            write_model(partial, gguf, config, plan, progress, should_stop)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder


def check_convertible(path: Path) -> None:
    """Raises ModelError as :func:`convert_gguf` would, if the file's header tells that it cannot be converted."""
    with GgufFile(path) as gguf:
        dense_config(gguf)
        for _ in dense_plan(gguf):
            pass
        check_tokenizer(gguf.metadata)


def fresh_partial(folder: Path) -> Path:
    """An empty ``folder.partial``. Files of an earlier, killed run are deleted."""
    partial = folder.with_name(folder.name + store.PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def write_model(
    folder: Path,
    gguf: GgufFile,
    config: dict[str, Any],
    plan: Sequence[PlannedTensor],
    progress: ProgressCallback,
    should_stop: StopCheck,
) -> None:
    """Fill ``folder``: weights, tokenizer, generation settings, and the config last. Raises ModelError."""
    try:
        # The tokenizer comes first, as it may be refused and the weights take long.
        end_ids = write_tokenizer(folder, gguf.metadata, should_stop)
        write_tensors(folder / "model.safetensors", gguf, plan, progress, should_stop)
        generation = {"eos_token_id": end_ids, "bos_token_id": config.get("bos_token_id")}
        write_json(folder / "generation_config.json", {k: v for k, v in generation.items() if v not in (None, [])})
        write_json(folder / "config.json", config)
    except OSError as error:
        raise ModelError(
            f"Writing {folder} failed: {error.strerror or error}; what was written is deleted.", "disk"
        ) from error


def write_json(path: Path, value: object) -> None:
    """Write ``value``; the file is there completely or not at all."""
    with new_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


# --- what is in the file ------------------------------------------------------------------------------------------


def dense_config(gguf: GgufFile) -> dict[str, Any]:
    """The Hugging Face ``config.json`` of a dense Llama-like GGUF. Raises ModelError if it is something else."""
    family = _require_supported(gguf)
    layers, hidden = _number(gguf, "block_count"), _number(gguf, "embedding_length")
    heads = _number(gguf, "attention.head_count")
    head_size = _number(gguf, "attention.key_length", hidden // max(1, heads))
    rotated = _number(gguf, "rope.dimension_count", head_size)
    if rotated != head_size or _number(gguf, "attention.value_length", head_size) != head_size:
        raise ModelError(
            f"{gguf.path} rotates {rotated} of {head_size} values per head: a model of this kind cannot be converted; "
            f"use its safetensors folder."
        )
    window = _number(gguf, "attention.sliding_window", 0)
    context = _number(gguf, "context_length")
    if family == "llama" and 0 < window < context:
        family = "mistral"
    rope = _rope(gguf, head_size)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "vocab_size": _tensor_shape(gguf, "token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": _number(gguf, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _number(gguf, "attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": context,
        "rms_norm_eps": round(_real(gguf, "attention.layer_norm_rms_epsilon", 1e-5), 12),
        # Both spellings: transformers 5 reads rope_parameters, other readers the older top-level name.
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    if family == "mistral":
        config["sliding_window"] = window
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    for key, field in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")):
        if isinstance(gguf.metadata.get(f"tokenizer.ggml.{key}"), int):
            config[field] = gguf.metadata[f"tokenizer.ggml.{key}"]
    check_config(config, str(gguf.path))
    return config


def dense_plan(gguf: GgufFile) -> Iterator[PlannedTensor]:
    """The tensors of a dense model under their Hugging Face names, shapes checked against the config.

    Raises ModelError naming a tensor that is missing, has the wrong shape, or is not known.
    """
    config = dense_config(gguf)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for source, wanted in _expected_tensors(config):
        # The first missing tensor ends this, as a file may claim any number of layers.
        _tensor_shape(gguf, source)
        expected[source] = wanted
    unknown = sorted(set(gguf.tensors) - set(expected) - {"rope_freqs.weight"})
    if unknown:
        raise ModelError(
            f"{gguf.path} holds the tensor {shown(unknown[0])}, which no {config['model_type']} model known here has; "
            f"use the model's safetensors folder."
        )
    for source, (name, shape) in expected.items():
        if _tensor_shape(gguf, source) != shape:
            raise ModelError(
                f"{gguf.path} is damaged: its tensor {source} has the shape {list(_tensor_shape(gguf, source))}, not "
                f"{list(shape)}; download it again."
            )
        yield PlannedTensor(name, shape, source, _unrotated(config, source, gguf))


def _expected_tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    hidden, ffn, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    yield "token_embd.weight", ("model.embed_tokens.weight", (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        here, there = f"blk.{layer}.", f"model.layers.{layer}."
        yield here + "attn_norm.weight", (there + "input_layernorm.weight", (hidden,))
        for short, long, rows in (("q", "q_proj", queries), ("k", "k_proj", keys), ("v", "v_proj", keys)):
            yield here + f"attn_{short}.weight", (there + f"self_attn.{long}.weight", (rows, hidden))
            if config["model_type"] == "qwen2":
                yield here + f"attn_{short}.bias", (there + f"self_attn.{long}.bias", (rows,))
        if config["model_type"] == "qwen3":
            yield here + "attn_q_norm.weight", (there + "self_attn.q_norm.weight", (size,))
            yield here + "attn_k_norm.weight", (there + "self_attn.k_norm.weight", (size,))
        yield here + "attn_output.weight", (there + "self_attn.o_proj.weight", (hidden, queries))
        yield here + "ffn_norm.weight", (there + "post_attention_layernorm.weight", (hidden,))
        yield here + "ffn_gate.weight", (there + "mlp.gate_proj.weight", (ffn, hidden))
        yield here + "ffn_up.weight", (there + "mlp.up_proj.weight", (ffn, hidden))
        yield here + "ffn_down.weight", (there + "mlp.down_proj.weight", (hidden, ffn))
    yield "output_norm.weight", ("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield "output.weight", ("lm_head.weight", (config["vocab_size"], hidden))


def _unrotated(config: dict[str, Any], source: str, gguf: GgufFile) -> Order | None:
    """llama.cpp stores q and k of the llama architecture with the two halves of each head interleaved; undo that."""
    if gguf.metadata["general.architecture"] != "llama" or not source.endswith(("attn_q.weight", "attn_k.weight")):
        return None
    heads = config["num_attention_heads" if source.endswith("attn_q.weight") else "num_key_value_heads"]
    size = config["head_dim"]
    return np.arange(heads * size, dtype=np.int64).reshape(heads, size // 2, 2).swapaxes(1, 2).reshape(-1)


def _require_supported(gguf: GgufFile) -> str:
    known = ", ".join(ARCHITECTURES)
    architecture = gguf.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{gguf.path} does not say which architecture it is; download it again.")
    if _get(gguf, "expert_count", 0) or "moe" in architecture:
        raise ModelError(
            f"{gguf.path} is a Mixture-of-Experts GGUF ({shown(architecture)}), which is not supported; use the "
            f"model's safetensors folder or repo id. GGUF works for dense models: {known}."
        )
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{gguf.path} is of the architecture {shown(architecture)}; supported GGUF architectures: {known}."
        )
    if gguf.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(
            f"{gguf.path} is one part of a split GGUF; merge the parts with llama-gguf-split --merge first."
        )
    return ARCHITECTURES[architecture]


def _rope(gguf: GgufFile, head_size: int) -> dict[str, Any]:
    theta = _real(gguf, "rope.freq_base", 10000.0)
    kind = _get(gguf, "rope.scaling.type", "none")
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_rope(gguf, theta, head_size)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = _real(gguf, "rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = _number(gguf, "rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise ModelError(
        f"{gguf.path} scales its positions by {shown(ascii(kind))}, which cannot be converted; "
        "use its safetensors folder."
    )


def _llama3_rope(gguf: GgufFile, theta: float, head_size: int) -> dict[str, Any]:
    """Llama 3.1 and later: the file holds the divisor of each frequency; find the parameters that give them."""
    divisors = gguf.floats("rope_freqs.weight").reshape(-1).astype(np.float64)
    parameters: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if divisors.shape != (head_size // 2,) or not np.allclose(
        llama3_divisors(parameters, head_size), divisors, rtol=1e-4
    ):
        raise ModelError(
            f"{gguf.path} scales its positions in a way that is not Llama 3's; use its safetensors folder."
        )
    return parameters


def llama3_divisors(parameters: dict[str, Any], head_size: int) -> NDArray[np.float64]:
    """By what each rotary frequency [head_size / 2] is divided under Llama 3's scaling."""
    frequency = parameters["rope_theta"] ** -(np.arange(0, head_size, 2) / head_size)
    turns = parameters["original_max_position_embeddings"] * frequency / (2 * np.pi)
    low, high, factor = parameters["low_freq_factor"], parameters["high_freq_factor"], parameters["factor"]
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - blend) / factor + blend), dtype=np.float64)


def _get(gguf: GgufFile, key: str, default: Any) -> Any:
    return gguf.metadata.get(f"{gguf.metadata['general.architecture']}.{key}", default)


def _number(gguf: GgufFile, key: str, default: int | None = None) -> int:
    value = _get(gguf, key, default)
    if isinstance(value, list) and value and len(set(value)) == 1:
        value = value[0]
    most = _LARGEST.get(key, LARGEST)
    if type(value) is not int or not (0 < value <= most or value == default == 0):
        raise ModelError(
            f"{gguf.path} is damaged: its {key} is {shown(value)}, not a whole number from 1 to {most}; "
            "download it again."
        )
    return value


def _real(gguf: GgufFile, key: str, default: float) -> float:
    value = _get(gguf, key, default)
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ModelError(
            f"{gguf.path} is damaged: its {key} is {shown(value)}, not a positive number; download it again."
        )
    return float(value)


def _tensor_shape(gguf: GgufFile, name: str) -> tuple[int, ...]:
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{gguf.path} is damaged: it has no tensor {name}; download it again.")
    return tensor.shape


# --- writing ------------------------------------------------------------------------------------------------------


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to bfloat16 (nearest, ties to even) as raw words of the same shape."""
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (words + (0x7FFF + ((words >> 16) & 1))) >> 16
    # Rounding would carry a NaN with a full mantissa into infinity.
    return np.where(np.isnan(values), (words >> 16) | 0x40, rounded).astype(np.uint16)


def write_tensors(
    path: Path, gguf: GgufFile, plan: Sequence[PlannedTensor], progress: ProgressCallback, should_stop: StopCheck
) -> None:
    """Write the planned tensors as bfloat16 safetensors, in order, block by block; synced to the disk at the end."""
    total = sum(tensor.nbytes for tensor in plan)
    done = 0
    with path.open("wb") as file:
        file.write(_safetensors_header(plan))
        for tensor in plan:
            for block in _blocks(gguf, tensor):
                if should_stop is not None and should_stop():
                    raise Cancelled("Stopped; what was written so far is deleted.")
                words = to_bfloat16(block)
                file.write(words.tobytes())
                done += words.nbytes
                progress("writing weights", done, total, "bytes")
        flush(file)


def _blocks(gguf: GgufFile, tensor: PlannedTensor) -> Iterable[NDArray[np.float32]]:
    if tensor.values is not None:
        yield tensor.values
        return
    for block in gguf.rows(tensor.source, tensor.row_order):
        yield block if tensor.column_order is None else block[:, tensor.column_order]


def _safetensors_header(plan: Sequence[PlannedTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in plan:
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    body = json.dumps(header, separators=(",", ":")).encode()
    body += b" " * (-(8 + len(body)) % 64)
    return struct.pack("<Q", len(body)) + body
