"""The tokenizer that is put together without transformers gives the ids that transformers' AutoTokenizer gives."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.models.architectures.families import FAMILIES, SUPPORTED, family_named
from engine.models.text.tokenizer import load_tokenizer
from engine.models.text.tokenizer_files import read_template, read_tokenizer
from tests.support.random_examples import examples

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it's back; isn't it? I'll see you at 10:45 on 2024-03-01.",
    "Grüße aus München! Ça va? Привет, мир. 日本語のテキスト。 🎉 emoji and\ttabs\nnew lines\r\n  and   spaces",
    "def function(argument): return argument ** 2  # comment",
    "HTTPServer parseXMLFile camelCase UPPER lower MiXeD 1234567890 3.14159",
] * 4
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "   leading",
    "trailing   ",
    "a  b   c\n\n\nd",
    "e\u0301 \u200d ﬁ Å",
    "हिन्दी में लिखा, ไทย ก็ได้",
    "<s>x</s> y <|endoftext|>z",
    "<|im_start|>user\nHi<|im_end|>\n <tool>a</tool> <pad>",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def trained_once(train: Callable[[], Any]) -> Callable[[], Any]:
    """``train``, of which every call gets a tokenizer of its own."""

    @functools.cache
    def text() -> str:
        return str(train().to_str())

    @functools.wraps(train)
    def copy() -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(text())

    return copy


@trained_once
def byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


@trained_once
def byte_fallback() -> Any:
    """As a converted sentencepiece BPE, the Llama 2 way."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    library = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.normalizer = steps
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*SPECIAL[:3], *bytes_], show_progress=False, limit_alphabet=60
    )
    library.train_from_iterator(CORPUS, trainer)
    state = json.loads(library.to_str())
    # The bytes are words of the vocabulary, not special tokens.
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in bytes_]
    library = Tokenizer.from_str(json.dumps(state))
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


@trained_once
def unigram() -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    library = Tokenizer(models.Unigram())
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL[:3], unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


def with_added(library: Any) -> Any:
    from tokenizers import AddedToken

    library.add_tokens([AddedToken("<tool>", special=False, normalized=False), AddedToken("</tool>", special=False)])
    library.add_special_tokens([AddedToken("<pad>", lstrip=True, rstrip=True)])
    return library


def added_entry(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content, **plain, "special": True, **flags}


Form = tuple[Callable[[], Any], dict[str, Any], dict[str, Any], dict[str, Any]]
"""A tokenizer, its tokenizer_config.json, its config.json, and further files."""

