"""Keys and values in 8 and 4 bits: less memory, each number within half a step, and the same conversations."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.ipc.messages import Load
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of
from engine.moe.kernels.bindings import available
from engine.runtimes.native.bindings import KEY_BLOCK
from engine.runtimes.native.cache import Page
from engine.session.loading import load_session
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import assert_close, fresh, prompt_of

pytestmark = needs_kernels

WIDE = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
GROUP = 32
BITS = {"Q8_0": 8, "Q4_0": 4}
LARGEST_CODE = {"Q8_0": 127, "Q4_0": 8}
each_format = pytest.mark.parametrize("format_", list(BITS))


CHOSEN = {
    "head_dim": 64,
    "indexer_budget": 160,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 32}


@pytest.fixture
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3_moe", **WIDE)


def numbers(page: Page, format_: str, of: str) -> NDArray[np.float32]:
    """Keys or values of a page's row 0, [layers, heads, positions, width]."""
    words, width = page.arrays[("keys", "values").index(of)][0], page.shape.alike[0].width
    layers, heads, blocks = words.shape[:3]
    if format_ == "F32":
        floats = words.view(np.float32)
        if of == "values":
            return floats.reshape(layers, heads, blocks * KEY_BLOCK, width)
        found = floats.reshape(layers, heads, blocks, width, KEY_BLOCK)
        return np.moveaxis(found, 3, 4).reshape(layers, heads, blocks * KEY_BLOCK, width)
    codes = words[..., : KEY_BLOCK * width * BITS[format_] // 8].view(np.int8)
    if format_ == "Q4_0":
        codes = np.stack([codes << 4 >> 4, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    data = codes.astype(np.float32)
    if of == "keys":
        data = np.moveaxis(data.reshape(layers, heads, blocks, width // 2, KEY_BLOCK, 2), 4, 3)
    else:
        data = np.moveaxis(data.reshape(layers, heads, blocks, KEY_BLOCK // 2, width, 2), 5, 4)
    data = data.reshape(layers, heads, blocks * KEY_BLOCK, width)
    data *= np.repeat(scales(page, format_, of), GROUP, axis=3)
    return data @ hadamard(width) if format_ == "Q4_0" else data


def hadamard(width: int) -> NDArray[np.float32]:
    """Sylvester's matrices along the diagonal, as large as ``width`` allows, of length 1."""
    size, matrix = width & -width, np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(width // size, dtype=np.float32), matrix / np.float32(size**0.5))


def scales(page: Page, format_: str, of: str) -> NDArray[np.float32]:
    """[layers, heads, positions, width / 32]"""
    words, width = page.arrays[("keys", "values").index(of)][0], page.shape.alike[0].width
    layers, heads, blocks = words.shape[:3]
    bits = (
        np.ascontiguousarray(words[..., KEY_BLOCK * width * BITS[format_] // 8 :]).view(np.uint16).astype(np.uint32)
        << 16
    )
    found = bits.view(np.float32).reshape(layers, heads, blocks, width // GROUP, KEY_BLOCK)
    return np.moveaxis(found, 3, 4).reshape(layers, heads, blocks * KEY_BLOCK, width // GROUP)


@each_format
@pytest.mark.parametrize("width", [64, 96, 512])
@pytest.mark.parametrize("instructions", available())
def test_what_is_kept_is_what_was_computed_to_half_a_step(
    tiny_model: Callable[..., Path], instructions: str, width: int, format_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("qwen3_moe", **(WIDE | {"head_dim": width}))
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    tokens = prompt_of(75)
    exact, packed = (
        load_native(folder, dtype="float32"),
        load_native(folder, dtype="float32", key_values=format_.lower()),
    )
    rows = exact.start(), packed.start()
    for each in rows:
        each.extend(tokens[:70])
        for token in tokens[70:]:
            each.step([token])
    pages = [each._cache._segments[0].page for each in rows]
    for of in ("keys", "values"):
        # Only the first layer's input is the same in both: later ones saw rounded keys.
        wanted, found = numbers(pages[0], "F32", of)[0, :, :75], numbers(pages[1], format_, of)[0, :, :75]
        if format_ == "Q4_0":  # what was turned before it was rounded
            wanted, found = wanted @ hadamard(width), found @ hadamard(width)
        step = np.abs(scales(pages[1], format_, of)[0, :, :75])
        # 4 bits have no 8: of two that are equally large, one is cut off by a step.
        most = np.repeat(step, GROUP, axis=2) * (0.5001 if format_ == "Q8_0" else 1.0001)
        assert (np.abs(found - wanted) <= most + 1e-6).all()
        largest = np.abs(wanted).reshape(*wanted.shape[:2], -1, GROUP).max(axis=3)
        np.testing.assert_array_less(step, largest / LARGEST_CODE[format_] * 1.008 + 1e-6)
        assert np.abs(found - wanted).mean() < 0.3 * step.mean()


@pytest.mark.parametrize(
    ("family", "options", "limit"),
    [
        ("qwen3_moe", WIDE, 0.03),
        ("qwen3_moe", WIDE | {"head_dim": 96}, 0.03),
        ("qwen3_moe", WIDE | {"head_dim": 512}, 0.03),
        ("deepseek_v2", LATENT, 0.03),
        # Its scores are not divided by the root of the width, so errors of keys weigh more.
        ("gemma4_text", {"head_dim": 32, "global_head_dim": 64}, 0.1),
        ("mimo_v2_flash", {"head_dim": 96, "v_head_dim": 64}, 0.03),
        # Rounded keys of blocks choose other ones where two suit nearly alike.
        ("qwen4_exp_text", CHOSEN, 0.1),
    ],
    ids=["heads", "heads of 96", "heads of 512", "latents", "two kinds of heads", "narrower values", "chosen blocks"],
)
@each_format
@pytest.mark.parametrize("instructions", available())
def test_answers_differ_slightly(
    tiny_model: Callable[..., Path],
    instructions: str,
    family: str,
    options: dict[str, Any],
    limit: float,
    format_: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_model(family, **options)
    limit *= 127 / LARGEST_CODE[format_]
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    exact, packed = (
        load_native(folder, dtype="float32"),
        load_native(folder, dtype="float32", key_values=format_.lower()),
    )
    tokens = prompt_of(300)
    expected = fresh(exact, tokens)
    found = fresh(packed, tokens)
    assert_close(found, expected, limit)
    assert np.abs(found - expected).max() > 0
    halves = packed.start()
    halves.extend(tokens[:211], want_logits=False)
    assert_close(halves.extend(tokens[211:]), found, limit / 3)


@each_format
def test_rows_branch_and_trade_places(folder: Path, format_: str) -> None:
    model = load_native(folder, key_values=format_.lower())
    choose, tokens = random.Random(1), prompt_of(150)
    single = model.start()
    single.extend(tokens)
    beams = single.fan_out(3)
    histories: list[list[int]] = [[], [], []]
    for _ in range(5):
        chosen = [choose.randrange(3, 160) for _ in range(3)]
        logits = beams.step(chosen)
        histories = [[*history, token] for history, token in zip(histories, chosen, strict=True)]
        for row in range(3):
            assert_close(logits[row], fresh(model, tokens + histories[row]), 2.5 / LARGEST_CODE[format_])
        parents = [choose.randrange(3) for _ in range(3)]
        beams.reorder(parents)
        histories = [histories[parent] for parent in parents]


@each_format
def test_what_it_takes_is_known_to_the_plan(tiny_model: Callable[..., Path], format_: str) -> None:
    folder = tiny_model("qwen3_moe", dtype="bfloat16", **WIDE)
    plain, packed = load_native(folder), load_native(folder, key_values=format_.lower())
    bytes_of = [model.facts.key_value_bytes_per_token for model in (plain, packed)]
    # A group of 32 numbers has a scale of two bytes.
    assert bytes_of[1] * 64 == bytes_of[0] * (4 * BITS[format_] + 2)
    caches = []
    for model in (plain, packed):
        rows = model.start()
        rows.extend(prompt_of(128))
        caches.append(rows._cache.nbytes)
    assert caches == [128 * each for each in bytes_of]
    sizes = sizes_of(open_model(folder), "bfloat16")
    assert sizes.for_runtime("native", key_values=format_.lower()).key_value_bytes_per_token == bytes_of[1]
    assert sizes.for_runtime("torch", key_values=format_.lower()).key_value_bytes_per_token == bytes_of[0]


def test_heads_that_do_not_fit_are_said(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("mixtral", head_dim=16)
    model = load_native(folder, key_values="q8_0")
    assert any("heads of 16 numbers" in notice for notice in model.facts.notices)
    plain = load_native(folder)
    assert model.facts.key_value_bytes_per_token == plain.facts.key_value_bytes_per_token
    assert np.array_equal(fresh(model, prompt_of(20)), fresh(plain, prompt_of(20)))
    sizes = sizes_of(open_model(folder))
    assert sizes.for_runtime("native", key_values="q8_0") == sizes.for_runtime("native")


def test_torch_says_that_it_cannot(folder: Path) -> None:
    request = Load(id=1, model=str(folder), runtime="torch", key_values="q8_0")
    session = load_session(request, lambda stage, done, total, unit: None)
    assert any("q8_0" in notice and "native" in notice for notice in session.facts.notices)
    session.close()


@each_format
def test_neighbours_that_share_bytes_do_not_disturb_each_other(folder: Path, format_: str) -> None:
    """Prompts begin and end at odd positions, after others that were cut off; threads take any part of them."""
    tokens, kept = prompt_of(90), []
    for threads in (1, 2, 3):
        model = load_native(folder, key_values=format_.lower(), cpu_threads=threads)
        for wrong in (0, 8):
            rows = model.start()
            for first, last in ((0, 33), (33, 47), (47, 90)):
                rows.extend(tokens[first:last])
                for token in prompt_of(wrong, seed=first):
                    rows.step([token])
                rows.truncate(last)
            contents = rows.contents()
            assert contents is not None
            kept.append(b"".join(bytes(array.read()) for array in contents))
    assert len(kept) == 6 and len(set(kept)) == 1
