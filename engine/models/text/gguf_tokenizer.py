"""The tokenizer inside a GGUF file, written as ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import Cancelled, ModelError
from engine.models.text.gguf_splits import SPLITS
from engine.models.text.tokenizer import END_OF_TURN_TOKENS
from engine.models.wording import shown

KNOWN_SPLITS = tuple(sorted(SPLITS))

_KINDS = ("gpt2", "llama", "gemma4")
"""Byte-level BPE; sentencepiece's BPE, with scores in place of merges; Gemma 4's, with merges."""

LONGEST_TOKEN = 1000
"""Maximum characters of a token; the longest in use is a run of some hundred spaces."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Special tokens of sentencepiece vocabularies whose files do not name them."""

_NAMED = ("bos", "eos", "eot", "eom", "padding", "seperator", "mask")
"""Control tokens that files name by their ids, in ggml's spelling."""

_BYTES = re.compile("<0x[0-9A-F]{2}>")


def check_tokenizer(metadata: dict[str, Any]) -> None:
    """Raises ModelError if the tokenizer of a GGUF with ``metadata`` is of an unknown kind, or invalid."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise ModelError(
            f"The GGUF's tokenizer is of the kind {shown(ascii(kind))}; supported are {', '.join(_KINDS)}."
        )
    name = metadata.get("tokenizer.ggml.pre", "(none)")
    if kind == "gpt2" and (not isinstance(name, str) or name not in SPLITS):
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
    metadata = _completed(metadata)
    try:
        kind = metadata["tokenizer.ggml.model"]
        if kind == "gpt2":
            tokenizer = _byte_level(metadata)
        elif kind == "gemma4":
            tokenizer = _gemma(metadata)
        else:
            tokenizer = _sentencepiece(metadata, should_stop)
        _add_special(tokenizer, metadata)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    except (ModelError, OSError):
        raise
    except KeyError as error:
        raise ModelError(
            f"The GGUF's tokenizer is damaged (it has no {error.args[0]}); download the file again."
        ) from error
    except Exception as error:  # the tokenizers library raises bare Exception for parts that do not fit together
        raise ModelError(
            f"The GGUF's tokenizer is damaged ({shown(repr(error), 200)}); download the file again."
        ) from error
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _token(metadata, key)
        if token is not None:
            config[f"{name}_token"] = token
    templates = _chat_templates(metadata)
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return sorted({end for end in ends if isinstance(end, int)})


def _completed(metadata: dict[str, Any]) -> dict[str, Any]:
    """``metadata`` with what a file may leave out, as llama.cpp takes it to be.

    Scores are 0, empty tokens get texts, and sentencepiece's ids are the usual ones. Without types tokens are ordinary
    ones, but for those that the file names by their ids, that are bytes, or that end turns by their spelling.
    Raises ModelError if there are fewer scores or types than tokens.
    """
    key = "tokenizer.ggml.{}".format
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(metadata[key("tokens")])]
    ids = _SENTENCEPIECE_IDS if metadata[key("model")] == "llama" else {}
    made = {key(f"{name}_token_id"): i for name, i in ids.items() if i < len(tokens)} | metadata
    made[key("tokens")] = tokens
    made.setdefault(key("scores"), [0.0] * len(tokens))
    if key("token_type") not in made:
        named = {made.get(key(f"{name}_token_id")): _CONTROL for name in _NAMED}
        named[made.get(key("unknown_token_id"))] = _UNKNOWN
        made[key("token_type")] = [
            named.get(i, _CONTROL if token in END_OF_TURN_TOKENS else _BYTE if _BYTES.fullmatch(token) else _NORMAL)
            for i, token in enumerate(tokens)
        ]
    for part in ("scores", "token_type"):
        if not isinstance(made[key(part)], list) or len(made[key(part)]) < len(tokens):
            raise ModelError(
                f"The GGUF's tokenizer is damaged (it has {len(tokens)} tokens and too few of {part}); download the "
                "file again."
            )
    return made


def _byte_level(metadata: dict[str, Any]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = SPLITS[metadata["tokenizer.ggml.pre"]]
    merges = [_merge(line) for line in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=split.whole_words))
    before: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    before += [pre_tokenizers.Split(Regex(step), "isolated") for step in split.steps]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, _bytes(split=split.as_gpt2)])
    if split.composed:
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


def _gemma(metadata: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = [_merge(line) for line in metadata["tokenizer.ggml.merges"]]
    unknown = _token(metadata, "unknown")
    tokenizer = Tokenizer(
        models.BPE(_vocabulary(metadata), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


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
    for token, kind in zip(tokens, types, strict=False):  # more types than tokens do no harm
        if kind in {_UNKNOWN, _CONTROL, _USER_DEFINED}:
            tokenizer.add_tokens([AddedToken(token, special=kind != _USER_DEFINED, normalized=False)])
    before = _token(metadata, "bos") if _begins(metadata) else None
    after = _token(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if before or after:
        names = [*([before] if before else []), "$A", *([after] if after else [])]
        special = [(token, tokenizer.token_to_id(token)) for token in (before, after) if token]
        tokenizer.post_processor = processors.TemplateProcessing(single=names, special_tokens=special)


def _begins(metadata: dict[str, Any]) -> bool:
    """Whether texts begin with the beginning-of-text token. Files of Gemma 4 that deny it are wrong."""
    kind = metadata["tokenizer.ggml.model"]
    usual = kind != "gpt2" or SPLITS[metadata["tokenizer.ggml.pre"]].begins
    return kind == "gemma4" or bool(metadata.get("tokenizer.ggml.add_bos_token", usual))


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name."""
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(f"{prefix}."): text for key, text in metadata.items() if key.startswith(f"{prefix}.")}
    return {name: text for name, text in {**named, "default": metadata.get(prefix)}.items() if isinstance(text, str)}


def _token(metadata: dict[str, Any], name: str) -> str | None:
    identity = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    return tokens[identity] if isinstance(identity, int) and 0 <= identity < len(tokens) else None
