"""The kernels built by other compilers and for other systems than the one that they are installed with."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
from setuptools import Extension
from setuptools.dist import Distribution
from setuptools.errors import CompileError

from engine.moe.kernels import bindings, build_command

ROOT = Path(__file__).resolve().parents[4]
NATIVE = Path(bindings.__file__).parent / "native"
COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]


def extension_settings() -> dict[str, Any]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (found,) = settings["tool"]["setuptools"]["ext-modules"]
    return dict(found)


@pytest.mark.soak
@pytest.mark.parametrize("target", ["aarch64-macos", "x86_64-macos", "x86_64-linux-gnu"])
def test_clang_builds_them_without_a_warning(tmp_path: Path, target: str) -> None:
    """A Python for both kinds of Mac compiles for both."""
    settings = extension_settings()
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-fno-sanitize=all", "-U_FORTIFY_SOURCE"]
    done = subprocess.run(
        [*command, *settings["extra-compile-args"], "-Werror", f"-I{NATIVE}",
         "-shared", "-o", str(tmp_path / "kernels"), "-lm",
         *(str(ROOT / source) for source in settings["sources"])],
        env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(tmp_path / "all"), "ZIG_LOCAL_CACHE_DIR": str(tmp_path / "own")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "kernels").stat().st_size > 100_000


def built_with(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> Extension:
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    extension = Extension("x", ["x.c"], extra_link_args=["-pthread"])
    build_command.BuildKernels(Distribution({"ext_modules": [extension]})).finalize_options()
    return extension


def test_a_mac_compiles_for_its_own_processor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHFLAGS", "")  # so that it is put back afterwards
    monkeypatch.delenv("ARCHFLAGS")
    assert built_with(monkeypatch, "darwin", "arm64").extra_link_args == ["-pthread"]
    assert os.environ["ARCHFLAGS"] == "-arch arm64"
    monkeypatch.setenv("ARCHFLAGS", "-arch arm64 -arch arm64e")
    built_with(monkeypatch, "darwin", "arm64")
    assert os.environ["ARCHFLAGS"] == "-arch arm64 -arch arm64e"


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C compiler here")
@pytest.mark.parametrize(("asked", "found", "fails"), [("", True, False), ("1", True, True), ("1", False, False)])
def test_kernels_that_are_asked_for_are_built_where_there_is_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str, found: bool, fails: bool
) -> None:
    (tmp_path / "wrong.c").write_text("int broken(", encoding="utf-8")
    monkeypatch.setenv(build_command.REQUIRED, asked)
    if not found:
        monkeypatch.setattr("shutil.which", lambda name: None)
    extension = Extension("wrong", [str(tmp_path / "wrong.c")], optional=True)
    command = build_command.BuildKernels(Distribution({"ext_modules": [extension]}))
    command.build_temp = command.build_lib = str(tmp_path)
    command.ensure_finalized()
    with pytest.raises(CompileError) if fails else contextlib.nullcontext():
        command.run()


@pytest.mark.skipif(sys.platform != "linux", reason="the linker of Linux")
def test_the_built_library_binds_everything_at_once() -> None:
    """Tag 24 (BIND_NOW) or 30 (FLAGS with 8) of its dynamic section, and a segment that is made read-only."""
    path = bindings.path()
    if path is None:
        pytest.skip("the native kernels were not built")
    data = path.read_bytes()

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    begin, size, count = number(32, 8), number(54, 2), number(56, 2)
    segments = {number(begin + size * i, 4): begin + size * i for i in range(count)}
    assert 0x6474E552 in segments  # PT_GNU_RELRO
    dynamic = segments[2]
    offset, length = number(dynamic + 8, 8), number(dynamic + 32, 8)
    tags = {number(offset + at, 8): number(offset + at + 8, 8) for at in range(0, length, 16)}
    assert 24 in tags or tags.get(30, 0) & 8
