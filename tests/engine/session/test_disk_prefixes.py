"""What was read is kept between runs: the same bits as without a restart, and nothing that should not be there."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.ipc.messages import Finished, ForgetPrefixes, Generate, Load, Loaded, Prefill, Sampling
from engine.models.store import prefix_files
from engine.models.store.prefix_files import prefix_folder
from engine.moe.kernels.bindings import choose
from engine.runtimes import runtime_named
from engine.runtimes.protocol import LoadedModel
from engine.session import disk_prefixes, stored_prefix, turn_cache
from engine.session.origins import Origins
from engine.session.prefix_cache import CHECKPOINT_TAIL
from engine.session.session import Session
from tests.engine.engine_process import EngineProcess
from tests.support.controls import Nobody
from tests.support.random_examples import examples

CASES = [("torch", "qwen3_moe", "float32", "auto"), ("torch", "minimax", "float32", "auto")]
if choose("bfloat16").native:
    CASES += [
        ("native", "qwen3_moe", "bfloat16", "auto"),
        ("native", "qwen3_moe", "float32", "auto"),
        ("native", "qwen3_moe", "bfloat16", "q8_0"),
        ("native", "qwen3_5_text", "bfloat16", "auto"),
    ]
if importlib.util.find_spec("mlx_lm") is not None:
    CASES += [("mlx", "qwen3_moe", "bfloat16", "auto"), ("mlx", "qwen3_5_text", "bfloat16", "auto")]
GREEDY = Sampling(temperature=0.0)
DRAWN = Sampling(temperature=1.0)
"""Without a seed, so that a prompt may be read in any way."""
IDENTITY = "ab" * 32
PROMPT = [(7 * place + place // 9) % 90 + 3 for place in range(150)]
"""Longer than the first page of keys, and no whole number of blocks."""


class Run:
    """One run of the engine with a model that stays loaded: what was asked, and what is kept."""

    def __init__(self, model: LoadedModel, limit: int = 1 << 30, identity: str = IDENTITY) -> None:
        self.session = Session(
            model, None, ends=(), defaults={}, prefill_chunk=24, prefix_disk_bytes=limit, identity=identity
        )
        self.emitted: list[Any] = []

    def ask(self, prompt: list[int], conversation: str = "chat1", tokens: int = 6, **options: Any) -> Finished:
        options.setdefault("sampling", GREEDY)
        request = Generate(id=1, prompt_ids=prompt, max_tokens=tokens, conversation=conversation, **options)
        return self.session.generate(request, self.emitted.append, Nobody())

    def keep(self, *, last: bool = False) -> list[str]:
        return self.session.keep_prefixes(lambda: False, last=last)

    @property
    def cached(self) -> tuple[list[int], Origins, bytes]:
        """The tokens in the cache, their origins, and what the next pass makes of them."""
        now = self.session._cache._latest
        assert now.rows is not None
        after = now.rows.fan_out(1)
        return list(now.tokens), now.origins, after.step([11]).tobytes()


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[LoadedModel]:
    runtime, family, dtype, key_values = request.param
    options = {"head_dim": 32} if key_values == "q8_0" else {}
    folder = tiny_model(family, dtype=dtype, eos_token_id=None, **options)
    load = Load(id=1, model="tiny", runtime=runtime, dtype=dtype, key_values=key_values, cpu_threads=1)
    loaded = runtime_named(runtime).load(folder, load, lambda *_: None)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[..., Path]) -> Iterator[LoadedModel]:
    """One model, for what does not depend on it."""
    load = Load(id=1, model="tiny", runtime="torch", dtype="float32", cpu_threads=1)
    loaded = runtime_named("torch").load(tiny_model("qwen3_moe", eos_token_id=None), load, lambda *_: None)
    yield loaded
    loaded.close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    return tmp_path


def files() -> list[Path]:
    return sorted(prefix_folder().glob("*")) if prefix_folder().exists() else []


def reused(run: Run) -> int:
    return next(event.reused for event in run.emitted if isinstance(event, Prefill))


@pytest.mark.sampled
def test_a_chat_goes_on_after_a_restart_as_without_one(model: LoadedModel) -> None:
    first = Run(model)
    answer = first.ask(PROMPT)
    first.keep()
    longer = [*PROMPT, *answer.token_ids[:-1], *range(40, 60)]
    restarted = Run(model)
    restarted.ask(longer, tokens=1, sampling=DRAWN)
    first.emitted.clear()
    first.ask(longer, tokens=1, sampling=DRAWN)
    assert reused(first) == reused(restarted) == len(PROMPT) + len(answer.token_ids) - 1
    assert restarted.cached == first.cached


@pytest.mark.sampled
def test_a_repeated_question_is_answered_at_once_with_the_same_bits(model: LoadedModel) -> None:
    first = Run(model)
    answer = first.ask(PROMPT, tokens=1)
    first.keep()
    restarted = Run(model)
    again = restarted.ask(PROMPT, tokens=1)
    assert again.token_ids == answer.token_ids and again.prefilled_tokens == 0
    assert restarted.cached == first.cached


@pytest.mark.sampled
def test_an_answer_that_can_be_repeated_does_not_depend_on_the_disk(model: LoadedModel) -> None:
    first = Run(model)
    answer = first.ask(PROMPT)
    longer = [*PROMPT, *answer.token_ids[:-1], *range(40, 60)]
    without = Run(model, limit=0)
    expected = without.ask(longer, logprobs=3)
    first.keep()
    restarted = Run(model)
    found = restarted.ask(longer, logprobs=3)
    assert found.token_ids == expected.token_ids
    if model.facts.runtime == "native":
        assert found.samples == expected.samples and restarted.cached == without.cached
    # The first prompt is reused, which was read; of a row with a state what lies before its checkpoint, if it has one.
    row = model.start()
    saved = 0 if row.checkpoint() is None else len(PROMPT) - CHECKPOINT_TAIL
    assert reused(restarted) == (len(PROMPT) if row.can_truncate else saved)


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="mlx is not installed")
def test_a_row_that_forgot_goes_on_after_a_restart_and_is_not_cut_further_back(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_cache, "CUT_BACK_TOKENS", 64)
    load = Load(id=1, model="tiny", runtime="mlx", dtype="float32")
    model = runtime_named("mlx").load(tiny_model("gpt_oss", eos_token_id=None), load, lambda *_: None)
    prompt = [(7 * place + place // 9) % 90 + 3 for place in range(400)]
    first = Run(model)
    answer = first.ask(prompt)
    first.keep()
    (path,) = files()
    stored = stored_prefix.open_prefix(path, IDENTITY, model.facts.vocabulary)
    assert stored.fields.shortest_cut == 336 - 64
    longer, other = [*prompt[:390], 9, 8, 7], [*prompt[:260], 9, 8, 7]
    for asked, expected in ((longer, 390), (other, 0)):
        again = Run(model)
        found, without = again.ask(asked), Run(model, limit=0).ask(asked)
        assert found.token_ids == without.token_ids and reused(again) == expected
        assert stored.reusable(np.array(asked), None) == expected
    assert Run(model).ask(prompt).token_ids == answer.token_ids
    model.close()


def test_nothing_of_another_conversation_is_in_a_file(model: LoadedModel) -> None:
    """Rows are cut back and go on with other words. The places behind those still hold the former ones."""
    if not model.start().can_truncate:
        pytest.skip("such rows are never cut back")
    common = PROMPT[:24]
    clean, used = Run(model), Run(model)
    used.ask([*common, *range(60, 85)], conversation="")
    for run, name in ((clean, "chat1"), (used, "chat2")):
        run.ask([*common, 17, 19, 23, 29, 31, 37, 41, 43, 47], conversation=name, tokens=1)
        assert run.session._cache._latest.origins == Origins([33])
        run.keep()
    assert len(files()) == 2
    one, other = (path.read_bytes() for path in files())
    assert one == other


def test_only_the_owner_can_read_the_files(plain: LoadedModel) -> None:
    run = Run(plain)
    os.umask(0)
    run.ask(PROMPT)
    assert run.keep() == []
    (path,) = files()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_without_a_name_nothing_is_written(plain: LoadedModel) -> None:
    run = Run(plain)
    run.ask(PROMPT, conversation="")
    run.keep(last=True)
    assert files() == []
    with pytest.raises(ModelError, match="no name of a conversation"):
        run.ask(PROMPT, conversation="../../chat1")


def test_a_row_is_written_again_when_it_has_grown(plain: LoadedModel) -> None:
    run = Run(plain)
    long = [*PROMPT, *PROMPT]
    run.ask(long, tokens=1)
    run.keep()
    (path,) = files()
    before = path.read_bytes()
    run.ask([*long, *range(3, 39)], tokens=1, sampling=DRAWN)
    run.keep()
    assert path.read_bytes() == before, "it has grown by less than an eighth"
    run.keep(last=True)
    assert path.read_bytes() != before and len(run.session.cached_tokens) == 336
    before = path.read_bytes()
    run.ask([*long, *range(3, 90)], tokens=1, sampling=DRAWN)
    run.keep()
    assert files() == [path] and path.read_bytes() != before


def test_a_conversation_that_begins_a_longer_one_is_not_there_twice(plain: LoadedModel) -> None:
    for prompt in (PROMPT[:96], PROMPT):
        run = Run(plain, limit=1 << 30)
        run.session._disk._known = list  # type: ignore[union-attr, method-assign]
        run.ask(prompt)
        del run.session._disk._known  # type: ignore[union-attr]
        run.keep()
    assert len(files()) == 2, "the answers differ"
    run.ask([*PROMPT[:96], *range(60, 85)], conversation="chat2")
    run.keep()
    assert [path.name.split("-")[0] for path in files()] == ["chat1", "chat1", "chat2"]


def test_the_least_recently_used_make_room(plain: LoadedModel) -> None:
    run = Run(plain)
    times = []
    for number in range(3):
        run.ask([number + 5, *PROMPT], conversation=f"chat{number}")
        run.keep()
        times.append(max(path.stat().st_mtime_ns for path in files()))
    size = max(path.stat().st_size for path in files())
    for place, path in enumerate(files()):
        os.utime(path, ns=(place * 10**9, place * 10**9))
    # chat0 is used again, so chat1 goes first.
    other = Run(plain, limit=3 * size + 5000)
    other.ask([5, *PROMPT], conversation="chat0")
    other.ask([90, *PROMPT], conversation="serve")
    other.keep()
    assert sorted({path.name.split("-")[0] for path in files()}) == ["chat0", "chat2", "serve"]
    assert sum(path.stat().st_size for path in files()) <= 3 * size + 5000
    tiny = Run(plain, limit=size // 2)
    tiny.ask([70, *PROMPT])
    assert tiny.keep() == [] and len(files()) == 3, "what does not fit at all removes nothing"


def test_the_number_of_files_has_a_limit(plain: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_prefixes, "MOST_FILES", 2)
    run = Run(plain)
    for number in range(4):
        run.ask([number + 5, *PROMPT[:40]], conversation=f"chat{number}")
        run.keep()
    assert len(files()) == 2


def test_a_deleted_conversation_is_not_written_again(plain: LoadedModel) -> None:
    run = Run(plain)
    run.ask(PROMPT, conversation="chat1")
    run.ask([5, *PROMPT], conversation="chat2")
    run.keep()
    run.session.forget_prefixes(["chat1"])
    run.session.forget_prefixes(["chat2"])
    assert files() == []
    run.keep(last=True)
    assert files() == []
    run.ask([*PROMPT, 9, 9, 9], conversation="chat1", sampling=DRAWN)
    run.keep()
    assert [path.name.split("-")[0] for path in files()] == ["chat1"], "it was brought back, and asked again"


def test_a_conversation_that_is_deleted_while_it_is_written_leaves_nothing(plain: LoadedModel) -> None:
    run = Run(plain)
    run.ask(PROMPT)
    asked = iter(range(100))

    def in_the_middle() -> bool:
        if next(asked) == 3:
            run.session.forget_prefixes(["chat1"])
        return False

    run.session.keep_prefixes(in_the_middle)
    assert next(asked) > 3 and files() == []
    run.keep(last=True)
    assert files() == []


def test_writing_ends_when_something_is_to_be_done(plain: LoadedModel) -> None:
    run = Run(plain)
    run.ask(PROMPT)
    for looks in range(6):
        asked = iter([False] * looks)
        run.session.keep_prefixes(lambda asked=asked: next(asked, True))  # type: ignore[misc]
        assert files() == []
    run.keep()
    assert len(files()) == 1


def test_a_full_disk_is_said_once(plain: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(plain)
    first = run.ask(PROMPT)

    def full(file: Any, data: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(stored_prefix, "_write_all", full)
        (said,) = run.keep()
        assert "cannot be kept on disk: No space left on device" in said
        run.ask([5, *PROMPT], conversation="chat2")
        assert run.keep() == [] and files() == []
        assert run.ask(PROMPT).token_ids == first.token_ids
    run.ask([6, *PROMPT], conversation="chat3")
    assert run.keep() == [] and len(files()) == 1


def test_another_model_does_not_use_it(plain: LoadedModel, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(plain)
    run.ask(PROMPT)
    run.keep()
    (path,) = files()
    other = Run(plain, identity="cd" * 32)
    other.ask(PROMPT)
    assert reused(other) == 0 and files() == [path]
    # Under this name it belongs here, but it does not.
    path.rename(path.with_name(path.name.replace(IDENTITY[:16], "cd" * 8)))
    other = Run(plain, identity="cd" * 32)
    other.ask(PROMPT)
    assert reused(other) == 0 and files() == []
    assert capfd.readouterr().err.count("cannot be used and is removed: it is of another model.") == 1


def test_what_is_no_file_of_ours_is_not_read(plain: LoadedModel, tmp_path: Path) -> None:
    run = Run(plain)
    run.ask(PROMPT)
    run.keep()
    (path,) = files()
    content = path.read_bytes()
    secret = tmp_path / "elsewhere"

    def linked() -> None:
        secret.write_bytes(content)
        secret.chmod(0o600)
        path.symlink_to(secret)

    def fifo() -> None:
        os.mkfifo(path, 0o600)

    def readable() -> None:
        path.write_bytes(content)
        path.chmod(0o644)

    for spoil in (linked, fifo, readable):
        path.unlink()
        spoil()
        after = Run(plain)
        after.ask(PROMPT)
        assert reused(after) == 0 and files() == []
        path.write_bytes(b"")
    assert secret.exists()


@pytest.fixture(scope="module")
def written(plain: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes, list[int]]:
    """The name and the contents of a file, and the tokens of its answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIVATELLM_HOME", str(tmp_path_factory.mktemp("home")))
        run = Run(plain)
        answer = run.ask(PROMPT[:60])
        run.keep()
        (path,) = files()
        return path.name, path.read_bytes(), answer.token_ids


