"""Sizes of packed models are what each runtime takes of memory: the files' bytes, and for torch an unpacked trunk."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from gguf import GGMLQuantizationType as Kind

from engine.errors import ModelError
from engine.ipc.messages import Load, Plan
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of
from engine.models.formats.gguf_file import GgufFile
from engine.models.store.gguf_folder import open_gguf
from engine.planning.hybrid import UNPACKING_ROOM, Device, gpu_room, policy_named, slabs_kept, workspace_bytes
from engine.runtimes import runtime_named
from engine.runtimes.mlx import gguf_files
from engine.session.plan_model import plan_model
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.torch_oracle import load
from tests.support.opened_experts import experts_of
from tests.support.progress import quiet
from tests.support.tiny_gguf import ARCHITECTURES, whole_blocks, write_tiny_gguf
from tests.support.tiny_models import write_tiny_model


def kind_of(name: str) -> Kind:
    """As in files called Q4_K_M: of some layers the down projection in more bits."""
    if "ffn_down" in name and name.startswith("blk.0."):
        return Kind.Q6_K
    return Kind.Q6_K if name == "output.weight" else Kind.Q4_K


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A GGUF file of the family that the test names, and its model folder."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    family = request.param
    source = write_tiny_model(tmp_path / "source", family, **whole_blocks(family))
    path = write_tiny_gguf(tmp_path / "m.gguf", source, ARCHITECTURES[family], quantised=kind_of)
    return path, open_gguf(path, quiet)


@needs_kernels
@pytest.mark.parametrize("folders", ["qwen2_moe", "olmoe", "llama"], indirect=True)
def test_predicted_memory_is_what_the_runtimes_take(folders: tuple[Path, Path]) -> None:
    path, folder = folders
    files = open_model(folder)
    sizes = sizes_of(files)
    assert sizes.dtype == "bfloat16" and sizes.stored == "Q4_K"
    with GgufFile(path) as gguf:
        mapped = sum(tensor.nbytes for tensor in gguf.tensors.values())
    native = sizes.for_runtime("native")
    assert native.trunk_bytes + native.expert_bytes == pytest.approx(mapped, rel=0.001)
    for runtime, model in (("native", load_native(folder)), ("torch", load(folder, partitioning="cpu"))):
        predicted, facts = sizes.for_runtime(runtime), model.facts
        assert predicted.trunk_bytes == pytest.approx(facts.trunk_bytes, rel=0.001)
        assert (predicted.expert_bytes, predicted.dtype) == (facts.expert_bytes, facts.dtype)
        assert predicted.key_value_bytes_per_token == facts.key_value_bytes_per_token
        planned = plan_model(Plan(id=1, load=Load(id=1, model=str(path), runtime=runtime, partitioning="cpu")))
        assert planned.memory[0].trunk == predicted.trunk_bytes
        assert planned.memory[0].experts == predicted.expert_bytes
        (numbers,) = [choice for choice in planned.choices if choice.what == "numbers"]
        assert (numbers.choice, numbers.reason) == ("bfloat16", "the weights are packed, most of them as Q4_K")
    assert sizes.for_runtime("torch", on_gpu=True).trunk_bytes > 2 * native.trunk_bytes
    wide = sizes_of(files, "float32")
    assert wide.for_runtime("torch").trunk_bytes == 2 * sizes.for_runtime("torch", on_gpu=True).trunk_bytes
    # Arithmetic is counted in weights, whatever bytes they are packed in.
    weights = [sizes.for_runtime(name) for name in ("native", "torch")]
    assert len({round(each.trunk_bytes * each.weights_per_trunk_byte) for each in weights}) == 1
    assert {each.trunk_file_bytes for each in weights} == {native.trunk_bytes}


@needs_kernels
def test_float16_is_computed_with_in_bfloat16_by_native_alone(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen2_moe", dtype="float16")
    sizes = sizes_of(open_model(folder))
    for runtime, model in (("native", load_native(folder)), ("torch", load(folder, partitioning="cpu"))):
        predicted = sizes.for_runtime(runtime)
        assert (predicted.dtype, predicted.stored) == (model.facts.dtype, "float16")
        assert predicted.trunk_bytes == pytest.approx(model.facts.trunk_bytes, rel=0.02)
        assert predicted.key_value_bytes_per_token == model.facts.key_value_bytes_per_token


@pytest.mark.parametrize("folders", ["qwen2_moe"], indirect=True)
def test_mlx_lays_a_gguf_file_out_and_refuses_what_would_grow_too_much(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = folders
    asked = Load(id=1, model=str(path), runtime="mlx")
    refusal = r"none of whose kernels takes .* of Q6_K: choose the native runtime, or"
    usual = gguf_files.MOST_GROWTH
    monkeypatch.setattr(gguf_files, "MOST_GROWTH", 1.1)
    with pytest.raises(ModelError, match=refusal):
        plan_model(Plan(id=1, load=asked))
    mlx = importlib.util.find_spec("mlx_lm") is not None
    if mlx:
        with pytest.raises(ModelError, match=refusal):
            runtime_named("mlx").load(folder, asked, quiet)
    monkeypatch.setattr(gguf_files, "MOST_GROWTH", usual)
    sizes = sizes_of(open_model(folder), "float32").for_runtime("mlx")
    planned = plan_model(Plan(id=1, load=msgspec.structs.replace(asked, dtype="float32")))
    assert (planned.memory[0].trunk, planned.memory[0].experts) == (sizes.trunk_bytes, sizes.expert_bytes)
    (weights,) = [choice for choice in planned.choices if choice.what == "weights"]
    assert weights.reason.startswith("laid out for mlx; ") and weights.reason.endswith(" GB in the GGUF file")
    if mlx:
        facts = runtime_named("mlx").load(folder, asked, quiet).facts
        assert (facts.trunk_bytes, facts.expert_bytes) == (sizes.trunk_bytes, sizes.expert_bytes)


@pytest.mark.parametrize("folders", ["olmoe"], indirect=True)
def test_a_gpu_has_slots_for_the_largest_expert_and_room_to_unpack_one(folders: tuple[Path, Path]) -> None:
    _, folder = folders
    experts = experts_of(folder)
    sizes = sizes_of(open_model(folder)).for_runtime("torch", on_gpu=True)
    large, small = (experts.place(layer, 0).nbytes for layer in (0, 1))
    assert small < sizes.slab_bytes < large == sizes.slot_bytes
    assert sizes.unpacked_slab_bytes == 2 * experts.place(0, 0).weights
    plain = workspace_bytes(sizes, gpu=False)
    assert workspace_bytes(sizes, gpu=True) - plain >= 2 * large + sizes.unpacked_slab_bytes + UNPACKING_ROOM
    free = 10**9 - gpu_room(sizes, Device("", 10**9, 10**9))
    there = Device("", free + 3 * large, free + 3 * large)
    assert slabs_kept(sizes, policy_named("balanced"), gpu_room(sizes, there)) == 3
