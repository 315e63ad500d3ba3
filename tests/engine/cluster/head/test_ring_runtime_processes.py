"""Every runtime, mode and exchange, by real engine processes that formed a ring: the answers of one machine."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from engine.ipc.messages import Notice
from engine.ipc.messages.ring import RingMode
from engine.moe.kernels.bindings import choose
from tests.engine.cluster.real_rings import ANSWER, TRUSTED, Machine, RealRing
from tests.support.engine_forks import with_libraries
from tests.support.tiny_gguf import whole_blocks, write_tiny_gguf
from tests.support.tiny_grouped import write_grouped
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

NEAR = 1e-4
"""Weighted sums are added in another order than on one machine."""
MODES: tuple[RingMode, ...] = ("exact", "fast", "central")
SAMPLED: dict[str, tuple[RingMode, ...]] = {
    "native float32": ("central",),
    "native bfloat16": ("fast",),
    "native packed": ("exact",),
    "torch packed": ("exact",),
    "torch float32": ("fast",),
    "mlx float32": ("fast",),
    "mlx 4-bit": ("exact",),
    "native published": ("exact",),
}
"""Modes by runtime and number format. Central mode with torch and with mlx is in the rings of unlike machines."""
KINDS = [
    *SAMPLED.items(),
    *(pytest.param(kind, MODES, marks=pytest.mark.soak, id=f"all-{kind}") for kind in SAMPLED),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {
        "float32": write_tiny_model(folder / "tiny-float32", "qwen3_moe"),
        "bfloat16": write_tiny_model(folder / "tiny-bfloat16", "qwen2_moe", dtype="bfloat16"),
        "packed": write_packed(folder),
        "published": write_published(folder),
    }
    if importlib.util.find_spec("mlx_lm") is not None:
        found["4-bit"] = write_quantised(folder)
    return found


def write_packed(folder: Path) -> Path:
    """A GGUF file in two parts, in a folder of its own, with several formats."""
    source = write_tiny_model(folder / "unpacked", "qwen2_moe", **whole_blocks("qwen2_moe"))
    (folder / "of a person").mkdir()
    return write_tiny_gguf(
        folder / "of a person" / "tiny-packed.gguf",
        source,
        "qwen2moe",
        quantised=lambda name: Kind.Q6_K if "ffn_down" in name and name.startswith("blk.0.") else Kind.Q4_K,
        parts=2,
    )


def write_published(folder: Path) -> Path:
    """gpt-oss in MXFP4 as its authors store it."""
    source = write_tiny_model(folder / "not quantised", "gpt_oss", **whole_blocks("gpt_oss"))
    return write_grouped(folder / "tiny-published", source, form="published")[0]


def write_quantised(folder: Path) -> Path:
    """4-bit weights in groups of 32, as mlx-lm makes and writes them."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    from engine.models.folders.opening import read_config
    from engine.runtimes.mlx.configuration import complete_config, translate_config

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "moe_intermediate_size": 32}
    source = write_tiny_model(folder / "source", "qwen3_moe", **sizes)
    model, _ = load_model(source, model_config=translate_config(complete_config(source, read_config(source))))
    model, config = quantize_model(model, json.loads((source / "config.json").read_text()), 32, 4)
    save_model(folder / "tiny-4-bit", model)
    save_config(config, folder / "tiny-4-bit" / "config.json")
    return folder / "tiny-4-bit"


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRing]:
    """Three machines alike."""
    with RealRing(tmp_path_factory.mktemp("ring"), [Machine()] * 3, with_libraries) as made:
        yield made


def need(runtime: str) -> None:
    if runtime == "native" and not choose("float32").native:
        pytest.skip("the native kernels are not built")
    if runtime == "mlx" and importlib.util.find_spec("mlx_lm") is None:
        pytest.skip("mlx-lm is not installed")


@pytest.mark.parametrize(("kind", "modes"), KINDS)
def test_answers_and_beams_are_those_of_one_machine(
    ring: RealRing, models: dict[str, Path], kind: str, modes: tuple[RingMode, ...]
) -> None:
    """A beam's score is a sum of log-probabilities: the same to the bit only if the logits are."""
    runtime, stored = kind.split()
    need(runtime)
    dtype = "bfloat16" if stored in ("bfloat16", "packed", "published") else "float32"
    model = models[stored]
    ring.alone(model, runtime, dtype)
    alone, beams = ring.answer(), ring.beams()
    assert len(alone) == ANSWER
    for mode in modes:
        formed = ring.form(model, runtime, 2 if mode == "exact" else 1, dtype, mode=mode)
        assert formed.mode == mode
        assert ring.answer() == alone, mode
        found = ring.beams()
        assert [beam.token_ids for beam in found] == [beam.token_ids for beam in beams], mode
        if mode == "fast":
            assert [beam.score for beam in found] == pytest.approx([beam.score for beam in beams], abs=NEAR)
        else:
            assert [beam.score for beam in found] == [beam.score for beam in beams], mode


@pytest.mark.parametrize(
    ("runtime", "exchange"),
    [("native", "tls"), ("native", "socket"), ("native", "envoy"), ("torch", "gloo"), ("mlx", "mlx")],
)
def test_every_exchange_gives_the_same_answer(
    ring: RealRing, models: dict[str, Path], runtime: str, exchange: str
) -> None:
    need(runtime)
    ring.alone(models["float32"], runtime)
    alone = ring.answer(24)
    formed = ring.form(models["float32"], runtime, mode="exact", exchange=exchange, trusted=TRUSTED)
    assert formed.exchange == exchange
    assert formed.encrypted == (exchange in ("tls", "envoy"))
    assert formed.exchange_s is not None
    assert ring.answer(24) == alone


@pytest.mark.soak
def test_a_group_of_mlx_serves_one_ring_after_another(ring: RealRing, models: dict[str, Path]) -> None:
    """A process can have one group in its life; that it was measured, or used before, must not use it up."""
    need("mlx")
    model = models["float32"]
    ring.form(model, "mlx", mode="exact", exchange="auto", trusted=TRUSTED)
    first = ring.answer()
    for _ in range(2):
        assert ring.form(model, "mlx", mode="exact", exchange="mlx", trusted=TRUSTED).exchange == "mlx"
        assert ring.answer() == first
    # Other machines cannot go on with it: the ring is formed all the same, and why is said.
    # A machine that takes long to answer is left out: then it is tried again.
    for _ in range(5):
        since = len(ring.head.events)
        loaded = ring.load(model, "mlx", 2, mode="exact", exchange="mlx", trusted=TRUSTED)
        assert loaded.facts.ring is not None
        if len(loaded.facts.ring.nodes) == 3:
            break
    said = " ".join(event.text for event in ring.head.events[since:] if isinstance(event, Notice))
    assert (loaded.facts.ring.exchange, len(loaded.facts.ring.nodes)) == ("tls", 3), said
    assert "“mlx” could not be made" in said
    assert "one only" in said
    assert "tls is used" in said
    assert ring.answer() == first
