"""The choice of a runtime, over all machines and all that a runtime may be lacking."""

from __future__ import annotations

import itertools

import pytest

from engine.planning.runtime_choice import RuntimeChoice, candidates, first_supported, has_gpu

MACHINES = list(itertools.product([False, True], [False, True], ["auto", "cpu", "hybrid", "ring"]))


@pytest.mark.parametrize(("apple_silicon", "gpu", "partitioning"), MACHINES)
def test_the_best_supported_runtime_is_taken(apple_silicon: bool, gpu: bool, partitioning: str) -> None:
    names = candidates(apple_silicon=apple_silicon, gpu=gpu, partitioning=partitioning)
    assert names[-1] == "torch"
    assert ("mlx" in names) == (apple_silicon and partitioning != "cpu")
    for lacking in itertools.product([False, True], repeat=2):
        unsupported = {name for name, missing in zip(("mlx", "native"), lacking, strict=True) if missing}
        chosen = first_supported(names, lambda name, gone=unsupported: name if name in gone else None)  # type: ignore[misc]
        assert chosen.name == next(name for name in names if name not in unsupported)
        assert chosen.is_fallback == (chosen.name != names[0])
        assert all(name in chosen.reason for name in unsupported & set(names[: names.index(chosen.name)]))


def test_a_fallback_names_everything_that_was_passed_over() -> None:
    reasons = {"mlx": "mlx-lm is not installed", "native": "its kernels are off", "torch": None}
    assert first_supported(("mlx", "native", "torch"), lambda name: reasons[name]) == RuntimeChoice(
        "torch",
        "mlx-lm is not installed; the faster native trunk is not used, because its kernels are off",
        is_fallback=True,
    )
    assert first_supported(("torch",), lambda name: reasons[name]) == RuntimeChoice("torch", "the default with a GPU")


def test_the_last_candidate_is_not_asked_about() -> None:
    asked: list[str] = []
    first_supported(("native", "torch"), lambda name: asked.append(name) or "no")  # type: ignore[func-returns-value]
    assert asked == ["native"]


@pytest.mark.parametrize(
    ("devices", "libraries", "visible", "found"),
    [
        (["null", "nvidia0", "nvidiactl"], [], None, True),
        (["null", "nvidiactl", "nvidia-uvm"], [], None, False),
        (["kfd", "dri"], [], None, True),
        (["dxg", "null"], ["libcuda.so", "libcuda.so.1", "libd3d12.so"], None, True),
        (["dxg", "null"], ["libd3d12.so", "libdxcore.so"], None, False),
        (["null"], ["libcuda.so.1"], None, False),
        ([], [], None, False),
        (["nvidia0"], [], "0", True),
        (["nvidia0"], [], "", False),
        (["dxg"], ["libcuda.so.1"], " -1", False),
    ],
)
def test_a_gpu_is_seen_by_its_device(
    devices: list[str], libraries: list[str], visible: str | None, found: bool
) -> None:
    assert has_gpu(devices, libraries, visible) == found
