"""Machines of a ring that are killed or stopped while something goes on: the conversation goes on all the same."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from engine.ipc.messages import BeamProgress, Cancel, Failed, Loaded, Notice, Piece, Prefill, Progress, RingChanged
from engine.ipc.messages.ring import RingChoice, RingFacts
from tests.faults import hooks
from tests.faults.ring_faults import EXPERT_BYTES, OTHER_PROMPT, PROMPT, Machine, Oracle, Ring
from tests.support.eventually import PATIENCE_S, eventually
from tests.support.hooked_engine import hooked
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

LONG = 30
LONG_PROMPT = [3 + (7 * place + place // 11) % 150 for place in range(600)]


def noticed(ring: Ring, gone: Machine, since: int) -> None:
    """The head's screen shows the machine as lost, and the loss was not found out by waiting for its contribution: that
    takes half a minute, where an ended link and silence are noticed in seconds."""
    ring.until(
        lambda peers: any(one.node_id == gone.identity.node_id and one.state in ("lost", "paired") for one in peers),
        since=since,
    )
    assert not [text for text in ring.notices(since) if "contributed nothing" in text]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_lost_in_an_answer(three: Ring, model: Path, alone: Oracle, number: signal.Signals) -> None:
    since = three.mark()
    asked = three.ask(LONG)
    piece = three.until_tokens(asked, 8)
    gone, left = three.followers
    gone.signal(number)
    noticed(three, gone, since)
    found = three.finished(asked)
    assert found.token_ids == alone(LONG).token_ids
    assert piece.tokens < LONG
    told = [text for text in three.notices(since) if f"Lost {gone.name}" in text]
    assert len(told) == 1
    assert "Going on with 2 machines." in three.notices(since)
    # What is left holds the model, so nothing is sent while the answer waits.
    events = three.engine.events[since:]
    assert not [event for event in events if isinstance(event, Progress) and "sending" in event.stage and event.total]
    formed = [event.ring for event in events if isinstance(event, RingChanged)][-1]
    assert formed is not None and len(formed.nodes) == 2
    assert bytes_to_send(formed) == 0
    # Nothing was shown twice and nothing is missing.
    counts = [event.tokens for event in three.engine.events[since:] if isinstance(event, Piece)]
    assert counts == sorted(counts)
    assert counts[-1] == LONG
    eventually(lambda: (found := left.lending()) is not None and found.nodes == 2)
    if number is signal.SIGKILL:
        return
    # It wakes up, does not answer for the ring that is over, and is taken back at the next question.
    since = three.mark()
    gone.signal(signal.SIGCONT)
    three.until_ready(since)
    assert three.answered_by_all(12, OTHER_PROMPT) == alone(12, OTHER_PROMPT).token_ids
    assert any(f"{gone.name} came back" in text for text in three.notices(since))
    eventually(lambda: (found := gone.lending()) is not None and found.nodes == 3)


def test_lost_while_several_are_answered(three: Ring, model: Path, alone: Oracle) -> None:
    """Each goes on with its own text, and the ring is formed once."""
    prompts = [PROMPT, OTHER_PROMPT, LONG_PROMPT[:40], LONG_PROMPT[1:9]]
    expected = [alone(LONG, prompt).token_ids for prompt in prompts]
    expected_beams = [(beam.token_ids, beam.score) for beam in alone(LONG, LONG_PROMPT[3:12], beams=3).beams]
    three.answered_by_all(1, [158])
    since = three.mark()
    asked = [three.ask(LONG, prompt) for prompt in prompts]
    beams = three.ask(LONG, LONG_PROMPT[3:12], beams=3)
    three.until_tokens(asked[-1], 4)
    gone = three.followers[0]
    gone.kill()
    noticed(three, gone, since)
    assert [three.finished(one).token_ids for one in asked] == expected
    assert [(beam.token_ids, beam.score) for beam in three.finished(beams).beams] == expected_beams
    assert [text for text in three.notices(since) if "oing on with" in text] == ["Going on with 2 machines."]


def test_killed_in_a_prompt(three: Ring, model: Path, alone: Oracle) -> None:
    three.whole(model, prefill_chunk=16)
    since = three.mark()
    asked = three.ask(12, LONG_PROMPT)
    three.engine.wait(lambda event: isinstance(event, Prefill) and event.id == asked and event.done >= 160, PATIENCE_S)
    gone = three.followers[1]
    gone.kill()
    noticed(three, gone, since)
    assert three.finished(asked).token_ids == alone(12, LONG_PROMPT).token_ids
    assert any(f"Lost {gone.name}" in text for text in three.notices(since))


def test_killed_in_a_beam_search(three: Ring, model: Path, alone: Oracle) -> None:
    since = three.mark()
    asked = three.ask(24, beams=4)
    three.engine.wait(lambda event: isinstance(event, BeamProgress) and event.step >= 5, PATIENCE_S, since)
    gone = three.followers[0]
    gone.kill()
    noticed(three, gone, since)
    found, expected = three.finished(asked), alone(24, beams=4)
    assert [(beam.token_ids, beam.score) for beam in found.beams] == [(b.token_ids, b.score) for b in expected.beams]
    assert any(f"Lost {gone.name}" in text for text in three.notices(since))


def test_both_killed_one_after_the_other(three: Ring, model: Path, alone: Oracle) -> None:
    since = three.mark()
    asked = three.ask(LONG)
    three.until_tokens(asked, 8)
    three.followers[0].kill()
    three.engine.wait(lambda event: isinstance(event, Notice) and "Lost" in event.text, PATIENCE_S, since)
    three.followers[1].kill()
    assert three.finished(asked).token_ids == alone(LONG).token_ids
    assert any("this machine alone" in text for text in three.notices(since))


def test_killed_between_two_questions(three: Ring, model: Path, alone: Oracle) -> None:
    first = three.answer(16)
    since = three.mark()
    gone = three.followers[0]
    gone.kill()
    noticed(three, gone, since)
    longer = [*PROMPT, *first.token_ids, 11, 12]
    assert three.answer(12, longer).token_ids == alone(12, longer).token_ids
    assert len([text for text in three.notices(since) if f"Lost {gone.name}" in text]) == 1


def test_killed_and_asked_at_once(three: Ring, model: Path, alone: Oracle) -> None:
    """The question comes before anybody has noticed."""
    assert three.answer(8).finish_reason == "length"
    since = three.mark()
    gone = three.followers[1]
    gone.kill()
    assert three.answer(12, OTHER_PROMPT).token_ids == alone(12, OTHER_PROMPT).token_ids
    assert len([text for text in three.notices(since) if f"Lost {gone.name}" in text]) == 1


@pytest.mark.parametrize(
    "stage",
    [
        "measuring the machines",
        "connecting",
        *(pytest.param(stage, marks=pytest.mark.soak) for stage in ("comparing weights", "opening the model")),
    ],
)
def test_killed_while_the_ring_is_formed(three: Ring, model: Path, alone: Oracle, stage: str) -> None:
    since = three.mark()
    request = begun(three, model, stage)
    gone, left = three.followers
    gone.kill()
    assert isinstance(three.last_of_load(request, since), Loaded)
    assert three.answer(12).token_ids == alone(12).token_ids
    eventually(lambda: (found := left.lending()) is not None and found.nodes == 2)


def begun(ring: Ring, model: Path, stage: str) -> int:
    """The id of a Load that has come to ``stage``."""
    since = ring.mark()
    request = ring.begin_load(model)
    reached = ring.engine.wait(
        lambda event: (
            event.id == request
            and (
                isinstance(event, Loaded)
                or (
                    isinstance(event, Progress)
                    and event.stage.startswith(stage)
                    and (event.done > 0 or stage != "sending weights")
                )
            )
        ),
        PATIENCE_S,
        since,
    )
    assert isinstance(reached, Progress)
    return request


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 MB, which take a moment to send."""
    return write_tiny_model(
        tmp_path_factory.mktemp("models") / "larger",
        "mixtral",
        num_local_experts=8,
        hidden_size=144,
        intermediate_size=704,
        num_hidden_layers=2,
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.soak),
    ],
)
def test_lost_while_weights_are_sent(three: Ring, large: Path, number: signal.Signals) -> None:
    for follower in three.followers:
        empty_disk(follower)
    since = three.mark()
    request = begun(three, large, "sending weights")
    gone = three.followers[0]
    gone.signal(number)
    assert isinstance(three.last_of_load(request, since), Loaded)
    assert len(three.answer(4).token_ids) == 4
    eventually(lambda: three.state_of(gone) in ("lost", "paired"))
    since = three.mark()
    gone.returns()
    eventually(lambda: three.state_of(gone) == "ready")
    assert len(three.answered_by_all(4)) == 4
    assert any(f"{gone.name} came back" in text for text in three.notices(since))
    # What had arrived before was not sent again.
    eventually(lambda: (found := gone.lending()) is not None and found.nodes == 3)


