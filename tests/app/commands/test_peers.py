"""``privatellm peers``, and the commands on a ring: what the engine is asked, what is printed, and what is refused."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from app.commands.join import JoinFlags, network_from
from app.commands.root import run
from engine.ipc.messages import OpenNetwork
from tests.app.scripted import install, make_home, play, written


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(make_home(tmp_path, monkeypatch))
    return tmp_path


def load_told_back(out: str) -> dict[str, object]:
    load: dict[str, object] = json.loads(json.loads(out)["choices"][0]["choice"])
    return load


def test_the_paired_machines_are_listed_without_a_network(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["peers"]) == 0
    out, _ = written(capsys)
    assert out.splitlines()[0] == "this machine: laptop  a1a1a1a1  oak tea"
    assert (
        "b2b2b2b2" in out and "  paired  " in out and "not reachable" not in out and "96.0 GB of 128.0 GB free" in out
    )
    assert run(["peers", "list", "--json"]) == 0
    found = json.loads(written(capsys)[0])
    assert found["open"] is False and found["peers"][0]["addresses"] == ["10.0.0.2:47820"]


def test_looking_opens_the_network_for_a_moment(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["peers", "list", "--look"]) == 0
    out, err = written(capsys)
    assert "ready" in out and "note: no multicast was heard" in err


def test_pairing_says_the_name_or_why_not(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["peers", "pair", "10.0.0.2:47820", "--code", "1234 5678"]) == 0
    assert "Paired with studio." in written(capsys)[1]
    monkeypatch.setattr(sys, "stdin", io.StringIO("0000 0000\n"))
    assert run(["peers", "pair", "b2b2"]) == 1
    assert "privatellm: The code is wrong." in written(capsys)[1]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run(["peers", "pair", "b2b2"]) == 2
    assert "no code" in written(capsys)[1]


def test_what_is_no_code_is_refused_before_anything_is_opened(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, "in-use")
    assert run(["peers", "pair", "10.0.0.2:47820", "--code", "1234"]) == 2
    assert "“1234” is not a code: it has 8 digits" in written(capsys)[1]


def test_forgetting(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["peers", "forget", "studio"]) == 0
    assert "studio is forgotten" in written(capsys)[1]
    assert run(["peers", "forget", "nobody"]) == 1
    assert "No paired machine is called nobody." in written(capsys)[1]


def test_a_network_that_cannot_be_opened_is_one_sentence(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, "in-use")
    assert run(["join", "--plain"]) == 1
    assert "privatellm: Port 47820 is in use" in written(capsys)[1]
    assert run(["plan", "starter", "--partitioning", "ring"]) == 1
    assert "privatellm: Port 47820 is in use" in written(capsys)[1]


@pytest.mark.parametrize(
    "arguments",
    [["--peer", "nowhere"], ["--listen", "x"], ["--listen", "a:1,b:2"], ["--memory", "0"], ["--gpu-memory", "-1"]],
)
def test_flags_of_join_are_checked(home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(["join", "--plain", *arguments]) == 2
    assert arguments[0] in written(capsys)[1]


def test_this_machine_is_lent_on_the_terms_of_its_settings(home: Path) -> None:
    assert network_from(JoinFlags()) == OpenNetwork(id=0, lend=True)
    (home / "config").mkdir(exist_ok=True)
    (home / "config" / "settings.toml").write_text(
        "[model]\ncpu_threads = 3\nkeep_resident = false\nlock_memory = true\n[ring]\nring_memory = 2.5\n"
    )
    wanted = network_from(JoinFlags(peers=("a:1",)))
    assert (wanted.cpu_threads, wanted.keep_resident, wanted.lock_memory) == (3, False, True)
    assert (wanted.lend, wanted.lend_memory, wanted.peers) == (True, 5 << 29, ["a:1"])
    assert network_from(JoinFlags(memory=1.0)).lend_memory == 1 << 30
    assert wanted.lend_gpu_memory is None, "half of the GPU, as the help says"
    assert network_from(JoinFlags(gpu_memory=0.5)).lend_gpu_memory == 1 << 29
    assert network_from(JoinFlags(gpu_memory=0.0)).lend_gpu_memory == 0


def test_a_plan_on_a_ring_shows_its_nodes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "starter", "--partitioning", "ring", "--peer", "10.0.0.9:47820"]) == 0
    out, _ = written(capsys)
    assert "Ring of 2: about 21.3 tokens/s; the best machine alone 14.2 tokens/s" in out
    assert "exact mode; tls, encrypted (140 µs each); no idle experts run" in out
    assert (
        "2  studio  2,432 experts 43.1 GB, trunk 1.9 GB, 96.0 GB free, 5.9 run per layer, up to 45.0 GB to send" in out
    )


def test_the_settings_of_the_ring_reach_the_engine(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "config").mkdir()
    (home / "config" / "settings.toml").write_text('[ring]\nring_mode = "fast"\nring_shares = "here=2"\n')
    assert run(["plan", "starter", "--partitioning", "ring", "--json"]) == 0
    load = load_told_back(written(capsys)[0])
    assert load["partitioning"] == "ring"
    assert load["ring"] == {
        "nodes": [], "mode": "fast", "exchange": "auto", "loading": "auto", "overlap": True,
        "shares": {"a1" * 32: 2 << 30}, "even_if_slower": False, "trusted": [],
        "wait_s": 300.0,  # nobody is there who could end its waiting
    }  # fmt: skip
    (home / "config" / "settings.toml").write_text('[ring]\nring_nodes = "attic"\n')
    assert run(["plan", "starter", "--partitioning", "ring"]) == 1
    assert "no paired machine is called attic" in written(capsys)[1]


def test_a_machine_to_try_needs_a_ring(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "starter", "--peer", "10.0.0.9:47820"]) == 2
    assert "--peer needs --partitioning ring" in written(capsys)[1]
    assert run(["ask", "hello", "--partitioning", "ring", "--peer", "10.0.0.9"]) == 2
    assert "--peer takes HOST:PORT, not '10.0.0.9'" in written(capsys)[1]


def test_a_question_to_a_ring(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ask", "say:hello there", "--partitioning", "ring"]) == 0
    assert written(capsys)[0].split() == ["hello", "there"]


def test_benches_of_the_ring(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "ring", "starter", "--nodes", "2,4", "--json"]) == 0
    assert json.loads(written(capsys)[0])["nodes"] == [2, 4]
    assert run(["bench", "exchange", "not/there"]) == 0  # no model is run for it
    assert "exchange of not/there" in written(capsys)[0]
    assert run(["bench", "ring", "starter", "--nodes", "two"]) == 2
    assert "--nodes" in written(capsys)[1]
