from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from engine.host import TurnQueue

Operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3)),
        st.tuples(st.just("take"), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 40)),
    ),
    max_size=60,
)


@given(Operations)
def test_everybody_gets_a_turn(operations: list[tuple[str, int]]) -> None:
    """Nobody is served twice while another waits, the items of one come in their order, and nothing is lost."""
    queue: TurnQueue[int, int] = TurnQueue()
    owners: list[int] = []
    waiting: list[int] = []
    served_since: dict[int, list[int]] = {}
    """Of each waiting owner: who was served since it waits for its next turn."""
    for operation, value in operations:
        if operation == "put":
            item = len(owners)
            owners.append(value)
            waiting.append(item)
            served_since.setdefault(value, [])
            queue.put(value, item)
        elif operation == "remove":
            known = value in waiting
            assert queue.remove(owners[value] if value < len(owners) else 0, value) == known
            if known:
                waiting.remove(value)
        elif waiting:
            item = queue.take()
            owner = owners[item]
            assert item == min(other for other in waiting if owners[other] == owner)
            waiting.remove(item)
            served_since[owner] = []
            for other in {owners[one] for one in waiting} - {owner}:
                served_since[other].append(owner)
                assert len(set(served_since[other])) == len(served_since[other]), (other, served_since[other])
        for owner in set(served_since) - {owners[one] for one in waiting}:
            del served_since[owner]
        assert queue.waiting() == len(waiting)
    assert sorted(queue.take() for _ in list(waiting)) == sorted(waiting)


def test_one_that_asks_often_does_not_delay_anothers_first_question_by_two() -> None:
    queue: TurnQueue[str, int] = TurnQueue()
    queue.put("a", 0)
    order = [queue.take()]
    for item, owner in enumerate("aaabbc", 1):
        queue.put(owner, item)
    order += [queue.take() for _ in range(6)]
    assert "".join("aaaabbc"[item] for item in order) == "abcabaa"


def test_who_takes_waits_for_an_item() -> None:
    queue: TurnQueue[str, int] = TurnQueue()
    taken: list[int] = []
    taking = threading.Thread(target=lambda: taken.append(queue.take()))
    taking.start()
    queue.put("a", 7)
    taking.join(60)
    assert taken == [7]
