"""The tokenizer inside a GGUF: the same ids as the tokenizer it was made from, and text survives the round trip."""

from __future__ import annotations

import copy
import functools
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Message
from engine.models.text.gguf_tokenizer import KNOWN_SPLITS, SPLITS, write_tokenizer
from engine.models.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.random_examples import examples

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it's back; isn't it? I'll see you at 10:45 on 2024-03-01.",
    "Grüße aus München! Ça va? Привет, мир. 日本語のテキスト。 🎉 emoji and\ttabs\nnew lines\r\n  and   spaces",
    "def function(argument): return argument ** 2  # comment",
    "HTTPServer parseXMLFile camelCase UPPER lower MiXeD 1234567890 3.14159",
] * 4
AWKWARD = [
    "",
    " ",
    "   leading",
    "trailing   ",
    "a  b   c\n\n\nd",
    "12 345 6789",
    "it's we'LL I'M",
    "naïve café",
    "🎉🎉日本",
    "x\x00y",
    "<|im_start|>user\nHi<|im_end|>",
]


def byte_level(pre: str) -> dict[str, Any]:
    """Metadata of a byte-level BPE trained on the corpus."""
    return copy.deepcopy(_byte_level()) | {"tokenizer.ggml.pre": pre}


@functools.cache
def _byte_level() -> dict[str, Any]:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    state = json.loads(library.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }


def written(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, metadata)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("pre", KNOWN_SPLITS)
def test_every_known_split_keeps_all_text(tmp_path: Path, pre: str) -> None:
    metadata = {**byte_level(pre), "tokenizer.ggml.add_bos_token": False}
    tokenizer = written(tmp_path, metadata)
    for text in [*CORPUS[:4], *AWKWARD]:
        plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
        assert tokenizer.decode(tokenizer.encode(text)) == plain
    assert tokenizer.vocabulary_size == len(metadata["tokenizer.ggml.tokens"])
    assert tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "ab 123", ["ab", " ", "1", "2", "3"]),
        ("gpt-2", "ab 123", ["ab", " 123"]),
        ("olmo", "ab 123", ["ab", " 123"]),
        ("llama-bpe", "ab 12345", ["ab", " ", "123", "45"]),
        ("qwen2", "ab 12", ["ab", " ", "1", "2"]),
        ("qwen2", "it's\n\nNow", ["it", "'s", "\n\n", "Now"]),
        ("tekken", "parseXMLFile", ["parse", "XMLFile"]),
        ("tekken", "ab 12", ["ab", " ", "1", "2"]),
        ("gpt-4o", "parseXMLFile's 12345", ["parse", "XMLFile's", " ", "123", "45"]),
        ("gpt-4o", "don't WE'LL 12345/\n", ["don't", " WE'LL", " ", "123", "45", "/\n"]),
        ("gpt-4o", "a/b//\n\nC", ["a", "/b", "//\n\n", "C"]),
        ("llama4", "I'LL naïve", ["I'LL", " naïve"]),
        ("minimax-m2", "x1234", ["x", "123", "4"]),
        ("lfm2", "ab 12345", ["ab", " ", "123", "45"]),
        ("glm4", "it's 1234", ["it", "'s", " ", "123", "4"]),
        ("qwen35", "हिन्दी 12", ["हिन्दी", " ", "1", "2"]),
        ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),
        (
            "deepseek-llm",
            "ab  \u00c9t\u00e9\n12, \u4e2d\u6587",
            ["ab", " ", " \u00c9", "t", "\u00e9", "\n", "12", ",", " ", "\u4e2d\u6587"],
        ),
        ("deepseek-coder", "ab x+1\n23 中", ["ab", " x", "+", "1", "\n", "2", "3", " ", "中"]),
        ("deepseek-v3", "fn(x) 12345 日本中", ["fn", "(x", ")", " ", "123", "45", " ", "日本中"]),
    ],
)
def test_text_is_split_as_the_models_rule_says(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = written(tmp_path, byte_level(pre))
    split = tokenizer._library.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == pieces


@pytest.mark.parametrize("text", [*CORPUS[:4], *AWKWARD[1:-1], "cafe\u0301 u\u0308ber"])
def test_olmos_ids_are_those_of_transformers(tmp_path: Path, text: str) -> None:
    from transformers import GPTNeoXTokenizer

    metadata = byte_level("olmo")
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = GPTNeoXTokenizer(vocab=vocabulary, merges=merges)
    assert written(tmp_path, metadata).encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


def test_rules_are_those_of_transformers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as THEIRS

    common = set(THEIRS) & set(SPLITS)
    assert common >= {"gpt-4o", "llama4", "lfm2", "minimax-m2", "qwen2", "qwen35", "llama-bpe", "tekken"}
    for name in common:
        assert SPLITS[name].steps == (THEIRS[name],)


HARD = [
    *CORPUS[:4],
    *AWKWARD[:-1],
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n",
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3",
    "កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= нещо на Български",
    "```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it",
    "if (a[0] != b->c) { return &x | ~y; }  // 100% $5 #1 @me\r\n\r\n\tdone",
    "東京タワー、ひらがな。한국어 텍스트 שלום ‘quotes’ “more” … ½ Ⅷ",
]


@pytest.mark.parametrize("pre", [name for name in KNOWN_SPLITS if name not in ("tekken", "gpt-4o", "llama4")])
def test_ids_are_llama_cpps(tmp_path: Path, pre: str) -> None:
    """Of those that are left out llama.cpp's rules are approximations."""
    from tests.support.prebuilt_llama_cpp import PrebuiltTokenizer

    metadata = {**byte_level(pre), "tokenizer.ggml.add_bos_token": False}
    path = write_vocabulary(tmp_path / "m.gguf", metadata)
    theirs, ours = PrebuiltTokenizer(path), written(tmp_path / "ours", metadata)
    for text in HARD:
        assert ours.encode(text) == theirs.encode(text), text


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file with a byte-level BPE and no tensors."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_context_length(16)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_ids_and_special_tokens_are_the_files(tmp_path: Path) -> None:
    metadata = byte_level("gpt-2")
    assert write_tokenizer(tmp_path, metadata) == [0, 2]
    tokenizer = written(tmp_path, metadata)
    assert tokenizer.encode("<|im_start|>hi<|im_end|>")[0] == 1
    assert tokenizer.encode("<|im_start|>hi<|im_end|>")[-1] == 2
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokenizer._library.id_to_token(i) for i in range(len(tokens))] == tokens


