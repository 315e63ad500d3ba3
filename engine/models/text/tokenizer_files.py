"""Building the tokenizer of a model's folder as transformers' AutoTokenizer does, without importing it.

``tokenizer.json`` is the `tokenizers` library's own file. transformers adds the special tokens of
``tokenizer_config.json`` (in older folders also of ``special_tokens_map.json`` and ``added_tokens.json``). For a few
classes it rebuilds the steps around the vocabulary instead of using the file's; these are in a table here. A folder of
any other class, or without a ``tokenizer.json``, is read by transformers itself, which takes longer and gives a notice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError, shown
from engine.models.architectures.families import family_named
from engine.models.formats.json_files import MOST_TOKENIZER_BYTES, SMALL_FILE, check_size, read_object, read_text
from engine.system.free_memory import give_back

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of special tokens that every tokenizer may have."""
TEMPLATE_BYTES = 2_000_000
"""Maximum bytes of a chat template; the largest in use have 30 thousand."""

_OTHER_TEMPLATES = ("tool_use", "rag")
"""Names of chat templates that are not for plain conversations."""
_CONFIG = "tokenizer_config.json"
_AS_THE_FILE_HAS_IT = ("", "PreTrainedTokenizer", "TokenizersBackend")
"""Classes (without ``Fast``) for which ``tokenizer.json`` is the whole tokenizer."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A folder's settings of its tokenizer. ``named`` are the special tokens that have a role, by their key."""

    backend: Library
    named: Mapping[str, str]
    notices: tuple[str, ...] = ()

    @functools.cached_property
    def added(self) -> Mapping[int, AddedToken]:
        """The tokens that were added to the vocabulary, by id."""
        return self.backend.get_added_tokens_decoder()


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """The tokenizer of ``folder``. Raises ModelError if a file is damaged, too large, or asks for code."""
    config = read_object(folder / _CONFIG, SMALL_FILE)
    declared, model_type = _declared_class(folder, config)
    class_name = _class_of(declared, model_type, lambda: _is_byte_level(folder))
    if _asks_for_code(config) and (not declared or class_name not in _KNOWN):
        raise _code_refused(folder)
    if not (folder / "tokenizer.json").is_file():
        return _read_by_transformers(folder, "the folder has no tokenizer.json")
    if class_name not in _KNOWN:
        return _read_by_transformers(folder, f"its class is {shown(class_name)}")
    try:
        found = _read(folder, config, class_name)
        # Reading a vocabulary takes twice the memory of having it.
        give_back()
        return found
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception for damaged files
        raise _damaged(folder, error) from error


# --- which class --------------------------------------------------------------------------------------------------


def _declared_class(folder: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """The class that the folder names, without ``Fast``, and its family; empty if it names none."""
    model = read_object(folder / "config.json", SMALL_FILE)
    declared = config.get("tokenizer_class") or model.get("tokenizer_class")
    model_type = model.get("model_type")
    name = declared.removesuffix("Fast") if isinstance(declared, str) else ""
    return name, model_type if isinstance(model_type, str) else ""


def _class_of(declared: str, model_type: str, byte_level: Callable[[], bool]) -> str:
    """The class that AutoTokenizer takes."""
    family = family_named(model_type)
    registered = "" if family is None else family.tokenizer_class
    believed = family is None or model_type not in family.tokenizer_overridden
    kept = family is not None and family.keeps_llama_tokenizer
    if declared == "LlamaTokenizer" and believed and not kept and byte_level():
        return "TokenizersBackend"
    if not declared:
        return registered
    if registered and registered != declared:
        return declared if registered != "TokenizersBackend" and believed else registered
    return declared


def _is_byte_level(folder: Path) -> bool:
    path = folder / "tokenizer.json"
    return path.is_file() and '"ByteLevel"' in read_text(path, MOST_TOKENIZER_BYTES)


def _asks_for_code(config: Mapping[str, Any]) -> bool:
    named = config.get("auto_map")
    return isinstance(named, list) or (isinstance(named, Mapping) and named.get("AutoTokenizer") is not None)


# --- the steps that transformers builds anew ----------------------------------------------------------------------

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _llama(library: Library, config: Mapping[str, Any]) -> None:
    from tokenizers import decoders, pre_tokenizers

    given = config.get("add_prefix_space")
    prefix = True if given is None else bool(given)
    scheme = "never" if not prefix else "always" if config.get("legacy") else "first"
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.normalizer = None
    library.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)


