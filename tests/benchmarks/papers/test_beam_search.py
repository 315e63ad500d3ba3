"""Both beam searches: same sequences, and as many tokens decoded as either algorithm says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.papers import beam_rows
from benchmarks.papers.beam_search import common_prefix, one_by_one, together
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.runtimes import runtime_named
from engine.runtimes.protocol import LoadedModel
from tests.support.tiny_models import write_tiny_model

PROMPT = [5, 9, 17, 4, 33, 21]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "mixtral", "mixtral")
    load = Load(id=0, model="tiny", runtime="torch", dtype="float32", keep_resident=False)
    loaded = runtime_named("torch").load(folder, load, lambda *_: None)
    yield loaded
    loaded.close()


def test_the_same_beams_and_many_more_tokens(model: LoadedModel) -> None:
    ours, theirs = together(model, PROMPT, 4, 12), one_by_one(model, PROMPT, 4, 12)
    assert theirs.best.tokens == ours.best.tokens
    assert theirs.best.score == pytest.approx(ours.best.score, abs=1e-4)
    assert ours.decoded == 11 * 4
    assert 11 * 4 < theirs.decoded <= 4 * sum(range(1, 12)) + 11
    assert 1 < theirs.longest <= 11


def test_one_beam_is_decoded_once(model: LoadedModel) -> None:
    ours, theirs = together(model, PROMPT, 1, 6), one_by_one(model, PROMPT, 1, 6)
    assert theirs.best.tokens == ours.best.tokens
    # Each token is decoded for its logits, and once more when it is kept.
    assert ours.decoded == 5
    assert theirs.decoded == 5 + 4


def test_common_prefix() -> None:
    assert common_prefix([(1, 2, 3), (1, 2, 4), (1, 2)]) == 2
    assert common_prefix([(1,), (2,)]) == 0
    assert common_prefix([]) == 0


def test_the_rows(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = beam_rows.searched(model, [PROMPT], (2, 3), 5)
    assert found.rows[0].tag == "executed" and (found.rows[0].ours or 0) > 0
    assert [line[0] for line in found.tables[0].lines] == ["2", "3"]

    def missing(*_: object) -> None:
        raise ModelError("There is no starter: privatellm models pull starter", kind="bad-input")

    monkeypatch.setattr(beam_rows, "find_folder", missing)
    row = beam_rows.beam_rows().rows[0]
    assert (row.tag, row.ours) == ("not possible here", None)
    assert "pull starter" in row.note


def test_prompts_have_the_papers_length(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        def encode(self, text: str, add_special_tokens: bool) -> object:
            return type("Encoded", (), {"ids": list(range(len(text.split())))})()

    monkeypatch.setattr(beam_rows, "read_tokenizer", lambda folder: type("Files", (), {"backend": Backend()})())
    prompts = beam_rows.prompts_of(Path("model"))
    assert len(prompts) == beam_rows.REPEATS
    assert all(len(prompt) == 32 for prompt in prompts)
