"""Popularity on the disk: learned, faded, merged, kept in one piece, and gone with the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.models.folders.opening import open_model
from engine.models.folders.prepare import prepare
from engine.models.store import local_models
from engine.models.store.local_models import profile_key
from engine.moe.popularity import (
    CALIBRATION_TOKENS,
    HALF_LIFE_TOKENS,
    PROFILE_VERSION,
    SAVE_INTERVAL_S,
    Popularity,
    PopularityWriter,
    Profile,
    ProfileModel,
    combined,
    faded,
    load_profile,
    model_of,
    save_profile,
    seed_counts,
    seed_order,
)
from engine.system.locations import profile_paths
from tests.support.clocks import Clock
from tests.support.opened_experts import experts_of

pytestmark = pytest.mark.usefixtures("home")


MODEL = ProfileModel(layers=(1, 3), experts=3, expert_bytes=300)


def counted(popularity: Popularity, routes: dict[tuple[int, int], int]) -> Popularity:
    for (layer, expert), number in routes.items():
        popularity.add(layer, expert, number)
    return popularity


def keeper(path: Path, popularity: Popularity, clock: Clock, said: list[str]) -> PopularityWriter:
    return PopularityWriter(path, MODEL, popularity, 1, said.append, clock)


def test_what_was_used_is_learned_over_several_sessions(tmp_path: Path) -> None:
    path, said, clock = tmp_path / "home" / "data" / "popularity" / "m.json", [], Clock()
    first = Popularity(MODEL.layers, MODEL.experts)
    kept = keeper(path, first, clock, said)
    counted(first, {(1, 0): 10, (3, 2): 4})
    kept.save()
    kept.save()  # nothing new: nothing is added twice
    counted(first, {(1, 1): 2})
    kept.save()
    second = Popularity(MODEL.layers, MODEL.experts)
    counted(second, {(1, 0): 1000})  # before the keeper: a model that was loaded with counts of its own
    again = keeper(path, second, clock, said)
    counted(second, {(1, 0): 5})
    again.save()
    found = load_profile(path, MODEL)
    assert found is not None
    assert found[1] == pytest.approx([15, 2, 0], abs=0.01)
    assert found[3] == pytest.approx([0, 0, 4], abs=0.01)
    assert said == []
    assert path.parent.stat().st_mode & 0o077 == 0


def test_saving_waits_for_its_time(tmp_path: Path) -> None:
    path, clock = tmp_path / "home" / "data" / "popularity" / "m.json", Clock()
    popularity = Popularity(MODEL.layers, MODEL.experts)
    kept = keeper(path, popularity, clock, [])
    counted(popularity, {(1, 0): 1})
    kept.save_if_due()
    assert not path.exists()
    clock.now = SAVE_INTERVAL_S
    kept.save_if_due()
    assert path.exists()


def test_benchmarks_are_not_learned_and_deleting_starts_anew(tmp_path: Path) -> None:
    path, clock = tmp_path / "home" / "data" / "popularity" / "m.json", Clock()
    popularity = Popularity(MODEL.layers, MODEL.experts)
    kept = keeper(path, popularity, clock, [])
    counted(popularity, {(1, 0): 100})
    kept.leave_out()
    kept.save()
    assert not path.exists()
    counted(popularity, {(1, 1): 3})
    kept.save()
    path.unlink()
    counted(popularity, {(1, 2): 4})
    kept.save()
    found = load_profile(path, MODEL)
    assert found is not None and found[1] == [0, 0, 4]


def test_a_disk_that_refuses_is_said_once_and_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "data"
    folder.mkdir(parents=True)
    (folder / "popularity").write_text("in the way")
    path, said, clock = folder / "popularity" / "m.json", [], Clock()
    popularity = Popularity(MODEL.layers, MODEL.experts)
    kept = keeper(path, popularity, clock, said)
    for _ in range(2):
        counted(popularity, {(1, 0): 1})
        kept.save()
    assert len(said) == 1 and "cannot be kept" in said[0]
    (folder / "popularity").unlink()
    kept.save()
    found = load_profile(path, MODEL)
    assert found is not None and found[1] == [2, 0, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"version": PROFILE_VERSION + 1},
        {"model": ProfileModel((1, 3), 3, 301)},
        {"model": ProfileModel((1, 2), 3, 300)},
        {"routes": [[1.0, 2.0, 3.0]]},
        {"routes": [[1.0, 2.0], [1.0, 2.0]]},
        {"routes": [[1.0, 2.0, -3.0], [0.0, 0.0, 0.0]]},
    ],
    ids=str,
)
def test_a_profile_of_something_else_is_not_used(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "p.json"
    profile = Profile(version=PROFILE_VERSION, model=MODEL, routes=[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    path.write_bytes(msgspec.json.encode(profile))
    assert load_profile(path, MODEL) == {1: [1, 2, 3], 3: [0, 0, 0]}
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(profile, **change)))
    said: list[str] = []
    assert load_profile(path, MODEL, said.append) is None
    assert len(said) == 1 and str(path) in said[0]


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"version": 1, "routes": "many"}'])
def test_a_damaged_profile_is_not_used(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(data)
    said: list[str] = []
    assert load_profile(path, MODEL, said.append) is None
    assert len(said) == 1


def test_old_use_fades_by_half() -> None:
    old = {1: [100.0, 0.0], 3: [8.0, 8.0]}
    new = {1: [0.0, 2.0 * HALF_LIFE_TOKENS], 3: [0.0, 0.0]}
    assert faded(old, new, experts_per_token=2) == {1: [50.0, 2.0 * HALF_LIFE_TOKENS], 3: [8.0, 8.0]}


@given(st.lists(st.lists(st.integers(0, 10**6), min_size=4, max_size=4), min_size=1, max_size=20))
def test_fading_keeps_recent_use_and_never_grows_without_bound(sessions: list[list[int]]) -> None:
    counts: dict[int, list[float]] | None = None
    for row in sessions:
        counts = faded(counts, {0: row}, experts_per_token=1)
        assert all(after >= now for after, now in zip(counts[0], row, strict=True))
    assert counts is not None
    assert sum(counts[0]) <= 2 * max(*map(sum, sessions), HALF_LIFE_TOKENS) + 1


def test_the_calibration_prompts_count_until_there_is_use_of_ones_own() -> None:
    prompts = {0: [30.0, 10.0]}
    alone = combined(None, prompts, experts_per_token=1)
    assert alone is not None and sum(alone[0]) == pytest.approx(CALIBRATION_TOKENS)
    both = combined({0: [0.0, 100.0 * CALIBRATION_TOKENS]}, prompts, experts_per_token=1)
    assert both is not None and both[0][1] > both[0][0]
    assert combined({0: [1.0, 2.0]}, None, 1) == {0: [1.0, 2.0]}
    assert combined(None, None, 1) is None


def test_the_order_of_seeding(tiny_model: Callable[..., Path]) -> None:
    files = open_model(tiny_model("mixtral"))
    experts = files.experts
    assert experts is not None
    pairs = {(layer, expert) for layer in experts.layers for expert in range(experts.count)}
    unknown = seed_order(files)
    # Without a profile the layers take turns.
    assert set(unknown) == pairs and {layer for layer, _ in unknown[: len(experts.layers)]} == set(experts.layers)
    own, prompts = profile_paths(profile_key(files.folder))
    counts = {layer: [0.0] * experts.count for layer in experts.layers}
    counts[experts.layers[-1]][5] = 20000.0
    save_profile(own, model_of(experts), counts)
    offline = {layer: [0.0] * experts.count for layer in experts.layers}
    offline[experts.layers[0]][3] = 7.0
    save_profile(prompts, model_of(experts), offline)
    assert seed_order(files, 2)[:2] == [(experts.layers[-1], 5), (experts.layers[0], 3)]
    assert set(seed_order(files, 2)) == pairs
    dense = open_model(tiny_model("llama"))
    assert seed_order(dense) == [] and seed_counts(dense) is None


def test_a_plain_model_and_its_bank_share_a_profile_and_removing_deletes_it(
    tiny_model: Callable[..., Path], home: Path
) -> None:
    plain = tiny_model("mixtral")
    resolved = local_models.resolve(str(plain))
    prepare(plain, resolved.prepared_folder, lambda *progress: None)
    assert profile_key(plain) == profile_key(resolved.prepared_folder)
    files = open_model(resolved.prepared_folder)
    assert files.experts is not None
    own, prompts = profile_paths(profile_key(plain))
    for path in (own, prompts):
        save_profile(path, model_of(files.experts), {layer: [1.0] * 8 for layer in files.experts.layers})
    plain_experts = open_model(plain).experts
    assert plain_experts is not None and load_profile(own, model_of(plain_experts)) is not None
    del files
    local_models.remove(str(plain))
    assert not own.exists() and not prompts.exists() and (plain / "config.json").exists()
    with pytest.raises(ModelError):
        local_models.remove(str(plain))


def test_what_was_learned_of_a_model_elsewhere_can_be_removed(tiny_model: Callable[..., Path]) -> None:
    plain = tiny_model("mixtral")
    experts = experts_of(plain)
    own, _ = profile_paths(profile_key(plain))
    save_profile(own, model_of(experts), {layer: [1.0] * 8 for layer in experts.layers})
    assert local_models.remove(str(plain)) > 0
    assert not own.exists() and (plain / "config.json").exists()
