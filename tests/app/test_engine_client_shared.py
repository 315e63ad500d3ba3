"""Programs of one person share an engine: each finds it, none disturbs another, and it ends with the last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app.engine_client import EngineClient, EngineDied
from engine.ipc.messages import (
    AnyEvent,
    AnyRequest,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    OpenNetwork,
    Piece,
)
from tests.app.scripted import fork_engines
from tests.support.eventually import eventually, has_ended
from tests.support.tiny_models import write_tiny_model

PATIENCE_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return write_tiny_model(folder, "mixtral", max_position_embeddings=1_000_000, eos_token_id=None)


NewClient = Callable[[], EngineClient]


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NewClient]:
    """Makes programs; all their engines have ended at the end."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fork_engines(monkeypatch)
    made: list[EngineClient] = []

    def new() -> EngineClient:
        made.append(EngineClient(share=True))
        return made[-1]

    yield new
    engines = [psutil.Process(each.pid) for each in made if each.pid is not None]
    for each in made:
        await each.close()
    for engine in engines:
        eventually(lambda engine=engine: has_ended(engine))  # type: ignore[misc]


async def heard(engine: EngineClient, request: AnyRequest) -> list[AnyEvent]:
    return [event async for event in engine.stream(request)]


async def load(engine: EngineClient, model: Path | str, **options: object) -> Loaded:
    await engine.start()
    request = Load(id=engine.new_id(), model=str(model), **options)  # type: ignore[arg-type]
    last = (await heard(engine, request))[-1]
    assert isinstance(last, Loaded), last
    return last


async def answer(engine: EngineClient, tokens: int = 3) -> list[int]:
    last = (await heard(engine, Generate(id=engine.new_id(), prompt_ids=[5, 6, 7], max_tokens=tokens)))[-1]
    assert isinstance(last, Finished), last
    return last.token_ids


async def test_the_second_program_finds_the_engine_of_the_first_which_ends_with_the_last(
    client: NewClient, model: Path
) -> None:
    first, second = client(), client()
    await load(first, model)
    assert (await load(second, model)).facts.load_s == 0.0
    assert second.pid == first.pid and second.clients == 2
    assert await answer(first) == await answer(second)
    assert first.clients == 2
    engine = psutil.Process(first.pid)
    await first.close()
    assert len(await answer(second)) == 3 and second.clients == 1
    await second.close()
    eventually(lambda: has_ended(engine))


async def test_a_program_that_must_end_now_leaves_the_engine_to_others(client: NewClient, model: Path) -> None:
    first, second = client(), client()
    await load(first, model)
    await load(second, model)
    await answer(first)
    first.kill()
    await first.close()
    assert len(await answer(second)) == 3
    third = client()
    await load(third, model)
    assert third.pid == second.pid
    second.kill()
    await second.close()
    assert len(await answer(third)) == 3


async def test_another_model_gets_an_engine_of_its_own(client: NewClient, model: Path) -> None:
    first, second, third = client(), client(), client()
    await load(first, model)
    await load(second, model, context_limit=77)
    assert first.pid != second.pid
    await load(third, model, context_limit=77)
    assert third.pid == second.pid
    assert await answer(first) == await answer(third)


async def test_who_changes_the_model_leaves_the_engine_to_the_others(client: NewClient, model: Path) -> None:
    first, second = client(), client()
    await load(first, model)
    await load(second, model)
    shared = first.pid
    await load(first, model, context_limit=77)
    assert first.pid != shared and second.pid == shared
    assert await answer(first) == await answer(second)
    alone = second.pid
    await load(second, model, context_limit=88)
    assert second.pid == alone, "nobody else is there"


async def test_a_model_that_cannot_be_loaded_is_said_by_whichever_engine(client: NewClient, model: Path) -> None:
    first, second = client(), client()
    await load(first, model)
    await second.start()
    failed = (await heard(second, Load(id=second.new_id(), model="nowhere/at-all")))[-1]
    assert isinstance(failed, Failed) and failed.kind != "in-use" and second.pid != first.pid


async def test_a_path_means_the_same_for_all(
    client: NewClient, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = client(), client()
    monkeypatch.chdir(model.parent)
    await load(first, "tiny")
    monkeypatch.chdir(tmp_path)
    await load(second, model)
    assert first.pid == second.pid
    (tmp_path / "tiny").mkdir()
    await second.start()
    failed = (await heard(second, Load(id=second.new_id(), model="tiny")))[-1]
    assert isinstance(failed, Failed) and str(tmp_path) in failed.error, "not the first one's folder"


async def test_the_network_is_opened_in_an_engine_of_ones_own(client: NewClient, model: Path) -> None:
    first, second = client(), client()
    await load(first, model)
    await load(second, model)
    opened = await heard(second, OpenNetwork(id=second.new_id(), listen="nonsense"))
    assert isinstance(opened[-1], Failed) and second.pid != first.pid
    assert len(await answer(first)) == 3


async def test_all_hear_that_a_shared_engine_died_and_go_on_with_another(client: NewClient, model: Path) -> None:
    first, second = client(), client()
    await load(first, model)
    await load(second, model)
    endless = second.stream(Generate(id=second.new_id(), prompt_ids=[5, 6, 7]))
    async for event in endless:
        if isinstance(event, Piece):
            break
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="another program had started"):
        async for _ in endless:
            continue
    with pytest.raises(EngineDied):
        await answer(first)
    await load(second, model)
    await load(first, model)
    assert first.pid == second.pid, "the second one's, now"
    assert await answer(first) == await answer(second)


OWNER = """
import asyncio, sys
from app.engine_client import EngineClient
from engine.ipc.messages import Load

async def main():
    engine = EngineClient(share=True)
    await engine.start()
    async for event in engine.stream(Load(id=engine.new_id(), model=sys.argv[1])):
        last = event
    print(type(last).__name__, engine.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def owner(client: NewClient, model: Path) -> Iterator[subprocess.Popen[str]]:
    """Another program, which has started an engine."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(model)], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


async def test_the_engine_outlives_a_killed_owner_that_is_not_its_only_program(
    client: NewClient, owner: subprocess.Popen[str], model: Path
) -> None:
    assert owner.stdout is not None
    said, pid = owner.stdout.readline().split()
    assert said == "Loaded"
    second = client()
    await load(second, model)
    assert second.pid == int(pid)
    owner.kill()
    owner.wait(PATIENCE_S)
    assert len(await answer(second)) == 3
