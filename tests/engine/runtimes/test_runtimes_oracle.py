"""Every family on every runtime equals transformers' own model on the same files, which is run once for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.architectures.families import FAMILIES
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import native_copies
from engine.models.formats.model_files import Experts, ExpertWeights
from engine.moe.kernels import bindings
from engine.runtimes.protocol import LoadedModel, Logits
from engine.runtimes.torch import runtime as torch_runtime
from engine.runtimes.torch.model import TorchModel
from tests.engine.runtimes.native_oracle import FAMILIES as NATIVE_FAMILIES
from tests.engine.runtimes.native_oracle import needs_kernels
from tests.engine.runtimes.subjects import MLX, NATIVE, TORCH, StoredModel, Subject, case, prompt_of
from tests.engine.runtimes.torch_oracle import chunks_of, library_model, library_run, our_run, typical, worst
from tests.support.tiny_families import TINY_FAMILIES, TINY_MOE_FAMILIES, family_of
from tests.support.tiny_models import write_tiny_model

Prepared = Callable[[Path], Path]

LIMIT = {"native": 2e-5, "torch": 1e-4, "mlx": 1e-3}
"""Largest difference of a logit in float32, of the largest logit of its step: the order of the sums differs."""
BFLOAT16_LIMIT = 2e-2
BFLOAT16_TYPICAL = 3e-2
"""Largest usual error, some of whose tokens go to other experts."""

STORED_TRANSPOSED = ("gpt_oss", "llama4_text", "dbrx")
"""Families whose checkpoints hold matrices that the native kernels cannot read where they lie."""

PROMPT = prompt_of(40)


def of_families(*runs: Any) -> list[Any]:
    """``runs`` (:class:`ParameterSet` whose first value is a subject), each with every family that the subject runs."""
    return [
        pytest.param(family, *run.values, marks=run.marks, id=f"{family}-{run.id}")
        for family in TINY_FAMILIES
        for run in runs
        if family in run.values[0].families and not ("plain" in run.values and family in run.values[0].prepared_only)
    ]


RUNS = of_families(
    case(NATIVE, "", "plain", 1),
    case(NATIVE, "", "prepared", 3),
    pytest.param(TORCH, "native", "plain", 3, marks=needs_kernels, id="torch-native-plain-3"),
    pytest.param(TORCH, "native", "prepared", 1, marks=needs_kernels, id="torch-native-prepared-1"),
    case(TORCH, "torch", "plain", 1),
    case(TORCH, "torch", "prepared", 3),
    case(MLX, "", "plain", 3),
    case(MLX, "", "prepared", 1),
)


def left_to_soak(family: str, subject: Subject, experts_by: str, form: str, chunks: int) -> bool:
    """A dense model cannot be prepared; a family meets mlx with one of the forms, and torch with one of the forms and
    one of the kernels, by turns. In bfloat16 it meets both kernels."""
    if form == "prepared" and family not in TINY_MOE_FAMILIES:
        return True
    if subject is MLX and family in TINY_MOE_FAMILIES:
        return (form == "plain") == (TINY_MOE_FAMILIES.index(family) % 2 == 1)
    if subject is not TORCH:
        return False
    if family not in TINY_MOE_FAMILIES:
        return experts_by == "native"
    turns = (("native", "plain"), ("torch", "prepared"), ("torch", "plain"), ("native", "prepared"))
    return (experts_by, form) != turns[TINY_MOE_FAMILIES.index(family) % len(turns)]


RUNS = [
    pytest.param(*run.values, marks=(*run.marks, pytest.mark.soak), id=run.id) if left_to_soak(*run.values) else run
    for run in RUNS
]
"""In `make test` native meets both forms of every family's files; the families together show torch each form with each
of the kernels."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``kernels("torch")``: torch runs the experts from now on; otherwise the native kernels."""
    return lambda which: monkeypatch.setenv(bindings.VARIABLE, "off" if which == "torch" else "")


@pytest.mark.parametrize(("family", "subject", "experts_by", "form", "chunks"), RUNS)
def test_float32_equals_the_library(
    family: str,
    subject: Subject,
    experts_by: str,
    form: str,
    chunks: int,
    stored_model: StoredModel,
    prepared: Prepared,
    kernels: Callable[[str], None],
) -> None:
    plain = stored_model(subject, family, as_saved=True)
    answer, theirs = library_run(plain, PROMPT, chunks=1)
    assert len(set(answer)) > 1, "the tiny model repeats itself, so it shows nothing"
    kernels(experts_by)
    # A dense model has no experts that could be prepared.
    folder = prepared(plain) if form == "prepared" and family in TINY_MOE_FAMILIES else plain
    model = subject.load(folder)
    ours = our_run(model, PROMPT, chunks, answer)
    assert worst(ours, theirs) < LIMIT[subject.name]
    assert [int(logits.argmax()) for logits in ours] == answer
    check_facts(model, folder, family)
    if model.facts.experts and subject is TORCH:
        in_torch = experts_by == "torch" or (form == "plain" and family in STORED_TRANSPOSED)
        assert model.facts.executor.startswith("local (torch, cpu" if in_torch else "local (native ")
    model.close()


