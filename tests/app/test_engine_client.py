from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from app import engine_links
from app.engine_client import Engine, EngineClient, EngineDied, how_it_ended
from engine.ipc.messages import Cancel, Done, Failed, Finished, Generate, Message, Notice, Piece, Pull
from tests.app.scripted import SCRIPT
from tests.support.own_children import own_children, remember_children


def command(script: str = "") -> list[str]:
    return [sys.executable, str(SCRIPT), script]


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    client = EngineClient(command())
    await client.start()
    yield client
    await client.close()


def generate(engine: Engine, words: str) -> Generate:
    return Generate(id=engine.new_id(), messages=[Message("user", words)])


async def heard(engine: Engine, words: str) -> list[object]:
    return [event async for event in engine.stream(generate(engine, words))]


async def test_an_answer(client: EngineClient) -> None:
    *pieces, last = await heard(client, "say:one two three")
    assert [piece.text for piece in pieces if isinstance(piece, Piece)] == ["one ", "two ", "three "]
    assert isinstance(last, Finished) and last.text == "one two three"


async def test_starting_twice_is_one_engine(client: EngineClient) -> None:
    pid = client.pid
    await asyncio.gather(client.start(), client.start())
    assert client.pid == pid and client.running


async def test_the_engine_is_in_a_session_of_its_own(client: EngineClient) -> None:
    assert client.pid is not None
    assert os.getsid(client.pid) == client.pid != os.getsid(0)


async def test_the_engine_works_where_this_program_does_or_at_the_top_if_that_was_deleted(
    client: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.pid is not None and psutil.Process(client.pid).cwd() == str(Path.cwd())
    await client.close()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    await client.start()
    assert client.pid is not None and psutil.Process(client.pid).cwd() == os.sep


async def test_answers_at_the_same_time_do_not_mix(client: EngineClient) -> None:
    answers = await asyncio.gather(*(heard(client, f"say:{name} {name}") for name in "abcdef"))
    for name, events in zip("abcdef", answers, strict=True):
        assert [event.text for event in events if isinstance(event, Piece)] == [f"{name} "] * 2


async def test_notices_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    client = EngineClient(command())
    notices: list[Notice] = []
    client.on_notice = notices.append
    await client.start()
    await heard(client, "say:x")
    assert [notice.text for notice in notices] == ["hello from the script"]
    await client.close()


async def test_a_failure_is_an_event_and_the_engine_goes_on(client: EngineClient) -> None:
    (failed,) = await heard(client, "fail:")
    assert isinstance(failed, Failed) and failed.error == "It failed."
    assert len(await heard(client, "say:x")) == 2


async def test_cancel(client: EngineClient) -> None:
    request = generate(client, "wait:")
    events = client.stream(request)
    assert isinstance(await anext(events), Piece)
    await client.send(Cancel(id=client.new_id(), target=request.id))
    last = await anext(events)
    assert isinstance(last, Finished) and last.finish_reason == "cancelled"


async def test_leaving_a_stream_cancels_its_request(client: EngineClient) -> None:
    request = generate(client, "wait:")
    sent: list[object] = []
    child = client._running_link()
    original = child.write_soon
    child.write_soon = lambda message: (sent.append(message), original(message))  # type: ignore[method-assign]
    async with aclosing(client.stream(request)) as events:
        await anext(events)
    assert [message.target for message in sent if isinstance(message, Cancel)] == [request.id]
    assert child.inboxes == {}
    assert len(await heard(client, "say:still there")) == 3


async def test_a_reader_far_behind_loses_no_text(client: EngineClient) -> None:
    request = generate(client, "many:5000")
    events = client.stream(request)
    first = await anext(events)
    await heard(client, "say:in between")  # meanwhile the other events arrive, unread
    rest = [event async for event in events]
    text = "".join(event.text for event in [first, *rest] if isinstance(event, Piece))
    assert text == "".join(f"{number} " for number in range(5000))
    assert isinstance(rest[-1], Finished)


# --- death --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "said"),
    [("-9", "memory ran out"), ("-11", "crashed (SIGSEGV)"), ("-15", "ended by SIGTERM"), ("3", "exit status 3")],
)
async def test_death_in_the_middle_of_an_answer(client: EngineClient, how: str, said: str) -> None:
    events = client.stream(generate(client, f"die:{how}"))
    piece = await anext(events)
    assert isinstance(piece, Piece) and piece.text == "last words"
    with pytest.raises(EngineDied) as caught:
        await anext(events)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not client.running and client.pid is None
    with pytest.raises(EngineDied):
        await client.send(Cancel(id=1, target=2))
    with pytest.raises(EngineDied):
        await heard(client, "say:x")
    await client.start()
    assert len(await heard(client, "say:again")) == 2


async def test_everybody_who_waits_hears_of_the_death(client: EngineClient) -> None:
    waiting = [client.stream(generate(client, "wait:")) for _ in range(3)]
    for events in waiting:
        await anext(events)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    for events in waiting:
        with pytest.raises(EngineDied, match="SIGKILL"):
            await anext(events)


