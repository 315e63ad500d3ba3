"""A wheel built from the tree holds everything the program needs, and works in an environment of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("app", "engine", "discovery", "assets")
COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]

pytestmark = pytest.mark.slow


def run(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout}\n{result.stderr}"
    return result.stdout


KERNELS = Path("engine/moe/kernels")
LIBRARY = KERNELS / "_native.abi3.so"


def installed() -> Path | None:
    """The library that the installation of this tree built, if nothing it is made of has changed since."""
    sources = [ROOT / "pyproject.toml", *(ROOT / KERNELS / "native").iterdir()]
    with contextlib.suppress(FileNotFoundError):
        if (ROOT / LIBRARY).stat().st_mtime >= max(file.stat().st_mtime for file in sources):
            return ROOT / LIBRARY
    return None


def copied(folder: Path) -> Path:
    """The tree without what an earlier build left in it."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "_native*"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, folder)
    settings = folder / "pyproject.toml"
    # How fast the kernels are is not looked at here. A compiler is done soonest with -Og: -O0 keeps what is inlined.
    slow = settings.read_text(encoding="utf-8").replace('"-O3"', '"-Og"')
    settings.write_text(slow, encoding="utf-8")
    return folder


@pytest.fixture(
    scope="module",
    params=["installed", pytest.param("compiled", marks=pytest.mark.soak)],
)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy of the tree: nothing left by an earlier build can slip in, nothing is left behind.

    ``installed``: but for the kernels, which setuptools built with the same settings as this tree was installed; they
    take ten times as long as all else. Where they were not, they are compiled.
    """
    folder = copied(tmp_path_factory.mktemp("source"))
    if request.param == "installed" and (library := installed()) is not None:
        version = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        built = folder / "build" / f"lib.{version}" / LIBRARY
        built.parent.mkdir(parents=True)
        shutil.copyfile(library, built)  # newer than what it is made of, so that it is taken as it is
    program = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    return folder / "dist" / run([sys.executable, "-c", program], folder).splitlines()[-1]


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in an environment that has the dependencies of this one, but not the tree's own packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel], folder)
    (own,) = folder.glob("lib/python*/site-packages")
    # A folder named in a .pth file is searched, but its own .pth files (the editable install) are not obeyed.
    (own / "dependencies.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    return folder


@pytest.mark.soak
def test_every_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    expected = {
        file.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert expected - inside == set()
    strangers = {name for name in inside if not name.startswith((*(f"{p}/" for p in PACKAGES), "privatellm-"))}
    assert strangers == set()


@pytest.mark.soak
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C compiler here")
def test_the_native_kernels_are_built_and_run_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    program = (
        "from engine.moe.kernels import bindings\n"
        "print(bindings.path())\n"
        "print(bindings.choose('bfloat16', {}).name in bindings.available())"
    )
    path, works = run([environment / "bin" / "python", "-c", program], tmp_path).splitlines()
    assert Path(path).is_relative_to(environment)
    assert works == "True"


@pytest.mark.soak
def test_without_a_compiler_it_installs_all_the_same(tmp_path: Path) -> None:
    """Editable, as `make chat` does it: everything but the native kernels."""
    folder = copied(tmp_path)
    program = "from setuptools import build_meta; print(build_meta.build_editable('dist'))"
    said = run([sys.executable, "-c", program], folder, CC=str(tmp_path / "no-such-compiler"))
    assert (folder / "dist" / said.splitlines()[-1]).is_file()
    assert list((folder / "engine" / "moe" / "kernels").glob("_native*")) == []


def test_styles_catalogue_and_migrations_are_among_them(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = {name.split("/")[-1]: archive.read(name).decode() for name in names if ".dist-info/" in name}
    for suffix in (".tcss", "assets/catalogue.toml", ".sql", "app/py.typed"):
        assert any(name.endswith(suffix) for name in names), f"no {suffix} in the wheel"
    assert "privatellm = app.cli:main" in metadata["entry_points.txt"]
    assert "Apache License" in metadata["LICENSE"]
    assert "License-Expression: Apache-2.0" in metadata["METADATA"]


@pytest.mark.soak
def test_the_installed_program_runs_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    program = environment / "bin" / "privatellm"
    located = run([program, "locate", "data"], tmp_path, PRIVATELLM_HOME=str(home))
    assert located == f"{home}/data\n"
    assert "ask" in run([program, "--help"], tmp_path, PRIVATELLM_HOME=str(home))
    listed = run([program, "models", "list"], tmp_path, PRIVATELLM_HOME=str(home))
    assert "starter" in listed


def test_the_data_files_are_read_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    program = (
        "import importlib.resources, app, engine.models.store.catalogue as catalogue\n"
        "print(app.__file__)\n"
        "print(importlib.resources.files('assets').joinpath('catalogue.toml').is_file())\n"
        "print(catalogue.find('starter') is not None)"
    )
    lines = run([environment / "bin" / "python", "-c", program], tmp_path).splitlines()
    assert Path(lines[0]).is_relative_to(environment)
    assert lines[1:] == ["True", "True"]
