"""The models that are measured: the starter, synthetic ones, and folders; each as the engines want it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.gguf_export import write_gguf
from benchmarks.packed_export import SCALE, write_packed
from benchmarks.packed_shapes import (
    Gemma4Shape,
    GlmAirShape,
    GlmFlashShape,
    Lfm2MoeShape,
    PackedShape,
    Qwen3NextShape,
)
from benchmarks.packed_tensors import Mix
from benchmarks.plain_export import write_plain
from benchmarks.shapes import (
    QWEN3_LAYERS,
    QWEN3_VOCABULARY,
    LlamaShape,
    MixtralShape,
    Qwen3MoeShape,
    Qwen35MoeShape,
    layer_bytes,
    model_bytes,
)
from benchmarks.synthetic import write_synthetic
from engine.models.architectures.gguf_architectures import config_of
from engine.models.folders.opening import open_model
from engine.models.formats.gguf_file import GgufFile

MEMORY_SHARE = 0.8
"""How much of the free memory or disk the benchmark takes."""

Kind = Literal[
    "starter",
    "mixtral",
    "qwen3-moe",
    "folder",
    "mixtral-q4",
    "qwen3-q4",
    "qwen3-mxfp4",
    "qwen35-q4",
    "dense-q4",
    "dense-q8",
    "glm47-q4",
    "next-q4",
    "gemma4-q4",
    "lfm2-q4",
    "glm45-q4",
    "qwen3-q3",
    "qwen3-q2",
    "qwen3-iq3s",
    "qwen3-iq3xxs",
    "qwen3-iq2s",
    "qwen3-iq2xs",
    "qwen3-iq2xxs",
]
"""What the targets are stated for; ``folder`` is any other model, which has none."""


@dataclass(frozen=True)
class Subject:
    """A model to compare on: as a plain Hugging Face folder, as GGUF, and prepared where it is. A packed one is
    a GGUF, and the folder links to it."""

    title: str
    folder: Path
    gguf: Path
    prepared: Path | None = None
    kind: Kind = "folder"
    packed: bool = False

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return config

    @property
    def nbytes(self) -> int:
        if self.packed:
            return self.gguf.stat().st_size
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def path_for(self, engine: str) -> Path:
        """Where ``engine`` (a key of ``benchmarks.engines.KINDS``) finds the model."""
        if engine.startswith("privatellm") and self.prepared is not None:
            return self.prepared
        return self.gguf if "llama.cpp" in engine else self.folder


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fitting_layers(work: Path, nothing: MixtralShape | Qwen3MoeShape) -> int:
    """Layers of a synthetic model that memory and disk have room for: two copies on disk (safetensors, GGUF), and in
    memory those two mapped and one that transformers holds for itself. ``nothing`` is its shape without layers."""
    memory = MEMORY_SHARE * psutil.virtual_memory().available / 3
    disk = MEMORY_SHARE * shutil.disk_usage(work).free / 2
    return max(1, int((min(memory, disk) - model_bytes(nothing)) // layer_bytes(nothing)))


def synthetic_subject(work: Path, shape: MixtralShape | Qwen3MoeShape, kind: Kind) -> Subject:
    """Write the synthetic model and its GGUF into ``work``, or reuse them. Exits if the disk is too small."""
    name = f"{shape.name}-{shape.layers}x{shape.hidden}x{shape.ffn}"
    title = f"{shape.title}, {shape.layers} layer" + "s" * (shape.layers > 1)
    subject = Subject(title, work / name, work / f"{name}.gguf", kind=kind)
    nbytes = model_bytes(shape)
    missing = nbytes * (2 - subject.gguf.is_file() - (subject.folder / "shape.json").is_file())
    if missing > 0.95 * shutil.disk_usage(work).free:
        raise SystemExit(f"The synthetic model needs {missing / 1e9:.0f} GB on {work}; give --work or fewer layers.")
    say(f"{subject.title}: {nbytes / 1e9:.1f} GB in {subject.folder}")
    write_synthetic(subject.folder, shape)
    write_gguf(subject.folder, subject.gguf)
    return subject


_FLAT = Qwen3MoeShape(QWEN3_LAYERS // 12, vocabulary=QWEN3_VOCABULARY // 12)

PACKED: dict[str, tuple[Kind, PackedShape, Mix]] = {
    "mixtral-q4": ("mixtral-q4", MixtralShape(), "Q4_K_M"),
    "qwen3-q4": ("qwen3-q4", Qwen3MoeShape(QWEN3_LAYERS // 6, vocabulary=QWEN3_VOCABULARY // 6), "Q4_K_M"),
    "qwen3-mxfp4": ("qwen3-mxfp4", Qwen3MoeShape(QWEN3_LAYERS // 6, vocabulary=QWEN3_VOCABULARY // 6), "MXFP4"),
    "qwen35-q4": ("qwen35-q4", Qwen35MoeShape(), "Q4_K_M"),
    "dense-q4": ("dense-q4", LlamaShape(), "Q4_K_M"),
    "dense-q8": ("dense-q8", LlamaShape(), "Q8_0"),
    "glm47-q4": ("glm47-q4", GlmFlashShape(), "Q4_K_M"),
    "next-q4": ("next-q4", Qwen3NextShape(), "Q4_K_M"),
    "gemma4-q4": ("gemma4-q4", Gemma4Shape(), "Q4_K_M"),
    "lfm2-q4": ("lfm2-q4", Lfm2MoeShape(), "Q4_K_M"),
    "glm45-q4": ("glm45-q4", GlmAirShape(), "Q4_K_M"),
    "qwen3-q3": ("qwen3-q3", _FLAT, "Q3_K"),
    "qwen3-q2": ("qwen3-q2", _FLAT, "Q2_K"),
    "qwen3-iq3s": ("qwen3-iq3s", _FLAT, "IQ3_S"),
    "qwen3-iq3xxs": ("qwen3-iq3xxs", _FLAT, "IQ3_XXS"),
    "qwen3-iq2s": ("qwen3-iq2s", _FLAT, "IQ2_S"),
    "qwen3-iq2xs": ("qwen3-iq2xs", _FLAT, "IQ2_XS"),
    "qwen3-iq2xxs": ("qwen3-iq2xxs", _FLAT, "IQ2_XXS"),
}
"""The packed synthetic models by name."""


def packed_subject(work: Path, name: str) -> Subject:
    """Write a model of :data:`PACKED` into ``work``, or reuse it."""
    kind, shape, mix = PACKED[name]
    title = f"{shape.title}, {shape.layers} layers, {mix}"
    subject = Subject(title, work / name, work / f"{name}.gguf", kind=kind, packed=True)
    write_packed(subject.gguf, shape.config(), mix, getattr(shape, "embedding_scale", SCALE))
    say(f"{subject.title}: {subject.nbytes / 1e9:.1f} GB in {subject.gguf}")
    return packed_folder(subject)


def packed_folder(subject: Subject) -> Subject:
    """Make the folder of a packed subject: without a vocabulary the program would refuse its file itself."""
    subject.folder.mkdir(exist_ok=True)
    with GgufFile(subject.gguf) as opened:
        config = config_of(opened)
    (subject.folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    link = subject.folder / subject.gguf.name
    link.unlink(missing_ok=True)
    link.symlink_to(subject.gguf.absolute())
    return subject


def starter_subject(work: Path) -> Subject:
    """The starter model, fetched if it is not on this machine."""
    from engine.models.store.local_models import resolve

    if resolve("starter").folder is None:
        from engine.models.store.starter import build_starter

        say("Fetching the starter model")
        build_starter(lambda stage, done, total, unit: None, lambda: False)
    return model_subject(resolve("starter").require_folder(), work, "Starter", "starter")


def model_subject(folder: Path, work: Path, title: str, kind: Kind = "folder") -> Subject:
    """A bfloat16 model of a family that can be exported and that is already on this machine, prepared or plain."""
    try:
        prepared = folder if _is_stacked(folder) else None
        plain = write_plain(folder, work / f"{folder.name}.plain") if prepared is not None else folder
        return Subject(title, plain, write_gguf(plain, work / f"{folder.name}.gguf"), prepared, kind)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{folder} cannot be compared: {error}.") from error


def _is_stacked(folder: Path) -> bool:
    """Whether gate and up of an expert are one matrix in the files, as in prepared models."""
    experts = open_model(folder).experts
    return experts is not None and experts.expert(experts.layers[0], 0).gate_up is not None


def add_arguments(parser: argparse.ArgumentParser, models: list[str]) -> None:
    """The options that say which models are measured, shared by the benchmarks."""
    named = "starter, synthetic (Mixtral-shaped), qwen3-moe (synthetic), or folders of bfloat16 models; packed: "
    named += ", ".join(PACKED)
    parser.add_argument("--models", nargs="+", default=models, help=named)
    parser.add_argument("--layers", default="2", help="layers of the Mixtral-shaped model: a number, or auto: as fit")
    parser.add_argument("--hidden", type=int, default=4096, help="its hidden size (multiple of 128)")
    parser.add_argument("--ffn", type=int, default=14336)
    deep = str(QWEN3_LAYERS // 8)
    parser.add_argument("--qwen3-layers", default=deep, help="layers of the Qwen3-MoE-shaped model, likewise")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    parser.add_argument("--work", type=Path, help="folder for the synthetic models and the GGUF files")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what means nothing (exit status 2)."""
    if arguments.hidden % 128:
        parser.error(f"--hidden {arguments.hidden} is not a multiple of 128 (heads of 128, as Mixtral's)")
    for flag, value in (("--layers", arguments.layers), ("--qwen3-layers", arguments.qwen3_layers)):
        if value != "auto" and not (value.isdecimal() and int(value)):
            parser.error(f"{flag} {value} is neither a number from 1 on nor auto")
    if arguments.threads < 1:
        parser.error(f"--threads {arguments.threads} is less than 1")