def bytes_to_send(ring: RingFacts) -> int:
    return sum(max(0, node.expert_bytes + node.trunk_bytes - node.has_bytes) for node in ring.nodes[1:])


def empty_disk(machine: Machine) -> None:
    shutil.rmtree(machine.home / "models")
    (machine.home / "models").mkdir()


def test_the_other_one_still_writes_when_weights_are_sent_anew(tmp_path: Path) -> None:
    """What was sent to it before is still on its way to the disk: it is waited for, not left out of the ring."""
    tiny = write_tiny_model(tmp_path / "tiny", "mixtral", num_local_experts=8, hidden_size=576)
    with Ring(2, {2: hooked(hooks.writes_slowly, seconds=1.5)}) as ring:
        request = ring.begin_load(tiny)
        gone, left = ring.followers
        ring.engine.wait(lambda event: isinstance(event, Progress) and event.stage.startswith("sending weights"), 120)
        gone.kill()
        loaded = ring.last_of_load(request)
        assert isinstance(loaded, Loaded), loaded
        assert loaded.facts.ring is not None
        assert left.identity.node_id in [node.node_id for node in loaded.facts.ring.nodes]


def test_stopped_head_frees_its_follower_for_another(two: Ring, model: Path, tmp_path: Path, alone: Oracle) -> None:
    assert two.answer(8).token_ids == alone(8).token_ids
    follower = two.followers[0]
    eventually(lambda: follower.lending() is not None)
    two.head.signal(signal.SIGSTOP)
    eventually(lambda: follower.lending() is None)
    other = Machine(tmp_path / "other", "other head")
    try:
        other.trust(follower)
        follower.trust(other)
        other.start(peers=[follower.address])
        borrowed = Ring.__new__(Ring)
        borrowed.head, borrowed.followers, borrowed.machines = other, [follower], [other]
        borrowed.until_ready()
        loaded = borrowed.load(model)
        assert loaded.facts.ring is not None
        assert len(loaded.facts.ring.nodes) == 2
        assert borrowed.answer(12).token_ids == alone(12).token_ids
        # The first head wakes up: its ring is over, the machine is lent elsewhere, and it goes on by itself.
        since = two.mark()
        two.head.signal(signal.SIGCONT)
        two.until(lambda peers: peers[0].state == "busy", since=since)
        assert two.answer(12, OTHER_PROMPT).token_ids == alone(12, OTHER_PROMPT).token_ids
        lending = follower.lending()
        assert lending is not None
        assert lending.head == "other head"
        assert borrowed.answer(12, OTHER_PROMPT).token_ids == alone(12, OTHER_PROMPT).token_ids
    finally:
        other.close()


