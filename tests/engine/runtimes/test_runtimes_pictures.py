"""A model that is shown pictures equals transformers' own whole model on the same files."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.models.store.gguf_folder import open_gguf
from engine.pictures.picture import Picture
from engine.pictures.shown import ShownPictures
from engine.pictures.sight import Sight
from engine.runtimes.native import inputs as native_inputs
from engine.runtimes.protocol import LoadedModel, Logits, TokenRows
from tests.engine.runtimes.seeing_oracle import TRANSPOSED, Prompt, as_native_runs, see, tokens_of, whole_logits
from tests.engine.runtimes.subjects import MLX, NATIVE, TORCH, Subject
from tests.support.pairwise import pairwise
from tests.support.progress import quiet
from tests.support.tiny_gguf import ARCHITECTURES, write_tiny_gguf
from tests.support.tiny_gguf_tower import write_tiny_tower
from tests.support.tiny_seeing import PLACEHOLDER, TINY_SEEING, random_picture, write_tiny_seeing

LIMIT = 2e-5
"""Largest difference of a logit in float32, of the largest logit: the order of the sums differs."""
FIRST, SECOND = random_picture(40, 24), random_picture(12, 56, seed=1)
PROMPT: Prompt = [5, 17, 101, FIRST, 42, 9, 77, SECOND, 30, 31]
ANSWER = [88, 12, 64, 7]

SUBJECTS = [pytest.param(subject, marks=subject.marks, id=subject.name) for subject in (NATIVE, TORCH, MLX)]
EVERY_RUN = (TINY_SEEING, (NATIVE, TORCH, MLX), (1000, 11, 3))
SAMPLED = pairwise(*EVERY_RUN)
RUNS = [
    pytest.param(
        *row,
        marks=[*row[1].marks, *(() if row in SAMPLED else (pytest.mark.soak,))],
        id=f"{row[0]}-{row[1].name}-{row[2]}",
    )
    for row in product(*EVERY_RUN)
]
"""Models, runtimes, and numbers of tokens that are read at once."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("seeing")
    return {kind: write_tiny_seeing(root / kind, kind) for kind in TINY_SEEING}


def load(subject: Subject, folder: Path, **options: Any) -> LoadedModel:
    folder = as_native_runs(folder) if subject is NATIVE else folder
    model = subject.load(folder, **options)
    see(model, folder, FIRST, SECOND)
    return model


def parts_of(model: LoadedModel, tokens: list[int], size: int) -> list[list[int]]:
    """``tokens`` in parts of ``size`` at least, which cut no picture whose tokens see each other."""
    assert model.pictures is not None
    whole = model.pictures.whole(tokens)
    parts, begin = [], 0
    while begin < len(tokens):
        end = min(begin + size, len(tokens))
        end = next((last for first, last in whole if first < end < last), end)
        parts.append(tokens[begin:end])
        begin = end
    return parts


def read(model: LoadedModel, tokens: list[int], size: int) -> tuple[TokenRows, Logits]:
    rows = model.start()
    logits = None
    for part in parts_of(model, tokens, size):
        logits = rows.extend(part)
    assert logits is not None
    return rows, logits


def assert_near(ours: Logits, theirs: Logits, limit: float = LIMIT) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=limit * float(np.abs(theirs).max()))


