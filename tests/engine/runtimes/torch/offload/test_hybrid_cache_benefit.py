"""When a cache is given up, and when it stays: predictions ask, measurements answer."""

from __future__ import annotations

from engine.runtimes.torch.offload.hybrid import CacheWorth, Verdict


def fed(worth: CacheWorth, measured_s: float, without_s: float) -> list[Verdict]:
    """A whole window of layers that took so long."""
    return [verdict for _ in range(worth.window) if (verdict := worth.add(measured_s, without_s)) is not None]


def test_a_cache_that_keeps_its_promise_is_never_questioned() -> None:
    worth = CacheWorth(window=8)
    for _ in range(5):
        assert fed(worth, 0.9, 1.0) == []
    assert worth.asks


def test_a_slow_cache_is_tried_without_and_given_up() -> None:
    worth = CacheWorth(window=8)
    assert fed(worth, 2.0, 1.0) == ["try-without"]
    assert fed(worth, 1.5, 1.0) == ["off"]
    assert not worth.asks
    assert (worth.with_cache, worth.without_cache) == (2.0, 1.5)
    assert fed(worth, 9.0, 1.0) == []


def test_a_wrong_prediction_does_not_cost_the_cache() -> None:
    worth = CacheWorth(window=8)
    assert fed(worth, 2.0, 1.0) == ["try-without"]
    assert fed(worth, 2.5, 1.0) == ["keep"]
    assert not worth.asks


def test_steps_of_many_tokens_are_compared_with_what_they_should_take() -> None:
    worth = CacheWorth(window=2)
    worth.add(2.0, 1.0)
    assert worth.add(200.0, 100.0) == "try-without"
    # The window without had short steps only, each 1.8 times as long as it should be.
    worth.add(1.8, 1.0)
    assert worth.add(1.8, 1.0) == "off"


def test_nothing_expected_concludes_nothing() -> None:
    assert fed(CacheWorth(window=3), 1.0, 0.0) == []