def test_a_beginning_token_is_added_where_the_file_says(tmp_path: Path) -> None:
    metadata = {**byte_level("gpt-2"), "tokenizer.ggml.add_bos_token": True}
    tokenizer = written(tmp_path, metadata)
    assert tokenizer.encode("hi")[0] == 1
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert written(tmp_path, metadata).encode("hi")[0] != 1


def test_named_chat_templates_come_along(tmp_path: Path) -> None:
    metadata = byte_level("gpt-2")
    metadata["tokenizer.chat_templates"] = ["rag", "tool_use"]
    metadata["tokenizer.chat_template.rag"] = "from {{ documents }}"
    metadata["tokenizer.chat_template.tool_use"] = "with {{ tools }}"
    rendered = written(tmp_path, metadata).render_chat([Message("user", "Hi")])
    assert rendered == "<|im_start|>Hi<|im_end|>"
    metadata["tokenizer.chat_template.plain"] = metadata.pop("tokenizer.chat_template")
    assert written(tmp_path, metadata).render_chat([Message("user", "Hi")]) == rendered
    names = [each["name"] for each in json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]]
    assert sorted(names) == ["plain", "rag", "tool_use"]
    for name in ("plain", "rag"):
        del metadata[f"tokenizer.chat_template.{name}"]
        assert written(tmp_path, metadata).render_chat([Message("user", "Hi")]) == "with None"