def check_facts(model: LoadedModel, folder: Path, family: str) -> None:
    facts, files = model.facts, open_model(folder)
    copied = native_copies(files.trunk()) if facts.runtime == "native" else 0
    assert (facts.family, facts.dtype, facts.trunk_bytes) == (family_of(family), "float32", files.trunk_bytes + copied)
    # What is no parameter in transformers (buffers of some routers) lies in the files, too.
    tables = sum(tensor.nbytes for _, tensor in files.tables())
    assert 0.99 < facts.parameters * 4 / (facts.trunk_bytes + tables - copied + facts.expert_bytes) <= 1.0
    if files.experts is None:
        assert (facts.experts, facts.experts_per_token, facts.moe_layers, facts.expert_bytes) == (0, 0, [], 0)
        assert facts.executor == "none (dense)" and model.popularity is None
        endings = ("layer_scalar", ".beta", ".eps")
        buffers = sum(tensor.nbytes for name, tensor in files.trunk() if name.endswith(endings))
        assert facts.parameters * 4 == facts.trunk_bytes - (buffers if facts.runtime == "torch" else 0)
    else:
        assert (facts.experts, facts.moe_layers) == (files.experts.count, list(files.experts.layers))
        assert facts.expert_bytes == files.experts.nbytes and facts.experts_per_token in (1, 2, 3)
    if isinstance(model, TorchModel) and FAMILIES[facts.family].decoder.compressed is None:
        rows = model.start()
        rows.extend([3, 4, 5])
        assert facts.key_value_bytes_per_token == sum(
            buffer.shape[1] * buffer.shape[3] * buffer.itemsize
            for layer in rows._cache.layers
            for buffer in layer.buffers().values()
        )


# --- rotary settings ------------------------------------------------------------------------------------------------


ROTARY: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "rope_theta": 2e4,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "olmo3": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1}},
    "gemma4_dense": {},
}
"""Rotary settings at the top level, as files of transformers 4 have them, or none."""


@pytest.mark.parametrize("subject", [case(NATIVE), case(MLX)])
@pytest.mark.parametrize("family", ROTARY)
def test_layers_of_both_kinds_are_rotated_as_the_library_does_by_other_files(
    family: str, subject: Subject, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / family, family)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | ROTARY[family]
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "rope_parameters"}))
    answer, theirs = library_run(folder, PROMPT, chunks=1)
    assert worst(our_run(subject.load(folder), PROMPT, 3, answer), theirs) < LIMIT[subject.name]


# --- bfloat16 -------------------------------------------------------------------------------------------------------


@pytest.fixture
def halved(family: str, tiny_model: Callable[..., Path]) -> Path:
    """The tiny model of ``family`` in bfloat16, over several files."""
    return tiny_model(family, dtype="bfloat16", shards=True)


def turn_about(
    names: str, ways: Sequence[tuple[Any, ...]], families: Sequence[str] = TINY_FAMILIES
) -> pytest.MarkDecorator:
    """Each of ``families`` in one of ``ways`` by turns, and every family in all of them in ``make test-soak``."""
    rows = [
        pytest.param(family, *way, marks=() if family in families and number % len(ways) == place else pytest.mark.soak)
        for number, family in enumerate(TINY_FAMILIES)
        for place, way in enumerate(ways)
    ]
    return pytest.mark.parametrize(("family", *names.split()), rows)


@pytest.mark.sampled
@turn_about("form chunks", [("prepared", 1), ("plain", 3)])
def test_bfloat16_equals_the_library(
    family: str, form: str, chunks: int, halved: Path, prepared: Prepared, kernels: Callable[[str], None]
) -> None:
    kernels("torch")
    # The reference prefills in the same chunks: in bfloat16 another cut rounds differently, in the library too.
    model = TORCH.load(prepared(halved) if form == "prepared" and family in TINY_MOE_FAMILIES else halved)
    answer, theirs = library_run(halved, PROMPT, chunks)
    ours = our_run(model, PROMPT, chunks, answer)
    assert [int(logits.argmax()) for logits in ours] == answer
    assert worst(ours, theirs) < BFLOAT16_LIMIT