@pytest.mark.parametrize(("kind", "subject", "size"), RUNS)
def test_a_prompt_and_steps_are_the_whole_models(
    folders: dict[str, Path], subject: Subject, kind: str, size: int
) -> None:
    model = load(subject, folders[kind])
    tokens = tokens_of(model, PROMPT)
    theirs = whole_logits(folders[kind], [*PROMPT, *ANSWER])
    rows, ours = read(model, tokens, size)
    assert_near(ours, theirs[len(tokens) - 1])
    for index, token in enumerate(ANSWER):
        assert_near(rows.step([token])[0], theirs[len(tokens) + index])
    other = whole_logits(folders[kind], [*PROMPT[:3], random_picture(40, 24, seed=2), *PROMPT[4:]])
    assert np.abs(other[-1] - ours).max() > 100 * LIMIT * np.abs(ours).max(), "the model does not look"
    model.close()


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("kind", TINY_SEEING)
def test_a_gguf_file_and_its_tower_are_the_whole_model(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subject: Subject, kind: str
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    language = write_language_model(tmp_path / "language", folders[kind])
    gemma = kind.startswith("gemma4")
    family = json.loads((language / "config.json").read_text())["model_type"]
    path = write_tiny_gguf(tmp_path / "tiny.gguf", language, "gemma4" if gemma else ARCHITECTURES[family])
    write_tiny_tower(path.with_name("mmproj-F32.gguf"), folders[kind])
    model = load(subject, open_gguf(path, quiet))
    assert model.pictures is not None
    sight = model.pictures.sight
    around: dict[str, tuple[Any, Any]] = {"gemma3": ((PLACEHOLDER,), (151,))}
    around |= dict.fromkeys(("ministral3", "mistral", "mistral4"), ((), (152,)))
    expected = around.get(kind, ((151,), (152,)) if gemma else ((), ()))
    assert (sight.placeholder, sight.before, sight.after) == (PLACEHOLDER, *expected)
    assert sight.together == (kind in ("gemma3", "gemma4", "gemma4_dense", "gemma4_unified"))
    assert sight.together_in_full == (kind == "gemma3")
    tokens = tokens_of(model, PROMPT)
    theirs = whole_logits(folders[kind], [*PROMPT, *ANSWER], sight.most)
    rows, ours = read(model, tokens, 1000)
    assert_near(ours, theirs[len(tokens) - 1])
    for index, token in enumerate(ANSWER):
        assert_near(rows.step([token])[0], theirs[len(tokens) + index])
    model.close()


def write_language_model(folder: Path, whole: Path) -> Path:
    """The language model in the folder ``whole`` as a model of its own."""
    folder.mkdir()
    tensors = load_file(whole / "model.safetensors")
    turned = whole.name in TRANSPOSED
    renamed = {
        name.replace("model.language_model.", "model.").removeprefix("language_model."): (
            tensor.mT.contiguous() if turned and ".experts." in name else tensor
        )
        for name, tensor in tensors.items()
        if name.startswith(("model.language_model.", "language_model.", "lm_head"))
    }
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config["text_config"]))
    return folder


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("kind", TINY_SEEING)
def test_beams_go_on_after_pictures(folders: dict[str, Path], subject: Subject, kind: str) -> None:
    model = load(subject, folders[kind])
    rows, _ = read(model, tokens_of(model, PROMPT), 1000)
    beams = rows.fan_out(3)
    beams.step([11, 12, 13])
    beams.reorder([2, 0, 0])
    found = beams.step([21, 22, 23])
    for ours, (first, second) in zip(found, [(13, 21), (11, 22), (11, 23)], strict=True):
        assert_near(ours, whole_logits(folders[kind], [*PROMPT, first, second])[-1])
    # The row that they came from is as it was.
    assert_near(rows.step([14])[0], whole_logits(folders[kind], [*PROMPT, 14])[-1])
    model.close()


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("kind", [kind for kind in TINY_SEEING if kind.startswith("gemma")])
def test_a_row_is_cut_back_before_a_picture(folders: dict[str, Path], subject: Subject, kind: str) -> None:
    model = load(subject, folders[kind])
    rows, _ = read(model, tokens_of(model, PROMPT), 1000)
    kept: Prompt = PROMPT[:6]
    rows.truncate(len(tokens_of(model, kept)))
    logits = rows.extend(tokens_of(model, [SECOND, 3]))
    assert logits is not None
    assert_near(logits, whole_logits(folders[kind], [*kept, SECOND, 3])[-1])
    model.close()


@pytest.mark.parametrize("kind", TINY_SEEING)
@pytest.mark.parametrize("subject", SUBJECTS[:1])
def test_a_saved_row_goes_on_by_itself(folders: dict[str, Path], subject: Subject, kind: str) -> None:
    model = load(subject, folders[kind])
    rows, _ = read(model, tokens_of(model, PROMPT), 1000)
    saved = rows.checkpoint() or rows.fan_out(1)
    if rows.verified_together:
        verified = rows.fan_out(1).verify(ANSWER)
        np.testing.assert_array_equal(
            verified, [saved.fan_out(1).replay(ANSWER[:end]) for end in range(1, len(ANSWER) + 1)]
        )
    stepped = [rows.step([token])[0] for token in ANSWER]
    logits = saved.replay(ANSWER)
    assert logits is not None
    np.testing.assert_array_equal(logits, stepped[-1])
    again = saved.extend(tokens_of(model, [SECOND, 4]))
    assert again is not None
    assert_near(again, whole_logits(folders[kind], [*PROMPT, *ANSWER, SECOND, 4])[-1])
    model.close()


