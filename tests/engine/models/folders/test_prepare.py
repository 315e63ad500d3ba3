"""Preparing a model: taken up after being killed at any point, bounded memory, full disks, and nothing overwritten."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from engine.errors import Cancelled, ModelError
from engine.models.folders import model_folder
from engine.models.folders import prepare as preparing
from engine.models.folders.model_folder import JOURNAL
from engine.models.folders.opening import open_model
from engine.models.folders.prepare import needs_preparing, prepare, read_prepared, verify
from engine.models.formats.mapped_file import MappedFile
from engine.models.formats.safetensors_files import encode_header
from engine.models.store.gguf_folder import open_gguf
from engine.pictures.folders import read_sight, tower_tensors
from tests.support.old_bank import write_old_bank
from tests.support.opened_experts import experts_of
from tests.support.progress import quiet
from tests.support.tiny_families import TINY_MOE_FAMILIES
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_seeing import write_tiny_seeing

pytestmark = pytest.mark.usefixtures("home")


TinyModel = Callable[..., Path]
TRUNK, *OF_LAYERS = (f"model-{number:05}-of-00004.safetensors" for number in range(1, 5))
"""Files of a prepared model of three layers."""


@pytest.fixture
def source(tiny_model: TinyModel) -> Path:
    return tiny_model("mixtral", dtype="bfloat16")


def partial(destination: Path) -> Path:
    return destination.with_name(destination.name + ".partial")


def assert_equal_models(mine: Path, theirs: Path) -> None:
    ours, others = open_model(mine), open_model(theirs)
    assert read_prepared(mine) is not None
    assert {n: t.words.tobytes() for n, t in ours.trunk()} == {n: t.words.tobytes() for n, t in others.trunk()}
    assert ours.experts is not None and others.experts is not None
    assert ours.experts.layers == others.experts.layers
    for layer in ours.experts.layers:
        for expert in range(ours.experts.count):
            one, two = ours.experts.expert(layer, expert), others.experts.expert(layer, expert)
            assert all(np.array_equal(getattr(one, p).words, getattr(two, p).words) for p in ("gate", "up", "down"))


# --- what is written ----------------------------------------------------------------------------------------------


def test_a_prepared_folder_is_complete_and_clean(source: Path, tmp_path: Path):
    plain = Path(shutil.copytree(source, tmp_path / "plain"))
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer.model", "LICENSE", "LICENSE.txt"):
        (plain / name).write_text(name)
    (plain / "pytorch_model.bin").write_text("never copied")
    (plain / "modeling_x.py").write_text("never copied")
    seen: list[tuple[str, int, int, str]] = []
    prepare(plain, tmp_path / "bank", lambda *step: seen.append(step))
    assert sorted(path.name for path in (tmp_path / "bank").iterdir()) == [
        "LICENSE", "LICENSE.txt", "chat_template.jinja", "config.json", "generation_config.json",
        "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors", "model-00003-of-00004.safetensors",
        "model-00004-of-00004.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer.model",
    ]  # fmt: skip
    assert not partial(tmp_path / "bank").exists()
    assert (tmp_path / "bank" / "tokenizer.json").read_text() == "tokenizer.json"
    assert_equal_models(tmp_path / "bank", plain)
    verify(tmp_path / "bank")
    totals = {total for _, _, total, _ in seen}
    assert len(totals) == 1
    done = [count for _, count, _, _ in seen]
    assert done == sorted(done)
    assert done[-1] == totals.pop()
    assert {unit for *_, unit in seen} == {"bytes"}
    assert {stage for stage, *_ in seen} == {"writing the trunk", "writing experts", "prepared"}


@pytest.mark.parametrize(
    ("family", "needed", "why"),
    [
        ("llama", False, "no routed experts"),
        ("mixtral", False, "as they are used"),
        ("granitemoe", False, "as they are used"),
        ("gpt_oss", True, "strides"),
        ("llama4_text", True, "strides"),
        ("dbrx", True, "strides"),
    ],
)
def test_which_folders_gain_by_it(tiny_model: TinyModel, family: str, needed: bool, why: str):
    answer, reason = needs_preparing(tiny_model(family))
    assert answer == needed
    assert why in reason


def test_what_is_prepared_gains_nothing(source: Path, tmp_path: Path):
    prepare(source, tmp_path / "bank", quiet)
    assert needs_preparing(tmp_path / "bank") == (False, "It is prepared already.")
    with pytest.raises(ModelError, match="prepared already"):
        prepare(tmp_path / "bank", tmp_path / "again", quiet)


def test_what_sees_is_kept(tmp_path: Path):
    source = write_tiny_seeing(tmp_path / "source", "qwen3_vl_moe")
    prepare(source, tmp_path / "bank", quiet)
    assert_equal_models(tmp_path / "bank", source)
    sights = [read_sight(folder) for folder in (source, tmp_path / "bank")]
    assert sights[0] is not None and sights[0] == sights[1]
    before, after = (tower_tensors(folder, sights[0]) for folder in (source, tmp_path / "bank"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        (one,), (two,) = tensor.entries, after[name].entries
        found = MappedFile(after[name].path).tensor(two.dtype, two.shape, two.start)
        np.testing.assert_array_equal(
            found.words, MappedFile(tensor.path).tensor(one.dtype, one.shape, one.start).words
        )


def test_a_dense_model_is_not_prepared(tiny_model: TinyModel, tmp_path: Path):
    with pytest.raises(ModelError, match="nothing to prepare"):
        prepare(tiny_model("llama"), tmp_path / "bank", quiet)
    assert not (tmp_path / "bank").exists()


# --- doing it again -----------------------------------------------------------------------------------------------


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def test_a_sound_bank_is_only_checked(source: Path, tmp_path: Path):
    prepare(source, tmp_path / "bank", quiet)
    before = identities(tmp_path / "bank")
    stages: list[str] = []
    prepare(source, tmp_path / "bank", lambda stage, *_: stages.append(stage))
    assert identities(tmp_path / "bank") == before
    assert set(stages) == {"checking"}


def test_a_damaged_bank_is_written_again(source: Path, tmp_path: Path):
    prepare(source, tmp_path / "bank", quiet)
    (tmp_path / "bank" / OF_LAYERS[1]).write_bytes(b"damage")
    prepare(source, tmp_path / "bank", quiet)
    assert_equal_models(tmp_path / "bank", source)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".partial") == []


def test_a_bank_of_a_changed_source_is_written_again(source: Path, tiny_model: TinyModel, tmp_path: Path):
    plain = Path(shutil.copytree(source, tmp_path / "plain"))
    prepare(plain, tmp_path / "bank", quiet)
    other = tiny_model("mixtral", dtype="bfloat16", seed=7)
    shutil.copy(other / "model.safetensors", plain / "model.safetensors")
    prepare(plain, tmp_path / "bank", quiet)
    assert_equal_models(tmp_path / "bank", other)


def test_an_open_bank_stays_readable_while_it_is_replaced(source: Path, tmp_path: Path):
    plain = Path(shutil.copytree(source, tmp_path / "plain"))
    prepare(plain, tmp_path / "bank", quiet)
    experts = experts_of(tmp_path / "bank")
    before = experts.expert(0, 0).gate.words.tobytes()
    os.utime(plain / "model.safetensors")
    prepare(plain, tmp_path / "bank", quiet)
    assert experts.expert(0, 0).gate.words.tobytes() == before
    with pytest.raises(ModelError, match="was changed"):
        experts.check_unchanged()


def test_a_persons_own_folder_is_not_written_over(source: Path, tmp_path: Path):
    destination = tmp_path / "thesis"
    destination.mkdir()
    (destination / "chapter1.txt").write_text("irreplaceable")
    with pytest.raises(ModelError, match="is not a prepared model"):
        prepare(source, destination, quiet)
    (tmp_path / "file").write_text("irreplaceable")
    with pytest.raises(ModelError, match="is not a prepared model"):
        prepare(source, tmp_path / "file", quiet)
    with pytest.raises(ModelError, match="written over it"):
        prepare(source, source, quiet)
    assert (destination / "chapter1.txt").read_text() == "irreplaceable"


def test_two_processes_do_not_write_the_same_bank(source: Path, tmp_path: Path):
    with model_folder.exclusive(tmp_path / "bank"), pytest.raises(ModelError, match="already working on bank"):
        prepare(source, tmp_path / "bank", quiet)


# --- stopping and being killed ------------------------------------------------------------------------------------


def stop_after(calls: int) -> Callable[[], bool]:
    left = iter(range(calls))
    return lambda: next(left, None) is None


def test_stopping_keeps_what_is_finished(source: Path, tmp_path: Path):
    destination = tmp_path / "bank"
    with pytest.raises(Cancelled, match="with 1 of 3 layers finished"):
        prepare(source, destination, quiet, should_stop=lambda: finished_layers(destination) == 1)
    assert not destination.exists()
    with pytest.raises(ModelError, match="has no config"):
        open_model(partial(destination))
    before = identities(partial(destination))
    prepare(source, destination, quiet)
    after = identities(destination)
    kept = {TRUNK, OF_LAYERS[0]}
    assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    assert_equal_models(destination, source)


def finished_layers(destination: Path) -> int:
    journal = partial(destination) / JOURNAL
    return sum(name in journal.read_text() for name in OF_LAYERS) if journal.exists() else 0


def test_stopping_at_any_time_leaves_nothing_wrong(source: Path, tmp_path: Path):
    calls = 0
    while True:
        destination = tmp_path / f"bank{calls}"
        try:
            prepare(source, destination, quiet, should_stop=stop_after(calls))
        except Cancelled:
            assert not destination.exists()
        else:
            assert_equal_models(destination, source)
            break
        calls += 5
    assert calls > 20


def test_what_was_damaged_in_between_is_not_taken_up(source: Path, tmp_path: Path):
    destination = tmp_path / "bank"
    with pytest.raises(Cancelled):
        prepare(source, destination, quiet, should_stop=lambda: finished_layers(destination) == 2)
    damaged = partial(destination) / OF_LAYERS[0]
    content = bytearray(damaged.read_bytes())
    content[1000] ^= 1
    damaged.write_bytes(content)
    with (partial(destination) / JOURNAL).open("ab") as journal:
        journal.write(b'{"file":"model-00004-of-')
    prepare(source, destination, quiet)
    assert_equal_models(destination, source)
    verify(destination)


def test_what_is_of_another_source_is_not_taken_up(source: Path, tiny_model: TinyModel, tmp_path: Path):
    destination = tmp_path / "bank"
    with pytest.raises(Cancelled):
        prepare(source, destination, quiet, should_stop=lambda: finished_layers(destination) == 2)
    other = tiny_model("mixtral", dtype="bfloat16", seed=7)
    prepare(other, destination, quiet)
    assert_equal_models(destination, other)


KILLED = """
import os, signal, sys
from pathlib import Path
from engine.models.folders.prepare import prepare
def counted(call):
    def wrapper(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return wrapper
for line in sys.stdin:
    left = int(line)
    pid = os.fork()
    if pid == 0:
        for name in ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        prepare(Path(sys.argv[1]), Path(sys.argv[2]), lambda *step: None)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""For every number that it reads, a forked process prepares, and kills itself at that change of the file system."""


@contextlib.contextmanager
def killing(source: Path, destination: Path) -> Iterator[Callable[[int], bool]]:
    """``kill(at)``: prepare in a process that is killed at its ``at``-th change of the file system; whether it was."""
    command = [sys.executable, "-c", KILLED, str(source), str(destination)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def kill(at: int) -> bool:
            print(at, file=stdin, flush=True)
            status = int(stdout.readline())
            assert status in (0, -signal.SIGKILL)
            return status != 0

        yield kill
        stdin.close()


@pytest.mark.soak
@pytest.mark.slow
def test_killed_at_every_change_of_the_file_system(source: Path, tmp_path: Path):
    destination, at = tmp_path / "bank", 1
    with killing(source, destination) as kill:
        while kill(at):
            for folder in (destination, partial(destination)):
                if opens(folder):
                    verify(folder)
            if at % 3 == 0:
                # Taken up where it was killed; the other times the next run is killed further on.
                prepare(source, destination, quiet)
                assert_equal_models(destination, source)
                assert not partial(destination).exists()
                shutil.rmtree(destination)
            at += 1
    assert at > 20
    assert_equal_models(destination, source)


@pytest.mark.soak
@pytest.mark.slow
def test_killed_while_replacing_a_bank(source: Path, tmp_path: Path):
    plain = Path(shutil.copytree(source, tmp_path / "plain"))
    destination, at = tmp_path / "bank", 1
    prepare(plain, destination, quiet)
    os.utime(plain / "model.safetensors", ns=(at, at))
    with killing(plain, destination) as kill:
        while kill(at * 4):
            for folder in (destination, partial(destination)):
                if opens(folder):
                    verify(folder)
            at += 1
            os.utime(plain / "model.safetensors", ns=(at, at))
    assert at > 2
    prepare(plain, destination, quiet)
    assert_equal_models(destination, source)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def opens(folder: Path) -> bool:
    try:
        open_model(folder)
    except ModelError:
        return False
    return True


# --- full and lying disks -----------------------------------------------------------------------------------------


def test_too_little_room_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"needs .* on the disk") as caught:
        prepare(source, tmp_path / "bank", quiet)
    assert caught.value.kind == "disk"
    assert not (tmp_path / "bank").exists()
    assert not list(partial(tmp_path / "bank").glob("*.safetensors*"))


def test_a_disk_that_fills_up_loses_nothing(source: Path, tmp_path: Path):
    """A limit on the size of files makes the third layer fail as a full disk does."""
    destination = tmp_path / "bank"
    with pytest.raises(Cancelled):
        prepare(source, destination, quiet, should_stop=lambda: finished_layers(destination) == 2)
    before = identities(partial(destination))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        with pytest.raises(ModelError, match=r"The disk is full.*make room.*goes on") as caught:
            prepare(source, destination, quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.kind == "disk"
    assert not destination.exists()
    names = sorted(path.name for path in partial(destination).glob("*.safetensors*"))
    assert names == [TRUNK, *OF_LAYERS[:2]]
    prepare(source, destination, quiet)
    after = identities(destination)
    assert {name: after[name] for name in names} == {name: before[name] for name in names}
    assert_equal_models(destination, source)


@pytest.mark.sampled
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_any_write_may_fail(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int):
    fsync, at, failed = os.fsync, 0, True
    while failed:
        at += 1
        failed, left = False, at
        destination = tmp_path / f"bank{at}"

        def failing(descriptor: int) -> None:
            nonlocal left, failed
            left -= 1
            if left == 0:
                failed = True
                raise OSError(code, os.strerror(code))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", failing)
        try:
            prepare(source, destination, quiet)
        except ModelError as error:
            assert error.kind == "disk"
            assert os.strerror(code) in str(error)
            assert ("The disk is full" in str(error)) == (code != errno.EIO)
            assert not list(partial(destination).rglob("*.part"))
            prepare(source, destination, quiet)
        assert_equal_models(destination, source)
    assert at > 20


def test_a_disk_that_does_not_keep_what_is_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def lose_a_bit(path: Path) -> None:
        if path.name == OF_LAYERS[1]:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    monkeypatch.setattr(preparing, "forget_cached", lose_a_bit)
    with pytest.raises(ModelError, match="does not read back as it was written") as caught:
        prepare(source, tmp_path / "bank", quiet)
    assert caught.value.kind == "disk"
    assert not (tmp_path / "bank").exists()
    monkeypatch.undo()
    prepare(source, tmp_path / "bank", quiet)
    assert_equal_models(tmp_path / "bank", source)


def test_a_source_that_changes_meanwhile_is_noticed(source: Path, tmp_path: Path):
    plain = Path(shutil.copytree(source, tmp_path / "plain"))

    def touch(stage: str, done: int, total: int, unit: str) -> None:
        os.utime(plain / "model.safetensors")

    with pytest.raises(ModelError, match="was changed while the model was open"):
        prepare(plain, tmp_path / "bank", touch)
    assert not (tmp_path / "bank").exists()


# --- memory -------------------------------------------------------------------------------------------------------

MEASURED = """
import json, sys
from pathlib import Path
from engine.models.folders.opening import open_model
from engine.models.folders.prepare import prepare
def rss(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(kind)).split()[1]) * 1024
start, peak = rss("RssAnon"), 0
def watch(stage, done, total, unit):
    global peak
    peak = max(peak, rss("RssAnon"))