@pytest.mark.sampled
@needs_kernels
@turn_about("chunks", [(1,), (3,)], TINY_MOE_FAMILIES)
def test_bfloat16_on_the_native_kernels_is_as_near_the_truth_as_the_library(
    family: str, chunks: int, halved: Path, prepared: Prepared
) -> None:
    """The kernels round less often than torch in bfloat16, and elsewhere; the truth is the same weights in float32.

    Where that makes a router choose another expert of two that are as good, a prompt shows nothing; there are others.
    The chunks are those of the test before, so that the library has been run.
    """
    form = prepared(halved) if family in TINY_MOE_FAMILIES else halved
    model, exact = TORCH.load(form), TORCH.load(form, dtype="float32")
    assert model.facts.experts == 0 or model.facts.executor.startswith("local (native ")

    def near(seed: int) -> bool:
        tokens = prompt_of(40, seed)
        answer, theirs = library_run(halved, tokens, chunks)
        truth, ours = our_run(exact, tokens, chunks, answer), our_run(model, tokens, chunks, answer)
        allowed = 1.25 * typical(theirs, truth)
        return typical(ours, truth) <= allowed and typical(ours, theirs) <= 2 * allowed

    assert any(near(seed) for seed in range(4))


def errors(ours: list[Logits], true: list[Logits]) -> list[float]:
    return [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, true, strict=True)]


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_bfloat16_of_the_native_trunk_is_nearer_to_float32_than_the_library_in_bfloat16(
    family: str, halved: Path, prepared: Prepared
) -> None:
    # Where two experts are about equally probable, a rounding anywhere sends a token to the other one, in the library
    # as here, and processors round differently: the median step of one of some prompts counts. What is stored as
    # bfloat16 and computed in float32 is the truth for both.
    bank = prepared(halved) if family in TINY_MOE_FAMILIES else halved
    models = [(NATIVE.load(bank if family in NATIVE.prepared_only else halved), 1), (NATIVE.load(bank), 3)]
    assert {model.facts.dtype for model, _ in models} == {"bfloat16"}

    def near(seed: int) -> bool:
        tokens = prompt_of(len(PROMPT), seed) if seed else PROMPT
        answer, theirs = library_run(halved, tokens, chunks=1)
        with torch.inference_mode():
            out = library_model(halved, "float32")(torch.tensor([tokens + answer]))
        true = list(out.logits[0, len(tokens) - 1 : -1].numpy())
        allowed = min(BFLOAT16_TYPICAL, float(np.median(errors(theirs, true))))
        return all(
            np.median(errors(our_run(model, tokens, chunks, answer), true)) < allowed for model, chunks in models
        )

    assert any(near(seed) for seed in range(4))


def one_a_family(rows: Sequence[Any]) -> list[Any]:
    """Of ``rows`` of :func:`of_families` one of each family, of the first one its first; the others for ``soak``."""
    found: list[Any] = []
    for number, (_, each) in enumerate(groupby(rows, key=lambda row: row.values[0])):
        same = list(each)
        for place, row in enumerate(same):
            marks = row.marks if place == number % len(same) else (*row.marks, pytest.mark.soak)
            found.append(pytest.param(*row.values, marks=marks, id=row.id))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "subject", "experts_by"),
    one_a_family(
        of_families(
            case(NATIVE, ""),
            pytest.param(TORCH, "native", marks=needs_kernels, id="torch-native"),
            case(TORCH, "torch"),
        )
    ),
)
def test_bfloat16_weights_in_float32(
    family: str, subject: Subject, experts_by: str, halved: Path, prepared: Prepared, kernels: Callable[[str], None]
) -> None:
    kernels(experts_by)
    model = subject.load(prepared(halved) if family in subject.prepared_only else halved, dtype="float32")
    assert model.facts.dtype == "float32"
    converted = any("converted" in notice for notice in model.facts.notices)
    assert converted == model.facts.executor.startswith("local (torch")
    answer, theirs = library_run(halved, PROMPT[:20], chunks=1, dtype="float32")
    assert worst(our_run(model, PROMPT[:20], 1, answer), theirs) < LIMIT[subject.name]


# --- the oracle itself ----------------------------------------------------------------------------------------------


class _Swapped:
    """Experts 0 and 1 of every layer change places."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        return self._experts.expert(layer, 1 - expert if expert < 2 else expert)


class _Files:
    def __init__(self, folder: Path, *given: Any) -> None:
        self._files = open_model(folder, *given)
        assert self._files.experts is not None
        self.experts = _Swapped(self._files.experts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


@pytest.mark.sampled
@pytest.mark.parametrize("family", TINY_MOE_FAMILIES)
def test_mixed_up_experts_would_be_noticed(
    family: str, stored_model: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stored_model(TORCH, family)
    monkeypatch.setattr(torch_runtime, "open_model", _Files)
    wrong = TORCH.load(folder)
    answer, theirs = library_run(folder, PROMPT, chunks=1)
    assert worst(our_run(wrong, PROMPT, 1, answer), theirs) > 10 * BFLOAT16_LIMIT


def test_chunks_cover_the_prompt() -> None:
    assert chunks_of([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
