"""The ruler itself: medians, ratios, the equality gate, the bytes a token reads."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from benchmarks.compare import parse
from benchmarks.measuring import (
    MEASURES,
    Measure,
    ReadBytes,
    Routing,
    Spread,
    compare_logits,
    markdown,
    read_fraction,
    speed_ratio,
)
from benchmarks.shapes import MixtralShape, Qwen3MoeShape


def test_a_ratio_is_of_medians_and_its_range_is_of_rounds() -> None:
    samples = {"privatellm": {"decode": [1.0, 2.0, 4.0]}, "llama.cpp": {"decode": [3.0, 2.0, 4.0]}}
    assert speed_ratio(samples, "decode", "llama.cpp") == Spread(1.5, 1.0, 3.0)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="no value was measured"):
        Spread.of([])


def test_equal_logits_pass_and_others_do_not() -> None:
    reference = np.random.default_rng(0).standard_normal((5, 100))
    noisy = reference + 1e-4 * np.random.default_rng(1).standard_normal((5, 100))
    assert compare_logits("same", noisy, reference).equal
    shuffled = np.vstack([noisy[:4], noisy[4:, ::-1]])
    assert not compare_logits("one position shuffled", shuffled, reference).equal
    one = compare_logits("one may be", shuffled, reference, may_differ=1)
    assert one.equal and one.apart == 1 and str(one).endswith("1 apart")
    assert not compare_logits("two are", np.vstack([noisy[:3], noisy[3:, ::-1]]), reference, may_differ=1).equal
    assert not compare_logits("none is a number", np.full_like(noisy, np.nan), reference, may_differ=1).equal
    with pytest.raises(ValueError, match="gave logits"):
        compare_logits("short", reference[:4], reference)


def test_another_choice_passes_only_as_a_near_tie() -> None:
    reference = np.zeros((1, 1000))
    reference[0, :500] = 5.0
    reference[0, 0] = 10.0
    reference[0, 1] = 9.9
    tied = reference.copy()
    tied[0, 1] = 10.01
    comparison = compare_logits("tied", tied, reference)
    assert (comparison.equal_choices, comparison.near_ties, comparison.equal) == (0, 1, True)
    assert json.loads(json.dumps(asdict(comparison)))["near_ties"] == 1
    reference[0, 1] = tied[0, 1] - 2.0
    comparison = compare_logits("not tied", tied, reference)
    assert (comparison.near_ties, comparison.equal) == (0, False)


def test_bytes_of_a_token_are_those_of_mixtral() -> None:
    config = {
        "hidden_size": 4096, "vocab_size": 32000, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336, "num_hidden_layers": 32,
    }  # fmt: skip
    # 12.88 billion active parameters, of which the embedding (131 million) is not read but for one row.
    reads = ReadBytes.of(config)
    assert reads.step() == pytest.approx(2 * (12.88e9 - 0.131e9), rel=1e-3)
    assert reads.step(8) - reads.step() == 32 * 6 * reads.expert


def test_bytes_of_a_token_are_those_of_qwen3_moe() -> None:
    reads = ReadBytes.of(Qwen3MoeShape(layers=48, vocabulary=151936).config())
    # 3.35 billion active parameters, of which the embedding (311 million) is not read but for one row.
    assert reads.step() == pytest.approx(2 * (3.353e9 - 0.311e9), rel=2e-3)


def test_a_tied_head_is_read_once_and_its_row_is_part_of_it() -> None:
    config = MixtralShape().config()
    tied = ReadBytes.of(config | {"tie_word_embeddings": True})
    assert ReadBytes.of(config).head - tied.head == 2 * config["hidden_size"]


def test_routing_of_too_few_experts_is_called_so() -> None:
    assert not Routing(65.0, 69.0).degenerate
    assert Routing(52.0, 69.0).degenerate
    assert str(Routing(8.0, 8.0)) == "8.0 (evenly routed 8.0)"


def test_variants_are_measured_where_that_says_something() -> None:
    decode, four, prompt = Measure("decode", rows=1), Measure("4 rows", rows=4), Measure("prefill 64", tokens=64)
    assert [measure.of("llama.cpp, all logits") for measure in (decode, four, prompt)] == [False, False, True]
    assert all(measure.of("privatellm") for measure in (decode, four, prompt))
    apart = Measure("4 answers", rows=4, apart=True)
    assert [apart.of(name) for name in ("privatellm", "llama.cpp", "transformers")] == [True, True, False]


def test_the_tables_hold_every_engine_and_measure() -> None:
    samples = {
        variant: {measure.name: [0.1 * scale, 0.12 * scale] for measure in MEASURES}
        for scale, variant in enumerate(("privatellm", "transformers", "llama.cpp"), start=1)
    }
    samples["llama.cpp, all logits"] = {measure.name: [0.4, 0.4] for measure in MEASURES if measure.tokens}
    text = markdown("A model", samples, MEASURES)
    for measure in MEASURES:
        assert text.count(f"| {measure.name} |") == 2
    assert "| decode | 110 (100–120) | 220 (200–240) | 330 (300–360) | – | 9.1 |" in text
    assert "| decode | 2.00 | 3.00 | – |" in text
    lines = read_fraction(samples, [20e9, 22e9], {"decode": 1_100_000_000, "4 rows": 2_200_000_000})
    assert lines[0].startswith("Streaming read in the same run: 21.0 GB/s (20.0–22.0).")
    assert "| decode | 1.100 | 48% | 24% | 16% | – |" in lines
    assert "| 4 rows | 2.200 | 95% | 48% | 32% | – |" in lines


@pytest.mark.parametrize(
    "values",
    [
        ["--hidden", "100"],
        ["--rounds", "0"],
        ["--layers", "none"],
        ["--qwen3-layers", "0"],
        ["--threads", "0"],
        ["--engines", "x"],
    ],
)
def test_bad_arguments_are_refused(values: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(values)
    assert stopped.value.code == 2
    assert values[0] in capsys.readouterr().err
