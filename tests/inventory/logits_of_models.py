"""The logits of every tiny model in every form on every runtime, or the sentence with which it is refused.

A model is also loaded without each of its settings in turn, so that what stands in for a missing one shows. Its
embedding is small then: the sum that a norm adds to the squares of its inputs is about as large as they are, and
changes the logits like everything else that a family's definition says.

Logits are kept as a few weighted sums of them, and compared as numbers, not as digests: instruction sets and numbers of
threads add in another order. What is computed in float32 must agree to a thousandth of the logits' size, which is far
above the differences between processors and far below what a wrong setting does. Where the native kernels round inputs
to eight bits, a router may choose another expert of two that are as good: the median of the steps must agree to a
fifth.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.models.folders.prepare import prepare
from engine.models.store.gguf_folder import open_gguf
from engine.moe.kernels.bindings import VARIABLE
from engine.runtimes.protocol import LoadedModel
from tests.engine.runtimes.mlx_oracle import FAMILIES as FAMILIES_OF_MLX_LM
from tests.engine.runtimes.mlx_oracle import write_quantised
from tests.engine.runtimes.subjects import (
    FP8,
    FP8_CHANNEL,
    FP8_TENSOR,
    GROUPED_MODELS,
    NATIVE,
    PACKED_MODELS,
    SUBJECTS,
    TORCH,
    ZERO_POINTS,
    Subject,
)
from tests.support.progress import quiet
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_fp8 import write_fp8
from tests.support.tiny_gguf import ARCHITECTURES, whole_blocks, write_tiny_gguf
from tests.support.tiny_grouped import write_grouped
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_zero_points import Form, write_zero_points

PROMPT = [3 + (number * number * 7 + number * 11) % 157 for number in range(24)]
"""More tokens than a tiny model's window has."""
DECODED = (7, 50)
VOCABULARY = 160
SUMS = 6
"""Weighted sums that are kept of the logits of each step."""
_WEIGHTS = np.sin(np.outer(np.arange(VOCABULARY) + 1.0, np.arange(SUMS) * 0.37 + 0.71) ** 2) / np.sqrt(VOCABULARY / 2)

EXACT = 6e-4
"""Largest difference of the sums of a step, as a share of the logits' size, where all is computed in float32. Four
kept digits round by nearly as much."""
ROUNDED = 0.25
"""The same of the median step where inputs are rounded to eight bits."""