prepare(Path(sys.argv[1]), Path(sys.argv[2]), watch)
prepared = peak - start
start, files = rss("RssAnon"), rss("RssFile")
experts = open_model(Path(sys.argv[2])).experts
checksum = 0
for layer in experts.layers:
    for expert in range(experts.count):
        weights = experts.expert(layer, expert)
        checksum += int(weights.gate_up.words[:, ::512].sum()) + int(weights.down.words[:, ::512].sum())
print(json.dumps({"prepare": prepared, "read": rss("RssAnon") - start, "files": rss("RssFile") - files}))
"""

HIDDEN, FFN, EXPERTS, LAYERS = 1024, 2048, 8, 2


def write_large_model(folder: Path, family: str) -> Path:
    """A model of 200 MB of experts, of which only names, shapes and bytes matter."""
    expert_tensors = {
        "mixtral": [
            (f"block_sparse_moe.experts.{expert}.{name}.weight", shape)
            for expert in range(EXPERTS)
            for name, shape in (("w1", (FFN, HIDDEN)), ("w2", (HIDDEN, FFN)), ("w3", (FFN, HIDDEN)))
        ],
        "llama4_text": [
            ("feed_forward.experts.gate_up_proj", (EXPERTS, HIDDEN, 2 * FFN)),
            ("feed_forward.experts.down_proj", (EXPERTS, FFN, HIDDEN)),
        ],
    }[family]
    tensors = [
        (f"model.layers.{layer}.{name}", "BF16", shape) for layer in range(LAYERS) for name, shape in expert_tensors
    ]
    tensors.append(("model.embed_tokens.weight", "BF16", (1000, HIDDEN)))
    folder.mkdir()
    config = {
        "model_type": family, "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_local_experts": EXPERTS,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tile = np.random.default_rng(0).bytes(1024 * 1024)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encode_header(tensors, {}))
        for _, _, shape in tensors:
            nbytes = 2 * int(np.prod(shape))
            for start in range(0, nbytes, len(tile)):
                file.write(tile[: nbytes - start])
    return folder


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize("family", ["mixtral", "llama4_text"])
def test_memory_is_bounded_by_one_expert(tmp_path: Path, family: str):
    expert = 3 * HIDDEN * FFN * 2
    model = expert * EXPERTS * LAYERS
    plain = write_large_model(tmp_path / "plain", family)
    command = [sys.executable, "-c", MEASURED, str(plain), str(tmp_path / "bank")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    room = 24 * 1024 * 1024
    assert measured["prepare"] <= expert + room < model / 4, measured
    assert measured["read"] <= room, measured
    assert measured["files"] >= 0.9 * model, measured


def test_a_gguf_file_is_not_prepared(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Its rows of queries and keys may lie in another order, and its biases are of another type."""
    folder = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", tiny_model("mixtral"), "llama"), quiet)
    assert needs_preparing(folder) == (False, "A GGUF file's weights are used where they lie: preparing gains nothing.")
    with pytest.raises(ModelError, match="holds the weights of a GGUF file"):
        prepare(folder, tmp_path / "bank", quiet)
    assert not (tmp_path / "bank").exists()


