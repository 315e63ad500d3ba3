"""Paired machines that nobody needs at the moment: the screen shows that they are gone all the same.

A machine of a ring that is killed between two questions, and a head that is stopped, are in test_ring_lost_nodes.py.
"""

from __future__ import annotations

import signal

import pytest

from tests.faults.ring_faults import Ring
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow


def test_lost_while_it_is_only_paired(ring_of_three: Ring) -> None:
    """One is killed and the other one stopped."""
    ring = ring_of_three
    for follower, number in zip(ring.followers, (signal.SIGKILL, signal.SIGSTOP), strict=True):
        eventually(lambda follower=follower: ring.state_of(follower) == "ready")  # type: ignore[misc]
        follower.signal(number)
    eventually(lambda: list(ring.states().values()) == ["paired", "paired"])


def test_stopped_in_a_ring_that_nobody_asks(three: Ring) -> None:
    gone = three.followers[0]
    gone.signal(signal.SIGSTOP)
    eventually(lambda: three.state_of(gone) == "lost")


def test_lent_machines_notice_that_an_idle_head_was_killed(three: Ring) -> None:
    eventually(lambda: all(follower.lending() is not None for follower in three.followers))
    three.head.kill()
    eventually(lambda: all(follower.lending() is None for follower in three.followers))
