"""The models that a first start offers: which fit a machine, and how fast they are said to be."""

from __future__ import annotations

import pytest

from app.chat.offers import MachineFigures, fits, offers, speed_or_why_not, speed_words, strength, tokens_per_s
from engine.models.store.catalogue import STARTER, catalogue, offered
from engine.planning.prediction import ASSUMED_MEMORY_READ, DECODING_SHARE, rough_tokens_per_s

PLENTY = 10**13


def machine(gigabytes: float, read: float = 24e9, disk: int = PLENTY) -> MachineFigures:
    return MachineFigures(int(gigabytes * 1e9), read, disk)


@pytest.mark.parametrize("apple", [False, True])
@pytest.mark.parametrize("gigabytes", [2, 4, 8, 16, 24, 32, 64, 128, 512])
def test_what_is_offered_fits_and_the_best_that_is_not_slow_comes_first(gigabytes: int, apple: bool) -> None:
    here = machine(gigabytes)
    entries = {entry.name: entry for entry in offered(apple=apple)}
    starter, *found = offers(list(entries.values()), here)
    assert starter.name == STARTER
    assert len(found) == (2 if gigabytes >= 8 else 0)
    assert len({offer.name for offer in found}) == len(found)
    for offer in found:
        assert fits(entries[offer.name], here) and entries[offer.name].suggested
    if found:
        best, quick = (entries[offer.name] for offer in found)
        assert tokens_per_s(best, here) >= 4
        stronger = [entry for entry in entries.values() if entry.suggested and fits(entry, here)]
        assert not any(strength(entry) > strength(best) and tokens_per_s(entry, here) >= 4 for entry in stronger)
        assert tokens_per_s(quick, here) > tokens_per_s(best, here)


@pytest.mark.parametrize("apple", [False, True])
@pytest.mark.parametrize(("gigabytes", "read"), [(128, 100e9), (128, 500e9), (512, 800e9)])
def test_a_large_machine_is_not_led_to_a_small_model(gigabytes: int, read: float, apple: bool) -> None:
    entries = {entry.name: entry for entry in offered(apple=apple)}
    _, best, quick = offers(list(entries.values()), machine(gigabytes, read))
    assert 4 * strength(entries[quick.name]) >= strength(entries[best.name]) > 20


def test_a_slow_or_full_machine_is_offered_less() -> None:
    entries = offered(apple=False)
    # Nothing is quick on a memory that is read at 1 GB/s: what is offered fits all the same.
    assert [offer.name for offer in offers(entries, machine(16, 1e9))] == ["starter", "qwen3-8b-q4", "olmoe-7b-q4"]
    assert [offer.name for offer in offers(entries, machine(16, disk=3 * 10**9))] == ["starter", "qwen3-4b-q4"]
    assert [offer.name for offer in offers(entries, machine(16, disk=0))] == ["starter"]


@pytest.mark.parametrize("read", [1e9, 4e9, 9e9, 24e9, 80e9])
@pytest.mark.parametrize("gigabytes", [8, 16, 24, 32, 64, 128])
def test_what_is_said_of_an_offer_is_true(gigabytes: int, read: float) -> None:
    here, entries = machine(gigabytes, read), {entry.name: entry for entry in offered(apple=False)}
    said = {offer.about: entries[offer.name] for offer in offers(list(entries.values()), here)[1:]}
    (best, of_all), *others = ((entry, "fit" in about) for about, entry in said.items())
    room = [entry for entry in entries.values() if entry.suggested and fits(entry, here)]
    assert of_all == (strength(best) == max(strength(entry) for entry in room))
    for about, entry in said.items():
        if "Quicker" in about:
            assert tokens_per_s(entry, here) > tokens_per_s(best, here)
        if "Better" in about:
            assert strength(entry) > strength(best)
        if "Smaller" in about:
            assert entry.gigabytes < best.gigabytes
    assert len(others) == 1


def test_memory_as_the_system_reports_it_is_a_little_less_than_it_was_sold_with() -> None:
    entry = next(entry for entry in catalogue() if entry.name == "qwen3-8b-q4")
    assert fits(entry, machine(15.4)) and not fits(entry, machine(12))
    nowhere = next(entry for entry in catalogue() if not entry.memory_gigabytes)
    assert not fits(nowhere, machine(10_000))
    assert speed_or_why_not(entry, machine(16)) == "about 3.6 tokens/s"
    assert speed_or_why_not(entry, machine(12)) == "needs 16 GB"
    assert speed_or_why_not(nowhere, machine(12)) == "needs a ring"
    assert speed_or_why_not(entry, MachineFigures(0, 0.0, 0)) == ""


def test_the_speed_is_that_of_streaming_what_a_token_uses() -> None:
    assert rough_tokens_per_s(4e9, 0.25, 20e9) == pytest.approx(DECODING_SHARE * 20)
    assert rough_tokens_per_s(4e9, 0.25, 0.0) == pytest.approx(DECODING_SHARE * ASSUMED_MEMORY_READ / 1e9)
    with pytest.raises(ValueError, match="0 bytes"):
        rough_tokens_per_s(0, 1.0, 1e9)


@pytest.mark.parametrize(
    ("rate", "words"),
    [(0.01, "about 0.1"), (1.52, "about 1.5"), (9.4, "about 9.4"), (9.6, "about 10"), (42.3, "about 42"),
     (129.0, "about 130"), (1333.0, "about 1,300")],
)  # fmt: skip
def test_a_rough_speed_has_two_digits(rate: float, words: str) -> None:
    assert speed_words(rate) == f"{words} tokens/s"


def test_the_offer_says_its_size_and_speed() -> None:
    starter, best, _ = offers(offered(apple=True), machine(8))
    assert starter.figures.startswith("92.9 MB to download · about ")
    assert best.figures.startswith("about 2.3 GB to download · about ")