# --- the layout ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", TINY_MOE_FAMILIES)
def test_it_holds_what_the_source_holds_as_aligned_rows(tiny_model: TinyModel, tmp_path: Path, family: str, dtype: str):
    source = tiny_model(family, dtype=dtype)
    prepare(source, tmp_path / "prepared", quiet)
    plain, prepared = open_model(source), open_model(tmp_path / "prepared")
    assert prepared.config == plain.config and prepared.trunk_bytes == plain.trunk_bytes
    trunk = {name: (tensor.dtype, tensor.words.tobytes()) for name, tensor in plain.trunk()}
    assert {name: (tensor.dtype, tensor.words.tobytes()) for name, tensor in prepared.trunk()} == trunk
    mine, theirs = prepared.experts, plain.experts
    assert mine is not None and theirs is not None and not mine.strided
    assert (mine.layers, mine.count, mine.dtype) == (theirs.layers, theirs.count, theirs.dtype)
    assert mine.nbytes == theirs.nbytes
    for layer in mine.layers:
        for expert in range(mine.count):
            weights, place = mine.expert(layer, expert), mine.place(layer, expert)
            assert len({span.file.path for span in place.spans}) == 1
            assert all(span.address % 64 == 0 for span in place.spans[:2])
            assert len(place.spans) == 2 + (3 if weights.down_bias is not None else 0)
            if not family.startswith("nemotron_h"):  # has no gates
                assert weights.gate_up is not None and weights.gate_up.words.flags.c_contiguous
                both = np.concatenate([weights.gate.words, weights.up.words])
                assert np.array_equal(weights.gate_up.words, both)
            for one, other in zip(weights.parts, theirs.expert(layer, expert).parts, strict=True):
                assert one.words.flags.c_contiguous
                assert np.array_equal(one.words, other.words)


