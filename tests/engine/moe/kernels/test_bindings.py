"""Which kernels run and why, without the library too; and how many threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.moe.kernels import bindings, pool

COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after an installation without a compiler."""
    monkeypatch.setattr(bindings, "path", lambda: None)
    bindings._opened.cache_clear()
    yield
    bindings._opened.cache_clear()


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C compiler here, so there need not be a library")
def test_where_there_is_a_compiler_there_is_a_library() -> None:
    """The build is optional, so that nothing else would notice that it fails."""
    assert bindings.path() is not None, "not built: run `pip install -e .` and read what it says"
    assert bindings.load() is not None
    assert "scalar" in bindings.available()


def test_the_best_set_is_chosen_and_the_reason_given() -> None:
    best = bindings.choose("bfloat16", {})
    if bindings.path() is None:
        assert best.name == "none"
        return
    assert best.name == bindings.available()[0]
    assert best.reason == "the CPU has it; PRIVATELLM_KERNELS overrides"
    assert bindings.choose("float32", {}).name != "avx512_bf16"


@pytest.mark.skipif(bindings.path() is None, reason="not built")
def test_the_environment_overrides() -> None:
    for name in bindings.available():
        assert bindings.choose("bfloat16", {bindings.VARIABLE: name}).name == name
    assert bindings.choose("bfloat16", {bindings.VARIABLE: " SCALAR "}).name == "scalar"
    off = bindings.choose("bfloat16", {bindings.VARIABLE: "off"})
    assert (off.native, off.reason) == (False, "switched off by PRIVATELLM_KERNELS=off")


@pytest.mark.skipif("avx512_bf16" not in bindings.available(), reason="this CPU lacks AVX512_BF16")
def test_float32_is_never_rounded_even_when_asked() -> None:
    assert bindings.choose("float32", {bindings.VARIABLE: "avx512_bf16"}).name == "avx512f"


def test_a_set_that_is_none_is_refused() -> None:
    with pytest.raises(ModelError, match="PRIVATELLM_KERNELS=sse9 is no set of kernels; use one of scalar, avx2"):
        bindings.choose("bfloat16", {bindings.VARIABLE: "sse9"})


@pytest.mark.skipif(bindings.path() is None, reason="not built")
@pytest.mark.parametrize(
    "formats",
    [
        (*bindings.FORMATS, "F64"),
        tuple(bindings.FORMATS)[:-1],
        ("F32", "BF16", *tuple(bindings.FORMATS)[2:]),
        ("F16", *tuple(bindings.FORMATS)[1:]),
    ],
)
def test_a_library_with_other_number_formats_is_refused(
    monkeypatch: pytest.MonkeyPatch, formats: tuple[str, ...]
) -> None:
    assert bindings.choose("float32", {}).native
    monkeypatch.setattr(bindings, "FORMATS", dict.fromkeys(formats, 0))
    bindings._opened.cache_clear()
    try:
        choice = bindings.choose("float32", {})
    finally:
        monkeypatch.undo()
        bindings._opened.cache_clear()
    assert not choice.native
    assert "has other number formats than this program; `pip install` again" in choice.reason


@pytest.mark.skipif(bindings.path() is None, reason="not built")
def test_a_set_this_cpu_lacks_is_refused() -> None:
    missing = next(name for name in bindings.SETS if name not in bindings.available())
    with pytest.raises(ModelError, match=f"PRIVATELLM_KERNELS={missing}, but this CPU lacks it .it has .*scalar"):
        bindings.choose("bfloat16", {bindings.VARIABLE: missing})


def test_without_the_library_torch_answers_and_the_reason_says_how_to_get_it(absent: None) -> None:
    choice = bindings.choose("bfloat16", {})
    assert not choice.native
    assert "no C compiler was found when this was installed" in choice.reason
    assert "pip install" in choice.reason
    assert bindings.available() == ()
    with pytest.raises(ModelError, match="cannot be used"):
        bindings.choose("bfloat16", {bindings.VARIABLE: "scalar"})
    with pytest.raises(ModelError, match="not built"):
        bindings.load()


def test_a_damaged_library_is_a_reason_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(bindings, "path", lambda: broken)
    bindings._opened.cache_clear()
    try:
        choice = bindings.choose("bfloat16", {})
        assert not choice.native
        assert "cannot be opened" in choice.reason
    finally:
        bindings._opened.cache_clear()


def test_the_kernels_are_chosen_without_torch() -> None:
    program = "import sys, engine.moe.kernels.layers as l; print('torch' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False False\n"


# ---- Threads ------------------------------------------------------------------------------------------------------


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n", encoding="utf-8")
    assert pool.cores_among([0, 1, 4, 5], tmp_path) == 2
    assert pool.cores_among([0, 4], tmp_path) == 1
    assert pool.cores_among([0, 9], tmp_path) == 2  # nothing known of CPU 9


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("150000 100000", 1.5), ("garbage", None), (None, None)]
)
def test_a_containers_limit_counts(tmp_path: Path, text: str | None, quota: float | None) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(text, encoding="utf-8")
    assert pool.cgroup_quota(tmp_path) == quota


def test_the_older_form_of_that_limit(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000", encoding="utf-8")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1", encoding="utf-8")
    assert pool.cgroup_quota(tmp_path) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000", encoding="utf-8")
    assert pool.cgroup_quota(tmp_path) == 3.0


def test_there_are_as_many_cores_as_this_process_may_use() -> None:
    assert 1 <= pool.physical_cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(bindings.path() is None, reason="not built")
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_a_pool_pins_its_threads_and_not_its_caller() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    threads = {task.name for task in Path("/proc/self/task").iterdir()}
    made = pool.Pool(2, cpus=[one, one])
    try:
        memory = (bindings.ctypes.c_char * (1 << 20))()
        made.read_seconds(bindings.ctypes.addressof(memory), len(memory))
        (new,) = {task.name for task in Path("/proc/self/task").iterdir()} - threads
        assert os.sched_getaffinity(int(new)) == {one}
        assert os.sched_getaffinity(0) == before
    finally:
        made.close()


@pytest.mark.skipif(bindings.path() is None, reason="not built")
def test_no_threads_is_refused() -> None:
    with pytest.raises(ModelError, match="0 threads cannot be started"):
        pool.Pool(0)


def test_every_source_is_named_in_the_build() -> None:
    """A file left out of pyproject.toml is missing from a source distribution, or changes without a new build."""
    root = Path(__file__).resolve().parents[4]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    folder = root / "engine" / "moe" / "kernels" / "native"
    for listed, suffix in ((extension["sources"], "*.c"), (extension["depends"], "*.h")):
        assert sorted(listed) == sorted(path.relative_to(root).as_posix() for path in folder.glob(suffix))
