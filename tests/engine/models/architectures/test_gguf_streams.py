"""GGUF files of Qwen3.8-Flash-Next: what their metadata says, and files that say something else than runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.models.architectures.gguf_architectures import config_of
from engine.models.formats.gguf_file import GgufFile
from engine.runtimes.native.shape import read_shape
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import write_tiny_model


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The settings of the tiny model's file with some of its metadata changed."""
    path = write_tiny_gguf(tmp_path / "m.gguf", write_tiny_model(tmp_path / "source", "qwen4_exp_text"), "qwen4exp")

    def settings(**metadata: Any) -> dict[str, Any]:
        with GgufFile(path) as gguf:
            for key, value in metadata.items():
                gguf.metadata[key if key.startswith("tokenizer") else f"qwen4exp.{key}"] = value
            return config_of(gguf)

    return settings


def test_a_text_ends_also_where_the_vocabulary_says(changed: Callable[..., dict[str, Any]]) -> None:
    assert changed()["eos_token_id"] == 2
    assert changed(**{"tokenizer.ggml.eos_token_id": 7})["eos_token_id"] == [2, 7]


def test_a_file_may_have_no_table_of_n_grams(changed: Callable[..., dict[str, Any]]) -> None:
    found = changed(**{"ple.layers": None})
    assert found["ple_layer_ids"] == [] and found["eos_token_id"] == 2


def test_layers_that_predict_ahead_attend_to_everything(changed: Callable[..., dict[str, Any]]) -> None:
    found = changed(
        **{"block_count": 5, "nextn_predict_layers": 1, "attention.compress_ratios": [0, 0, 0, 4, 0]},
    )
    assert found["num_hidden_layers"] == 4 and found["indexer_compress_ratio"] == 4


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"ple.layer_multipliers": [1, 3, 5]}, "for ple.layer_multipliers, other numbers than its sizes give"),
        ({"ple.head_offsets": [0, 1, 2, 3]}, "for ple.head_offsets, other numbers"),
        ({"ple.head_vocab_sizes": "many"}, "ngram_vocab_size_base"),
        ({"ple.layers": [0, 1]}, r"n-grams in the layers \[0, 1\], and one layer"),
        ({"ple.layers": ["x"]}, "n-grams in the layers"),
        ({"attention.compress_ratios": [0, 0, 0, 0]}, r"blocks of \[0\] tokens"),
        ({"attention.compress_ratios": [4]}, "compress_ratios, which must be a number for each of 4 layers"),
        ({"hyper_connection.count": None}, "hyper_connection.count is None"),
        ({"attention.indexer.top_k": 13}, "indexer_budget, which must be a multiple of 4"),
    ],
    ids=str,
)
def test_files_that_do_not_run_are_refused(
    changed: Callable[..., dict[str, Any]], metadata: dict[str, Any], said: str
) -> None:

    with pytest.raises(ModelError, match=said):
        read_shape(changed(**metadata), (0, 1, 2, 3))
