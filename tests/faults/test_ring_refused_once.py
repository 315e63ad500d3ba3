"""A machine that refuses to be in a ring, once or always: the others go on, and it is tried again, but not for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import hooks
from tests.faults.ring_faults import Oracle, Ring
from tests.support.eventually import eventually
from tests.support.hooked_engine import hooked

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """How often node 1 is still to refuse, and how often it was asked."""
    return tmp_path_factory.mktemp("asked") / "asked"


@pytest.fixture(scope="module")
def ring(asked: Path) -> Iterator[Ring]:
    with Ring(2, arguments={1: hooked(hooks.refuses, path=str(asked))}) as made:
        yield made


@pytest.mark.parametrize(("times", "tried", "state"), [(1, 2, "ring"), (99, 2, "ready")])
def test_a_machine_that_refuses_is_tried_once_more(
    ring: Ring, asked: Path, model: Path, alone: Oracle, times: int, tried: int, state: str
) -> None:
    asked.write_text(f"{times} 0")
    since = ring.mark()
    ring.load(model)
    refusing, other = ring.followers

    def has_come_about() -> bool:
        # It is tried again by a question.
        assert ring.answer(8).token_ids == alone(8).token_ids
        count = int(asked.read_text().split()[1])
        return count >= tried and (ring.state_of(refusing), ring.state_of(other)) == (state, "ring")

    eventually(has_come_about)
    for _ in range(2):
        assert ring.answer(8).token_ids == alone(8).token_ids
    assert int(asked.read_text().split()[1]) == tried
    said = [text for text in ring.notices(since) if "node 1 is left out of the ring: It is still busy." in text]
    assert len(said) == 1


@pytest.mark.soak
def test_a_machine_that_was_in_the_ring_since_may_refuse_again(
    ring: Ring, asked: Path, model: Path, alone: Oracle
) -> None:
    """As with a cable that is loose: what was long ago does not keep it out."""
    asked.write_text("1 0")
    ring.load(model)
    assert ring.answered_by_all(8) == alone(8).token_ids
    for _ in range(2):
        asked.write_text("1 0")
        gone = ring.followers[1]
        gone.kill()
        assert ring.answer(8).token_ids == alone(8).token_ids
        gone.returns()
        eventually(lambda gone=gone: ring.state_of(gone) == "ready")  # type: ignore[misc]
        assert ring.answered_by_all(8) == alone(8).token_ids
        assert int(asked.read_text().split()[0]) < 1
