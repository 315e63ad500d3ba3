"""Made-up experts that machines measure: of the format that was asked for, packed ones by the packed kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.packed_blocks import unpacked
from engine.calibration import synthetic_experts
from engine.calibration.calibration_file import load_calibration, save_calibration
from engine.calibration.synthetic_experts import SyntheticCpuSide, check_shape, expert_curve
from engine.models.formats.model_files import ExpertWeights
from engine.models.formats.number_formats import BLOCKS, is_grouped, is_packed, scales_shape, stored_bytes
from engine.moe.kernels.bindings import FORMATS, choose
from engine.moe.kernels.layers import LayerExperts
from engine.planning.calibration import ExpertShape, Processor, estimated, guessed
from engine.runtimes.torch.offload.torch_tensors import unpacked as unpacked_groups

HIDDEN, FFN = 512, 256

needs_kernels = pytest.mark.skipif(not choose("bfloat16").native, reason="the native kernels cannot run here")


def shape_with(gate: str, down: str) -> ExpertShape:
    nbytes = 2 * stored_bytes(gate, (FFN, HIDDEN)) + stored_bytes(down, (HIDDEN, FFN))
    if gate == "BLOCK_FP8":
        nbytes += 3 * stored_bytes("F32", scales_shape((FFN, HIDDEN)))
    elif gate == "GROUPED_NVFP4":  # a byte for 16 weights, and a table of 256 numbers for each matrix
        nbytes += 3 * HIDDEN * FFN // 16 + 3 * 1024
    elif is_grouped(gate):  # a byte for 32 weights, or a scale and a bias of two bytes each for 64
        nbytes += 3 * HIDDEN * FFN // 32 if gate == "OCP_MXFP4" else 3 * HIDDEN * FFN // 16
    return ExpertShape(hidden=HIDDEN, ffn=FFN, dtype=gate, expert_bytes=nbytes)


@needs_kernels
@pytest.mark.parametrize(
    ("gate", "down"),
    [*((name, name) for name in FORMATS), ("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"), ("MXFP4", "Q8_0"), ("IQ4_XS", "Q5_K")],
)
def test_experts_are_measured_in_their_own_formats(gate: str, down: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ExpertWeights] = []

    class Watched(LayerExperts):
        def __init__(self, weights: dict[int, ExpertWeights], *others: object) -> None:
            made.extend(weights.values())
            super().__init__(weights, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(synthetic_experts, "LayerExperts", Watched)
    monkeypatch.setattr(synthetic_experts, "CYCLE_BYTES", 1 << 20)
    shape = shape_with(gate, down)
    check_shape(shape)
    side = SyntheticCpuSide(shape, "bfloat16", 1)
    for tokens in (1, 40):
        side.prepare(tokens)
        side.run(tokens)
        out = side._calls[tokens]._out
        assert np.isfinite(out).all() and np.abs(out).max() < 1e30
    first = made[0]
    found = (first.gate.dtype, first.up.dtype, first.down.dtype)
    assert found[:2] == (gate, gate)
    assert stored_bytes(found[2], (HIDDEN, FFN)) == stored_bytes(down, (HIDDEN, FFN))
    assert sum(part.nbytes for part in first.parts) == shape.expert_bytes
    for part in first.parts:
        if is_grouped(part.dtype):
            values = np.abs(unpacked_groups(part, torch.float32).numpy())
            assert values[values > 0].min() > 1e-6 and values.max() < 1e3
        elif is_packed(part.dtype):
            values = np.abs(unpacked(part.dtype, part.words[:1]))
            assert values[values > 0].min() > 1e-6 and values.max() < 1e3


def test_rows_that_are_not_whole_blocks_get_the_nearest_format() -> None:
    rows = ExpertShape(hidden=256, ffn=96, dtype="Q4_K", expert_bytes=2 * stored_bytes("Q4_K", (96, 256)) + 20_000)
    formats = synthetic_experts._formats(rows)
    assert formats is not None and formats[0] == "Q4_K" and 96 % BLOCKS[formats[1]][0] == 0
    assert synthetic_experts._formats(ExpertShape(hidden=96, ffn=256, dtype="Q4_K", expert_bytes=40_000)) is None


def test_what_no_kernel_runs_is_counted_with_its_unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    packed, plain = shape_with("Q4_K", "Q4_K"), shape_with("BF16", "BF16")
    assert packed.packed and not plain.packed
    rate = 10e9
    assert expert_curve(plain, "bfloat16", 1, rate).at(1) == pytest.approx(plain.expert_bytes / rate)
    assert expert_curve(packed, "bfloat16", 1, rate).at(1) > 5 * expert_curve(plain, "bfloat16", 1, rate).at(1)
    # The native kernels read packed weights as they are, and so does the guess of a CPU that has them.
    cpu, gpu = guessed(packed).cpu, guessed(packed).gpu
    assert gpu is not None and cpu.at(1) < guessed(plain).cpu.at(1) and gpu.at(1) > cpu.at(1)


def test_calibrations_of_packed_and_plain_experts_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    shapes = [shape_with("BF16", "BF16"), shape_with("Q4_K", "Q4_K"), shape_with("Q4_K", "Q6_K")]
    for number, shape in enumerate(shapes, 1):
        save_calibration(estimated(shape, cpu=Processor(number * 1e9, 1e12), machine="here"))
    for number, shape in enumerate(shapes, 1):
        found = load_calibration(shape, "here")
        assert found is not None and (found.shape, found.memory_read) == (shape, number * 1e9)
    assert load_calibration(shape_with("Q5_K", "Q5_K"), "here") is None
