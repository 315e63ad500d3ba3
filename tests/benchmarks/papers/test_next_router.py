"""Prefetching by the next layer's router: the memory's limit is kept, and guesses change reads, not tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.papers import beyond_rows, next_router
from benchmarks.papers.capped_experts import (
    AHEAD,
    PIECE_BYTES,
    CappedExperts,
    LayerRun,
    pieces_of,
    reads_past_the_cache,
)
from benchmarks.papers.next_router import as_it_will_be, prefetched, recall_of, routers_of
from engine.ipc.messages import Load
from engine.runtimes import runtime_named
from engine.runtimes.torch.model import TorchModel
from tests.support.opened_experts import experts_of
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(not reads_past_the_cache(), reason="this system reads no file past its cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "mixtral", "mixtral")


@pytest.fixture
def capped(folder: Path) -> Iterator[CappedExperts]:
    experts = experts_of(folder)
    try:
        with CappedExperts(experts, slots=2) as found:
            yield found
    except OSError as error:
        pytest.skip(f"this file system reads no file past the cache: {error}")


def test_only_the_most_recent_experts_of_a_layer_stay(capped: CappedExperts) -> None:
    for expert in (0, 1, 0, 2):
        capped.need(0, [expert])
    assert [(0, expert) in capped for expert in range(3)] == [True, False, True]
    read = capped.bytes_read
    capped.need(0, [0, 2])
    assert capped.bytes_read == read
    capped.need(1, [3])
    assert capped.bytes_read > read and len(capped) == 3


def test_guesses_displace_only_guesses(capped: CappedExperts) -> None:
    capped.need(0, [0, 1])
    for expert in range(4):
        capped.announce(1, [expert])
        capped.need(0, [0, 1])
    capped.need(1, [2])
    assert (0, 0) in capped and (0, 1) in capped and (1, 2) in capped
    assert len(capped) <= 2 * 2 + AHEAD


def test_pieces_are_whole_pages_that_hold_an_expert(folder: Path) -> None:
    experts = experts_of(folder)
    for piece in pieces_of(experts, (1, 2)):
        assert piece.start % 4096 == piece.nbytes % 4096 == 0 < piece.nbytes <= PIECE_BYTES
    assert sum(piece.nbytes for piece in pieces_of(experts, (1, 2))) >= experts.place(1, 2).nbytes


def test_guesses_change_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_router, "WARM", 1)
    monkeypatch.setattr(next_router, "STEPS", 4)
    monkeypatch.setattr(next_router, "ROUNDS", 1)
    model = runtime_named("torch").load(
        folder, Load(id=0, model="tiny", runtime="torch", dtype="float32", keep_resident=False), lambda *_: None
    )
    assert isinstance(model, TorchModel) and model.executor is not None
    backend = model.executor.backend
    assert set(routers_of(folder, model.facts.experts)) == set(range(model.facts.layers))
    try:
        found = prefetched(model, folder, [5, 9, 17])
        assert model.executor.backend is backend
    except OSError as error:
        pytest.skip(f"this file system reads no file past the cache: {error}")
    finally:
        model.close()
    assert (found.none.recall, found.known.recall) == (0.0, 1.0)
    assert 0.0 < found.router.recall <= 1.0
    assert found.none.tokens == found.known.tokens and len(found.none.tokens) == 4
    lines = beyond_rows.read_ahead(found)
    assert [line.after.split(";")[0] for line in lines] == [f"{100 * found.router.recall:.0f} %", "100 %"]


def test_recall_leaves_out_the_first_layer() -> None:
    runs = [LayerRun(0, (1, 2), ()), LayerRun(1, (0, 3), (3, 1)), LayerRun(0, (0, 1), ()), LayerRun(1, (2, 3), (2, 3))]
    assert recall_of(runs) == 0.75
    known = as_it_will_be(runs)
    assert [known(0, None), known(0, None)] == [(0, 3), (2, 3)]  # type: ignore[arg-type]
