"""Writes the GGUF files of this folder with llama.cpp's own converter and quantiser, and what they must give.

Run by hand, in an environment with llama-cpp-python (``pip install '.[bench]'``) and llama.cpp's sources, which its
source distribution on PyPI holds in ``vendor/llama.cpp``:

    python -m tests.engine.runtimes.converted.write SOURCES

The models are those of ``tiny_models.py``: random weights of our own. Their widths are no whole blocks of 256 values,
and some are none of 32, so that the quantiser falls back to other packed formats and to float16, matrix by matrix.
Beside each file lie a prompt, an answer and the logits that transformers computes in float32 from what the stored
weights stand for. Which weight is where is found by converting a copy of the model whose weights are numbers of places.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent

Floats = NDArray[np.float32]
_NARROW: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
_DELTA: dict[str, Any] = {
    "num_attention_heads": 4,
    "hidden_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 4,  # where one of two equally good experts is taken, nothing can be compared
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_value_heads": 4,
}
_SPACE = "\u2581"
PROMPT_TOKENS = 24
STEPS = 4


@dataclass(frozen=True)
class Written:
    """A file of this folder."""

    name: str
    family: str
    outtype: str
    """What the converter writes."""
    quantised: int | None = None
    """llama.cpp's number of what its quantiser makes of that; None: it is left as it is."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the tiny model."""


_Q8_0, _Q4_K_M, _Q4_0 = 7, 15, 2
FILES = (
    Written("llama-Q4_K_M", "llama", "bf16", _Q4_K_M, _NARROW | {"intermediate_size": 72}),
    Written("qwen2moe-BF16", "qwen2_moe", "bf16", None, _NARROW | {"num_experts": 4, "mlp_only_layers": []}),
    Written("qwen2moe-Q4_K_M", "qwen2_moe", "f16", _Q4_K_M, _NARROW | {"num_experts": 4, "mlp_only_layers": []}),
    Written("qwen3next-F16", "qwen3_next", "f16", None, _DELTA),
    Written("qwen35moe-Q8_0", "qwen3_5_moe_text", "bf16", _Q8_0, _DELTA | {"vocab_size": 192, "seed": 1}),
    Written(
        "lfm2moe-Q4_K_M", "lfm2_moe", "bf16", _Q4_K_M, {"hidden_size": 32, "num_attention_heads": 2, "num_experts": 4}
    ),
    Written(
        "gemma4-Q4_0", "gemma4_text", "bf16", _Q4_0, {"hidden_size": 32, "num_experts": 4, "num_attention_heads": 6}
    ),
)


def write(file: Written, folder: Path) -> None:
    """Write ``file`` and its logits into ``folder``."""
    from tests.support.tiny_models import write_tiny_model

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source = write_tiny_model(root / file.name, file.family, dtype="bfloat16", **file.options)
        write_tokenizer(source, gemma=file.family == "gemma4_text")
        made = folder / f"{file.name}.gguf"
        convert(source, made, file.outtype)
        numbered = root / "numbered" / file.name
        counts = number(source, numbered)
        convert(numbered, root / "numbered.gguf", "f32")
        if file.quantised is not None:
            quantise(made, root / "quantised.gguf", file.quantised)
            shutil.move(root / "quantised.gguf", made)
        truth = root / "truth"
        restore(source, truth, made, root / "numbered.gguf", counts)
        np.savez_compressed(folder / f"{file.name}.npz", **expected(truth))


