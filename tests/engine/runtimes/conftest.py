"""Models of all runtimes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from engine.models.folders.prepare import prepare
from engine.models.store.gguf_folder import open_gguf
from engine.runtimes.protocol import LoadedModel
from tests.engine.runtimes.subjects import (
    FP8,
    FP8_CHANNEL,
    FP8_TENSOR,
    GROUPED_MODELS,
    PACKED_MODELS,
    PUBLISHED,
    ZERO_POINTS,
    StoredModel,
    Subject,
)
from tests.support.progress import quiet
from tests.support.tiny_fp8 import write_fp8
from tests.support.tiny_gguf import ARCHITECTURES, whole_blocks, write_tiny_gguf
from tests.support.tiny_grouped import write_grouped
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_zero_points import write_zero_points


@pytest.fixture(scope="session")
def stored_model(
    tiny_model: Callable[..., Path],
    prepared: Callable[[Path], Path],
    packed: Callable[[str, str], Path],
    grouped: Callable[[str, str], tuple[Path, Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> StoredModel:
    """The folder of a tiny model in the form ``stored``, written once a session. Not to be changed."""
    root = tmp_path_factory.mktemp("quantised")
    written: dict[str, Path] = {}

    def folder_of(
        subject: Subject, family: str, stored: str = "float32", as_saved: bool = False, **options: Any
    ) -> Path:
        if stored in PACKED_MODELS:
            return packed(family, stored)
        if stored in GROUPED_MODELS or stored in ZERO_POINTS or stored in (PUBLISHED, FP8, FP8_CHANNEL, FP8_TENSOR):
            return grouped(family, stored)[0]
        if stored != "4-bit":
            saved = tiny_model(family, dtype=stored, **(subject.unlike.get(family, {}) | options))
            return prepared(saved) if family in subject.prepared_only and not as_saved else saved
        from tests.engine.runtimes.mlx_oracle import write_quantised

        if family not in written:
            written[family] = write_quantised(root / family, family, **options)
        return written[family]

    return folder_of


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Callable[[str, str], Path]:
    """``packed(family, name)``: the folder of a GGUF file in the formats that PACKED_MODELS has under ``name``, written
    once a session. Not to be changed."""
    root = tmp_path_factory.mktemp("packed")

    @functools.cache
    def folder_of(family: str, name: str) -> Path:
        kind, parts = PACKED_MODELS[name]
        path = root / f"{family}-{name}.gguf"
        path = write_tiny_gguf(
            path, tiny_model(family, **whole_blocks(family)), ARCHITECTURES[family], quantised=kind, parts=parts
        )
        return open_gguf(path, quiet, folder=root / f"gguf--{family}-{name}")

    return folder_of


@pytest.fixture(scope="session")
def packed_model(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> Callable[[str, str], tuple[Path, Path]]:
    """``packed_model(family, kind)``: the model folder of ``family`` packed as ``kind``, and the folder of what its
    weights stand for, written once a session. Not to be changed."""
    root = tmp_path_factory.mktemp("packed-as")

    @functools.cache
    def folders_of(family: str, kind: str) -> tuple[Path, Path]:
        folder = root / f"{family}-{kind}"
        folder.mkdir()
        path = write_tiny_gguf(
            folder / "m.gguf",
            tiny_model(family, **whole_blocks(family)),
            ARCHITECTURES[family],
            quantised=GGMLQuantizationType[kind],
            extra={"attention.sliding_window": 16} if family == "mistral" else {},
            merged=kind in ("Q8_0", "Q6_K"),
            truth=folder / "truth",
        )
        return open_gguf(path, quiet, folder=folder / "opened"), folder / "truth"

    return folders_of


@pytest.fixture(scope="session")
def grouped(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> Callable[[str, str], tuple[Path, Path]]:
    """``grouped(family, name)``: the folder of a model in the form that GROUPED_MODELS or ZERO_POINTS has under
    ``name``, as published, or in FP8, and that of what its weights stand for, written once a session. Not to be
    changed."""
    root = tmp_path_factory.mktemp("grouped")

    @functools.cache
    def folder_of(family: str, name: str) -> tuple[Path, Path]:
        if name in (FP8, FP8_CHANNEL, FP8_TENSOR):
            return _in_fp8(root / f"{family}-{name}", family, name.removeprefix(FP8).removeprefix("-") or "block")
        if name in ZERO_POINTS:
            source = tiny_model(family, **whole_blocks(family))
            return write_zero_points(root / f"{family}-{name}", source, ZERO_POINTS[name], files=2)
        options = {"form": "published"} if name == PUBLISHED else GROUPED_MODELS[name]
        return write_grouped(
            root / f"{family}-{name.replace(' ', '-')}", tiny_model(family, **whole_blocks(family)), **options
        )

    return folder_of


def _in_fp8(folder: Path, family: str, strategy: str) -> tuple[Path, Path]:
    """A tiny model of several blocks in rows and columns, the last ones smaller, in two files. The attention of one
    layer stays bfloat16."""
    sizes: dict[str, Any] = {"hidden_size": 328, "intermediate_size": 200}
    if family == "granitemoe":  # whose experts share a tensor, in which each begins with a block
        sizes = {"hidden_size": 256, "intermediate_size": 256}
    if "moe_intermediate_size" in whole_blocks(family):
        sizes["moe_intermediate_size"] = 200
    source = write_tiny_model(folder.with_name(folder.name + "-source"), family, **(whole_blocks(family) | sizes))
    return write_fp8(folder, source, kept=lambda module: "layers.1.self_attn" in module, files=2, strategy=strategy)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """``prepared(folder)``: that checkpoint as a bank, prepared once a session. Not to be changed."""
    root = tmp_path_factory.mktemp("prepared")
    banks: dict[Path, Path] = {}

    def bank_of(folder: Path) -> Path:
        if folder not in banks:
            bank = root / f"{folder.name}-{len(banks)}"
            prepare(folder, bank, quiet)
            banks[folder] = bank
        return banks[folder]

    return bank_of


@pytest.fixture(scope="module")
def loaded(stored_model: StoredModel) -> Iterator[Callable[..., LoadedModel]]:
    """``loaded(subject, family, stored="float32")``: that model on one machine, loaded once a file. To be left as it
    was, and not to be closed."""
    models: dict[tuple[str, str, str], LoadedModel] = {}

    def model_of(subject: Subject, family: str, stored: str = "float32") -> LoadedModel:
        key = (subject.name, family, stored)
        if key not in models:
            models[key] = subject.load(stored_model(subject, family, stored))
        return models[key]

    yield model_of
    for model in models.values():
        model.close()
