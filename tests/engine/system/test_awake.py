"""The system does not fall asleep while something goes on that nobody touches the keyboard for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from engine import host
from engine.cluster import network
from engine.cluster.network import ClusterNetwork
from engine.host import Client, Host, Task
from engine.ipc.messages import AnyEvent, CloseNetwork, Done, Load, OpenNetwork, Pull
from engine.system import awake
from engine.system.awake import Awake, holding_command

PATIENCE_S = 120.0
SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_on_a_mac_it_is_caffeinate_that_ends_with_the_engine() -> None:
    assert holding_command(42, "darwin") == ["/usr/bin/caffeinate", "-i", "-s", "-w", "42"]


def test_on_linux_it_is_systemd_where_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake.shutil, "which", lambda name: f"/bin/{name}")
    command = holding_command(42, "linux", tmp_path)
    assert command[0] == "/bin/systemd-inhibit" and "--what=idle:sleep" in command
    assert command[-4:] == ["/bin/tail", "--pid=42", "-f", os.devnull]
    assert holding_command(42, "linux", tmp_path / "absent") == []
    monkeypatch.setattr(awake.shutil, "which", lambda name: None)
    assert holding_command(42, "linux", tmp_path) == []


def test_the_program_runs_exactly_while_anybody_holds_it() -> None:
    keeper = Awake(SLEEPS, after_s=0.0)
    with keeper.held():
        timer = keeper._timer
        assert timer is not None
        timer.join(PATIENCE_S)
        process = keeper.process
        assert process is not None and process.poll() is None
        with keeper.held():
            pass
        assert keeper.process is process and process.poll() is None
    assert keeper.process is None and process.poll() is not None


def test_what_is_over_soon_starts_nothing() -> None:
    keeper = Awake(SLEEPS, after_s=600.0)
    with keeper.held():
        pass
    assert keeper.process is None and keeper._timer is None


def test_a_program_that_is_not_there_does_no_harm() -> None:
    keeper = Awake(["/no/such/program"], after_s=0.0)
    with keeper.held():
        timer = keeper._timer
        assert timer is not None
        timer.join(PATIENCE_S)
    assert keeper.process is None


class Noted(Awake):
    """Notes how often it is held."""

    def __init__(self) -> None:
        super().__init__([])

    @property
    def holders(self) -> int:
        return self._holders


def test_downloads_and_answers_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, seen = Noted(), []
    monkeypatch.setattr(host, "AWAKE", noted)
    made = Host(lambda event: None)

    def run(task: Task) -> AnyEvent:
        seen.append(noted.holders)
        return Done(id=1, path="")

    monkeypatch.setattr(made, "_run", run)
    for request in (Pull(id=1, model="m"), Load(id=2, model="m")):
        made._answer(Task(request, Client(lambda event: None)))
    assert seen == [1, 1] and noted.holders == 0


def test_lending_holds_it_until_the_network_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.null.Keyring")
    noted = Noted()
    monkeypatch.setattr(network, "AWAKE", noted)
    opened = ClusterNetwork(lambda event: None)
    try:
        opened.answer(OpenNetwork(id=1, name="me", listen="127.0.0.1:0"))
        assert noted.holders == 0, "looking for machines is no lending"
        opened.answer(CloseNetwork(id=2))
        opened.answer(OpenNetwork(id=3, name="me", listen="127.0.0.1:0", lend=True))
        assert noted.holders == 1
        opened.answer(CloseNetwork(id=4))
        assert noted.holders == 0
    finally:
        opened.close()


def test_a_lent_machine_waits_for_the_keyrings_dialogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.null.Keyring")
    waited: list[float | None] = []
    load = network.load_identity
    monkeypatch.setattr(
        network, "load_identity", lambda folder, patience_s=None: (waited.append(patience_s), load(folder))[1]
    )
    for number, lend in enumerate((True, False)):
        opened = ClusterNetwork(lambda event: None)
        opened.answer(OpenNetwork(id=number, name="me", listen="127.0.0.1:0", lend=lend))
        opened.close()
    assert waited == [network.DIALOGUE_S, None] and network.DIALOGUE_S >= 120