def gemma() -> dict[str, Any]:
    """Metadata of a BPE over whole characters, with bytes for those it lacks, trained on the corpus."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, normalizers, trainers

    library = Library(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Replace(" ", "\u2581")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    library.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    state = json.loads(library.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    kinds = {"<pad>": 3, "<eos>": 3, "<bos>": 3, "<unk>": 2}
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 6 if token.startswith("<0x") else 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["merges"]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    }


def test_gemmas_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import GemmaTokenizer

    metadata = gemma()
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs, ours = GemmaTokenizer(vocab=vocabulary, merges=merges), written(tmp_path, metadata)
    for text in (text for text in HARD if "<|" not in text):
        ids = ours.encode(text)
        assert ids == [2, *theirs(text, add_special_tokens=False)["input_ids"]]
        assert ours.decode(ids) == text


def test_an_unknown_split_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'from-the-future'.* known are .*qwen2"):
        write_tokenizer(tmp_path, byte_level("from-the-future"))
    old = byte_level("gpt-2")
    del old["tokenizer.ggml.pre"]
    with pytest.raises(ModelError, match=r"'\(none\)'"):
        write_tokenizer(tmp_path, old)
    with pytest.raises(ModelError, match="'rwkv'"):
        write_tokenizer(tmp_path, {"tokenizer.ggml.model": "rwkv"})


TYPES, SCORES = "tokenizer.ggml.token_type", "tokenizer.ggml.scores"


def test_tokens_without_types_are_ordinary_but_for_those_that_are_named(tmp_path: Path) -> None:
    metadata = byte_level("gpt-2")
    whole = written(tmp_path / "whole", metadata)
    del metadata[TYPES]
    ours = written(tmp_path / "ours", metadata)
    assert write_tokenizer(tmp_path / "ours", metadata) == [0, 2]
    for text in [*CORPUS[:4], *AWKWARD]:
        assert ours.encode(text) == whole.encode(text)
    assert ours.decode([1, *ours.encode("hi"), 2]) == "hi"


def test_ends_of_turns_are_known_by_their_spelling_where_nothing_names_them(tmp_path: Path) -> None:
    metadata = byte_level("gpt-2")
    for key in (TYPES, *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot"))):
        del metadata[key]
    ours = written(tmp_path, metadata)
    assert write_tokenizer(tmp_path, metadata) == []
    assert ours.encode("hi<|im_end|>")[-1] == 2
    assert 2 in ours.end_of_turn_ids
    assert ours.encode("<|im_start|>")[0] != 1, "nothing says that this one is a mark"


def test_sentencepiece_without_types_ids_or_beginning(sentencepiece_model: Any, tmp_path: Path) -> None:
    """The usual ids are those of this vocabulary. Bytes are known by their spelling."""
    metadata = sentencepiece_metadata(sentencepiece_model)
    for key in (TYPES, *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown"))):
        del metadata[key]
    (tmp_path / "m").mkdir()
    assert write_tokenizer(tmp_path / "m", metadata) == [2]
    ours = written(tmp_path / "m", metadata)
    for text in (text for text in [*CORPUS[:4], *AWKWARD[1:]] if "\0" not in text):
        assert ours.encode(text) == [1, *sentencepiece_model.encode(text)]
        assert ours.decode(ours.encode(text)) == text


def test_sentencepiece_without_scores_prefers_the_pieces_that_come_first(
    sentencepiece_model: Any, tmp_path: Path
) -> None:
    """Trained vocabularies lie in the order of their scores, so that nothing changes."""
    metadata = sentencepiece_metadata(sentencepiece_model)
    del metadata[SCORES]
    ours = written(tmp_path, metadata)
    for text in (text for text in [*CORPUS[:4], *AWKWARD[1:]] if "\0" not in text):
        assert ours.encode(text) == [1, *sentencepiece_model.encode(text)]


def test_empty_tokens_and_spare_types_do_no_harm(tmp_path: Path) -> None:
    metadata = byte_level("gpt-2")
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["", ""]
    metadata[TYPES] += [1, 1, 5]
    tokenizer = written(tmp_path, metadata)
    assert tokenizer._library.id_to_token(size + 1) == f"[EMPTY_{size + 1}]"
    assert tokenizer.decode(tokenizer.encode(CORPUS[0])) == CORPUS[0]


@pytest.mark.parametrize("said", [True, False, None])
def test_gemma_begins_whatever_the_file_says(tmp_path: Path, said: bool | None) -> None:
    metadata = gemma() | ({} if said is None else {"tokenizer.ggml.add_bos_token": said})
    assert written(tmp_path, metadata).encode("hi")[0] == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.merges", None),
        ("tokenizer.ggml.token_type", "1"),
        ("tokenizer.ggml.tokens", None),
        ("tokenizer.ggml.tokens", ["a", "a"]),
        ("tokenizer.ggml.merges", ["nospace"]),
        ("tokenizer.ggml.merges", ["zz yy"]),
        ("tokenizer.ggml.token_type", [1]),
    ],
)
def test_a_damaged_tokenizer_is_said(tmp_path: Path, key: str, value: object) -> None:
    metadata = byte_level("gpt-2")
    if value is None:
        del metadata[key]
    else:
        metadata[key] = value
    with pytest.raises(ModelError, match="tokenizer is damaged"):
        write_tokenizer(tmp_path, metadata)


@pytest.fixture(scope="module")
def sentencepiece_model() -> Any:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(model: Any) -> dict[str, Any]:
    size = model.get_piece_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(size)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="module")
def from_sentencepiece(sentencepiece_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return written(tmp_path_factory.mktemp("spm"), sentencepiece_metadata(sentencepiece_model))


@pytest.mark.parametrize("text", [text for text in [*CORPUS[:4], *AWKWARD[1:]] if "\0" not in text])
def test_sentencepiece_ids_are_sentencepieces(
    from_sentencepiece: Tokenizer, sentencepiece_model: Any, text: str
) -> None:
    assert from_sentencepiece.encode(text) == [1, *sentencepiece_model.encode(text)]
    assert from_sentencepiece.decode(from_sentencepiece.encode(text)) == text


@settings(max_examples=examples(30), deadline=None)
@given(text=st.text(alphabet="abcdefgh thequick,.!?'\n12Ãé日🎉", min_size=1, max_size=40))
def test_sentencepiece_ids_agree_on_any_text(
    from_sentencepiece: Tokenizer, sentencepiece_model: Any, text: str
) -> None:
    assert from_sentencepiece.encode(text) == [1, *sentencepiece_model.encode(text)]


def test_a_token_longer_than_any_is_refused_before_it_is_cut(sentencepiece_model: Any, tmp_path: Path) -> None:
    for metadata in (sentencepiece_metadata(sentencepiece_model), byte_level("gpt-2")):
        metadata["tokenizer.ggml.tokens"][-1] = "a" * 1001
        with pytest.raises(ModelError, match="a token of 1001 characters, over 1000"):
            write_tokenizer(tmp_path, metadata)


def test_cutting_tokens_is_stopped(sentencepiece_model: Any, tmp_path: Path) -> None:
    with pytest.raises(Cancelled):
        write_tokenizer(tmp_path, sentencepiece_metadata(sentencepiece_model), lambda: True)
    assert not (tmp_path / "tokenizer.json").exists()
