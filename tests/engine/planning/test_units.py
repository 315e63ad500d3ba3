"""Amounts of memory in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planning.units import byte_rate, byte_size

_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@pytest.mark.parametrize(
    ("nbytes", "text", "fine"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1 kB", "1 kB"),
        (999_999, "1 MB", "1.0 MB"),
        (1_500_000, "2 MB", "1.5 MB"),
        (99_960_000, "100 MB", "100 MB"),
        (250_000_000, "250 MB", "250 MB"),
        (999_600_000, "1.0 GB", "1.0 GB"),
        (43_100_000_000, "43.1 GB", "43.1 GB"),
        (128_000_000_000, "128.0 GB", "128 GB"),
        (3.4e12, "3.4 TB", "3.4 TB"),
        (-2.5e9, "-2.5 GB", "-2.5 GB"),
    ],
)
def test_sizes(nbytes: float, text: str, fine: str) -> None:
    assert (byte_size(nbytes), byte_size(nbytes, fine=True)) == (text, fine)


@given(st.floats(0, 9e14), st.booleans())
def test_a_size_is_rounded_in_one_unit(nbytes: float, fine: bool) -> None:
    number, unit = byte_size(nbytes, fine=fine).split()
    step = _UNITS[unit] * (0.1 if "." in number else 1)
    assert abs(float(number) * _UNITS[unit] - nbytes) <= 0.5001 * step
    assert unit == "TB" or float(number) < 1000


def test_rates() -> None:
    assert (byte_rate(118e6), byte_rate(999.6e6), byte_rate(2.41e9)) == ("118 MB/s", "1.0 GB/s", "2.4 GB/s")
