"""What a GGUF file's weights take in mlx, which files are refused for it, and what is said of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from benchmarks.packed_blocks import WRITTEN
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of
from engine.models.formats.number_formats import MLX_BITS
from engine.models.store.gguf_folder import open_gguf
from engine.planning.units import byte_size
from engine.runtimes.mlx import eligible, gguf_files
from engine.runtimes.mlx.gguf_files import dtype_of, in_gguf, laid_out_in_mlx, refuse_unsupported, unsupported_reason
from tests.support.progress import quiet
from tests.support.tiny_gguf import ARCHITECTURES, whole_blocks, write_tiny_gguf
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("home")

Opened = Callable[..., Path]


@pytest.fixture
def opened(tmp_path: Path, tiny_model: Callable[..., Path]) -> Opened:
    """``opened(kind, family="qwen3_moe", name="m")``: the model folder of a GGUF file with matrices of that format, or
    of that of each by its name."""

    def folder_of(kind: Kind | Callable[[str], Kind], family: str = "qwen3_moe", name: str = "m") -> Path:
        source = tiny_model(family, **whole_blocks(family))
        path = write_tiny_gguf(tmp_path / f"{name}.gguf", source, ARCHITECTURES[family], quantised=kind)
        return open_gguf(path, quiet, folder=tmp_path / f"opened-{name}")

    return folder_of


def with_embedding(kind: Kind) -> Callable[[str], Kind]:
    return lambda name: kind if name.startswith(("token_embd", "output")) else Kind.Q4_0


@pytest.mark.parametrize("kind", WRITTEN)
def test_sizes_plans_and_the_file_say_the_same(kind: str, opened: Opened) -> None:
    files = open_model(opened(Kind[kind]))
    for dtype, width in (("bfloat16", 2), ("float32", 4)):
        sizes = sizes_of(files, dtype).for_runtime("mlx")
        found = laid_out_in_mlx(files, width)
        assert sizes.trunk_bytes + sizes.expert_bytes == found.nbytes
        assert laid_out_in_mlx(files, width, with_trunk=False).nbytes == sizes.expert_bytes
        assert eligible.weight_bytes(files.folder, dtype) == found.nbytes
    native = sizes_of(files).for_runtime("native")
    assert found.stored == native.trunk_bytes + native.expert_bytes
    # What is left of MXFP4 is the embedding.
    assert (kind in found.unpacked) == (kind not in MLX_BITS or kind == "MXFP4")
    assert found.is_packed


def test_a_bias_for_each_group_is_all_that_q4_0_adds(opened: Opened) -> None:
    found = laid_out_in_mlx(open_model(opened(Kind.Q4_0, "llama")), 2)
    # Norms are stored in float32, and are a part of a thousandth.
    assert found.growth == pytest.approx(20 / 18, rel=0.01)
    assert not found.unpacked and found.added == 0
    assert found.notice("bfloat16").startswith("the GGUF file's weights were laid out for mlx: 724 kB in memory")


def test_what_no_kernel_takes_is_named_with_its_bytes(opened: Opened) -> None:
    found = laid_out_in_mlx(open_model(opened(with_embedding(Kind.Q6_K))), 2)
    assert list(found.unpacked) == ["Q6_K"]
    numbers = found.unpacked["Q6_K"] * 256 // 210
    assert found.added == 2 * numbers - found.unpacked["Q6_K"]
    said = found.notice("bfloat16")
    assert f"{byte_size(found.unpacked['Q6_K'], fine=True)} of Q6_K of them unpacked to bfloat16" in said
    assert f"which takes {byte_size(found.added, fine=True)} more; scales were rounded to bfloat16" in said
    assert "rounded" not in found.notice("float32")


@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.MXFP4, Kind.Q4_K, Kind.F16, Kind.BF16, Kind.F32]
)
def test_files_that_mlx_takes_are_not_refused(kind: Kind, opened: Opened) -> None:
    folder = opened(kind)
    assert in_gguf(folder) and unsupported_reason(folder, ring=False) is None
    assert eligible.unsupported_reason(folder, Load(id=1, model="m")) is None
    refuse_unsupported(folder, ring=False)


def test_a_file_that_would_grow_too_much_is_refused_with_what_to_take_instead(opened: Opened) -> None:
    folder = opened(Kind.Q6_K, name="Qwen3-30B-A3B-Q6_K")
    reason = unsupported_reason(folder, ring=False)
    assert reason is not None and "none of whose kernels takes 1.6 MB of Q6_K" in reason
    assert eligible.unsupported_reason(folder, Load(id=1, model="m")) == reason
    with pytest.raises(ModelError, match=r"choose the native runtime, or qwen3-30b-4bit of the catalogue\.") as raised:
        refuse_unsupported(folder, ring=False)
    assert raised.value.kind == "bad-input"
    with pytest.raises(ModelError, match=r"whose kernels take wider codes: .* or a model of mlx-community\."):
        refuse_unsupported(opened(Kind.IQ4_XS, name="other"), ring=False)


def test_a_small_part_in_another_format_is_no_reason(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = opened(lambda name: Kind.Q6_K if name == "blk.0.attn_v.weight" else Kind.Q4_0)
    assert unsupported_reason(folder, ring=False) is None
    monkeypatch.setattr(gguf_files, "MOST_GROWTH", 1.1)
    assert "takes" in (unsupported_reason(folder, ring=False) or "")


def test_a_ring_leaves_gguf_files_to_the_native_runtime(opened: Opened) -> None:
    folder = opened(Kind.Q4_0)
    asked = Load(id=1, model="m", partitioning="ring")
    assert "a ring reads a GGUF file with the native runtime" in (eligible.unsupported_reason(folder, asked) or "")


@pytest.mark.parametrize(
    ("kind", "asked", "computes"),
    [
        (Kind.Q4_0, "auto", "bfloat16"),
        (Kind.BF16, "auto", "bfloat16"),
        (Kind.F16, "auto", "float16"),
        (Kind.F32, "auto", "float32"),
        (Kind.Q8_0, "float32", "float32"),
    ],
)
def test_packed_weights_are_computed_with_in_bfloat16(kind: Kind, asked: str, computes: str, opened: Opened) -> None:
    assert dtype_of(open_model(opened(kind)), asked) == computes


def test_a_family_that_mlx_does_not_run_is_refused_as_such(opened: Opened) -> None:
    folder = opened(Kind.Q8_0, "deepseek_v2")
    assert "does not run the family 'deepseek_v2'" in (eligible.unsupported_reason(folder, Load(id=1, model="m")) or "")


def test_a_folder_with_safetensors_is_no_gguf_file(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "llama")
    assert not in_gguf(folder)
    (folder / "m.gguf").touch()
    assert not in_gguf(folder)
