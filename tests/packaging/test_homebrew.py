"""The Homebrew formula that is written for a wheel. Homebrew itself is not here."""

from __future__ import annotations

import hashlib
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORMULA = ROOT / "packaging" / "homebrew" / "formula.sh"


def formula(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", str(FORMULA), *arguments], capture_output=True, text=True, check=False)


def test_it_pins_the_wheel_and_asks_for_what_torch_and_mlx_need(tmp_path: Path) -> None:
    wheel = tmp_path / "privatellm-1.2.3-cp311-abi3-macosx_14_0_arm64.whl"
    wheel.write_bytes(b"a wheel")
    url = f"https://example.org/files/{wheel.name}"
    found = formula(str(wheel), url)
    assert found.returncode == 0, found.stderr
    settings = dict(re.findall(r'^  (url|sha256|version|homepage|license) "([^"]+)"', found.stdout, re.MULTILINE))
    assert settings == {
        "url": url,
        "sha256": hashlib.sha256(b"a wheel").hexdigest(),
        "version": "1.2.3",
        "homepage": "https://example.org/files",
        "license": "Apache-2.0",
    }
    for needed in ("using: :nounzip", "depends_on arch: :arm64", "depends_on macos: :sonoma", '"python@3.13"'):
        assert needed in found.stdout
    assert re.search("@[A-Z0-9]+@", found.stdout) is None


def test_libraries_that_could_not_be_installed_are_said_by_the_program(tmp_path: Path) -> None:
    wheel = tmp_path / "privatellm-1.2.3-cp311-abi3-macosx_14_0_arm64.whl"
    wheel.write_bytes(b"a wheel")
    written = re.search(r"<<~SH\n(.*?)\n    SH\n", formula(str(wheel), "https://example.org/x").stdout, re.DOTALL)
    assert written is not None
    script = tmp_path / "privatellm"
    script.write_text(textwrap.dedent(written[1]).replace("#{libexec}", str(tmp_path / "lib exec")))
    found = subprocess.run(["sh", str(script), "models"], capture_output=True, text=True, check=False)
    assert found.returncode == 1 and "brew postinstall privatellm" in found.stderr
    program = tmp_path / "lib exec" / "environment" / "bin" / "privatellm"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$#:$2"\n')
    program.chmod(0o755)
    found = subprocess.run(["sh", str(script), "ask", "two words"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "2:two words\n")


@pytest.mark.parametrize("name", ["absent-1.whl", "privatellm-1.2.3.tar.gz"])
def test_what_is_no_wheel_of_it_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "privatellm-1.2.3.tar.gz").write_bytes(b"")
    found = formula(str(tmp_path / name), "https://example.org/x")
    assert found.returncode == 1 and found.stdout == ""
    assert "privatellm:" in found.stderr.splitlines()[-1]
