"""Amounts of memory in words, the same everywhere. Decimal units, as disks and vendors count."""

from __future__ import annotations


def byte_size(nbytes: float, *, fine: bool = False) -> str:
    """``999 B``, ``82 kB``, ``637 MB``, ``43.1 GB``, ``3.4 TB``.

    ``fine``: for amounts that are often small, a tenth is shown from megabytes on and only below a hundred of a unit:
    ``12.3 MB``, ``637 MB``, ``118 GB``.
    """
    amount, unit = nbytes, "B"
    for larger in ("kB", "MB", "GB", "TB"):
        # What would be rounded to a thousand of a unit is one of the next.
        if abs(amount) < 999.5:
            break
        amount, unit = amount / 1000, larger
    tenths = (unit in ("MB", "GB") and abs(amount) < 99.95) or unit == "TB" if fine else unit in ("GB", "TB")
    return f"{amount:.1f} {unit}" if tenths else f"{amount:.0f} {unit}"


def byte_rate(bytes_per_s: float) -> str:
    """``118 MB/s``, ``2.4 GB/s``."""
    return f"{byte_size(bytes_per_s)}/s"
