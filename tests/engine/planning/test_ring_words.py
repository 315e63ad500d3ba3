"""Why a machine that is known is not in the ring."""

from __future__ import annotations

import pytest

from engine.ipc.messages.ring import PeerFacts
from engine.planning.ring_words import absent_lines

STRANGER = PeerFacts(node_id="99", state="found")


def paired(state: str, **more: object) -> PeerFacts:
    return PeerFacts(node_id="aa", name="studio", state=state, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        (paired("busy", lends=True), "studio is lent to the ring of another machine."),
        (paired("paired"), "studio is paired but does not answer: is `privatellm join` running on it?"),
        (paired("lost"), "studio is paired but does not answer: is `privatellm join` running on it?"),
        (paired("refused", problem="Version 2 there."), "studio cannot be used: Version 2 there."),
        (
            paired("refused", problem="It has privatellm 2 and this machine has 1; install the same version on both."),
            "studio cannot be used: it has privatellm 2 and this machine has 1; install the same version on both.",
        ),
        (paired("ready"), "studio is there but not lent: run `privatellm join` on it."),
    ],
)
def test_each_reason_is_said_with_what_to_do(peer: PeerFacts, said: str) -> None:
    assert absent_lines([STRANGER, peer], [], set()) == [said]


def test_nothing_is_said_of_others_while_somebody_is_there() -> None:
    assert absent_lines([paired("busy"), STRANGER], [], {"bb"}) == []


def test_a_machine_that_was_asked_for_is_told_of_also_then() -> None:
    assert absent_lines([paired("busy")], ["aa", "bb"], {"bb"}) == [
        "studio is lent to the ring of another machine; the ring is formed without it."
    ]


def test_strangers_are_told_of_where_nobody_is_paired() -> None:
    assert absent_lines([STRANGER], [], set()) == ["A machine was found that is not paired with this one: pair first."]
    assert absent_lines([STRANGER, STRANGER], [], set())[0].startswith("2 machines were found that are not paired")
    assert absent_lines([], [], set()) == []
