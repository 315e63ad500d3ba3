"""Shares of what mlx-lm wrote: an expert is a row of each of several stacked tensors, and only those are sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.progress import quiet

mlx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from engine.cluster.weights.shard_store import ShardStore  # noqa: E402
from engine.cluster.weights.weight_fingerprint import differences, identity_of  # noqa: E402
from engine.models.architectures.families import check_supported, expert_shape  # noqa: E402
from engine.models.folders.opening import read_config  # noqa: E402
from engine.models.folders.shard_files import is_shard, read_shard  # noqa: E402
from engine.models.folders.weight_layout import layout_of  # noqa: E402
from tests.engine.runtimes.mlx_oracle import MOE_FAMILIES, QUANTISABLE, write_quantised  # noqa: E402
from tests.support.shards import offer_part, send  # noqa: E402

pytestmark = pytest.mark.usefixtures("home")


def tensors(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        found |= mlx.load(str(path))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("family", [family for family in QUANTISABLE if family in MOE_FAMILIES])
def test_held_rows_and_the_trunk_arrive_the_rest_is_holes(family: str, tmp_path: Path):
    folder = write_quantised(tmp_path, family)
    shape = expert_shape(read_config(folder), check_supported(read_config(folder)))
    assert shape is not None
    held = {layer: [1, shape.count - 1] for layer in shape.layers}
    offered = offer_part(folder, held)
    assert layout_of(folder).opened is None
    assert offered.identity.quantisation == "4-bit in groups of 32"
    shares = ShardStore(tmp_path / "node", "head")
    need = send(shares, folder, offered)
    assert read_shard(need.folder).experts == {layer: tuple(rows) for layer, rows in held.items()}

    layout = layout_of(folder)
    settings = sum(path.stat().st_size for path in layout.settings)
    own = 2 * len(shape.layers) * layout.expert_bytes
    assert offered.nbytes == settings + sum(layout.headers) + layout.trunk_bytes + own
    whole, mine = tensors(folder), tensors(need.folder)
    assert list(mine) == list(whole)
    compared = 0
    for name, array in whole.items():
        stacked = ".switch_mlp." in name or (".experts." in name and ".ffn." not in name)
        if stacked:
            layer = int(name.split(".layers.")[1].split(".")[0])
            for expert in range(shape.count):
                same = bool(mlx.array_equal(mine[name][expert], array[expert]))  # type: ignore[index]
                assert same or expert not in held[layer]
                assert expert in held[layer] or not mine[name][expert].any()  # type: ignore[index]
            compared += 1
        elif ".ffn.experts." in name:
            layer, expert = (int(name.split(mark)[1].split(".")[0]) for mark in (".blocks.", ".experts."))
            if expert in held[layer]:
                assert bool(mlx.array_equal(mine[name], array))
            else:
                assert not mine[name].any()  # type: ignore[attr-defined]
            compared += 1
        else:
            assert bool(mlx.array_equal(mine[name], array)), name
    assert compared >= 3 * len(shape.layers)
    assert differences(offered.identity, identity_of(folder)) is None
    assert shares.need(offered, quiet).wanted == ()


def test_sizes_of_a_quantised_model(tmp_path: Path):
    folder = write_quantised(tmp_path, "qwen3_moe")
    found = layout_of(folder)
    assert found.count * found.expert_bytes * len(found.layers) + found.trunk_bytes == sum(
        entry.nbytes  # type: ignore[attr-defined]
        for entry in tensors(folder).values()
    )
    assert not is_shard(folder)
