"""A ring that is formed again while a person waits: what is said when, Esc meanwhile, and who is not waited for."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.ipc.messages import AnyEvent, Cancel, Finished, Loaded, Notice, Piece, Progress, RingChanged
from tests.faults.ring_faults import OTHER_PROMPT, PROMPT, Machine, Oracle, Ring
from tests.support.eventually import PATIENCE_S, eventually
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

STAGES = ["measuring the links", "comparing weights", "sending weights", "connecting", "opening the model"]
SAMPLED = ["sending weights", "opening the model"]
LARGE = {"num_local_experts": 8, "hidden_size": 144, "intermediate_size": 704, "num_hidden_layers": 2}
"""Its weights take a moment to send."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "larger", "mixtral", **LARGE, eos_token_id=None)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    oracle = Oracle(tmp_path_factory.mktemp("alone") / "home", model)
    yield oracle
    oracle.engine.close()


def told_of(ring: Ring, asked: int, since: int) -> list[AnyEvent]:
    """What the screen heard of a question, and the notices meanwhile."""
    return [event for event in ring.engine.events[since:] if event.id == asked or isinstance(event, Notice)]


def reached(ring: Ring, asked: int, stage: str) -> bool:
    """Whether the question comes to ``stage`` before it is answered."""
    found = ring.engine.wait(
        lambda event: (
            event.id == asked
            and (isinstance(event, Finished) or (isinstance(event, Progress) and event.stage.startswith(stage)))
        ),
        PATIENCE_S,
    )
    return isinstance(found, Progress)


def stopped(ring: Ring, asked: int) -> Finished:
    """Esc is pressed; the answer ends."""
    ring.engine.send(Cancel(id=ring.engine.new_id(), target=asked))
    found = ring.finished(asked)
    assert found.finish_reason == "cancelled"
    return found


def lose(ring: Ring, gone: Machine) -> None:
    """It dies and its disk is emptied; the ring goes on without it."""
    gone.kill()
    shutil.rmtree(gone.home / "models")
    (gone.home / "models").mkdir()
    eventually(lambda: ring.state_of(gone) in ("lost", "paired"))
    assert len(ring.answer(4).token_ids) == 4
    eventually(lambda: ring.state_of(gone) == "paired")


def returns(ring: Ring, gone: Machine) -> None:
    gone.returns()
    eventually(lambda: ring.state_of(gone) == "ready")


def asked_until(ring: Ring, gone: Machine, stage: str) -> tuple[int, int]:
    """A question that has come to ``stage`` as ``gone``, which lost its weights, is taken back, and the mark before it.

    A machine that is slow to answer is taken in by a later question. Once it is in the ring without ``stage`` having
    been seen, it goes and comes again.
    """
    begun = time.monotonic()
    lose(ring, gone)
    returns(ring, gone)
    while True:
        mark = ring.mark()
        if reached(ring, asked := ring.ask(8), stage):
            return asked, mark
        assert time.monotonic() - begun < PATIENCE_S, ring.notices()[-5:]
        if ring.state_of(gone) == "ring":
            lose(ring, gone)
            returns(ring, gone)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "stage", [pytest.param(one, marks=() if one in SAMPLED else pytest.mark.soak) for one in STAGES]
)
def test_stopped_while_a_machine_is_taken_back(two: Ring, model: Path, alone: Oracle, stage: str) -> None:
    """The next question does not wait for it again: the machine is taken back when it comes anew."""
    gone = two.followers[0]
    asked, begun = asked_until(two, gone, stage)
    found = stopped(two, asked)
    since = two.mark()
    # All stages may have ended before Esc came, and the answer have begun.
    formed = f"{gone.name} came back; going on with 2 machines." in two.notices(begun)
    assert found.token_ids == (alone(len(found.token_ids)).token_ids if formed else [])
    asked = two.ask(8)
    assert two.finished(asked).token_ids == alone(8).token_ids
    assert not any(isinstance(event, Progress) and "sending" in event.stage for event in told_of(two, asked, since))
    # While the links are measured the present ring, which is this machine alone, has not ended yet.
    alone_again = any("this machine alone" in text for text in two.notices(since))
    assert formed or alone_again or stage == STAGES[0]
    assert two.state_of(gone) == ("ring" if formed else "ready")
    # As another process it is taken back: the next test waits for that.
    gone.kill()


