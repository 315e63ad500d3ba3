"""One model in two forms, stepped in turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.forms import main
from engine.moe.kernels.bindings import choose
from tests.support.tiny_fp8 import write_fp8
from tests.support.tiny_models import write_tiny_model


@pytest.mark.skipif(not choose("bfloat16").native, reason="the native kernels cannot run here")
def test_forms_are_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = write_tiny_model(tmp_path / "plain", "qwen3_moe", dtype="bfloat16")
    packed, _ = write_fp8(tmp_path / "packed", write_tiny_model(tmp_path / "source", "qwen3_moe"))
    assert main([str(plain), str(packed), "--rows", "1", "3", "--rounds", "2", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [line[:2] for line in cells] == [["plain", "1"], ["packed", "1"], ["plain", "3"], ["packed", "3"]]
    assert all(line[4].startswith("1.00 ") for line in cells if line[0] == "plain")
    with pytest.raises(SystemExit):
        main([str(plain), "--rows", "0"])
