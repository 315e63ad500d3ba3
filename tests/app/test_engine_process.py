"""An engine is begun before this program knows what it will ask, and taken or ended later."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import engine_process
from app.engine_client import EngineClient
from tests.app.scripted import SCRIPT, make_home
from tests.support.own_children import own_children, remember_children


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    remember_children()
    yield make_home(tmp_path, monkeypatch)
    engine_process.end_begun()


async def test_who_starts_an_engine_gets_the_one_that_was_begun() -> None:
    engine_process.begin()
    begun = own_children()
    client = EngineClient()
    await client.start()
    assert [client.pid] == begun == own_children()
    await client.close()
    await client.start()
    assert client.pid is not None and client.pid not in begun
    await client.close()


def test_an_engine_that_was_begun_for_another_command_is_ended() -> None:
    engine_process.begin()
    (begun,) = own_children()
    other = engine_process.take([sys.executable, str(SCRIPT), "deaf"])
    assert own_children() == [other.pid] and other.pid != begun
    engine_process.end(other)
    assert own_children() == []


def test_an_engine_that_nobody_takes_is_ended() -> None:
    engine_process.begin()
    assert len(own_children()) == 1
    engine_process.end_begun()
    assert own_children() == []


def test_an_engine_that_cannot_be_begun_is_reported_by_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "host_command", lambda: ("/nowhere/python",))
    engine_process.begin()
    with pytest.raises(OSError, match="nowhere"):
        engine_process.take(("/nowhere/python",))


def test_an_engine_is_begun_before_what_takes_long_is_imported() -> None:
    program = "import sys, app.cli, app.interrupts, app.engine_process; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) & {"click", "asyncio", "msgspec", "tomlkit", "tomllib", "hashlib"} == set()