FAST = "PreTrainedTokenizerFast"
FORMS: dict[str, Form] = {
    "plain": (byte_level, {"tokenizer_class": FAST, "eos_token": "<|endoftext|>"}, {}, {}),
    "no tokenizer_config": (byte_level, {}, {"model_type": "llama"}, {}),
    "added tokens": (lambda: with_added(byte_level()), {"tokenizer_class": FAST, "pad_token": "<pad>"}, {}, {}),
    "added_tokens_decoder": (
        byte_level,
        {
            "tokenizer_class": FAST,
            "bos_token": "<s>",
            "added_tokens_decoder": {
                "1": added_entry("<s>"),
                "2": added_entry("</s>", lstrip=True),
                "420": added_entry("<tool>", special=False, normalized=True),
                "421": added_entry("</tool>", rstrip=True),
            },
        },
        {},
        {},
    ),
    "special_tokens_map": (
        byte_level,
        {"tokenizer_class": FAST, "bos_token": "<s>", "additional_special_tokens": ["<tool>"]},
        {},
        {
            "special_tokens_map.json": {
                "bos_token": {"content": "</s>"},
                "eos_token": "<|im_end|>",
                "pad_token": "<pad>",
            }
        },
    ),
    "added_tokens.json": (
        byte_level,
        {"tokenizer_class": FAST, "extra_special_tokens": ["</tool>"], "image_token": "<image>"},
        {},
        {"added_tokens.json": {"</tool>": 421, "<tool>": 420}},
    ),
    "qwen2": (
        byte_level,
        {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>", "add_prefix_space": False},
        {"model_type": "qwen2"},
        {},
    ),
    "qwen 3.5": (byte_level, {"tokenizer_class": FAST}, {"model_type": "qwen3_5_moe_text"}, {}),
    "qwen 3.5, dense": (byte_level, {"tokenizer_class": "Qwen3_5Tokenizer"}, {"model_type": "qwen3_5_text"}, {}),
    "qwen3, class unnamed": (byte_level, {}, {"model_type": "qwen3_moe"}, {}),
    "qwen2, class disbelieved": (byte_level, {"tokenizer_class": FAST}, {"model_type": "qwen2"}, {}),
    "olmoe": (byte_level, {"tokenizer_class": "GPTNeoXTokenizerFast"}, {"model_type": "olmoe"}, {}),
    "gpt2": (byte_level, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, {"model_type": "dbrx"}, {}),
    "granite": (byte_level, {"tokenizer_class": "GPT2Tokenizer"}, {"model_type": "granitemoe"}, {}),
    "llama 3 by llama's class": (byte_level, {"tokenizer_class": "LlamaTokenizer"}, {"model_type": "llama"}, {}),
    "llama 2": (byte_fallback, {"tokenizer_class": "LlamaTokenizer", "legacy": False}, {"model_type": "llama"}, {}),
    "llama 2, legacy": (
        byte_fallback,
        {"tokenizer_class": "LlamaTokenizer", "legacy": True},
        {"model_type": "llama"},
        {},
    ),
    "llama 2, no prefix": (
        byte_fallback,
        {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": False},
        {"model_type": "llama"},
        {},
    ),
    "mixtral": (
        byte_fallback,
        {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"},
        {"model_type": "mixtral"},
        {},
    ),
    "phimoe": (byte_fallback, {"tokenizer_class": "LlamaTokenizer"}, {"model_type": "phimoe"}, {}),
    "gemma": (byte_fallback, {"tokenizer_class": "GemmaTokenizerFast"}, {"model_type": "gemma3_text"}, {}),
    "gemma, class unnamed": (byte_fallback, {"bos_token": "<s>"}, {"model_type": "gemma3"}, {}),
    "unigram": (lambda: with_added(unigram()), {"tokenizer_class": FAST, "unk_token": "<unk>"}, {}, {}),
    "by transformers": (byte_level, {"tokenizer_class": "CohereTokenizerFast"}, {"model_type": "llama"}, {}),
}


def write(folder: Path, form: Form) -> Path:
    make, tokenizer_config, config, others = form
    folder.mkdir(exist_ok=True)
    make().save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config.json": tokenizer_config, "config.json": config, **others}.items():
        if content:
            (folder / name).write_text(json.dumps(content))
    return folder


def both(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    ours = load_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    return ours, theirs


@pytest.mark.parametrize("name", FORMS)
def test_the_ids_are_autotokenizers(tmp_path: Path, name: str) -> None:
    ours, theirs = both(write(tmp_path, FORMS[name]))
    assert dict(ours._named) == dict(theirs.special_tokens_map)
    assert ours.vocabulary_size == len(theirs)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.encode_rendered(text, beginning=False) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode_exactly(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert bool(ours.notices) == (name == "by transformers")


@settings(deadline=None, max_examples=examples(12))
@given(text=st.text(max_size=60))
def test_the_ids_agree_on_any_text(pairs: dict[str, tuple[Any, Any]], text: str) -> None:
    for name, (ours, theirs) in pairs.items():
        assert ours.encode(text) == theirs.encode(text), name


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    names = ("added_tokens_decoder", "qwen2", "olmoe", "llama 2", "mixtral", "unigram")
    return {name: both(write(tmp_path_factory.mktemp("pair"), FORMS[name])) for name in names}


def test_a_folder_without_tokenizer_json_is_read_by_transformers_and_it_is_said(tmp_path: Path) -> None:
    write(tmp_path, FORMS["qwen2"])
    state = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    (tmp_path / "merges.txt").write_text("".join(" ".join(merge) + "\n" for merge in state["merges"]))
    (tmp_path / "tokenizer.json").unlink()
    ours, theirs = both(tmp_path)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    assert ours.notices == (
        "The tokenizer is read by transformers, which makes loading slower: the folder has no tokenizer.json.",
    )


@pytest.mark.parametrize(
    ("given", "template"),
    [
        ({"chat_template": "{{ 1 }}"}, "{{ 1 }}"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, "d"),
        ({"chat_template": {"default": "d", "rag": "r"}}, "d"),
        ({"chat_template": ""}, None),
        ({}, None),
    ],
)
def test_the_template_is_autotokenizers(tmp_path: Path, given: dict[str, Any], template: str | None) -> None:
    make, config, model, others = FORMS["plain"]
    write(tmp_path, (make, {**config, **given}, model, others))
    assert read_template(tmp_path) == template
    _, theirs = both(tmp_path)
    assert (theirs.get_chat_template() if theirs.chat_template else None) == template
    (tmp_path / "chat_template.jinja").write_text("{{ 'file' }}")
    _, theirs = both(tmp_path)
    assert read_template(tmp_path) == theirs.get_chat_template() == "{{ 'file' }}"


@pytest.mark.parametrize(
    ("given", "template"),
    [
        ({"tool_use": "t"}, "t"),
        ({"rag": "r", "tool_use": "t"}, "t"),
        ({"rag": "r", "tool_use": "t", "plain": "p"}, "p"),
        ({"one": "1", "other": "2", "default": "d", "tool_use": "t"}, "d"),
    ],
)
def test_a_template_is_chosen_by_its_purpose(tmp_path: Path, given: dict[str, str], template: str) -> None:
    """transformers takes none where none is called default, unless there are tools."""
    make, config, model, others = FORMS["plain"]
    write(tmp_path, (make, {**config, "chat_template": given}, model, others))
    assert read_template(tmp_path) == template


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"chat_template": {"one": "1", "other": "2", "tool_use": "t"}},
            "several chat templates .one, other, tool_use.",
        ),
        ({"chat_template": [{"name": "rag", "template": "r"}]}, "several chat templates .rag. and none"),
        ({"chat_template": 7}, "gives 7 for chat_template, which must be text"),
        ({"added_tokens_decoder": {"x": {}}}, "cannot be read"),
        ({"added_tokens_decoder": {"1": 3}}, "cannot be read"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    make, config, model, others = FORMS["plain"]
    write(tmp_path, (make, {**config, **given}, model, others))
    with pytest.raises(ModelError, match=said):
        load_tokenizer(tmp_path)


def test_files_that_are_far_too_large_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, FORMS["plain"])
    monkeypatch.setattr("engine.models.text.tokenizer_files.MOST_TOKENIZER_BYTES", 1000)
    with pytest.raises(ModelError, match="over 1000"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x" * 2_000_001}))
    monkeypatch.undo()
    with pytest.raises(ModelError, match="chat_template of 2000001 characters"):
        read_template(tmp_path)


def test_the_classes_of_the_families_are_transformers() -> None:
    """A family that is added, or a new version of transformers, may ask for a line in a record."""
    from transformers.models.auto.tokenization_auto import (
        MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
        TOKENIZER_MAPPING_NAMES,
    )

    families = {*SUPPORTED, *(family.whole for family in FAMILIES.values() if family.whole)}
    records = {name: family for name in families if (family := family_named(name)) is not None}
    # transformers registers some classes for the whole only.
    wholes = {name: TOKENIZER_MAPPING_NAMES.get(family.whole) for name, family in records.items()}
    registered = {name: TOKENIZER_MAPPING_NAMES.get(name) or wholes.get(name) or "" for name in families}
    assert registered == {name: family.tokenizer_class for name, family in records.items()}
    overridden = {name for name, family in records.items() if name in family.tokenizer_overridden}
    assert MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS & families == overridden
