"""A machine that refuses to be in a ring, once or always: the others go on, and it is tried again, but not for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from ring_faults import Oracle, Ring, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REFUSING = """
import pathlib
import engine.ring.control.lending as lending
from engine.errors import ModelError

offer, asked = lending.Lender._offer, []

def refusing(self, caller, pieces):
    asked.append(0)
    pathlib.Path({path!r}).write_text(str(len(asked)))
    if len(asked) <= {times}:
        raise ModelError("It is still busy.", kind="disk")
    return offer(self, caller, pieces)

lending.Lender._offer = refusing
"""


@pytest.mark.parametrize(("times", "asked", "state"), [(1, 2, "ring"), (99, 2, "ready")])
def test_a_machine_that_refuses_is_tried_once_more(
    model: Path, alone: Oracle, tmp_path: Path, times: int, asked: int, state: str
) -> None:
    path = tmp_path / "asked"
    with Ring(2, codes={1: REFUSING.format(path=str(path), times=times)}) as ring:
        ring.load(model)
        refusing, other = ring.followers
        for _ in range(3):
            assert ring.answer(24).token_ids == alone(24).token_ids
        eventually(lambda: (ring.state_of(refusing), ring.state_of(other)) == (state, "ring"))
        assert int(path.read_text()) == asked
        said = [text for text in ring.notices() if "node 1 is left out of the ring: It is still busy." in text]
        assert len(said) == 1
