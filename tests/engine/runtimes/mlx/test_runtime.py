"""What runs without a ring although a ring was asked for loads on a Mac's GPU, too: mlx has no CPU alone there.

There is no Metal here: mlx is only told that its device is a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.progress import quiet

mx = pytest.importorskip("mlx.core")

from engine.bench import ring as ring_bench  # noqa: E402
from engine.bench.running import load_for, run_bench  # noqa: E402
from engine.cluster.network import ClusterNetwork  # noqa: E402
from engine.doctor_facts import doctor_facts  # noqa: E402
from engine.errors import ModelError  # noqa: E402
from engine.ipc.messages import Bench, Done, Load, NetworkState, OpenNetwork  # noqa: E402
from engine.runtimes import choosing  # noqa: E402
from engine.session.loading import load_session  # noqa: E402
from tests.engine.runtimes.mlx_oracle import load, prompt_of, write_comparable, write_quantised  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.null.Keyring")
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    return write_comparable(tmp_path / "model", "mixtral")


def test_the_cpu_alone_is_refused_where_a_person_chose_it(folder: Path) -> None:
    with pytest.raises(ModelError, match="for the CPU alone choose the torch runtime"):
        load(folder, partitioning="cpu")


def test_a_ring_that_nobody_joins_is_this_machine(folder: Path) -> None:
    network = ClusterNetwork(lambda event: None)
    try:
        opened = network.answer(OpenNetwork(id=1, name="me", listen="127.0.0.1:0"))
        assert isinstance(opened, Done | NetworkState)
        request = Load(id=2, model=str(folder), runtime="mlx", partitioning="ring", keep_resident=False)
        session = load_session(request, quiet, network=network)
        assert (session.facts.runtime, session.facts.device) == ("mlx", "gpu")
        assert session.facts.ring is None or len(session.facts.ring.nodes) == 1
        assert session.model.start().extend(prompt_of(5)) is not None
        session.close()
    finally:
        network.close()


@pytest.mark.parametrize(("runtime", "partitioning"), [("mlx", "auto"), ("auto", "cpu"), ("torch", "cpu")])
def test_measuring_experts_asks_for_the_cpu_only_where_there_is_one(
    folder: Path, runtime: str, partitioning: str
) -> None:
    wanted = Load(id=1, model=str(folder), runtime=runtime, keep_resident=False)  # type: ignore[arg-type]
    request = load_for(Bench(id=1, kind="experts", load=wanted))
    assert (request.runtime, request.partitioning) == (runtime, partitioning)
    assert load_session(request, quiet).model.start().extend(prompt_of(5)) is not None


def test_the_ring_benchmark_loads_one_node_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_bench, "experts_at_once", lambda *_: 1.0)
    wanted = Load(id=1, model=str(folder), runtime="mlx")
    bench = ring_bench._Bench(Bench(id=1, kind="ring", load=wanted), "m", folder, 1, quiet, lambda: False)
    model = ring_bench.load_model(bench._runtime, "m", folder, bench._load, quiet)
    assert model.facts.device == "gpu"
    model.close()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_model_in_four_bits_is_measured_as_it_is_loaded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    quantised = write_quantised(tmp_path / "q", "qwen3_moe")
    wanted = Load(id=1, model=str(quantised), runtime="mlx", keep_resident=False)
    request = Bench(id=1, kind=kind, load=wanted, rounds=1)  # type: ignore[arg-type]
    session = load_session(load_for(request), quiet)
    result = run_bench(request, session, quantised, quiet, lambda: False, buffer_bytes=1)
    assert result.data["runtime"] == "mlx" and result.data["dtype"].startswith("4-bit")
    session.close()


def test_doctor_takes_a_model_in_four_bits_for_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(choosing, "on_apple_silicon", lambda: True)
    quantised = write_quantised(tmp_path / "q", "qwen3_moe")
    facts = doctor_facts(Load(id=1, model=str(quantised)))
    assert facts.model_problem is None or facts.model_problem == ""
    assert facts.runtime == "mlx"