def needs_both(ring: Ring, **more: Any) -> RingChoice:
    """The head has room for five eighths of the experts."""
    shares = {ring.head.identity.node_id: EXPERT_BYTES * 5 // 8}
    return RingChoice(even_if_slower=True, mode="exact", exchange="tls", shares=shares, overlap=False, **more)


def waits_for(ring: Ring, machine: Machine, since: int) -> str:
    """What is said as the answer waits; the screen shows it, too."""
    text = f"The answer waits for {machine.name}: "
    said = ring.engine.wait(lambda event: isinstance(event, Notice) and event.text.startswith(text), PATIENCE_S, since)
    ring.engine.wait(
        lambda event: isinstance(event, Progress) and event.stage.startswith(f"waiting for {machine.name}: "),
        PATIENCE_S,
        since,
    )
    assert isinstance(said, Notice)
    return said.text


def test_an_answer_waits_for_the_machine_it_cannot_go_on_without(two: Ring, model: Path, alone: Oracle) -> None:
    two.whole(model, needs_both(two))
    since = two.mark()
    asked = two.ask(LONG)
    two.until_tokens(asked, 8)
    gone = two.followers[0]
    gone.kill()
    line = waits_for(two, gone, since)
    assert "B are missing; it goes on by itself then." in line
    gone.start(lend=True)
    assert two.finished(asked).token_ids == alone(LONG).token_ids
    assert two.notices(since).count(line) == 1
    # Asked while it is away, a question waits as well; esc ends that, and what was written stays.
    since = two.mark()
    asked = two.ask(LONG)
    piece = two.until_tokens(asked, 8)
    gone.kill()
    waits_for(two, gone, since)
    two.engine.send(Cancel(id=two.engine.new_id(), target=asked))
    stopped = two.finished(asked)
    assert stopped.finish_reason == "cancelled"
    assert piece.tokens <= len(stopped.token_ids) < LONG
    assert stopped.token_ids == alone(LONG).token_ids[: len(stopped.token_ids)]
    since = two.mark()
    asked = two.ask(12, OTHER_PROMPT)
    waits_for(two, gone, since)
    gone.start(lend=True)
    assert two.finished(asked).token_ids == alone(12, OTHER_PROMPT).token_ids


def test_both_are_lost_and_one_comes_back(three: Ring, model: Path, alone: Oracle) -> None:
    """The second one while the ring is formed again: the answer waits for both, and one of them is enough."""
    three.whole(model, needs_both(three))
    since = three.mark()
    asked = three.ask(LONG)
    three.until_tokens(asked, 8)
    first, second = three.followers
    first.kill()
    three.engine.wait(lambda event: isinstance(event, Notice) and "Lost" in event.text, PATIENCE_S, since)
    second.kill()
    three.engine.wait(
        lambda event: isinstance(event, Notice) and "The answer waits for " in event.text, PATIENCE_S, since
    )
    second.start(lend=True)
    assert three.finished(asked).token_ids == alone(LONG).token_ids
    assert any("oing on with 2 machines." in text for text in three.notices(since))


def test_an_answer_waits_no_longer_than_it_may(two: Ring, model: Path) -> None:
    """The missing gigabytes are named, and the text that was written stays."""
    two.whole(model, needs_both(two, wait_s=1.0))
    since = two.mark()
    asked = two.ask(LONG)
    piece = two.until_tokens(asked, 8)
    gone = two.followers[0]
    gone.kill()
    failed = two.last(asked)
    assert isinstance(failed, Failed), failed
    assert failed.kind == "memory"
    assert "missing" in failed.error and gone.name in failed.error
    written = [event for event in two.engine.events[since:] if isinstance(event, Piece)]
    assert written[-1].tokens >= piece.tokens


def test_a_follower_that_leaves_by_itself(two: Ring, model: Path, alone: Oracle) -> None:
    """``join`` is ended by the person there, in the middle of an answer."""
    since = two.mark()
    asked = two.ask(LONG)
    two.until_tokens(asked, 8)
    two.followers[0].engine.close()
    assert two.finished(asked).token_ids == alone(LONG).token_ids
    assert any("this machine alone" in text for text in two.notices(since))
