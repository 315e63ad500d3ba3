"""Origins as values, against a plain list that says of every token whether it was written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.session.origins import Origins

PLAIN = st.lists(st.booleans(), max_size=20)


def made_of(plain: list[bool]) -> Origins:
    made = Origins()
    for written in plain:
        made = made.written() if written else made.read(1)
    return made


def expanded(runs: tuple[int, ...]) -> list[bool]:
    return [run < 0 for run in runs for _ in range(abs(run))]


@given(PLAIN, PLAIN, st.integers(0, 25), st.integers(0, 9))
def test_origins_are_what_a_plain_list_says(
    plain: list[bool], plain_other: list[bool], length: int, count: int
) -> None:
    made, other = made_of(plain), made_of(plain_other)
    assert made.length == len(plain) and expanded(made.runs) == plain
    assert all((left < 0) != (right < 0) for left, right in zip(made.runs, made.runs[1:], strict=False))
    assert expanded(made.cut(length).runs) == plain[:length]
    same = 0
    while plain[: same + 1] == plain_other[: same + 1] and same < min(len(plain), len(plain_other)):
        same += 1
    assert made.shared(other) == made_of(plain[:same])
    assert expanded(tuple(made.after(length))) == plain[length:]
    assert expanded(made.read(count).runs) == plain + [False] * count
    assert expanded(made.written(count).runs) == plain + [True] * count