def _qwen2(library: Library, config: Mapping[str, Any], words: str = _QWEN2_SPLIT) -> None:
    """``words``: the regular expression by which text is split."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    split = pre_tokenizers.Split(Regex(words), behavior="isolated", invert=False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False)
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    library.decoder = decoders.ByteLevel()


def _qwen35(library: Library, config: Mapping[str, Any]) -> None:
    _qwen2(library, config, _QWEN35_SPLIT)


def _gpt2(library: Library, config: Mapping[str, Any]) -> None:
    from tokenizers import decoders, pre_tokenizers

    library.normalizer = None
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    library.decoder = decoders.ByteLevel()


def _gpt_neox(library: Library, config: Mapping[str, Any]) -> None:
    from tokenizers import normalizers, processors

    _gpt2(library, config)
    library.normalizer = normalizers.NFC()
    library.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


def _gemma(library: Library, config: Mapping[str, Any]) -> None:
    from tokenizers import decoders, normalizers, pre_tokenizers

    library.normalizer = normalizers.Replace(" ", "▁")
    library.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@dataclass(frozen=True)
class _Rebuilt:
    """A class whose steps transformers builds anew. ``named``: the special tokens where the folder names none."""

    build: Callable[[Library, Mapping[str, Any]], None]
    named: Mapping[str, str]
    fuse_unknown: bool = False
    byte_fallback: bool = False


_END = "<|endoftext|>"
_REBUILT = {
    "LlamaTokenizer": _Rebuilt(_llama, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, True, True),
    "Qwen2Tokenizer": _Rebuilt(_qwen2, dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END)),
    "Qwen3_5Tokenizer": _Rebuilt(_qwen35, dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END)),
    "GPT2Tokenizer": _Rebuilt(_gpt2, dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END)),
    "GemmaTokenizer": _Rebuilt(
        _gemma, {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")}, True, True
    ),
    "GPTNeoXTokenizer": _Rebuilt(
        _gpt_neox, {**dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END), "pad_token": "<|padding|>"}
    ),
}
_KNOWN = frozenset((*_AS_THE_FILE_HAS_IT, *_REBUILT))


def _rebuild(library: Library, rebuilt: _Rebuilt, config: Mapping[str, Any]) -> None:
    model: Any = library.model
    if type(model).__name__ != "BPE":
        raise ValueError(f"its model is {type(model).__name__}, and its class needs BPE")
    model.dropout, model.unk_token = None, None
    model.continuing_subword_prefix = model.end_of_word_suffix = None
    model.fuse_unk, model.byte_fallback = rebuilt.fuse_unknown, rebuilt.byte_fallback
    model.ignore_merges = False
    rebuilt.build(library, config)


# --- reading ------------------------------------------------------------------------------------------------------


def _read(folder: Path, config: Mapping[str, Any], class_name: str) -> TokenizerFiles:
    from tokenizers import Tokenizer as Library

    path = folder / "tokenizer.json"
    check_size(path, MOST_TOKENIZER_BYTES)
    library = Library.from_file(str(path))
    library.no_truncation()
    library.no_padding()
    rebuilt = _REBUILT.get(class_name)
    if rebuilt is not None:
        _rebuild(library, rebuilt, config)
    settings = dict(config)
    added = _added_tokens(folder, settings)
    named = {**(rebuilt.named if rebuilt is not None else {}), **_named_tokens(settings)}
    _add(library, added, [text for text in named.values() if text] + _extra_tokens(settings))
    return TokenizerFiles(library, {key: text for key, text in named.items() if text})


def _added_tokens(folder: Path, settings: dict[str, Any]) -> list[Any]:
    """What is added to the vocabulary, in the order of the ids; ``settings`` takes in what older files say."""
    from tokenizers import AddedToken

    listed = settings.get("added_tokens_decoder")
    if listed is not None:
        return [_added(listed[key]) for key in sorted(listed, key=int)]
    settings.update(read_object(folder / "special_tokens_map.json", SMALL_FILE))
    special = {text for text in _named_tokens(settings).values() if text} | set(_extra_tokens(settings))
    older = read_object(folder / "added_tokens.json", SMALL_FILE)
    return [
        AddedToken(text, special=text in special, normalized=text not in special)
        for text in sorted(older, key=lambda each: int(older[each]))
    ]


def _added(entry: Any) -> Any:
    from tokenizers import AddedToken

    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return AddedToken(str(entry["content"]), **{flag: bool(entry[flag]) for flag in flags if flag in entry})


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """The special tokens with a role: the usual ones and a model's own; None for one that is switched off."""
    keys = [key for key in settings if key.endswith("_token") and (key in NAMED_TOKENS or _text_of(settings[key]))]
    named = {key: _text_of(settings[key]) for key in keys}
    own = _first_extra(settings)
    return {**named, **({str(key): _text_of(value) for key, value in own.items()} if isinstance(own, Mapping) else {})}


