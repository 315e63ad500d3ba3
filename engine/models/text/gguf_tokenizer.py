"""The tokenizer inside a GGUF file, written as ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import Cancelled, ModelError, shown
from engine.models.text.tokenizer import END_OF_TURN_TOKENS

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"

_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with case, as DeepSeek's first tokenizers list them; later versions of Unicode have more."""
_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_WIDE_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True)
class TextSplit:
    """How text is split before merging. ``steps`` are regular expressions; each splits what those before it left."""

    steps: tuple[str, ...] = ()
    single_digits: bool = False
    """Whether every digit is alone, before the steps."""
    as_gpt2: bool = False
    """Whether GPT-2's own rule comes last."""
    composed: bool = False
    """Whether text is composed (NFC) first."""
    whole_words: bool = False
    """Whether words of the vocabulary are taken whole, without merging."""
    begins: bool = False
    """Whether texts begin with the beginning-of-text token if the file does not say it."""


_GPT2 = TextSplit(as_gpt2=True)
_DIGITS = TextSplit(single_digits=True, as_gpt2=True)
_LLAMA3 = TextSplit((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}",))
_LLAMA3_WHOLE = replace(_LLAMA3, whole_words=True, begins=True)
_QWEN2 = TextSplit((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_TAIL}",), composed=True)
_QWEN35 = TextSplit(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}",
    ),
    composed=True,
)
_TEKKEN = TextSplit((rf"{'|'.join(_CASED_WORDS)}|\p{{N}}|{_CASED_TAIL}",), whole_words=True, begins=True)
_GPT4O = TextSplit((rf"{'|'.join(f'{word}{_CONTRACTIONS}?' for word in _CASED_WORDS)}|\p{{N}}{{1,3}}|{_CASED_TAIL}",))
_DEEPSEEK_LLM = TextSplit(
    ("[\r\n]", rf"\s?[{_CASED_LETTERS}]+", _WIDE_PUNCTUATION, r"\s+$", _IDEOGRAPHS, r"\p{N}+"),
)
_DEEPSEEK_CODER = TextSplit(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}"))
_DEEPSEEK_V3 = TextSplit(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}",
    ),
)

SPLITS: Mapping[str, TextSplit] = {
    "gpt-2": _GPT2,
    "olmo": replace(_GPT2, composed=True),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3", "falcon3", "pixtral", "lfm2"), _LLAMA3_WHOLE),
    **dict.fromkeys(("dbrx", "chatglm-bpe"), _LLAMA3),
    "glm4": replace(_LLAMA3, whole_words=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}
"""The rules by the names that files give them."""


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