def test_others_read_it_as_ordinary_safetensors(source: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    prepare(source, tmp_path / "prepared", quiet)
    mine, theirs = (AutoModelForCausalLM.from_pretrained(str(each)) for each in (tmp_path / "prepared", source))
    weights = theirs.state_dict()
    assert {name: tensor.shape for name, tensor in mine.state_dict().items()} == {
        name: tensor.shape for name, tensor in weights.items()
    }
    assert all(bool((tensor == weights[name]).all()) for name, tensor in mine.state_dict().items())
    with safe_open(tmp_path / "prepared" / TRUNK, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == sorted(name for name, _ in open_model(source).trunk())


def test_a_sound_folder_verifies_and_a_wrong_bit_is_named(source: Path, tmp_path: Path):
    prepare(source, tmp_path / "prepared", quiet)
    counts: list[int] = []
    verify(tmp_path / "prepared", counts.append)
    assert sum(counts) == sum(path.stat().st_size for path in (tmp_path / "prepared").glob("*.safetensors"))
    for name in (TRUNK, OF_LAYERS[2]):
        path = tmp_path / "prepared" / name
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(ModelError, match=f"{name} is damaged: its checksum is wrong"):
            verify(tmp_path / "prepared")
        content[-1] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"metadata": 1}', '{"metadata": {"prepared_from": 1}}', '{"metadata": {"total_size": 1}}']
)
def test_an_index_that_says_nothing_of_preparing(source: Path, tmp_path: Path, text: str):
    """Such a folder is a person's own: it is not written over."""
    prepare(source, tmp_path / "prepared", quiet)
    (tmp_path / "prepared" / "model.safetensors.index.json").write_text(text)
    assert read_prepared(tmp_path / "prepared") is None
    with pytest.raises(ModelError, match="is not a prepared model"):
        prepare(source, tmp_path / "prepared", quiet)
    with pytest.raises(ModelError, match="has no checksums"):
        verify(tmp_path / "prepared")


def test_a_copy_of_an_earlier_version_is_replaced(source: Path, tmp_path: Path):
    write_old_bank(source, tmp_path / "prepared")
    prepare(source, tmp_path / "prepared", quiet)
    assert_equal_models(tmp_path / "prepared", source)
    assert not (tmp_path / "prepared" / "bank.json").exists()