def write_tokenizer(folder: Path, gemma: bool) -> None:
    """A tokenizer of as many tokens as most of the models have; transformers adds some for one of them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.support.tiny_gguf_metadata import TOKENS

    tokens = ["<unk>", "<s>", "</s>", *(_SPACE if gemma and token == "\u0120" else token for token in TOKENS)]
    vocabulary = {token: i for i, token in enumerate([*tokens, *(f"<unused{i}>" for i in range(160 - len(tokens)))])}
    merges = [(token[0], token[1]) for token in TOKENS if len(token) == 2]
    library = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=gemma, fuse_unk=True))
    if gemma:
        library.normalizer = normalizers.Replace(" ", _SPACE)
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        library.decoder = decoders.Sequence(steps)
    else:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    fast = PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)


def convert(source: Path, to: Path, outtype: str) -> None:
    """Run llama.cpp's converter, which is on the import path.

    It knows tokenizers by what they make of a text; this one is told its rule.
    """
    import convert_hf_to_gguf
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    ahead = ["--no-nextn"] if "linear_num_key_heads" in json.loads((source / "config.json").read_text()) else []
    with arguments(str(source), "--outfile", str(to), "--outtype", outtype, *ahead):
        convert_hf_to_gguf.main()


@contextlib.contextmanager
def arguments(*given: str) -> Iterator[None]:
    kept = sys.argv
    sys.argv = ["convert_hf_to_gguf.py", *given]
    try:
        yield
    finally:
        sys.argv = kept


def quantise(source: Path, to: Path, kind: int) -> None:
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread, parameters.allow_requantize = kind, 1, True
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(to).encode(), ctypes.byref(parameters))
    assert code == 0, f"llama.cpp could not quantise {source}"


def number(source: Path, to: Path) -> dict[str, int]:
    """A copy of the model in ``source`` whose weights are numbers from 0 on, and the number of each tensor's first."""
    from safetensors.numpy import save_file

    shutil.copytree(source, to)
    first, firsts, made = 0, {}, {}
    for name, values in sorted(load_file_wide(source).items()):
        firsts[name] = first
        made[name] = np.arange(first, first + values.size, dtype=np.float32).reshape(values.shape)
        first += values.size
    assert first < 1 << 24, "float32 counts no further"
    save_file(made, to / "model.safetensors", metadata={"format": "pt"})
    return firsts


def load_file_wide(folder: Path) -> dict[str, Floats]:
    from safetensors.torch import load_file

    return {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}


def restore(source: Path, truth: Path, made: Path, numbered: Path, firsts: dict[str, int]) -> None:
    """The model in ``source`` with the weights that ``made`` stores, in float32. What is stored in float32 may be
    stored otherwise than it was (norms, decays), and is the source's own."""
    from gguf import GGMLQuantizationType, GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    wide = load_file_wide(source)
    whole = np.concatenate([wide[name].reshape(-1) for name in sorted(wide)])
    places = {tensor.name: tensor.data for tensor in GGUFReader(numbered).tensors}
    for tensor in GGUFReader(made).tensors:
        if tensor.tensor_type == GGMLQuantizationType.F32:
            continue
        stored = dequantize(tensor.data, tensor.tensor_type).reshape(-1)
        whole[places[tensor.name].reshape(-1).astype(np.int64)] = stored
    shutil.copytree(source, truth)
    ends = {name: firsts[name] + wide[name].size for name in wide}
    tensors = {name: whole[firsts[name] : ends[name]].reshape(wide[name].shape) for name in wide}
    save_file(tensors, truth / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((truth / "config.json").read_text())
    (truth / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))


def expected(truth: Path) -> dict[str, NDArray[Any]]:
    """A prompt, the answer that transformers gives, and its logits [steps, vocabulary]."""
    from tests.engine.runtimes.torch_oracle import library_run

    prompt = np.random.default_rng(3).integers(3, 139, PROMPT_TOKENS).tolist()
    answer, logits = library_run(truth, prompt, chunks=1, dtype="float32")
    return {"prompt": np.array(prompt), "answer": np.array(answer[:STEPS]), "logits": np.stack(logits[:STEPS])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="llama.cpp's sources")
    parser.add_argument("--to", type=Path, default=HERE, help="folder to write into")
    options = parser.parse_args()
    # The converter needs the gguf package of its own version, before anything imports another.
    sys.path[:0] = [str(options.sources), str(options.sources / "gguf-py")]
    for file in FILES:
        write(file, options.to)
        print(f"{file.name}: {(options.to / file.name).with_suffix('.gguf').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
