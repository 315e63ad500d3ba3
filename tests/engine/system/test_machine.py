"""What this machine is: its processor, its GPU and the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.system.machine import Gpu, driver_problem, gpu, parse_gpus, processor

SMI = "NVIDIA H200, 143771, 140000\nTesla, with a comma, 16384, 12\n"


@pytest.mark.parametrize(
    ("text", "visible", "found"),
    [
        (SMI, None, Gpu("NVIDIA H200", 143771 << 20, 140000 << 20)),
        (SMI, "1", Gpu("Tesla, with a comma", 16384 << 20, 12 << 20)),
        (SMI, "GPU-1234", Gpu("NVIDIA H200", 143771 << 20, 140000 << 20)),
        (SMI, "7", None),
        ("NVIDIA H200 MIG, [N/A], [Insufficient Permissions]\n", None, None),
        ("No devices were found\n", None, None),
        ("", None, None),
    ],
)
def test_what_the_drivers_program_tells(text: str, visible: str | None, found: Gpu | None) -> None:
    assert parse_gpus(text, visible) == found


def test_a_gpu_that_is_hidden_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'A card, 100, 50'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu() == Gpu("A card", 100 << 20, 50 << 20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    program.write_text("#!/bin/sh\necho broken >&2\nexit 9\n")
    assert gpu() is None


@pytest.mark.parametrize(
    ("cuda", "driver", "said"),
    [
        ("13.0", "550.54.14", "it needs driver 580 or newer for CUDA 13.0, and 550.54.14 is installed"),
        ("12.8", "470.256.02", "it needs driver 525 or newer for CUDA 12.8, and 470.256.02 is installed"),
        ("13.0", "580.65.06", ""),
        ("12.8", "550.54.14", ""),
        ("99.0", "550.54.14", ""),
        ("13.0", "[N/A]", ""),
        ("13.0", "", ""),
        (None, "550.54.14", ""),
    ],
)
def test_a_driver_that_is_too_old_is_named(cuda: str | None, driver: str, said: str) -> None:
    assert driver_problem(cuda, driver) == said


def test_the_driver_is_asked_for_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --query-gpu=driver_version ] && printf "570.1\\n570.1\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert driver_problem("13.0") == "it needs driver 580 or newer for CUDA 13.0, and 570.1 is installed"


def test_the_processor_has_a_name() -> None:
    assert processor().strip() == processor() != ""
