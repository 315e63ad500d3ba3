"""Paired machines that nobody needs at the moment: the screen shows that they are gone all the same."""

from __future__ import annotations

import signal

import pytest
from ring_faults import Ring, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOST = [signal.SIGKILL, signal.SIGSTOP]
NAMES = ["killed", "stopped"]


def test_lost_while_it_is_only_paired(ring_of_three: Ring) -> None:
    """Both ways at once."""
    ring = ring_of_three
    for follower, number in zip(ring.followers, LOST, strict=True):
        eventually(lambda follower=follower: ring.state_of(follower) == "ready")  # type: ignore[misc]
        follower.signal(number)
    eventually(lambda: list(ring.states().values()) == ["paired", "paired"])


@pytest.mark.parametrize("number", LOST, ids=NAMES)
def test_lost_in_a_ring_that_nobody_asks(three: Ring, number: signal.Signals) -> None:
    gone = three.followers[0]
    gone.signal(number)
    eventually(lambda: three.state_of(gone) == "lost")


@pytest.mark.parametrize("number", LOST[::-1], ids=NAMES[::-1])
def test_a_lent_machine_notices_that_an_idle_head_is_gone(two: Ring, number: signal.Signals) -> None:
    follower = two.followers[0]
    eventually(lambda: follower.lending() is not None)
    two.head.signal(number)
    eventually(lambda: follower.lending() is None)
