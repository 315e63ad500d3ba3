"""The tokenizer inside a GGUF file, written as ``tokenizer.json`` and ``tokenizer_config.json``.

A GGUF names the rule by which its byte-level BPE splits text before merging (``tokenizer.ggml.pre``), but does not
contain it. The known rules are in a table. Any other is refused by name, as a wrong rule gives subtly wrong prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import Cancelled, ModelError
from engine.models.wording import shown

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
_DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact"})
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama-v3", "llama3", "tekken"})
"""Pre-tokenizers for which words of the vocabulary are taken whole, without merging."""

_PLAIN = frozenset({"gpt-2", "olmo"})
"""Pre-tokenizers that split as GPT-2's does."""
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen", "olmo"})
"""Pre-tokenizers of models whose text is composed (NFC) before it is split."""

KNOWN_SPLITS = tuple(sorted({*_SPLITS, *_DIGITS_FIRST, *_PLAIN}))

LONGEST_TOKEN = 1000
"""Maximum characters of a token; the longest in use is a run of some hundred spaces."""

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6


def check_tokenizer(metadata: dict[str, Any]) -> None:
    """Raises ModelError if the tokenizer of a GGUF with ``metadata`` is of an unknown kind, or invalid."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"The GGUF's tokenizer is of the kind {shown(ascii(kind))}; supported are gpt2 and llama.")
    name = metadata.get("tokenizer.ggml.pre", "(none)")
    if kind == "gpt2" and name not in KNOWN_SPLITS:
        raise ModelError(
            f"The GGUF's tokenizer splits text by the rule {shown(ascii(name))}, which is not known here; known are "
            f"{', '.join(KNOWN_SPLITS)}. Use the model's safetensors folder."
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelError("The GGUF's tokenizer is damaged (its tokens are no texts); download the file again.")
    longest = max(map(len, tokens), default=0)
    if longest > LONGEST_TOKEN:
        raise ModelError(
            f"The GGUF's tokenizer has a token of {longest} characters, over {LONGEST_TOKEN}; download the file again."
        )


def write_tokenizer(folder: Path, metadata: dict[str, Any], should_stop: Callable[[], bool] | None = None) -> list[int]:
    """Write the tokenizer of a GGUF with ``metadata`` into ``folder``; returns the ids that end a turn.

    Raises ModelError if the tokenizer is of a kind that is not known, or damaged; Cancelled if ``should_stop()``.
    """
    check_tokenizer(metadata)
    try:
        if metadata["tokenizer.ggml.model"] == "gpt2":
            tokenizer = _byte_level(metadata)
        else:
            tokenizer = _sentencepiece(metadata, should_stop)
        _add_special(tokenizer, metadata)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    except (ModelError, OSError):
        raise
    except Exception as error:  # the tokenizers library raises bare Exception for parts that do not fit together
        raise ModelError(
            f"The GGUF's tokenizer is damaged ({shown(repr(error), 200)}); download the file again."
        ) from error
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _token(metadata, key)
        if token is not None:
            config[f"{name}_token"] = token
    if isinstance(metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = metadata["tokenizer.chat_template"]
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return sorted({end for end in ends if isinstance(end, int)})


def _byte_level(metadata: dict[str, Any]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata["tokenizer.ggml.pre"]
    vocabulary = _vocabulary(metadata)
    merges = [_merge(line) for line in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS_FIRST))
    if name in _DIGITS_FIRST:
        before = [pre_tokenizers.Digits(individual_digits=True), _bytes(split=True)]
    elif name in _SPLITS:
        before = [pre_tokenizers.Split(Regex(_SPLITS[name]), "isolated"), _bytes(split=False)]
    else:
        before = [_bytes(split=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bytes(*, split: bool) -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right:
        raise ValueError(f"merge {line!r}")
    return left, right


def _sentencepiece(metadata: dict[str, Any], should_stop: Callable[[], bool] | None) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = _vocabulary(metadata)
    scores, types = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    merges: list[tuple[float, int, str, str]] = []
    for piece, identity in vocabulary.items():
        if types[identity] in {_UNKNOWN, _CONTROL, _BYTE}:
            continue
        if should_stop is not None and should_stop():
            raise Cancelled("Stopped; what was written so far is deleted.")
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[identity], identity, left, right))
    merges.sort()
    unknown = _token(metadata, "unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            [(left, right) for _, _, left, right in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: identity for identity, token in enumerate(tokens)}
    if not vocabulary or len(vocabulary) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens, {len(vocabulary)} of them different")
    return vocabulary


def _add_special(tokenizer: Any, metadata: dict[str, Any]) -> None:
    from tokenizers import AddedToken, processors

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    for token, kind in zip(tokens, types, strict=True):
        if kind in {_UNKNOWN, _CONTROL, _USER_DEFINED}:
            tokenizer.add_tokens([AddedToken(token, special=kind != _USER_DEFINED, normalized=False)])
    before = (
        _token(metadata, "bos") if metadata.get("tokenizer.ggml.add_bos_token", _bos_by_default(metadata)) else None
    )
    after = _token(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if before or after:
        names = [*([before] if before else []), "$A", *([after] if after else [])]
        special = [(token, tokenizer.token_to_id(token)) for token in (before, after) if token]
        tokenizer.post_processor = processors.TemplateProcessing(single=names, special_tokens=special)


def _bos_by_default(metadata: dict[str, Any]) -> bool:
    return metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in {
        "llama-bpe",
        "llama-v3",
        "llama3",
        "tekken",
    }


def _token(metadata: dict[str, Any], name: str) -> str | None:
    identity = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    return tokens[identity] if isinstance(identity, int) and 0 <= identity < len(tokens) else None