def work_folder(arguments: argparse.Namespace) -> Path:
    """``--work``, or a folder beside the models; made if it is not there."""
    from engine.system.locations import locate

    work: Path = arguments.work or locate("models") / "benchmarks"
    work.mkdir(parents=True, exist_ok=True)
    return work


def subject_named(name: str, arguments: argparse.Namespace) -> Subject:
    """The model that ``--models`` calls ``name``, written or fetched if need be."""
    work: Path = arguments.work
    if name == "starter":
        return starter_subject(work)
    if name == "synthetic":
        heads = arguments.hidden // 128

        def mixtral(layers: int) -> MixtralShape:
            return MixtralShape(
                layers, arguments.hidden, arguments.ffn, heads=heads, key_value_heads=max(1, heads // 4)
            )

        layers = fitting_layers(work, mixtral(0)) if arguments.layers == "auto" else int(arguments.layers)
        return synthetic_subject(work, mixtral(layers), "mixtral")
    if name == "qwen3-moe":
        deep = arguments.qwen3_layers
        layers = fitting_layers(work, Qwen3MoeShape(0)) if deep == "auto" else int(deep)
        # The vocabulary shrinks with the depth, so that the head keeps its share of what a token reads.
        return synthetic_subject(
            work, Qwen3MoeShape(layers, vocabulary=max(1000, QWEN3_VOCABULARY * layers // QWEN3_LAYERS)), "qwen3-moe"
        )
    if name in PACKED:
        return packed_subject(work, name)
    return model_subject(Path(name), work, Path(name).name)
