"""The rules by which byte-level BPE tokenizers of GGUF files split text before they merge it.

A GGUF names its rule (``tokenizer.ggml.pre``) and does not contain it. The rules here are those of the tokenizers that
the models' makers publish; a name that is not here is refused, as a wrong rule gives subtly wrong prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
