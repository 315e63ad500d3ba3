"""Calibrations on the disk: found again on the same machine for the same experts, and refused everywhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.calibration.calibration_file import (
    calibration_key,
    calibration_path,
    load_calibration,
    machine_key,
    save_calibration,
    shape_of,
)
from engine.planning.calibration import CALIBRATION_VERSION, Calibration, Curve, ExpertShape
from tests.support.opened_experts import experts_of

SHAPE = ExpertShape(hidden=64, ffn=96, dtype="BF16", expert_bytes=36864)
MACHINE = "A processor; avx2; 4 threads; A GPU"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    return tmp_path


def calibration(**changes: Any) -> Calibration:
    return msgspec.structs.replace(
        Calibration(
            version=CALIBRATION_VERSION,
            machine=MACHINE,
            shape=SHAPE,
            cpu=Curve((1, 4, 16), (1e-3, 1.5e-3, 4e-3)),
            memory_read=4e10,
            gpu=Curve((1, 4, 16), (1e-4, 1e-4, 2e-4)),
            weight_copy=2e-3,
            activation_copy=Curve((1, 16), (1e-5, 2e-5)),
            cpu_overlapped=1.2,
            copy_overlapped=1.1,
        ),
        **changes,
    )


def test_what_was_saved_is_found_again() -> None:
    path = save_calibration(calibration())
    assert path == calibration_path(SHAPE, MACHINE)
    assert path.parent.stat().st_mode & 0o077 == 0
    said: list[str] = []
    assert load_calibration(SHAPE, MACHINE, said.append) == calibration()
    assert said == []


def test_another_machine_or_shape_has_a_place_of_its_own() -> None:
    save_calibration(calibration())
    said: list[str] = []
    for machine in (MACHINE.replace("4 threads", "2 threads"), MACHINE.replace("avx2", "scalar"), MACHINE[:-1]):
        assert load_calibration(SHAPE, machine, said.append) is None
    for change in ({"hidden": 65}, {"ffn": 97}, {"dtype": "F32"}, {"expert_bytes": 1}):
        assert load_calibration(msgspec.structs.replace(SHAPE, **change), MACHINE, said.append) is None
    assert said == []
    assert load_calibration(SHAPE, MACHINE) == calibration()


def test_experts_without_a_gate_count_by_their_weights(tiny_model: Callable[..., Path]) -> None:
    for family, width in (("mixtral", 56), ("nemotron_h", 26)):  # two thirds of 40
        experts = experts_of(tiny_model(family, dtype="bfloat16"))
        shape = shape_of(experts)
        assert (shape.hidden, shape.ffn, shape.packed) == (48, width, False)
        assert 0.95 < shape.weights / experts.place(experts.layers[0], 0).weights <= 1
    assert shape_of(experts_of(tiny_model("nemotron_h", moe_intermediate_size=1856))).ffn == 1216


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": CALIBRATION_VERSION + 1}, f"version {CALIBRATION_VERSION + 1}, not {CALIBRATION_VERSION}"),
        ({"machine": "Another; avx2; 4 threads; no GPU"}, "measured on Another"),
        ({"shape": ExpertShape(1, 2, "BF16", 3)}, "experts of another shape"),
    ],
)
def test_a_file_of_something_else_is_refused(change: dict[str, Any], said: str) -> None:
    path = save_calibration(calibration())
    path.write_bytes(msgspec.json.encode(calibration(**change)))
    notices: list[str] = []
    assert load_calibration(SHAPE, MACHINE, notices.append) is None
    assert len(notices) == 1 and said in notices[0] and "bench experts" in notices[0] and str(path) in notices[0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"version": "one"}',
        b'{"version": 1}',
        pytest.param(b"x" * 1_000_001, id="long"),
    ],
)
def test_a_damaged_file_is_ignored_with_a_word(data: bytes) -> None:
    path = save_calibration(calibration())
    path.write_bytes(data)
    notices: list[str] = []
    assert load_calibration(SHAPE, MACHINE, notices.append) is None
    assert len(notices) == 1 and "damaged" in notices[0]
    assert path.read_bytes() == data
    save_calibration(calibration())
    assert load_calibration(SHAPE, MACHINE) == calibration()


NONSENSE: list[dict[str, Any]] = [
    {"memory_read": 0.0},
    {"memory_read": float("inf")},
    {"cpu_overlapped": 0.5},
    {"copy_overlapped": 0.0},
    {"weight_copy": -1.0},
    {"weight_copy": 0.0},
    {"activation_copy": None},
    {"cpu": Curve((), ())},
    {"cpu": Curve((1, 2), (1e-3,))},
    {"cpu": Curve((2, 1), (1e-3, 1e-3))},
    {"cpu": Curve((0, 1), (1e-3, 1e-3))},
    {"cpu": Curve((1, 2), (1e-3, -1e-3))},
    {"gpu": Curve((1,), (0.0,))},
]


@pytest.mark.parametrize("change", NONSENSE, ids=str)
def test_figures_that_mean_nothing_are_neither_kept_nor_used(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        save_calibration(calibration(**change))
    path = save_calibration(calibration())
    text = json.dumps(msgspec.to_builtins(calibration(**change)))
    path.write_text(text)
    notices: list[str] = []
    assert load_calibration(SHAPE, MACHINE, notices.append) is None
    assert len(notices) == 1


def test_the_key_names_what_makes_a_difference() -> None:
    assert machine_key("avx2", 1, None).endswith("; avx2; 1 thread; no GPU")
    keys = {
        calibration_key("bfloat16", 1, None),
        calibration_key("bfloat16", 2, None),
        calibration_key("bfloat16", 2, "A GPU"),
    }
    assert len(keys) == 3


def test_the_key_follows_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    assert "; torch; 3 threads;" in calibration_key("float32", 3, None)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_the_shape_of_a_models_experts(tiny_model: Callable[..., Path], family: str) -> None:
    experts = experts_of(tiny_model(family))
    shape = shape_of(experts)
    last = experts.expert(experts.layers[-1], experts.count - 1)
    assert (shape.ffn, shape.hidden) == last.gate.shape == last.up.shape
    assert (shape.hidden, shape.ffn) == last.down.shape
    biases = (last.gate_bias, last.up_bias, last.down_bias)
    parts = [last.gate, last.up, last.down, *(bias for bias in biases if bias is not None)]
    assert shape.expert_bytes == sum(part.nbytes for part in parts)
