"""How much of a piece of this process's memory is in its page tables, as Linux tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

SMAPS = Path("/proc/self/smaps")
needs_smaps = pytest.mark.skipif(not SMAPS.exists(), reason="memory by mapping is told by Linux alone")


def resident_bytes(*pieces: tuple[int, int]) -> int:
    """Bytes in memory of the mappings that overlap ``pieces``, each an address and the number of bytes from there on.
    All are looked for at once, as Linux takes long to tell."""
    inside, found = False, 0
    for line in SMAPS.read_text().splitlines():
        begin, dash, rest = line.partition("-")
        if dash and ":" not in begin:
            first, last = int(begin, 16), int(rest.split()[0], 16)
            inside = any(first < address + nbytes and address < last for address, nbytes in pieces)
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found
