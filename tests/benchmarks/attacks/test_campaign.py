"""The attacks, a few of each: nothing crashes, hangs, grows without limit or fails in words that nobody chose.

And the attacks themselves: what they look for, they find.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.attacks.__main__ import ATTACKS, main
from benchmarks.attacks.campaign import Attack, Attempt, Draw, Refused, plain, run
from benchmarks.attacks.kernels import at_the_edge
from benchmarks.attacks.mutating import spoiled, spoiled_tree
from engine.moe.kernels.bindings import choose

SEED = 20
INPUTS = 40
"""Of each attack, or fewer if there are not so many."""


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_nothing_breaks(attack: Attack) -> None:
    if "kernel" in attack.name and not choose("float32").native:
        pytest.skip(choose("float32").reason)
    tally = run(attack, SEED, min(INPUTS, attack.inputs) if attack.inputs > 1000 else attack.inputs)
    assert tally.clean, "\n".join(tally.found)
    if "answers" not in attack.name and "strangers" not in attack.name:
        assert tally.refused, "an attack of which nothing is refused attacks nothing"


def test_whatever_goes_wrong_is_counted_and_the_others_go_on() -> None:
    kept: list[bytes] = []

    def attempt(draw: Draw) -> None:
        match draw.number:
            case 1:
                raise Refused
            case 2:
                raise ZeroDivisionError("nobody meant this")
            case 3:
                ctypes.string_at(0)
            case 4:
                while True:
                    pass
            case 5:
                kept.append(b"x" * (300 << 20))

    tally = run(Attack("x", 8, lambda home: plain(attempt), memory_bytes=200 << 20, cpu_s=1.5), SEED, 8)
    assert (tally.inputs, tally.taken, tally.refused) == (8, 4, 1)
    assert (tally.crashes, tally.hangs) == (1, 1)
    assert tally.unexpected == {"ZeroDivisionError at test_campaign.py:attempt": 1, "memory": 1}
    assert not tally.clean and len(tally.found) == 4


def test_what_cannot_begin_is_no_success() -> None:
    @contextlib.contextmanager
    def broken(home: Path) -> Iterator[Attempt]:
        raise OSError("no folder")
        yield

    with pytest.raises(RuntimeError, match="does not work as it is"):
        run(Attack("broken", 8, broken), SEED, 8)


def test_a_read_behind_the_end_of_an_array_is_a_crash() -> None:
    def attempt(draw: Draw) -> None:
        values = at_the_edge(np.arange(100, dtype=np.uint8))
        assert ctypes.string_at(values.ctypes.data, 100)[-1] == 99
        ctypes.string_at(values.ctypes.data, 100 + draw.number)

    tally = run(Attack("edge", 2, lambda home: plain(attempt)), SEED, 2)
    assert (tally.taken, tally.crashes) == (1, 1)


def test_the_same_seed_makes_the_same_inputs() -> None:
    tree = {"a": 1, "b": [1, 2, {"c": "d"}]}
    for number in range(50):
        first, second = random.Random(number), random.Random(number)
        assert repr(spoiled_tree(tree, first)) == repr(spoiled_tree(tree, second))
        assert spoiled(b"some bytes of a file", first) == spoiled(b"some bytes of a file", second)
    assert tree == {"a": 1, "b": [1, 2, {"c": "d"}]}


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "frames of the engine", "--part", "0.0002"]) == 0
    assert "| frames of the engine | 10 |" in capsys.readouterr().out