def test_stopped_while_the_others_take_over(three: Ring, alone: Oracle) -> None:
    """In the middle of an answer: what was written stays, and the next question forms the ring."""
    ring = three
    gone, left = ring.followers
    since = ring.mark()
    asked = ring.ask(30)
    ring.until_tokens(asked, 8)
    gone.kill()
    assert reached(ring, asked, "connecting")
    found = stopped(ring, asked)
    assert len(found.token_ids) >= 8
    assert found.token_ids == alone(len(found.token_ids)).token_ids
    assert ring.answer(8, OTHER_PROMPT).token_ids == alone(8, OTHER_PROMPT).token_ids
    said = [text for text in ring.notices(since) if gone.name in text or "oing on with" in text]
    assert len(said) == 2, said
    assert said[0].startswith(f"Lost {gone.name}: ")
    assert said[1] == "Going on with 2 machines."
    eventually(lambda: ring.state_of(left) == "ring")


def test_a_loss_is_told_before_the_ring_is_formed_again(three: Ring, alone: Oracle) -> None:
    ring = three
    gone = ring.followers[0]
    since = ring.mark()
    asked = ring.ask(30)
    ring.until_tokens(asked, 8)
    gone.kill()
    assert ring.finished(asked).token_ids == alone(30).token_ids
    order = [
        "progress" if isinstance(event, Progress) else event.text.split()[0]
        for event in told_of(ring, asked, since)
        if isinstance(event, Notice) or (isinstance(event, Progress) and event.stage != "running the answer again")
    ]
    assert order[0] == "Lost" and order[-1] == "Going" and set(order[1:-1]) == {"progress"}, order
    kinds = [type(event) for event in ring.engine.events[since:] if isinstance(event, (Piece, RingChanged))]
    assert kinds[0] is Piece
    assert Piece in kinds[kinds.index(RingChanged) :]


def nodes_of(loaded: Loaded) -> list[str]:
    """Names of the machines that the model runs on. One that a busy machine did not reach in time is not among them."""
    return [node.name for node in loaded.facts.ring.nodes] if loaded.facts.ring is not None else []


def test_a_machine_that_has_nothing_is_not_waited_for(model: Path, alone: Oracle, tmp_path: Path) -> None:
    with Ring(1) as ring:
        ring.load(model)
        new = Machine(tmp_path / "new", "newcomer")
        try:
            ring.head.trust(new)
            new.trust(ring.head)
            new.start(lend=True, peers=[ring.head.address])
            eventually(lambda: ring.state_of(new) == "ready")
            since = ring.mark()
            for prompt in (PROMPT, OTHER_PROMPT):
                assert ring.answer(8, prompt).token_ids == alone(8, prompt).token_ids
            assert len([text for text in ring.notices(since) if "newcomer is there now" in text]) == 1
            assert len(ring.notices(since)) == 1
            assert ring.state_of(new) == "ready"
            # A loss is no reason to wait for it either.
            ring.followers[0].kill()
            since = ring.mark()
            assert ring.answer(8).token_ids == alone(8).token_ids
            assert any("this machine alone" in text for text in ring.notices(since))
            # Formed by the person, it is in it, and from then on it is taken back when it returns.
            eventually(lambda: ring.state_of(new) == "ready" and nodes_of(ring.load(model)) == ["head", "newcomer"])
            assert ring.answer(8, OTHER_PROMPT).token_ids == alone(8, OTHER_PROMPT).token_ids
        finally:
            new.close()


def test_a_machine_that_has_its_share_joins(two: Ring, model: Path, alone: Oracle) -> None:
    """It was given its share before this conversation began, and appears in the middle of it."""
    ring = two
    late = ring.followers[0]
    late.engine.close()
    eventually(lambda: ring.state_of(late) in ("lost", "paired"))
    ring.load(model)
    assert ring.answer(4).token_ids == alone(4).token_ids
    returns(ring, late)
    since = ring.mark()
    # A machine that takes long to answer does not delay a question: it is in the ring for a later one.
    for tokens in range(8, 13):
        assert ring.answer(tokens, OTHER_PROMPT).token_ids == alone(tokens, OTHER_PROMPT).token_ids
        if ring.notices(since):
            break
    assert ring.notices(since) == ["node 1 joined; going on with 2 machines."]
    eventually(lambda: ring.state_of(late) == "ring")
