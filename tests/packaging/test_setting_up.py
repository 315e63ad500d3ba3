"""What `make chat` does on a fresh machine, as far as it can be seen without downloading anything."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ROOT / "packaging" / "install.sh"
ENSURE_STARTER = ROOT / "packaging" / "ensure_starter.sh"


def shell(script: Path, *arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in {"PYTHON", "TORCH_INDEX", "PRIVATELLM_HOME"}}
    return subprocess.run(
        ["sh", str(script), *arguments],
        cwd=folder,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH on which there is no Python but the ones a test puts there."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for tool in ("sh", "uname", "sed", "rm", "dirname", "cat", "head"):
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    return folder


def test_no_python_is_one_line_that_says_what_to_do(tmp_path: Path, tools: Path) -> None:
    result = shell(INSTALL, ".venv", ".", folder=tmp_path, PATH=str(tools))
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "needs Python 3.11 to 3.14" in result.stderr
    assert not (tmp_path / ".venv").exists()


def fake_python(
    path: Path, version: tuple[int, int], machine: str = "arm64", *, prefix: str = "", options: str | None = None
) -> Path:
    """A Python of ``version`` as far as install.sh asks it. It was compiled with ``options``. Without any it says that
    it cannot make environments; with them it fails when it is to make one."""
    real = f"sys.version_info = {version!r} + (0,); platform.machine = lambda: {machine!r}"
    real += f"; sys.base_prefix = {prefix!r}; sysconfig.get_config_var = lambda name: {options!r}"
    refused = '"import venv"' if options is None else '"no such code"'
    return program(
        path,
        f'case "$2" in *{refused}*) exit 1;; venv) exit 1;; esac\n'
        f'exec {sys.executable} -c "import platform, sys, sysconfig; {real}; exec(sys.argv[1])" "$2"',
    )


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        ({"python3": (3, 9), "python3.12": (3, 12)}, "python3.12"),
        ({"python3": (3, 15), "python3.11": (3, 11)}, "python3.11"),
        ({"python3": (3, 12), "python3.14": (3, 14), "python3.13": (3, 13)}, "python3.13"),
        ({"python3": (3, 14)}, "python3"),
    ],
)
def test_the_python_that_libraries_have_packages_for_is_taken(
    tmp_path: Path, tools: Path, installed: dict[str, tuple[int, int]], chosen: str
) -> None:
    for name, version in installed.items():
        fake_python(tools / name, version)
    result = shell(INSTALL, ".venv", ".", folder=tmp_path, PATH=str(tools))
    assert result.returncode == 1
    assert result.stderr == (
        f"privatellm: {tools / chosen} cannot make virtual environments: its venv module is missing "
        "(Debian: apt install python3-venv).\n"
    )


@pytest.mark.soak
def test_an_optimised_python_is_taken_before_others(tmp_path: Path, tools: Path) -> None:
    """Of one folder of PATH as of several; one that cannot make environments is passed over."""
    own, system = tmp_path / "own", tmp_path / "system"
    fake_python(own / "python3.13", (3, 13), options="--enable-shared")
    fake_python(own / "python3.12", (3, 12), prefix="/usr")
    fake_python(system / "python3.11", (3, 11), prefix="/usr", options="--enable-shared")
    fake_python(system / "python3", (3, 14), options="--enable-optimizations --with-lto")

    def chosen(*folders: Path) -> str:
        path = ":".join(map(str, (*folders, tools)))
        result = shell(INSTALL, ".venv", ".", folder=tmp_path, PATH=path)
        assert result.returncode == 1
        (line,) = result.stderr.splitlines()
        return line.removeprefix("privatellm: ").partition(" could not make .venv")[0]

    assert chosen(own) == str(own / "python3.13")
    assert chosen(own, system) == str(system / "python3.11")
    (system / "python3.11").unlink()
    assert chosen(own, system) == str(system / "python3")


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_a_python_without_packages_is_refused_in_one_line(
    tmp_path: Path, tools: Path, version: tuple[int, int]
) -> None:
    python = fake_python(tools / "python3", version)
    result = shell(INSTALL, ".venv", ".", folder=tmp_path, PATH=str(tools))
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert "needs Python 3.11 to 3.14, and found none" in result.stderr
    named = shell(INSTALL, ".venv", ".", folder=tmp_path, PATH=str(tools), PYTHON=str(python))
    assert named.stderr == f"privatellm: PYTHON={python} is not a Python of version 3.11 to 3.14; name another one.\n"


@pytest.mark.parametrize(
    ("arm64", "macos", "machine", "said"),
    [
        ("0", "15.1", "x86_64", "this Mac has an Intel processor"),
        ("1", "13.6.9", "arm64", "this is macOS 13.6.9, and torch and mlx need macOS 14 or newer"),
        ("1", "26.2", "x86_64", "is a Python for Intel Macs (x86_64, run by Rosetta)"),
        ("1", "14.0", "arm64", "cannot make virtual environments"),
        ("1 translated", "15.1", "x86_64", "this terminal is run by Rosetta"),
    ],
)
def test_a_mac_that_cannot_run_it_is_told_so(
    tmp_path: Path, tools: Path, arm64: str, macos: str, machine: str, said: str
) -> None:
    (tools / "uname").unlink()
    program(tools / "uname", "echo Darwin")
    number, _, translated = arm64.partition(" ")
    program(tools / "sysctl", f'[ "$2" = sysctl.proc_translated ] && echo {int(bool(translated))} || echo {number}')
    program(tools / "sw_vers", f"echo {macos}")
    fake_python(tools / "python3.13", (3, 13), machine)
    result = shell(INSTALL, ".venv", ".", folder=tmp_path, PATH=str(tools))
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert said in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_versions_are_those_of_the_project() -> None:
    import tomllib

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    assert wanted == ">=3.11,<3.15"
    assert "(3, 11) <= sys.version_info[:2] <= (3, 14)" in INSTALL.read_text(encoding="utf-8")


@pytest.mark.soak
def test_a_failed_installation_leaves_no_stamp_behind(tmp_path: Path) -> None:
    """pip fails (there is nothing to install here): make must not take the environment for finished."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "packaging", tmp_path / "packaging")
    (tmp_path / "pyproject.toml").write_text("not toml at all [", encoding="utf-8")
    # Giving an environment a pip of its own takes ten times as long as all else: this one sees the tests' own.
    quick = program(
        tmp_path / "quick",
        f'[ "$1 $2" = "-m venv" ] || exec {sys.executable} "$@"\n'
        f'{sys.executable} -m venv --without-pip "$3"\n'
        f'echo {sysconfig.get_path("purelib")} >$(echo "$3"/lib/python*/site-packages)/pip.pth',
    )
    result = subprocess.run(
        ["make", "install", f"PYTHON={quick}"],
        cwd=tmp_path,
        env={**os.environ, "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "privatellm: pip could not install" in result.stderr
    assert (tmp_path / ".venv" / "bin" / "python").exists()
    assert not (tmp_path / ".venv" / ".installed").exists()


@pytest.mark.parametrize("target", ["chat", "test", "check"])
def test_what_is_installed_is_not_installed_again(tmp_path: Path, target: str) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "packaging", tmp_path / "packaging")
    (tmp_path / "pyproject.toml").touch()
    program(tmp_path / ".venv" / "bin" / "python", "exit 0")
    for stamp in (".installed", ".installed-test"):
        (tmp_path / ".venv" / stamp).touch()
    first = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "install.sh" not in first.stdout
    # A changed pyproject.toml is newer than the stamps.
    os.utime(tmp_path / ".venv" / ".installed", (0, 0))
    second = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "install.sh" in second.stdout
    # An environment whose interpreter is gone is set up again.
    (tmp_path / ".venv" / "bin" / "python").unlink()
    third = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "install.sh" in third.stdout


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, Path]:
    """A stand-in for the program that notes how it was called, and its notes."""
    notes = tmp_path / "calls"
    path = program(
        tmp_path / ".venv" / "bin" / "privatellm",
        f'echo "$@" >>{notes}\n[ "$1" = locate ] && echo {tmp_path}/models\n'
        f'[ "$1" = models ] && mkdir -p "${{PRIVATELLM_HOME:-{tmp_path}}}/models/starter" '
        f'&& touch "${{PRIVATELLM_HOME:-{tmp_path}}}/models/starter/config.json"\nexit 0',
    )
    return path, notes