def _extra_tokens(settings: Mapping[str, Any]) -> list[str]:
    extra = _first_extra(settings)
    found = [_text_of(token) for token in extra] if isinstance(extra, list) else []
    return [text for text in found if text]


def _first_extra(settings: Mapping[str, Any]) -> Any:
    return settings.get("extra_special_tokens") or settings.get("additional_special_tokens")


def _text_of(token: Any) -> str | None:
    """The text of a special token, which is written as text or as a table."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add(library: Library, added: list[Any], special: list[str]) -> None:
    """Add tokens, and those of ``special`` that are not there yet."""
    from tokenizers import AddedToken

    if added:
        library.add_tokens(added)
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    missing = [text for text in dict.fromkeys(special) if text not in known]
    if missing:
        library.add_tokens([AddedToken(text, special=True) for text in missing])


def read_template(folder: Path) -> str | None:
    """The chat template of ``folder``; None if it has none. Raises ModelError if it is no text, or far too long."""
    config = read_object(folder / _CONFIG, SMALL_FILE)
    own = folder / "chat_template.jinja"
    if own.is_file():
        return read_text(own, TEMPLATE_BYTES)
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {each.get("name"): each.get("template") for each in template if isinstance(each, Mapping)}
    if isinstance(template, Mapping) and template:
        chosen = _for_conversations(template)
        if chosen is None:
            names = shown(", ".join(sorted(map(str, template))))
            raise ModelError(
                f"{folder / _CONFIG} has several chat templates ({names}) and none is called default; name one so."
            )
        template = chosen
    if template is not None and not isinstance(template, str) and template:
        raise ModelError(f"{folder / _CONFIG} gives {shown(template)} for chat_template, which must be text.")
    if template and len(template) > TEMPLATE_BYTES:
        raise ModelError(f"{folder / _CONFIG} has a chat_template of {len(template)} characters; {TEMPLATE_BYTES} go.")
    return template or None


def _for_conversations(templates: Mapping[Any, Any]) -> str | None:
    """The one of several named templates that conversations are written with: the one called default, else the only
    one that has no other purpose, else the one for tools. None if there is no such one."""
    texts = {name: text for name, text in templates.items() if isinstance(text, str)}
    plain = [text for name, text in texts.items() if name not in _OTHER_TEMPLATES]
    if "default" in texts or not plain:
        return texts.get("default", texts.get("tool_use"))
    return plain[0] if len(plain) == 1 else None


# --- by transformers ----------------------------------------------------------------------------------------------


def _read_by_transformers(folder: Path, why: str) -> TokenizerFiles:
    from transformers import AutoTokenizer

    for path in folder.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".model"):
            check_size(path, MOST_TOKENIZER_BYTES)
    try:
        inner = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise _code_refused(folder) from error
        raise _damaged(folder, error) from error
    library = getattr(inner, "backend_tokenizer", None)
    if library is None:
        raise ModelError(
            f"The tokenizer in {folder} is of the class {shown(type(inner).__name__)}, which has no tokenizer.json; "
            "use a copy of the model that has one."
        )
    library.no_truncation()
    library.no_padding()
    notice = f"The tokenizer is read by transformers, which makes loading slower: {why}."
    return TokenizerFiles(library, dict(inner.special_tokens_map), (notice,))


def _code_refused(folder: Path) -> ModelError:
    return ModelError(f"The tokenizer in {folder} asks for code from its repository, which is never run.")


def _damaged(folder: Path, error: Exception) -> ModelError:
    reason = shown(" ".join(str(error).split()), 200)
    return ModelError(
        f"The tokenizer in {folder} cannot be read ({type(error).__name__}: {reason}); download the model again."
    )
