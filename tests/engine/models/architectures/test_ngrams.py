"""Rows of tables of n-grams: those that transformers looks up, whatever parts a text is read in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from engine.errors import ModelError
from engine.models.architectures.families import completed
from engine.models.architectures.ngrams import NgramHash, ngram_hashes
from tests.support.tiny_families import tiny_config

END = 2
TWO = {"ple_layer_ids": [1, 3]}
"""Layers with tables, counted from 1."""


def settings(**others: Any) -> dict[str, Any]:
    return dict(completed(tiny_config("qwen4_exp_text", **(TWO | others)).to_dict()))


def library(place: int, **others: Any) -> Any:
    """transformers' embedding of the table number ``place``; its table gives each row's own number."""
    config = tiny_config("qwen4_exp_text", **(TWO | others))
    with torch.device("meta"):
        module = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, config.ple_layer_ids[place] - 1, place)
    return module


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "others",
    [{}, {"ngram_size": 4, "heads_per_ngram": 1}, {"seed": 99, "vocab_size": 248_320, "ngram_vocab_size_base": 30_000}],
    ids=["tiny", "four tokens", "large"],
)
def test_numbers_of_the_hash_are_those_of_transformers(place: int, others: dict[str, Any]) -> None:
    ours, theirs = ngram_hashes(settings(**others))[place], library(place, **others)
    wanted = Qwen4ExpTextNGramEmbedding.__init__.__globals__["_build_layer_multipliers"](
        theirs.unigram_vocab_size, theirs.ngram_size, place, theirs.seed
    )
    assert list(ours.multipliers) == wanted.tolist()
    assert list(ours.sizes) == theirs.head_vocab_sizes and list(ours.offsets) == theirs.head_offsets
    assert ours.rows == theirs.total_vocab_size <= theirs.ngram_embedding.num_embeddings
    assert ours.end == theirs.eos_token_id


def rows_by_transformers(tokens: list[int], **others: Any) -> list[list[int]]:
    config = tiny_config("qwen4_exp_text", **others)
    module = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 0, 0)
    looked_up: list[torch.Tensor] = []
    module.ngram_embedding.register_forward_pre_hook(lambda _, inputs: looked_up.append(inputs[0]))
    with torch.inference_mode():
        module(torch.tensor([tokens]), None)
    found: list[list[int]] = looked_up[0][0].tolist()
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 3, 9), (6,)], ids=str)
def test_rows_do_not_depend_on_the_parts_in_which_a_text_is_read(size: int, cuts: tuple[int, ...]) -> None:
    tokens = np.random.default_rng(1).integers(3, 160, 24)
    tokens[[3, 9, 10, 18]] = END
    own = ngram_hashes(settings(ngram_size=size))[0]
    before = np.full((1, size - 1), END)
    found = []
    for part in np.split(tokens, cuts):
        found.append(own.rows_of(before, part[None])[0])
        before = np.concatenate([before, part[None]], axis=1)[:, -(size - 1) :]
    assert np.concatenate(found).tolist() == rows_by_transformers(tokens.tolist(), ngram_size=size)


def test_texts_do_not_change_each_other() -> None:
    own = ngram_hashes(settings())[0]
    before, tokens = np.array([[7, 8], [END, 9]]), np.array([[3, 4, 5], [6, END, 8]])
    together = own.rows_of(before, tokens)
    for row in range(2):
        assert (own.rows_of(before[row : row + 1], tokens[row : row + 1])[0] == together[row]).all()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"eos_token_id": None}, "for eos_token_id"),
        ({"eos_token_id": 160}, "for eos_token_id"),
        ({"seed": "x"}, "gives x for seed"),
        ({"ngram_size": 1}, "ngram_size"),
        ({"heads_per_ngram": 100}, "2 tables of n-grams with 200 heads each, over 256"),
        ({"ngram_vocab_size_base": 1 << 40}, "ngram_vocab_size_base"),
    ],
)
def test_impossible_settings_are_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        ngram_hashes(settings() | changed)


def test_the_last_of_several_ends_is_not_the_one_that_counts() -> None:
    assert ngram_hashes(settings() | {"eos_token_id": [5, 2]})[0].end == 5
    assert isinstance(ngram_hashes(settings())[0], NgramHash)