_SMALL = 1e-3
"""Factor of the embedding where settings are left out."""
_WITHOUT_EFFECT = frozenset(
    [
        *("architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range"),
        *("model_type", "output_router_logits", "pad_token_id", "pretraining_tp", "router_aux_loss_coef"),
        *("transformers_version", "use_cache", "vocab_size", "num_hidden_layers", "hidden_size"),
    ]
)
"""Settings that every file has, or that no runtime reads."""
_PLACES = re.compile(r"(?<!\w)/(?:[\w.+-]+/)+[\w.+-]*")
_LONGEST = 120
"""Characters that are kept of a refusal."""
_AS_WITH_IT = "as with it"
SMALL, SMALL_GGUF = "small embedding", "GGUF with a small embedding"
FAMILIES = TINY_FAMILIES


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of a model in one form on one runtime: ``sums`` [steps, SUMS], or ``refused`` in words."""

    family: str
    form: str
    runtime: str
    sums: NDArray[np.float64] | None = None
    refused: str = ""

    @property
    def name(self) -> str:
        return f"{self.family}, {self.form}, {self.runtime}"

    def is_like(self, other: Outcome, share: float = 1.0) -> bool:
        """Whether both are the same, or as near as ``share`` of what is allowed."""
        if self.sums is None or other.sums is None:
            return self.refused == other.refused
        return _apart(self, other) <= share * self.allowed

    @property
    def allowed(self) -> float:
        return ROUNDED if is_rounded(self.form, self.runtime) else EXACT

    def __str__(self) -> str:
        return " ".join(f"{value:.4g}" for value in self.sums.flat) if self.sums is not None else self.refused


def _apart(one: Outcome, other: Outcome) -> float:
    assert one.sums is not None and other.sums is not None
    steps = np.sqrt(((one.sums - other.sums) ** 2).mean(axis=1) / (other.sums**2).mean())
    return float(np.median(steps) if is_rounded(one.form, one.runtime) else steps.max())


def is_rounded(form: str, runtime: str) -> bool:
    """Whether the runtime rounds inputs of matrices that are stored in this form."""
    return runtime == "native" and form in _PACKED


def outcomes(family: str, folder: Path) -> Iterator[Outcome]:
    """All outcomes of ``family``, whose models are written in ``folder``."""
    for form, write in _forms(family).items():
        try:
            written = write(folder / form.replace(" ", "-"))
        except ModelError as error:
            yield from (Outcome(family, form, subject.name, refused=_sentence(error)) for subject in SUBJECTS)
        else:
            yield from (outcome_of(subject, family, form, written) for subject in SUBJECTS)
    yield from _without_settings(family, folder)
    if family in ARCHITECTURES:
        yield from _without_metadata(family, folder)


# --- the file -------------------------------------------------------------------------------------------------------


def lines_of(found: list[Outcome]) -> list[str]:
    """Lines that keep the outcomes of a family: one for runtimes that agree, and none of the numbers again for a model
    that gives the same without a setting as with it."""
    whole = {each.runtime: each for each in found if each.form == SMALL}
    whole_gguf = {each.runtime: each for each in found if each.form == SMALL_GGUF}
    lines = []
    for form in dict.fromkeys(each.form for each in found):
        left = [each for each in found if each.form == form]
        while left:
            first, *others = left
            alike = [first, *(each for each in others if each.is_like(first, 0.1) and each.allowed == first.allowed)]
            base = (whole_gguf if form.startswith("GGUF without") else whole).get(left[0].runtime)
            same = " without " in f" {form}" and base is not None and all(each.is_like(base, 0.1) for each in alike)
            kind = "" if left[0].sums is not None else "refused: "
            runtimes = " ".join(each.runtime for each in alike)
            lines.append(f"{left[0].family}, {form}, {runtimes}: {kind}{_AS_WITH_IT if same else left[0]}")
            left = [each for each in left if each not in alike]
    return lines


def read_lines(lines: list[str]) -> dict[str, Outcome]:
    """The outcomes that ``lines`` keep, by their names."""
    kept: dict[str, Outcome] = {}
    for line in sorted(lines, key=lambda line: line.endswith(_AS_WITH_IT)):
        names, _, said = line.partition(": ")
        family, form, runtimes = names.split(", ")
        for runtime in runtimes.split():
            outcome = Outcome(family, form, runtime)
            if said.startswith("refused: "):
                outcome = replace(outcome, refused=said.removeprefix("refused: "))
            elif said == _AS_WITH_IT:
                base = SMALL_GGUF if form.startswith("GGUF") else SMALL
                outcome = replace(outcome, sums=kept[f"{family}, {base}, {runtime}"].sums)
            else:
                outcome = replace(outcome, sums=np.array(said.split(), np.float64).reshape(-1, SUMS))
            kept[outcome.name] = outcome
    return kept


def differences(kept: dict[str, Outcome], found: list[Outcome]) -> list[str]:
    """What is other now than the file says, one sentence each."""
    names = {each.name for each in found}
    said: list[str] = []
    for each in found:
        before = kept.get(each.name)
        if before is None:
            said.append(f"{each.name}: is new")
        elif not each.is_like(before):
            if each.sums is None or before.sums is None:
                said.append(f"{each.name}: was {before}, is {each}")
            else:
                share = _apart(each, before)
                said.append(f"{each.name}: differs by {share:.2g} of the logits' size, {each.allowed} is allowed")
    return [*said, *(f"{name}: is gone" for name in kept if name not in names)]


# --- forms ----------------------------------------------------------------------------------------------------------


_GROUPED_HERE = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss"),
    "glm4_moe",
)
"""Families whose trunk mlx-lm stores as transformers does."""
_ZERO_POINTS_HERE = ("llama", "qwen3_moe")
"""A family without and one with experts, in the forms that are read alike in all of them."""
_CORRECTED = ("deepseek_v3", "glm4_moe_lite", "glm4_moe", "lfm2_moe", "ernie4_5_moe", "nemotron_h")
"""Families whose scores are corrected where they are compared, and divided by their sum."""
_CHOSEN = 3
"""Experts of a token in these tiny models."""
_PUBLISHED, _BY_MLX_LM = "as published", "4 bits by mlx-lm"
_NVFP4_OF_MLX = "NVFP4 as mlx-lm stores it"
_PACKED = frozenset(
    [*(f"GGUF {name}" for name in PACKED_MODELS), *GROUPED_MODELS, *ZERO_POINTS, _PUBLISHED, _BY_MLX_LM, _NVFP4_OF_MLX]
)


def _forms(family: str) -> dict[str, Callable[[Path], Path]]:
    """How each form of ``family`` is written into a folder."""
    forms: dict[str, Callable[[Path], Path]] = {
        "float32": lambda folder: write_tiny_model(folder, family),
        "bfloat16": lambda folder: write_tiny_model(folder, family, dtype="bfloat16", shards=True),
        "prepared": lambda folder: _prepared(write_tiny_model(folder / "plain", family), folder / "prepared"),
    }
    if family in _CORRECTED:
        forms["small scores"] = lambda folder: _with_small_scores(write_tiny_model(folder, family))
    if family in ARCHITECTURES:
        forms["GGUF F32"] = lambda folder: _gguf(folder, family, lambda name: GGMLQuantizationType.F32)
        forms |= {f"GGUF {name}": partial(_gguf, family=family, kind=kind) for name, (kind, _) in PACKED_MODELS.items()}
        forms[FP8] = partial(_fp8, family=family, strategy="block")
    if family in _GROUPED_HERE:
        forms |= {name: partial(_grouped, family=family, **options) for name, options in GROUPED_MODELS.items()}
    if family in _ZERO_POINTS_HERE:
        forms |= {name: partial(_zero_points, family=family, form=form) for name, form in ZERO_POINTS.items()}
        forms[_NVFP4_OF_MLX] = lambda folder: _grouped(folder, family, mode="nvfp4", group=16)
        forms |= {name: partial(_fp8, family=family, strategy=name.partition("-")[2])
                  for name in (FP8_CHANNEL, FP8_TENSOR)}  # fmt: skip
    if family == "gpt_oss":
        forms[_PUBLISHED] = lambda folder: _grouped(folder, family, form="published")
    if family in FAMILIES_OF_MLX_LM:
        forms[_BY_MLX_LM] = lambda folder: write_quantised(folder, family)
    return forms


def _with_small_scores(folder: Path) -> Path:
    """``folder``, whose routers choose the first experts whatever their scores, which are often nearly 0: what is added
    to their sum before they are divided by it shows."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            chosen = torch.arange(tensor.numel()) < _CHOSEN
            return torch.where(chosen, 10.0, 0.0).to(tensor.dtype).reshape(tensor.shape)
        return tensor * 100 if name.endswith((".mlp.gate.weight", ".feed_forward.gate.weight")) else tensor

    return _changed(folder, change)