@pytest.mark.parametrize("kind", TINY_SEEING)
@pytest.mark.parametrize("subject", SUBJECTS[:1])
def test_long_prompts_run_in_pieces(
    folders: dict[str, Path], subject: Subject, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_inputs, "PIECE", 16)
    model = load(subject, folders[kind])
    _, ours = read(model, tokens_of(model, PROMPT), 1000)
    assert_near(ours, whole_logits(folders[kind], PROMPT)[-1])
    model.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("key_values", ["auto", "q8_0", "q4_0"])
@pytest.mark.parametrize("subject", SUBJECTS[:1])
def test_rows_like_embeddings_are_those_tokens(tmp_path: Path, subject: Subject, key_values: str, dtype: str) -> None:
    """Given rows go through the same arithmetic as tokens, to the bit, whatever keys and values are stored in."""
    folder = write_tiny_seeing(tmp_path / "model", "gemma4", dtype, head_dim=32, global_head_dim=32)
    model = subject.load(folder, key_values=key_values)
    hidden = model.facts.hidden
    picture = Picture(4, 12, bytes(4 * 12 * 3))
    model.pictures = ShownPictures(Sight("qwen3_5", 150, 2, 2, most=100), hidden)
    table = load_file(folder / "model.safetensors")["model.language_model.embed_tokens.weight"].float().numpy()
    text = [20, 30, 40]
    scaled = table[text] * np.float32(hidden**0.5)
    tokens = model.pictures.show(picture)
    model.pictures.put(picture.digest, scaled)
    given, plain = model.start(), model.start()
    ours, theirs = given.extend([7, *tokens, 8, 9]), plain.extend([7, *text, 8, 9])
    assert ours is not None and theirs is not None
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(given.step([3]), plain.step([3]))
    model.close()


@pytest.mark.parametrize("kind", ["gemma4", "qwen3_5"])
@pytest.mark.parametrize(("key_values", "limit"), [("q8_0", 0.05), ("q4_0", 0.5)])
@pytest.mark.parametrize("subject", SUBJECTS[:1])
def test_packed_keys_and_values_of_pictures_are_near(
    tmp_path: Path, subject: Subject, kind: str, key_values: str, limit: float
) -> None:
    wide = {"head_dim": 32, "global_head_dim": 32} if kind == "gemma4" else {"head_dim": 32}
    folder = write_tiny_seeing(tmp_path / "model", kind, **wide)
    model = load(subject, folder, dtype="float32", key_values=key_values)
    rows, ours = read(model, tokens_of(model, PROMPT), 1000)
    theirs = whole_logits(folder, [*PROMPT, 88])
    assert_near(ours, theirs[-2], limit)
    assert_near(rows.step([88])[0], theirs[-1], limit)
    model.close()


@pytest.mark.parametrize("subject", SUBJECTS[:1])
def test_what_no_window_reaches_is_given_back(folders: dict[str, Path], subject: Subject) -> None:
    model = load(subject, folders["gemma4"])
    prompt: Prompt = [*PROMPT, *range(3, 140)]
    kept, _ = read(model, tokens_of(model, prompt), 1000)
    rows, _ = read(model, tokens_of(model, prompt), 1000)
    rows.forget_unseen(rows.length)
    assert rows.forgotten_bytes > 0
    np.testing.assert_array_equal(rows.step([88]), kept.step([88]))
    assert_near(rows.step([89])[0], whole_logits(folders["gemma4"], [*prompt, 88, 89])[-1])
    model.close()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_tokens_of_pictures_are_taken_in_prompts_only(folders: dict[str, Path], subject: Subject) -> None:
    model = load(subject, folders["gemma4"])
    picture = tokens_of(model, [FIRST])
    rows = model.start()
    rows.extend([5])
    with pytest.raises(ModelError, match="outside the model's vocabulary"):
        rows.step([picture[0]])
    model.pictures = None
    with pytest.raises(ModelError, match="outside the model's vocabulary"):
        rows.extend(picture)
    model.close()
