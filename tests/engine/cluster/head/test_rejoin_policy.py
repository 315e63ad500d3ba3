"""When a machine that refused to be in the ring is tried again."""

from __future__ import annotations

import pytest

from engine.cluster.head.rejoin_policy import AGAIN_S, MOST_AGAIN_S, RejoinPolicy
from tests.support.clocks import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def policy(clock: Clock) -> RejoinPolicy:
    return RejoinPolicy(None, clock)  # type: ignore[arg-type]  # nothing is looked up


def test_the_next_question_tries_a_machine_that_refused_once(policy: RejoinPolicy) -> None:
    assert not policy.take_due("attic")
    policy.refused("attic", "first")
    assert policy.take_due("attic")
    assert not policy.take_due("attic")
    assert not policy.take_due("cellar")


def test_further_tries_take_longer_and_longer_but_never_end(policy: RejoinPolicy, clock: Clock) -> None:
    policy.refused("attic", "first")
    pauses = []
    for _ in range(12):
        begun = clock.now
        policy.refused("attic", "first")
        assert not policy.take_due("attic")
        while not policy.take_due("attic"):
            clock.now += AGAIN_S / 2
        pauses.append(clock.now - begun)
    assert pauses[:3] == [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S]
    assert pauses[-1] == MOST_AGAIN_S


@pytest.mark.parametrize("what", ["in the ring", "restarted"])
def test_what_it_refused_before_is_forgotten(policy: RejoinPolicy, what: str) -> None:
    policy.refused("attic", "first")
    policy.refused("attic", "first")
    assert not policy.take_due("attic")
    if what == "in the ring":
        policy.accepted(["attic"])
    policy.refused("attic", "first" if what == "in the ring" else "second")
    assert policy.take_due("attic")