def _changed(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    changed = {name: change(name, tensor).contiguous() for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _prepared(plain: Path, folder: Path) -> Path:
    prepare(plain, folder, quiet)
    return folder


def _blocks(folder: Path, family: str) -> Path:
    return write_tiny_model(folder / "plain", family, **whole_blocks(family))


def _grouped(folder: Path, family: str, **options: Any) -> Path:
    return write_grouped(folder / "model", _blocks(folder, family), **options)[0]


def _zero_points(folder: Path, family: str, form: Form) -> Path:
    return write_zero_points(folder / "model", _blocks(folder, family), form)[0]


def _fp8(folder: Path, family: str, strategy: str) -> Path:
    return write_fp8(folder / "model", _blocks(folder, family), strategy=strategy)[0]


def _gguf(folder: Path, family: str, kind: Callable[[str], GGMLQuantizationType]) -> Path:
    source = _blocks(folder, family)
    path = write_tiny_gguf(folder / "model.gguf", source, ARCHITECTURES[family], quantised=kind)
    return open_gguf(path, quiet, folder=folder / "opened")


# --- what stands in for a missing setting ---------------------------------------------------------------------------


def _without_settings(family: str, folder: Path) -> Iterator[Outcome]:
    for subject in SUBJECTS:
        here = folder / f"small-for-{subject}"
        plain = with_small_embedding(write_tiny_model(here / "plain", family, **subject.unlike.get(family, {})))
        model = _prepared(plain, here / "prepared") if family in subject.prepared_only else plain
        whole = outcome_of(subject, family, SMALL, model)
        yield whole
        config = json.loads((model / "config.json").read_text())
        for name, changed in _each_left_out(config) if whole.sums is not None else ():
            (model / "config.json").write_text(json.dumps(changed))
            yield outcome_of(subject, family, f"without {name}", model)


def _each_left_out(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in config.items():
        if name in _WITHOUT_EFFECT:
            continue
        yield name, {key: kept for key, kept in config.items() if key != name}
        if isinstance(value, dict) and not any(isinstance(inner, dict) for inner in value.values()):
            for inner in value:
                yield f"{name}.{inner}", config | {name: {key: kept for key, kept in value.items() if key != inner}}


def with_small_embedding(folder: Path) -> Path:
    """``folder``, in which the embedding of the model is made small."""
    ends = ("embed_tokens.weight", "wte.weight")
    return _changed(folder, lambda name, tensor: tensor * _SMALL if name.endswith(ends) else tensor)


def _without_metadata(family: str, folder: Path) -> Iterator[Outcome]:
    source = with_small_embedding(_blocks(folder / "small-gguf", family))
    whole = write_tiny_gguf(folder / "small.gguf", source, ARCHITECTURES[family])
    opened = open_gguf(whole, quiet, folder=folder / "whole")
    yield outcome_of(NATIVE, family, SMALL_GGUF, opened)
    names = [name for name in GGUFReader(whole).fields if name.startswith(f"{ARCHITECTURES[family]}.")]
    for name in names:
        form, path = f"GGUF without {name.partition('.')[2]}", folder / f"without-{name}.gguf"
        # A key of the same length that nothing reads.
        path.write_bytes(whole.read_bytes().replace(name.encode(), b"-" * len(name), 1))
        try:
            opened = open_gguf(path, quiet, folder=folder / f"without-{name}")
        except ModelError as error:
            yield Outcome(family, form, "native", refused=_sentence(error))
        else:
            yield outcome_of(NATIVE, family, form, opened)
            shutil.rmtree(opened)
        path.unlink()


# --- running --------------------------------------------------------------------------------------------------------


def outcome_of(subject: Subject, family: str, form: str, folder: Path) -> Outcome:
    """What becomes of the model in ``folder`` on the runtime that is the ``subject``."""
    exact = {} if is_rounded(form, subject.name) else {"dtype": "float32"}
    try:
        with _kernels("off" if subject is TORCH else ""):
            model = subject.load(folder, **exact)
            try:
                sums = _sums(model)
            finally:
                model.close()
    except ModelError as error:
        return Outcome(family, form, subject.name, refused=_sentence(error))
    except Exception as error:  # of a library, which meets a setting that it did not expect
        return Outcome(family, form, subject.name, refused=f"{type(error).__name__} in a library")
    return Outcome(family, form, subject.name, sums)


def _sums(model: LoadedModel) -> NDArray[np.float64]:
    rows = model.start()
    logits = [rows.extend(PROMPT), *(rows.step([token])[0] for token in DECODED)]
    return np.stack([np.asarray(each, np.float64) @ _WEIGHTS for each in logits if each is not None])


@contextmanager
def _kernels(which: str) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = which
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _sentence(error: ModelError) -> str:
    """The text of ``error`` without places of this machine."""
    return _PLACES.sub("PLACE", " ".join(str(error).split()))[:_LONGEST]