def test_the_starter_is_fetched_once(tmp_path: Path, recorded: tuple[Path, Path]) -> None:
    path, notes = recorded
    for _ in range(2):
        assert shell(ENSURE_STARTER, str(path), folder=tmp_path).returncode == 0
    assert notes.read_text(encoding="utf-8").splitlines() == ["locate models", "models pull starter"]


def test_another_home_gets_its_own_starter(tmp_path: Path, recorded: tuple[Path, Path]) -> None:
    path, notes = recorded
    assert shell(ENSURE_STARTER, str(path), folder=tmp_path).returncode == 0
    home = tmp_path / "second home"
    for _ in range(2):
        assert shell(ENSURE_STARTER, str(path), folder=tmp_path, PRIVATELLM_HOME=str(home)).returncode == 0
    calls = notes.read_text(encoding="utf-8").splitlines()
    assert calls == ["locate models", "models pull starter", "models pull starter"]


def test_a_starter_that_cannot_be_fetched_does_not_keep_the_chat_closed(tmp_path: Path) -> None:
    path = program(
        tmp_path / ".venv" / "bin" / "privatellm", f'[ "$1" = locate ] && echo {tmp_path}/m && exit 0\nexit 1'
    )
    result = shell(ENSURE_STARTER, str(path), folder=tmp_path)
    assert result.returncode == 0
    assert "the starter model could not be fetched" in result.stderr