async def test_garbage_on_the_pipe_ends_the_engine(client: EngineClient) -> None:
    pid = client.pid
    events = client.stream(generate(client, "garbage:"))
    assert isinstance(await anext(events), Piece)
    with pytest.raises(EngineDied, match="could not be read"):
        await anext(events)
    assert pid is not None and not psutil.pid_exists(pid)


async def test_an_engine_that_closes_its_pipe_is_not_said_to_lack_memory(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_links, "_END_WAIT_S", 0.1)
    with pytest.raises(EngineDied, match="closed its output") as raised:
        await heard(client, "mute:")
    assert "memory" not in str(raised.value)


async def test_whatever_goes_wrong_while_reading_ends_in_a_word(client: EngineClient) -> None:
    def fail(notice: Notice) -> None:
        raise KeyError("a screen that is gone")

    events = client.stream(generate(client, "wait:"))
    await anext(events)
    client.on_notice = fail
    with pytest.raises(EngineDied, match=r"KeyError.* and was stopped"):
        await heard(client, "notice:x")
    with pytest.raises(EngineDied):
        await anext(events)


async def test_words_that_no_frame_can_hold_are_refused_and_the_engine_goes_on(client: EngineClient) -> None:
    [refused] = await heard(client, "say:half a pair \ud800")
    assert isinstance(refused, Failed) and refused.kind == "bad-input"
    assert "surrogates" in refused.error
    assert len(await heard(client, "say:again")) == 2


def test_closing_that_is_cancelled_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))

    async def cancelled_while_closing() -> None:
        client = EngineClient(command("deaf"))
        await client.start()
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0.02)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing

    asyncio.run(cancelled_while_closing())
    gc.collect()
    assert not [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]
    assert own_children() == []


async def test_death_is_seen_though_something_still_holds_the_pipe(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_links, "_END_WAIT_S", 0.1)
    events = client.stream(generate(client, "orphan:"))
    piece = await anext(events)
    assert isinstance(piece, Piece)
    with pytest.raises(EngineDied, match="exit status 3"):
        await anext(events)
    os.kill(int(piece.text), signal.SIGKILL)


@pytest.mark.parametrize(("script", "said"), [("no-hello", "exit status 1"), ("other-version", "protocol"), ("", "")])
async def test_an_engine_that_does_not_come_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    client = EngineClient(command(script) if script else ["/nowhere/python"])
    with pytest.raises(EngineDied, match=said or "could not be started"):
        await client.start()
    assert not client.running
    await client.close()
    if script == "no-hello":
        assert "cannot import anything" in (tmp_path / "logs" / "engine.log").read_text()


async def test_an_engine_that_never_says_hello(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    monkeypatch.setattr(engine_links, "_HELLO_WAIT_S", 0.05)
    monkeypatch.setattr(engine_links, "_END_WAIT_S", 0.05)
    client = EngineClient(["sleep", "60"])
    with pytest.raises(EngineDied, match="did not answer"):
        await client.start()
    assert own_children() == []


async def test_a_start_that_is_given_up_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    client = EngineClient(["sleep", "60"])
    start = asyncio.create_task(client.start())
    while not own_children():  # noqa: ASYNC110 (there is no event for a process that appears)
        await asyncio.sleep(0.01)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert own_children() == []


# --- the end ------------------------------------------------------------------------------------------------------


async def test_close_ends_the_process_and_what_was_asked(client: EngineClient) -> None:
    pid = client.pid
    events = client.stream(generate(client, "wait:"))
    await anext(events)
    await client.close()
    await client.close()
    assert pid is not None and not psutil.pid_exists(pid) and not client.running
    with pytest.raises(EngineDied, match="closed"):
        await anext(events)
    with pytest.raises(EngineDied, match="not running"):
        await client.send(Cancel(id=1, target=2))


async def test_an_engine_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    monkeypatch.setattr(engine_links, "_END_WAIT_S", 0.05)
    client = EngineClient(command("deaf"))
    await client.start()
    pid = client.pid
    await client.close()
    assert pid is not None and not psutil.pid_exists(pid)


async def test_kill_is_at_once(client: EngineClient) -> None:
    events = client.stream(generate(client, "wait:"))
    await anext(events)
    client.kill()
    with pytest.raises(EngineDied):
        await anext(events)
    client.kill()


async def test_a_log_that_cannot_be_written_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file where the folder belongs")
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    client = EngineClient(command())
    await client.start()
    *_, done = [event async for event in client.stream(Pull(id=client.new_id(), model="m"))]
    assert isinstance(done, Done) and done.id == 1
    await client.close()


def test_somebodys_folder_named_engine_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit(77)")
    program = "import asyncio; from app.engine_client import EngineClient\n" \
        "async def main():\n    client = EngineClient()\n    await client.start()\n    await client.close()\n" \
        "asyncio.run(main())"  # fmt: skip
    environment = {**os.environ, "PRIVATELLM_HOME": str(tmp_path / "home")}
    result = subprocess.run(
        [sys.executable, "-P", "-c", program],
        check=False,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("code", [*range(-64, 4), 255])
def test_every_way_to_end_has_its_sentence(code: int) -> None:
    sentence = how_it_ended(code)
    assert sentence.endswith(".") and "\n" not in sentence


@pytest.fixture(autouse=True)
def _children_before() -> None:
    remember_children()
