"""The messages of a conversation that are mounted: a window over them that never leaves it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.tui.chat.transcript import MOST_MESSAGES, Window


@given(st.integers(0, 400), st.lists(st.sampled_from(["older", "newer", "appended"]), max_size=40))
def test_a_window_never_leaves_the_conversation(total: int, moves: list[str]) -> None:
    window = Window.newest(total)
    for move in moves:
        step = {
            "older": Window.with_older,
            "newer": Window.with_newer,
            "appended": Window.appended,
        }[move]
        window = step(window)
        assert 0 <= window.start <= window.end <= window.total
        assert window.end - window.start <= MOST_MESSAGES


@given(st.integers(1, 400))
def test_all_messages_can_be_reached(total: int) -> None:
    window = Window.newest(total)
    seen = set(range(window.start, window.end))
    while window.older:
        window = window.with_older()
        seen |= set(range(window.start, window.end))
    while window.newer:
        window = window.with_newer()
        seen |= set(range(window.start, window.end))
    assert seen == set(range(total))


def test_a_new_message_stays_out_while_the_reader_is_elsewhere() -> None:
    window = Window(0, 30, 100)
    assert window.appended() == Window(0, 30, 101)


@given(st.integers(1, 300), st.data())
def test_a_window_around_a_message_holds_it(total: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, total - 1))
    window = Window.around(index, total)
    assert index in window
    assert window.end <= total
