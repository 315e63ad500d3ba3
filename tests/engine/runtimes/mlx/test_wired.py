"""mlx's weights: all of them are touched between questions, and the wired limit is set once and restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.progress import quiet

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from engine.errors import ModelError  # noqa: E402
from engine.ipc.messages import Load  # noqa: E402
from engine.models.folders.weight_layout import layout_of  # noqa: E402
from engine.moe.expert_parallel import RankContext  # noqa: E402
from engine.planning.residency import Wiring  # noqa: E402
from engine.residency.resident_model import ResidentModel  # noqa: E402
from engine.runtimes.mlx import wired  # noqa: E402
from engine.runtimes.mlx.loading import load_experts  # noqa: E402
from engine.runtimes.mlx.runtime import MlxRuntime  # noqa: E402
from engine.runtimes.mlx.wired import WiredLimit, said_of  # noqa: E402
from engine.runtimes.protocol import LoadedModel  # noqa: E402
from tests.engine.cluster.ring_places import placed  # noqa: E402
from tests.engine.runtimes.mlx_oracle import write_comparable, write_quantised  # noqa: E402

PATIENCE_S = 120.0


def loaded(folder: Path, **options: Any) -> LoadedModel:
    return MlxRuntime().load(folder, Load(id=1, model=str(folder), **options), quiet)


@pytest.mark.parametrize("write", [write_comparable, write_quantised])
def test_every_weight_is_touched(tmp_path: Path, write: Callable[..., Path]):
    folder = write(tmp_path / "model", "qwen3_moe")
    model = loaded(folder)
    assert model.kept_weights() is not None
    weights = model.kept_weights()
    on_gpu = mx.default_device() == mx.gpu
    assert weights.own_memory == on_gpu and weights.resident(0) != on_gpu
    assert sum(weights.sizes) == model.facts.trunk_bytes + model.facts.expert_bytes
    news: list[tuple[int, int]] = []
    ready = ResidentModel(
        model, folder, Load(id=1, model="m"), on_progress=lambda done, total: news.append((done, total))
    )
    assert ready.warmer is not None and ready.warmer.wait_until_warm(PATIENCE_S)
    with ready.answering():
        before = ready.warmer.touched
        rows = model.start()
        rows.extend([3, 4, 5])
        assert ready.warmer.touched == before
    ready.close()
    assert ready.warmer.problem == ""
    assert news[-1] == (sum(weights.sizes), sum(weights.sizes))
    model.close()


class Limits:
    """What mlx would be told."""

    def __init__(self, before: int = 7) -> None:
        self.now = before
        self.told: list[int] = []

    def __call__(self, nbytes: int) -> int:
        before, self.now = self.now, nbytes
        self.told.append(nbytes)
        return before


def test_the_limit_is_restored():
    limits = Limits()
    limit = WiredLimit(limits)
    limit.restore()
    assert limits.told == [] and not limit.is_set
    limit.set(100)
    limit.set(200)
    assert limit.is_set
    limit.restore()
    limit.restore()
    assert limits.told == [100, 200, 7]


@pytest.fixture
def a_mac(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """32 GB of memory, of which the GPU is to use 24."""
    limits = Limits()
    monkeypatch.setattr(wired, "LIMIT", WiredLimit(limits))
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    facts = {"memory_size": 32 * 10**9, "max_recommended_working_set_size": 24 * 10**9}
    monkeypatch.setattr(mx, "device_info", lambda: facts)
    return limits


def test_the_share_and_its_keys_and_values_are_wired(a_mac: Limits):
    assert wired.wire(10 * 10**9, 2 * 10**9) == (True, "")
    assert a_mac.now == 12 * 10**9


def test_an_old_macos_keeps_nothing_wired(a_mac: Limits, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wired.platform, "mac_ver", lambda: ("14.7.1", ("", "", ""), "arm64"))
    kept, said = wired.wire(10 * 10**9, 0)
    assert not kept and said.startswith("macOS 14 keeps no memory wired") and a_mac.told == []
    assert wired.wire(10 * 10**9, 0) == (False, ""), "said once"
    monkeypatch.setattr(wired.platform, "mac_ver", lambda: ("15.0", ("", "", ""), "arm64"))
    assert wired.wire(10 * 10**9, 0) == (True, "")


def test_what_is_wired_is_let_go_and_taken_up_again():
    limits = Limits()
    limit = WiredLimit(limits)
    limit.hold(False)
    assert limits.told == []
    limit.set(100)
    limit.hold(False)
    limit.hold(True)
    limit.hold(False)
    limit.restore()
    assert limits.told == [100, 7, 100, 7, 7]


def test_buffers_that_nothing_uses_are_not_wired(monkeypatch: pytest.MonkeyPatch):
    limits = Limits()
    limit = WiredLimit(limits)
    monkeypatch.setattr(mx, "clear_cache", lambda: limits.told.append(-1))
    limit.set(100)
    limit.hold(False)
    limit.hold(True)
    assert limits.told == [-1, 100, 7, -1, 100]


def test_the_usual_context_is_wired_and_not_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wanted: list[int] = []
    monkeypatch.setattr(wired, "wire", lambda share, key_values: (wanted.append(key_values), (True, ""))[1])
    folder = write_comparable(tmp_path / "model", "mixtral", max_position_embeddings=131072)
    model = loaded(folder)
    assert model.facts.context_limit == 131072
    assert wanted == [4096 * model.facts.key_value_bytes_per_token]
    model.close()


@pytest.mark.parametrize("in_ring", [False, True])
def test_only_a_node_of_a_ring_is_kept_ready_for_ever(tmp_path: Path, in_ring: bool):
    folder = write_comparable(tmp_path / "model", "mixtral")
    model = loaded(folder)
    ready = ResidentModel(model, folder, Load(id=1, model="m"), held={} if in_ring else None)
    assert ready.warmer is not None
    assert (ready.warmer._lets_go is None) == in_ring
    ready.close()
    model.close()


def test_what_is_not_wired_is_said(a_mac: Limits):
    all_of_it, said = wired.wire(23 * 10**9, 4 * 10**9)
    assert (all_of_it, a_mac.now) == (True, 24 * 10**9)
    assert said.startswith("24.0 GB are kept wired, 3.0 GB of keys and values are not")
    all_of_it, said = wired.wire(30 * 10**9, 0)
    assert not all_of_it and "6.0 GB of the weights are not" in said


def test_a_refused_limit_is_said(a_mac: Limits, monkeypatch: pytest.MonkeyPatch):
    def refuse(nbytes: int) -> int:
        raise ValueError("too large")

    monkeypatch.setattr(wired, "LIMIT", WiredLimit(refuse))
    assert wired.wire(10**9, 0) == (
        False,
        "No memory is kept wired for the weights (too large): the first token after a pause may be slow.",
    )


def test_loading_wires_and_closing_restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limits = Limits()
    limit = WiredLimit(limits)

    def wire(share: int, key_values: int) -> tuple[bool, str]:
        limit.set(share + key_values)
        return True, "a line"

    monkeypatch.setattr(wired, "LIMIT", limit)
    monkeypatch.setattr(wired, "wire", wire)
    folder = write_comparable(tmp_path / "model", "mixtral")
    model = loaded(folder, context_limit=100)
    facts = model.facts
    assert limits.now == facts.trunk_bytes + facts.expert_bytes + 100 * facts.key_value_bytes_per_token
    assert facts.notices[-1] == "a line"
    model.close()
    model.close()
    assert limits.told[1:] == [7]
    assert loaded(folder, keep_resident=False).facts.notices[-1:] != ["a line"]
    assert len(limits.told) == 2


def test_experts_without_a_trunk_are_wired_and_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limits = Limits()
    limit = WiredLimit(limits)

    def wire(share: int, key_values: int) -> tuple[bool, str]:
        limit.set(share + key_values)
        return True, "a line"

    monkeypatch.setattr(wired, "LIMIT", limit)
    monkeypatch.setattr(wired, "wire", wire)
    folder = write_comparable(tmp_path / "model", "mixtral")
    layout = layout_of(folder)
    context = RankContext("epoch", 1, placed(layout.layers, layout.count, 2), "central")
    experts = load_experts(folder, Load(id=1, model="m"), quiet, context)
    held = sum(len(context.placement.held(1, layer)) for layer in layout.layers)
    assert limits.now == held * layout.expert_bytes
    assert experts.weights_are_wired and experts.notices[-1] == "a line"
    assert experts.kept_weights() is not None
    news: list[tuple[int, int]] = []
    ready = ResidentModel(
        experts, folder, Load(id=1, model="m"), on_progress=lambda done, total: news.append((done, total)), trunk=False
    )
    assert ready.warmer is not None and ready.warmer.wait_until_warm(PATIENCE_S)
    assert news[-1] == (limits.now, limits.now)
    ready.close()
    experts.close()
    experts.close()
    assert limits.told[1:] == [7]
    left = load_experts(folder, Load(id=1, model="m", keep_resident=False), quiet, context)
    assert len(limits.told) == 2 and "a line" not in left.notices
    left.close()


def test_nothing_is_wired_without_a_gpu():
    assert wired.wire(10**9, 10**9) == (False, "")
    assert said_of(Wiring(5, 0), 5) == ""


def test_a_closed_model_has_no_weights(tmp_path: Path):
    model = loaded(write_comparable(tmp_path / "model", "mixtral"))
    model.close()
    with pytest.raises(ModelError):
        model.start().extend([1])
