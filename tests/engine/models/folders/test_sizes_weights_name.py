"""What a model's number format is called."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from engine.models.folders.opening import open_model
from engine.models.folders.sizes import weights_name
from engine.models.store.gguf_folder import open_gguf
from engine.system.free_memory import memory_in_use
from tests.support.tiny_gguf import whole_blocks, write_tiny_gguf
from tests.support.tiny_models import write_tiny_model


def quantised(name: str) -> GGMLQuantizationType:
    """Most of the experts in four bits, some in six, as such mixtures are."""
    if "exps" not in name:
        return GGMLQuantizationType.F32
    return GGMLQuantizationType.Q6_K if "down" in name and ".0." in name else GGMLQuantizationType.Q4_K


def test_plain_weights_have_short_names(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "mixtral")
    assert weights_name(open_model(folder)) in ("bf16", "f32")


@pytest.mark.parametrize(
    ("file", "name"),
    [("tiny-Q4_K_M.gguf", "Q4_K_M"), ("tiny-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"), ("tiny.gguf", "Q4_K"),
     ("tiny-Q8_0.gguf", "Q4_K")],
)  # fmt: skip
def test_a_mixture_is_called_as_its_file_says_unless_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, name: str
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    source = write_tiny_model(tmp_path / "source", "qwen3_moe", **whole_blocks("qwen3_moe"))
    path = write_tiny_gguf(tmp_path / file, source, "qwen3moe", quantised=quantised)
    assert weights_name(open_model(open_gguf(path, lambda *_: None))) == name


def test_the_memory_of_this_process_is_known() -> None:
    use = memory_in_use()
    assert use.own > 1_000_000 and use.mapped >= 0
