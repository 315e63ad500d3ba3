"""The kernels of every instruction set under sanitizers, called as hostile model files would call them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.attacks import sanitizers

CALLS = 250

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(sanitizers.missing()), reason=sanitizers.missing() or "nothing is missing"),
]


@pytest.mark.parametrize(("name", "sets"), [("x86", "avx512_bf16 avx512f avx2 scalar"), ("ARM", "neon scalar")])
def test_nothing_is_undefined_whatever_is_asked(tmp_path: Path, name: str, sets: str) -> None:
    library = sanitizers.build(name, tmp_path)
    done = sanitizers.attack(library, CALLS, seed=7)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"instruction sets: {sets}\n" in done.stderr
    assert "| calls of the expert kernels | 150 |" in done.stdout

    # What the sanitizers look for, they find: a read behind the end of an array on the stack.
    source = tmp_path / "dispatch.c"
    text = source.read_text("utf-8")
    beyond = "volatile int64_t few[2] = {0, 0}; volatile int at = 2;"
    begin = "int pllm_has(int set) {"
    assert begin in text
    source.write_text(text.replace(begin, f"{begin} {beyond} if (few[at] == 42) set++;"), "utf-8")
    done = sanitizers.attack(sanitizers.linked(tmp_path, [source]), 5, seed=7)
    assert done.returncode == 1 and "index 2 out of bounds" in done.stderr
