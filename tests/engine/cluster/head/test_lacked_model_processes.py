"""A head that lacks the model asks with a ring: it comes from the machines that have it, and the ring answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from engine.bench.local_ring import LocalEngine, open_network, pair_homes
from engine.errors import ModelError
from engine.ipc.messages import Done, Pull
from engine.models.folders.prepare import prepare
from engine.models.formats.gguf_file import GgufFile
from engine.models.store.gguf_folder import write_settings
from tests.engine.cluster.real_rings import PROMPT, Machine, RealRing
from tests.support.engine_forks import forked
from tests.support.tiny_gguf import whole_blocks, write_tiny_gguf
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow
PLAIN, PREPARED, SHARED, PACKED = "owner--plain", "owner--prepared", "owner--shared", "owner--packed--Q4_K_M"
ANSWER = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by the names that they have where they are whole."""
    folder = tmp_path_factory.mktemp("models")
    model = write_tiny_model(folder / PLAIN, "mixtral", num_local_experts=8, dtype="bfloat16")
    prepare(model, folder / f"{PREPARED}.prepared", lambda *_: None)
    shared = write_tiny_model(folder / SHARED, "mixtral", num_local_experts=8, dtype="bfloat16", seed=1)
    source = write_tiny_model(folder / "source", "qwen2_moe", **whole_blocks("qwen2_moe"))
    packed = folder / "a file" / "packed-Q4_K_M.gguf"
    packed.parent.mkdir()
    write_tiny_gguf(packed, source, "qwen2moe", quantised=GGMLQuantizationType.Q4_K)
    with GgufFile(packed) as gguf:
        write_settings(packed.parent, gguf)
    packed.parent.rename(folder / PACKED)
    return {PLAIN: model, PREPARED: folder / f"{PREPARED}.prepared", SHARED: shared, PACKED: folder / PACKED}


def test_a_model_that_only_followers_have_runs_in_a_ring(tmp_path: Path, made: dict[str, Path]):
    """As a plain folder on one, prepared on the other; then both have a half of what the head gave away."""
    others = [Machine(models=(made[PLAIN], made[PACKED])), Machine(models=(made[PREPARED],))]
    with RealRing(tmp_path, [Machine(), *others]) as ring:
        models = ring.head.home / "models"

        def copied(name: str) -> Done:
            done = ring.head.ask(Pull(id=ring.head.new_id(), model=name), 120)
            assert isinstance(done, Done)
            return done

        with pytest.raises(ModelError, match="not on this machine"):
            ring.load(Path("owner/absent"), "native", 2)
        assert copied("owner/plain").detail == "Copied from node 1."
        assert copied("owner/prepared").detail == "Copied from node 2."
        ring.alone(made[PLAIN], "native", "bfloat16")
        alone = ring.answer()
        for name in ("owner/plain", "owner/prepared"):
            # What another machine has whole is not sent back to it.
            facts = ring.form(Path(name), "native", 2, "bfloat16")
            assert ring.answer() == alone
            assert any(share.has_bytes >= share.expert_bytes + share.trunk_bytes for share in facts.nodes[1:])
        # One GGUF file of a repository; the other machine is sent its share of it.
        assert copied("owner/packed:Q4_K_M").detail == "Copied from node 1."
        ring.alone(made[PACKED], "native", "bfloat16")
        alone = ring.answer()
        ring.form(Path("owner/packed:Q4_K_M"), "native", 2, "bfloat16")
        assert ring.answer() == alone
        (share,) = (ring.engines[2].home / "models").glob("*packed*.share")
        for file in (models / PACKED / "packed-Q4_K_M.gguf", share / "packed-Q4_K_M.gguf"):
            assert file.stat().st_size == (made[PACKED] / file.name).stat().st_size and not file.is_symlink()
        # The head gives all experts away, and loses its copy.
        shutil.copytree(made[SHARED], models / SHARED)
        ring.load(Path("owner/shared"), "native", 2, "bfloat16", shares={ring.ids[0]: 0})
        answer = ring.answer()
        ring.alone(made[PLAIN], "native")
        shutil.rmtree(models / SHARED)
        assert copied("owner/shared").detail in ("Copied from node 1 and node 2.", "Copied from node 2 and node 1.")
        assert {path.name: path.read_bytes() for path in (models / SHARED).iterdir()} == {
            path.name: path.read_bytes() for path in made[SHARED].iterdir()
        }
        ring.alone(models / SHARED, "native", "bfloat16")
        assert ring.answer() == answer


def test_ask_answers_with_a_model_that_only_a_lent_machine_has(tmp_path: Path, made: dict[str, Path]):
    """As a person does it; the Internet is not there."""
    homes = [tmp_path / "head", tmp_path / "studio"]
    for home in homes:
        (home / "models").mkdir(parents=True)
        (home / "config" / "network").mkdir(parents=True)
    (homes[1] / "models" / PLAIN).symlink_to(made[PLAIN], target_is_directory=True)
    pair_homes(homes)
    studio = LocalEngine(homes[1], {"OMP_NUM_THREADS": "1"}, launch=forked)
    try:
        address = open_network(studio, "studio", lend=True)
        environment = {
            **os.environ,
            "PRIVATELLM_HOME": str(homes[0]),
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring",
            "OMP_NUM_THREADS": "1",
        }
        program = [str(Path(sys.executable).with_name("privatellm"))]
        question = ["ask", "--model", "owner/plain", "--partitioning", "ring", "--runtime", "native", "--json"]
        said = [*question, "--prompt-ids", ",".join(map(str, PROMPT)), "--max-tokens", str(ANSWER)]
        network = ["--peer", address]
        found = subprocess.run(
            [*program, *said, *network, "--temperature", "0"],
            env=environment,
            capture_output=True,
            check=False,
            text=True,
            timeout=240,
        )
        assert found.returncode == 0, found.stderr
        assert "Copied from" in found.stderr
        assert len(json.loads(found.stdout)["token_ids"]) == ANSWER
        assert (homes[0] / "models" / PLAIN / "config.json").is_file()
    finally:
        studio.close()
