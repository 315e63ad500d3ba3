"""Reading the small files of a model's folder, with limits, as they are not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelError, damaged, shown

SMALL_FILE = 20_000_000
"""Maximum bytes of a configuration; the largest in use have some hundred thousand."""
MOST_TOKENIZER_BYTES = 200_000_000
"""Maximum bytes of a tokenizer's vocabulary; the largest in use has 35 million."""
LONGEST_LIST = 100_000
"""Maximum entries of a list: far above layers, experts or end tokens of any model."""
DEEPEST = 64
"""Maximum depth of nested tables and lists."""

_SMALLEST_NUMBER, _LARGEST_NUMBER = -(2**63), 2**63 - 1


def read_text(path: Path, limit: int) -> str:
    """The text of ``path``. Raises ModelError if it cannot be read, is over ``limit`` bytes, or is not UTF-8."""
    try:
        return _read(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(f"{path} cannot be read: it is not UTF-8 text") from error


def check_size(path: Path, limit: int) -> None:
    """Raises ModelError if the file is over ``limit`` bytes, or cannot be looked at."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); check the file.") from error
    if size > limit:
        raise damaged(f"{path} is damaged: it has {size} bytes, over {limit}")


def read_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in ``path``; empty if there is no such file. Raises ModelError if it is damaged or too large."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path, limit))
    except (ValueError, RecursionError) as error:
        raise damaged(f"{path} is damaged: it is not JSON") from error
    if not isinstance(value, dict):
        raise damaged(f"{path} is damaged: it is not a table of settings")
    return value


def _read(path: Path, limit: int) -> bytes:
    check_size(path, limit)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); check the file.") from error


def check_values(settings: dict[str, Any], name: str) -> None:
    """Raises ModelError naming a setting whose number has more than 64 bits, whose list is too long, or that is nested
    too deeply. No model needs these, and they could take unlimited memory or time.
    """
    waiting: list[tuple[str, Any, int]] = [("", settings, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        if depth > DEEPEST:
            raise damaged(f"{name} nests {shown(key)} more than {DEEPEST} deep")
        if isinstance(value, int) and not _SMALLEST_NUMBER <= value <= _LARGEST_NUMBER:
            raise damaged(f"{name} gives {shown(value)} for {shown(key)}, a number beyond 64 bits")
        if isinstance(value, list) and len(value) > LONGEST_LIST:
            raise damaged(f"{name} has {len(value)} entries in {shown(key)}, over {LONGEST_LIST}")
        if isinstance(value, dict):
            waiting += [(f"{key}.{inner}" if key else str(inner), item, depth + 1) for inner, item in value.items()]
        elif isinstance(value, list):
            waiting += [(key, item, depth + 1) for item in value]
