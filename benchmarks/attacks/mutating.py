"""How inputs are spoiled: bytes, numbers and trees of JSON, by a generator of random numbers alone."""

from __future__ import annotations

import random
from typing import Any

NUMBERS = (
    0,
    -1,
    1,
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**200,
    1e308,
    float("nan"),
)
TEXTS = (
    "",
    "\x1b]0;owned\x07",
    "\x9b31m",
    "\u202etxet",
    "\ud800",
    "a" * 70_000,
    "../../etc/passwd",
    "/dev/zero",
    "\x00",
    "%s%n{0.__class__}",
    "NaN",
)


def spoiled(data: bytes, draw: random.Random) -> bytes:
    """``data`` with a few bytes changed, cut off, doubled, or with a large number written into it."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        if not found:
            return bytes(found)
        at = draw.randrange(len(found))
        match draw.randrange(6):
            case 0:
                found[at] = draw.randrange(256)
            case 1:
                found[at] ^= 1 << draw.randrange(8)
            case 2:
                del found[at : at + draw.choice((1, 4, 8, len(found)))]
            case 3:
                found[at:at] = found[at : at + draw.choice((1, 8, 64))]
            case 4:
                width = draw.choice((2, 4, 8))
                found[at : at + width] = draw.choice((0, 2**15, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1)).to_bytes(
                    8, "little"
                )[:width]
            case _:
                found[at : at + 16] = draw.randbytes(16)
    return bytes(found)


def odd_value(draw: random.Random) -> Any:
    """A value of any kind that JSON has, most of them out of place anywhere."""
    match draw.randrange(7):
        case 0:
            return draw.choice(NUMBERS)
        case 1:
            return draw.choice(TEXTS)
        case 2:
            return draw.choice((True, False, None))
        case 3:
            return [odd_value(draw) for _ in range(draw.randrange(3))]
        case 4:
            return {draw.choice(TEXTS): odd_value(draw) for _ in range(draw.randrange(3))}
        case 5:
            return draw.randrange(100_000)
        case _:
            return [draw.randrange(1000)] * draw.choice((1, 100, 10_000))


def spoiled_tree(tree: Any, draw: random.Random) -> Any:
    """``tree`` with one to three values replaced, removed or put in another place. The original is left alone."""
    if isinstance(tree, dict) and tree and draw.random() < 0.9:
        found = dict(tree)
        for _ in range(draw.randint(1, 3)):
            if not found:
                break
            key = draw.choice(list(found))
            match draw.randrange(4):
                case 0:
                    del found[key]
                case 1:
                    found[key] = found[draw.choice(list(found))]
                case 2 if isinstance(found[key], dict | list):
                    found[key] = spoiled_tree(found[key], draw)
                case _:
                    found[key] = odd_value(draw)
        return found
    if isinstance(tree, list) and tree and draw.random() < 0.9:
        items = list(tree)
        items[draw.randrange(len(items))] = odd_value(draw)
        return items
    return odd_value(draw)
