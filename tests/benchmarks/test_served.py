"""The comparison of servers: its models have a token for each letter, and its figures are what the streams say."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.letters import END
from benchmarks.packed_export import write_packed
from benchmarks.served import OURS, SPEEDS, THEIRS, WAITS, choices_of, report
from benchmarks.shapes import LlamaShape
from engine.models.formats.gguf_file import GgufFile
from engine.models.text.gguf_tokenizer import write_tokenizer

TINY = LlamaShape(layers=1, hidden=256, ffn=256, heads=4, key_value_heads=1, vocabulary=512)


def test_a_prompt_has_as_many_tokens_as_letters(tmp_path: Path) -> None:
    path = write_packed(tmp_path / "tiny.gguf", TINY.config(), "Q4_K_M", letters=True)
    with GgufFile(path) as opened:
        ends = write_tokenizer(tmp_path, opened.metadata)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert ends == [tokenizer.token_to_id(END)]
    assert len(tokenizer.encode("user: w0 and so on\n").ids) == len("user: w0 and so on\n")
    with pytest.raises(ValueError, match="100 tokens do not hold"):
        write_packed(tmp_path / "x.gguf", LlamaShape(vocabulary=100, layers=1).config(), "Q4_K_M", letters=True)


def test_figures_of_rounds_and_streams() -> None:
    lines = [b": ping\n", b"\n", b'data: {"choices": [{"delta": {"content": "a"}}]}\n', b"data: [DONE]\n"]
    assert list(choices_of(lines)) == [{"delta": {"content": "a"}}]
    with pytest.raises(RuntimeError, match="an answer failed"):
        list(choices_of([b'data: {"error": {"message": "no"}}\n']))
    fast, slow = dict.fromkeys(SPEEDS, 20.0) | dict.fromkeys(WAITS, 0.5), dict.fromkeys((*SPEEDS, *WAITS), 5.0)
    text = report("Tiny", [{OURS: fast, THEIRS: slow}] * 3)
    assert "| one client, tokens/s | 20.0 (20.0–20.0) | 5.0 (5.0–5.0) | 4.00 (4.00–4.00) |" in text
    assert "| first token, kept, ms | 500 (500–500) | 5000 (5000–5000) | 10.00 (10.00–10.00) |" in text