def put(name: str, content: bytes) -> Path:
    path = prefix_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(0o600)
    return path


@pytest.mark.soak
@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_removed(
    plain: LoadedModel, written: tuple[str, bytes, list[int]], data: st.DataObject
) -> None:
    name, content, answer = written
    damaged = bytearray(content)
    match data.draw(st.sampled_from(["bit", "cut", "more", "header"])):
        case "bit":
            damaged[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del damaged[data.draw(st.integers(0, len(content) - 1)) :]
        case "more":
            damaged += data.draw(st.binary(min_size=1, max_size=9))
        case "header":
            place = data.draw(st.integers(0, 900))
            eight = data.draw(st.binary(min_size=8, max_size=8).filter(lambda eight: eight not in content))
            damaged[place : place + 8] = eight
    path = put(name, bytes(damaged))
    run = Run(plain)
    found = run.ask(PROMPT[:60])
    assert found.token_ids == answer
    # What differs in its tokens is not read for this prompt, so its damage is not seen.
    assert reused(run) == 0 or bytes(damaged) == content
    if path.exists():
        run.session._cache.forget()
        assert run.session._disk.better(header_tokens(path), None, 0, lambda: False) is None  # type: ignore[union-attr]
    assert not path.exists()


def header_tokens(path: Path) -> list[int]:
    return [int(token) for token in stored_prefix.open_prefix(path, IDENTITY, 10**9).tokens]


@pytest.mark.soak
@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_lie_with_a_right_checksum_is_refused(
    plain: LoadedModel, written: tuple[str, bytes, list[int]], data: st.DataObject
) -> None:
    """Headers that somebody made by hand: nothing fails, and no memory is taken for what is not there."""
    name, content, answer = written
    begin = len(stored_prefix.MAGIC) + 4
    length = int.from_bytes(content[begin - 4 : begin], "little")
    header = msgspec.msgpack.decode(content[begin : begin + length])
    number = st.integers(-3, 70) | st.integers(-(2**63), 2**63 - 1)
    part = st.sampled_from(header["parts"]) | st.tuples(
        st.sampled_from(["0 keys", "1 values", "9 keys", "0 recurrent", "logits", "²"]),
        st.sampled_from(["float32", "uint8", "object"]),
        st.lists(number, max_size=5),
    )
    field = data.draw(st.sampled_from(["tokens", "runs", "known", "begun", "can_truncate", "parts"]))
    wrong = {
        "tokens": st.binary(max_size=300),
        "runs": st.lists(number, max_size=6),
        "known": number,
        "begun": st.lists(number, max_size=3),
        "can_truncate": st.just(False),
        "parts": st.lists(part, max_size=8),
    }[field]
    header[field] = data.draw(wrong.filter(lambda value: value != header[field]))
    packed = msgspec.msgpack.encode(header)
    body = stored_prefix.MAGIC + len(packed).to_bytes(4, "little") + packed + content[begin + length : -32]
    path = put(name, body + hashlib.blake2b(body, digest_size=32).digest())
    run = Run(plain)
    found = run.ask(PROMPT[:60])
    if field in ("runs", "known", "can_truncate"):
        assert len(found.token_ids) == len(answer)  # other borders may give other bits
    else:
        assert found.token_ids == answer
    if field in ("parts", "begun"):
        assert not path.exists()


def test_a_row_that_fails_at_once_is_removed(plain: LoadedModel, written: tuple[str, bytes, list[int]]) -> None:
    """Of other heads than the model's, in as many bytes: only a pass can tell."""
    name, content, answer = written
    begin = len(stored_prefix.MAGIC) + 4
    length = int.from_bytes(content[begin - 4 : begin], "little")
    header = msgspec.msgpack.decode(content[begin : begin + length])
    for each in header["parts"][:-1]:
        one, heads, tokens, width = each[2]
        each[2] = [one, heads // 2, tokens, width * 2]
    packed = msgspec.msgpack.encode(header)
    body = stored_prefix.MAGIC + len(packed).to_bytes(4, "little") + packed + content[begin + length : -32]
    path = put(name, body + hashlib.blake2b(body, digest_size=32).digest())
    run = Run(plain)
    with pytest.raises(RuntimeError):
        run.ask([*PROMPT[:60], 5], sampling=DRAWN)
    assert not path.exists()
    assert run.ask(PROMPT[:60]).token_ids == answer


def test_what_ended_processes_were_writing_is_removed(plain: LoadedModel) -> None:
    gone = next(pid for pid in range(2**22 - 1, 0, -1) if not Path(f"/proc/{pid}").exists())
    left = put(f"chat1-{'0' * 16}-{'1' * 16}.prefix.{gone}.part", b"x")
    being_written = put(f"chat1-{'0' * 16}-{'1' * 16}.prefix.{os.getppid()}.part", b"x")
    stranger = put("notes.txt", b"x")
    Run(plain)
    assert files() == [being_written, stranger] and not left.exists()
    prefix_files.remove_prefixes()
    assert files() == [stranger]


def test_a_prompt_that_is_barely_known_is_run(plain: LoadedModel) -> None:
    run = Run(plain)
    run.ask(PROMPT[:48])
    run.keep()
    other = Run(plain)
    other.ask([*PROMPT[:24], *range(60, 80)])
    assert reused(other) == 0


def test_a_row_for_which_no_memory_is_free_is_not_read(plain: LoadedModel) -> None:
    run = Run(plain)
    run.ask(PROMPT)
    run.keep()
    other = Run(plain)
    other.session._disk._memory = lambda: 1000  # type: ignore[union-attr]
    other.ask(PROMPT)
    assert reused(other) == 0 and len(files()) == 1


def test_tokens_are_compared_as_they_are(plain: LoadedModel, written: tuple[str, bytes, list[int]]) -> None:
    path = put(written[0], written[1])
    found = stored_prefix.open_prefix(path, IDENTITY, plain.facts.vocabulary)
    for length in (0, 1, 59, 60):
        assert found.shared(np.array([*PROMPT[:length], 2], np.int32)) == length
    assert found.shared(np.array([], np.int32)) == 0


def test_an_engine_goes_on_where_another_one_ended(home: Path, tiny_model: Callable[..., Path]) -> None:
    """Written after an answer, and what was added in the end when the engine ends; read by the next engine."""
    load = Load(id=1, model=str(tiny_model("qwen3_moe", eos_token_id=None)), prefix_disk_bytes=1 << 30)

    def ask(engine: EngineProcess, prompt: list[int]) -> tuple[Finished, int]:
        events = engine.ask(Generate(id=2, prompt_ids=prompt, max_tokens=40, conversation="chat1", sampling=DRAWN))
        finished = events[-1]
        assert isinstance(finished, Finished)
        return finished, next(event.reused for event in events if isinstance(event, Prefill))

    with EngineProcess(home) as engine:
        assert isinstance(engine.ask(load)[-1], Loaded)
        answer, _ = ask(engine, PROMPT)
    assert len(files()) == 1
    with EngineProcess(home) as engine:
        engine.ask(load)
        prompt = [*PROMPT, *answer.token_ids, 5]
        _, reused = ask(engine, prompt)
        assert reused == len(prompt) - 2, "the last token of an answer was not run"
        engine.send(ForgetPrefixes(id=9, conversations=["chat1"]))
        ask(engine, [9, *PROMPT])
    assert [path.name.split("-")[0] for path in files()] == ["chat1"], "only what was asked afterwards"
    with EngineProcess(home) as engine:
        engine.ask(msgspec.structs.replace(load, prefix_disk_bytes=None))
        assert len(files()) == 1
        assert isinstance(engine.ask(msgspec.structs.replace(load, id=3, prefix_disk_bytes=0))[-1], Loaded)
        assert not prefix_folder().exists()
