"""No test of this folder touches the system's keyring or the user's home."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keyring
import pytest
from keyring.backends import fail

from discovery.link_listener import LinkListener
from discovery.pairing_service import KIND, PairingService
from discovery.peers import Peer
from tests.discovery.announcing_machines import Listening, Process
from tests.discovery.discovery_machines import Machine, MemoryKeyring, Shower


@pytest.fixture(autouse=True)
def no_keyring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As on a server without a desktop."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    before = keyring.get_keyring()
    keyring.set_keyring(fail.Keyring())
    yield
    keyring.set_keyring(before)


@pytest.fixture
def memory_keyring(no_keyring: None) -> MemoryKeyring:
    backend = MemoryKeyring()
    keyring.set_keyring(backend)
    return backend


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], Machine]:
    """``machine(name)``: a machine with an identity of its own."""
    return lambda name: Machine(tmp_path / name.replace(" ", "-"), name)


@pytest.fixture
def shower(machine: Callable[[str], Machine]) -> Iterator[Shower]:
    shown = machine("Kitchen Mac")
    paired: list[Peer] = []
    failed: list[tuple[str, int]] = []
    now = [1000.0]
    service = PairingService(
        shown.identity,
        shown.peers,
        shown.name,
        on_paired=paired.append,
        on_failed=lambda sentence, tries_left: failed.append((sentence, tries_left)),
        clock=lambda: now[0],
    )
    with_listener = LinkListener.open("127.0.0.1")
    with_listener.register(KIND, service.handle)
    yield Shower(shown, with_listener, service, paired, failed, now)
    with_listener.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: object, **options: object) -> Process:
        started.append(Process(*arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    at_once(Process.close, started)


@pytest.fixture
def listen() -> Iterator[Callable[..., Listening]]:
    opened: list[Listening] = []

    def begin(*arguments: object, **options: object) -> Listening:
        opened.append(Listening(*arguments, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield begin
    at_once(lambda one: one.neighbourhood.close(), opened)


def at_once(close: Callable[[Any], None], what: list[Any]) -> None:
    """A goodbye takes its time, for every one the same."""
    if what:
        with ThreadPoolExecutor(len(what)) as pool:
            list(pool.map(close, what))
