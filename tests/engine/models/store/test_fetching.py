"""Downloading from a hub: complete, resumed, checked, and each failure in one line with what was fetched kept."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import operator
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest

from engine.errors import Cancelled, ModelError
from engine.models.folders import model_folder
from engine.models.folders.opening import read_config
from engine.models.store import downloading, local_models
from engine.models.store import hub as hub_module
from engine.models.store.fetching import pull
from tests.engine.models.store.loopback_hub import CONFIG, REVISION, LoopbackHub, Repo, git_blob_id
from tests.support.eventually import eventually
from tests.support.progress import quiet

REPO = "someone/tiny-mixtral"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Progress:
    """Remembers what was reported."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, str]] = []

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        self.calls.append((stage, done, total, unit))

    def downloading(self) -> list[tuple[int, int]]:
        return [(done, total) for stage, done, total, _ in self.calls if stage == "downloading"]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-tokens"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(downloading, "RETRY_DELAYS_S", (0.0, 0.0))
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@functools.cache
def random_bytes(seed: int, count: int) -> bytes:
    return np.random.default_rng(seed).bytes(count)


def repository() -> Repo:
    weights = {name: random_bytes(i, 3_000_000) for i, name in enumerate(SHARDS)}
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}}
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "README.md": b"hello",
        "pytorch_model.bin": b"pickle",
        "modeling_custom.py": b"import os",
        "consolidated.safetensors": b"the same weights again",
        "original/model.safetensors": b"and again",
        **weights,
    }
    return Repo(files, large={*SHARDS, "consolidated.safetensors"})


@pytest.fixture
def repo() -> Repo:
    return repository()


@pytest.fixture
def hub(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with LoopbackHub({REPO: repo}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server


def partial_folder() -> Path:
    return local_models.resolve(REPO).plain_folder.with_name("someone--tiny-mixtral.partial")


def test_a_model_is_downloaded_whole_and_nothing_else(hub: LoopbackHub, repo: Repo) -> None:
    progress = Progress()
    folder = pull(REPO, progress)
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors.index.json", *SHARDS, "origin.json"}
    assert all((folder / name).read_bytes() == repo.files[name] for name in SHARDS)
    assert json.loads((folder / "origin.json").read_text()) == {"repo": REPO, "revision": REVISION}
    seen = progress.downloading()
    assert seen == sorted(seen, key=lambda pair: (pair[1], pair[0])), "progress never goes back within a total"
    assert seen[-1][0] == seen[-1][1] > 6_000_000
    assert local_models.resolve(REPO).folder == folder
    assert not partial_folder().exists()
    assert [item.name for item in local_models.installed()] == [REPO]


def test_a_model_that_is_here_asks_nothing(hub: LoopbackHub) -> None:
    folder = pull(REPO, quiet)
    before = len(hub.requests)
    assert pull(REPO, quiet) == folder
    assert len(hub.requests) == before


def test_a_cut_connection_is_resumed_where_it_broke_off(hub: LoopbackHub, repo: Repo) -> None:
    repo.cut_after = {SHARDS[0]: 1_250_000}
    folder = pull(REPO, quiet)
    assert (folder / SHARDS[0]).read_bytes() == repo.files[SHARDS[0]]
    asked = hub.file_requests(SHARDS[0])
    assert len(asked) == 3
    assert asked[0] is None and all(wanted is not None for wanted in asked[1:])


def test_a_server_that_gives_up_leaves_what_came_for_the_next_time(hub: LoopbackHub, repo: Repo) -> None:
    repo.cut_after = {SHARDS[1]: 0}
    with pytest.raises(ModelError, match=r"broke off .* are kept: run it again") as raised:
        pull(REPO, quiet)
    assert raised.value.kind == "network"
    assert local_models.resolve(REPO).folder is None
    assert [name for name, _ in local_models.partial_downloads()] == [REPO]
    assert local_models.installed() == []
    first_shard = len(hub.file_requests(SHARDS[0]))
    repo.cut_after = {}
    folder = pull(REPO, quiet)
    assert (folder / SHARDS[1]).read_bytes() == repo.files[SHARDS[1]]
    assert len(hub.file_requests(SHARDS[0])) == first_shard, "a verified file is not fetched again"


def test_a_server_that_ignores_ranges_still_gives_the_right_file(hub: LoopbackHub, repo: Repo) -> None:
    repo.cut_after = {SHARDS[0]: 2_000_000}
    repo.ignores_ranges = True
    served = 0

    def uncut_later() -> bool:
        nonlocal served
        served = len(hub.file_requests(SHARDS[0]))
        if served >= 2:
            repo.cut_after = {}
        return False

    folder = pull(REPO, quiet, uncut_later)
    assert (folder / SHARDS[0]).read_bytes() == repo.files[SHARDS[0]]
    assert served >= 2


def test_a_part_longer_than_the_file_is_thrown_away(hub: LoopbackHub, repo: Repo) -> None:
    repo.cut_after = {SHARDS[0]: 0}
    with pytest.raises(ModelError):
        pull(REPO, quiet)
    (part,) = partial_folder().glob("*.part")
    part.write_bytes(b"y" * 3_000_001)
    repo.cut_after = {}
    folder = pull(REPO, quiet)
    assert (folder / SHARDS[0]).read_bytes() == repo.files[SHARDS[0]]


def test_a_busy_server_is_asked_again(hub: LoopbackHub, repo: Repo) -> None:
    repo.busy_times = 2
    assert model_folder.is_complete(pull(REPO, quiet))


@pytest.mark.parametrize("name", ["config.json", SHARDS[1]])
def test_a_file_with_the_wrong_digest_is_refused_and_removed(hub: LoopbackHub, repo: Repo, name: str) -> None:
    repo.wrong_digests = {name}
    with pytest.raises(ModelError, match=rf"{name} of {REPO} arrived damaged .* was deleted") as raised:
        pull(REPO, quiet)
    assert raised.value.kind == "network"
    assert not list(partial_folder().glob(f"{name}*"))
    assert local_models.resolve(REPO).folder is None


def test_more_bytes_than_stated_are_refused(hub: LoopbackHub, repo: Repo) -> None:
    repo.extra_bytes = 5
    with pytest.raises(ModelError, match=r"sends more of config\.json"):
        pull(REPO, quiet)


def test_too_small_a_disk_is_found_before_the_weights_are_asked_for(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 70_000_000))
    with pytest.raises(ModelError, match=r"needs 73 MB .* 70 MB free") as raised:
        pull(REPO, quiet)
    assert raised.value.kind == "disk"
    assert hub.file_requests(SHARDS[0]) == []


def test_a_disk_that_fills_up_keeps_what_is_there(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(downloading.Download, "_copy", full)
    with pytest.raises(ModelError, match="is full") as raised:
        pull(REPO, quiet)
    assert raised.value.kind == "disk"
    monkeypatch.undo()


def test_without_network_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"^There is no connection to http://127.0.0.1:9") as raised:
        pull(REPO, quiet)
    assert raised.value.kind == "network"
    assert "\n" not in str(raised.value)


def test_something_that_is_no_hub_is_named(monkeypatch: pytest.MonkeyPatch, repo: Repo) -> None:
    class NoHub(LoopbackHub):
        def answer(self, handler: object) -> None:
            from tests.engine.models.store import loopback_hub

            loopback_hub._send(handler, 200, b"<html>welcome to the hotel</html>")  # type: ignore[arg-type]

    with NoHub({REPO: repo}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        with pytest.raises(ModelError, match="does not answer like a model hub"):
            pull(REPO, quiet)


def test_an_unknown_repo_is_said_in_one_line(hub: LoopbackHub) -> None:
    with pytest.raises(ModelError, match="knows no model someone/else") as raised:
        pull("someone/else", quiet)
    assert raised.value.kind == "bad-input"
    assert local_models.partial_downloads() == []


def test_a_gated_repo_says_where_to_accept_its_terms(hub: LoopbackHub, repo: Repo) -> None:
    repo.gated = True
    with pytest.raises(ModelError, match=rf"accept them at {hub.address}/{REPO}, then set HF_TOKEN"):
        pull(REPO, quiet)


def test_the_token_stays_here_when_nobody_asks_for_it(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pull(REPO, quiet)
    assert {sent for _, _, sent in hub.requests} == {None}


def test_the_token_does_not_go_where_others_can_read_it(
    hub: LoopbackHub, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    repo.wants_token = True
    with pytest.raises(ModelError, match=r"your hub token is only sent over https; check HF_ENDPOINT"):
        pull(REPO, quiet)
    assert {sent for _, _, sent in hub.requests} == {None}


def test_the_token_goes_to_the_hub_that_asks_for_it_and_to_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    asked: list[tuple[str, str | None]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent = request.headers.get("Authorization")
        asked.append((request.url.host, sent))
        if request.url.host == "hub.example" and sent is None:
            return httpx2.Response(401)
        if request.url.path.endswith("/config.json") and request.url.host == "hub.example":
            return httpx2.Response(302, headers={"Location": "https://store.example/config.json"})
        return httpx2.Response(200, stream=httpx2.ByteStream(json.dumps({"sha": "a" * 40}).encode()))

    with httpx2.Client(transport=httpx2.MockTransport(answer), follow_redirects=True) as client:
        assert hub_module.list_repository(client, REPO).revision == "a" * 40
        client.get(f"https://hub.example/{REPO}/resolve/main/config.json")
    secret = "Bearer hf_secret"
    assert asked == [("hub.example", None), ("hub.example", secret), ("hub.example", secret), ("store.example", None)]


def test_a_file_that_needs_the_token_is_asked_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    data = b"{}"

    def answer(request: httpx2.Request) -> httpx2.Response:
        known = "Authorization" in request.headers
        return httpx2.Response(200, stream=httpx2.ByteStream(data)) if known else httpx2.Response(403)

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as client:
        task = downloading.Download(
            client,
            REPO,
            lambda name: f"https://hub.example/{name}",
            lambda response: hub_module.raise_for_status(response, REPO),
            tmp_path,
            quiet,
            None,
            unlock=lambda response: hub_module.unlock(client, response),
        )
        digest = f"sha1:{hashlib.sha1(b'blob 2' + bytes(1) + data).hexdigest()}"
        task.fetch([hub_module.RemoteFile("config.json", len(data), digest)], len(data))
    assert (tmp_path / "config.json").read_bytes() == data


def test_a_packed_answer_is_not_unpacked(hub: LoopbackHub, repo: Repo) -> None:
    repo.packed = True
    with pytest.raises(ModelError, match="a packed answer, which was not asked for"):
        pull(REPO, quiet)


def test_an_answer_without_end_is_not_read(hub: LoopbackHub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_ANSWER_LIMIT", 100_000)
    repo.padding = 1_000_000
    with pytest.raises(ModelError, match="is too large; it was not used"):
        pull(REPO, quiet)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_settings_larger_than_any_are_not_fetched(
    hub: LoopbackHub, repo: Repo, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "SMALL_FILE", 1000)
    monkeypatch.setattr(hub_module, "_LARGE_SETTINGS", {"tokenizer.json": 2000})
    repo.files[name] = b" " * 3000
    with pytest.raises(ModelError, match=rf"{name} of {REPO} has 3000 bytes, over [12]000"):
        pull(REPO, quiet)
    assert hub.file_requests(name) == []


@pytest.mark.parametrize("unsafe", ["../../evil.safetensors", "/etc/evil.safetensors", "a/b.safetensors", "evil.bin"])
def test_an_index_naming_an_unsafe_file_is_refused(hub: LoopbackHub, repo: Repo, unsafe: str) -> None:
    repo.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": unsafe}}).encode()
    repo.files[unsafe] = b"evil"
    with pytest.raises(ModelError, match="unsafe file"):
        pull(REPO, quiet)
    assert hub.file_requests(SHARDS[0]) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "rwkv9"}, "rwkv9"),
        ({"model_type": "mixtral", "auto_map": {"AutoModel": "modeling_custom.X"}}, "auto_map"),
        ({"model_type": "mixtral", "quantization_config": {"quant_method": "gptq"}}, "GPTQ"),
        (
            {"model_type": "mixtral", "quantization_config": {"quant_method": "made-up"}},
            "quantised with .?made-up",
        ),
        ({key: value for key, value in CONFIG.items() if key != "vocab_size"}, "vocab_size"),
    ],
)
def test_a_model_that_cannot_run_is_refused_after_its_configuration(
    hub: LoopbackHub, repo: Repo, config: dict[str, object], message: str
) -> None:
    repo.files["config.json"] = json.dumps(config).encode()
    with pytest.raises(ModelError, match=message):
        pull(REPO, quiet)
    assert hub.file_requests(SHARDS[0]) == hub.file_requests("tokenizer.json") == []


def test_a_file_that_names_the_quantisation_is_read_before_the_weights(hub: LoopbackHub, repo: Repo) -> None:
    repo.files["quantize_config.json"] = json.dumps({"bits": 3, "group_size": 128, "damp_percent": 0.1}).encode()
    with pytest.raises(ModelError, match="quantised with GPTQ with 3 bits, which does not run here; take a GGUF file"):
        pull(REPO, quiet)
    assert hub.file_requests(SHARDS[0]) == hub.file_requests("tokenizer.json") == []


def test_a_model_that_a_file_beside_its_configuration_describes_is_fetched_with_it(
    hub: LoopbackHub, repo: Repo
) -> None:
    repo.files["quantize_config.json"] = json.dumps({"bits": 4, "group_size": 128, "desc_act": False}).encode()
    folder = pull(REPO, quiet)
    assert (folder / "quantize_config.json").is_file()
    assert read_config(folder)["quantization_config"]["quant_method"] == "gptq"


def test_pickled_weights_are_refused(hub: LoopbackHub, repo: Repo) -> None:
    repo.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    with pytest.raises(ModelError, match="only pickled weights"):
        pull(REPO, quiet)


def test_cancelling_keeps_the_part_and_the_next_pull_goes_on(hub: LoopbackHub, repo: Repo) -> None:
    progress = Progress()

    def enough() -> bool:
        return bool(progress.downloading()) and progress.downloading()[-1][0] > 1_500_000

    with pytest.raises(Cancelled):
        pull(REPO, progress, enough)
    (part,) = partial_folder().glob("*.part")
    kept = part.stat().st_size
    assert kept > 1_000_000
    pull(REPO, quiet)
    assert hub.file_requests(SHARDS[0])[-1] == f"bytes={kept}-"


def test_a_redirect_to_the_file_store_does_not_carry_the_token(
    hub: LoopbackHub, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with LoopbackHub({REPO: repository()}) as file_store:
        repo.redirect_to = file_store.address
        folder = pull(REPO, quiet)
    assert (folder / SHARDS[0]).read_bytes() == repo.files[SHARDS[0]]
    assert len(file_store.requests) == 5
    assert {sent for _, _, sent in file_store.requests} == {None}


def test_a_new_revision_is_not_glued_to_an_old_beginning(hub: LoopbackHub, repo: Repo) -> None:
    repo.cut_after = {SHARDS[0]: 0}
    with pytest.raises(ModelError):
        pull(REPO, quiet)
    (part,) = partial_folder().glob("*.part")
    part.write_bytes(repo.files[SHARDS[0]][:1_000_000])
    repo.cut_after = {}
    repo.files[SHARDS[0]] = b"new" * 1000
    folder = pull(REPO, quiet)
    assert (folder / SHARDS[0]).read_bytes() == b"new" * 1000
    assert not list(folder.glob("*.part"))


@pytest.mark.soak
def test_kill_at_any_moment_then_pull_again(hub: LoopbackHub, repo: Repo) -> None:
    program = (
        "import sys\nfrom engine.models.store.fetching import pull\n"
        "pull(sys.argv[1], lambda s, d, t, u: (print(d, flush=True), sys.stdin.readline()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    for lines in (2, 5):
        with subprocess.Popen(
            [sys.executable, "-c", program, REPO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            # It goes on from one report to the next when it is told to, and waits at the last one.
            process.stdin.write(b"\n" * (lines - 1))
            process.stdin.flush()
            for _ in range(lines):
                assert process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        assert local_models.resolve(REPO).folder is None
    folder = pull(REPO, quiet)
    assert all((folder / name).read_bytes() == repo.files[name] for name in SHARDS)


def test_two_pulls_at_once_do_not_mix(hub: LoopbackHub) -> None:
    with (
        model_folder.exclusive(local_models.resolve(REPO).plain_folder),
        pytest.raises(ModelError, match="already working"),
    ):
        pull(REPO, quiet)


def test_the_hub_switched_off_for_the_engine_does_not_stop_a_pull(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    program = "import sys\nfrom engine.models.store.fetching import pull\nprint(pull(sys.argv[1], lambda *a: None))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run(
        [sys.executable, "-c", program, REPO], check=False, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert model_folder.is_complete(Path(done.stdout.strip()))


def test_what_lies_in_the_way_is_not_touched(hub: LoopbackHub) -> None:
    folder = local_models.resolve(REPO).plain_folder
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match=f"in the way.*models remove {REPO}"):
        pull(REPO, quiet)
    assert (folder / "notes.txt").read_text() == "mine"
    assert hub.requests == []
    local_models.remove(REPO)
    assert model_folder.is_complete(pull(REPO, quiet))


def test_pulling_a_local_folder_returns_it(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert pull(str(folder), quiet) == folder
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        pull(str(folder), quiet)


def test_importing_the_module_opens_nothing_and_imports_nothing_heavy() -> None:
    program = (
        "import sys, socket\nsocket.socket = None\n"
        "import engine.models.store.fetching, engine.models.store.local_models\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'httpx2', 'gguf') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_waiting_between_tries_can_be_cancelled(hub: LoopbackHub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloading, "RETRY_DELAYS_S", (3600.0,))
    repo.busy_times = 100
    asked = itertools.count()
    with pytest.raises(Cancelled):
        pull(REPO, quiet, lambda: repo.busy_times < 100 and next(asked) > 3)


def test_a_server_that_says_nothing_cannot_keep_a_download_from_stopping(
    hub: LoopbackHub, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.models.store import hub as engine_hub

    patient = engine_hub.new_client()
    patient.timeout = None
    monkeypatch.setattr(engine_hub, "new_client", lambda: patient)
    repo.stall_after = {SHARDS[0]: 5000}
    asked = itertools.count()

    def stop() -> bool:
        # Only once the download waits for what does not come.
        return bool(hub.file_requests(SHARDS[0])) and next(asked) > 20

    with pytest.raises(Cancelled):
        pull(REPO, quiet, stop)
    assert not repo.waited_in_vain
    repo.stalled.set()


def test_checking_a_large_file_can_be_stopped(tmp_path: Path) -> None:
    from engine.models.store.hub import digest_of

    path = tmp_path / "large"
    path.write_bytes(b"1")

    def stop() -> None:
        raise Cancelled("Stopped.")

    with pytest.raises(Cancelled):
        digest_of(path, "sha256:", stop)
    assert digest_of(path, "sha256:") == f"sha256:{hashlib.sha256(b'1').hexdigest()}"


@pytest.mark.parametrize("odd", ["\0\0", "/../../../ab", "0" * 63, "g" * 64, "0" * 64 + "\n"])
@pytest.mark.parametrize("large", [True, False])
def test_what_is_no_checksum_is_refused_before_it_is_part_of_a_name(
    hub: LoopbackHub, repo: Repo, odd: str, large: bool
) -> None:
    repo.said_digests[SHARDS[0] if large else "config.json"] = odd
    with pytest.raises(ModelError, match=r"impossible checksum of (model-00001|config\.json)"):
        pull(REPO, quiet)
    assert not partial_folder().exists()


@pytest.mark.parametrize("nested", ["index", "answer"])
def test_deeply_nested_answers_are_said_in_one_line(hub: LoopbackHub, repo: Repo, nested: str) -> None:
    if nested == "index":
        repo.files["model.safetensors.index.json"] = b'{"weight_map": {"a":' + b"[" * 200_000
    else:
        repo.unknown = "[" * 200_000 + "]" * 200_000
    with pytest.raises(ModelError, match=r"index of .* is damaged|does not answer like a model hub") as raised:
        pull(REPO, quiet)
    assert "\n" not in str(raised.value)


def test_a_checksum_is_worked_out_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes(3, 100_000)
    (tmp_path / "x").write_bytes(data)
    monkeypatch.setattr(hub_module, "_DIGEST_CHUNK", 1000)
    for like, expected in (("sha1:", git_blob_id(data)), ("sha256:", hashlib.sha256(data).hexdigest())):
        pieces: list[None] = []
        found = hub_module.digest_of(tmp_path / "x", like, functools.partial(pieces.append, None))
        assert found == like + expected and len(pieces) == 100


# --- in ranges -------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloading, "LARGE", 1_000_000)
    monkeypatch.setattr(downloading, "_CHUNK", 50_000)


def begins(wanted: list[str | None]) -> list[int]:
    """Where the ranges of ``wanted`` begin."""
    return [int((each or "bytes=0-").removeprefix("bytes=").partition("-")[0]) for each in wanted]


QUARTERS = [0, 750_000, 1_500_000, 2_250_000]


@pytest.mark.usefixtures("in_ranges")
def test_a_large_file_comes_in_ranges_at_once(hub: LoopbackHub, repo: Repo) -> None:
    repo.together = downloading.RANGES
    progress = Progress()
    folder = pull(REPO, progress)
    assert all((folder / name).read_bytes() == repo.files[name] for name in SHARDS)
    assert [sorted(begins(hub.file_requests(name))) for name in SHARDS] == [QUARTERS] * 2
    assert max(repo.at_once) == downloading.RANGES
    seen = progress.downloading()
    assert seen == sorted(seen, key=lambda pair: (pair[1], pair[0])) and seen[-1][0] == seen[-1][1] > 6_000_000
    assert len(list(folder.iterdir())) == 6
    assert local_models.partial_downloads() == []


@pytest.mark.usefixtures("in_ranges")
def test_each_range_that_is_cut_goes_on_where_it_broke_off(hub: LoopbackHub, repo: Repo) -> None:
    repo.cut_after = {SHARDS[0]: 300_000}
    folder = pull(REPO, quiet)
    assert (folder / SHARDS[0]).read_bytes() == repo.files[SHARDS[0]]
    assert sorted(begins(hub.file_requests(SHARDS[0]))) == [
        start + done for start in QUARTERS for done in (0, 300_000, 600_000)
    ]


def noted() -> list[list[int]]:
    (note,) = partial_folder().glob("*.ranges.part")
    ranges: list[list[int]] = json.loads(note.read_bytes())["ranges"]
    return ranges


@pytest.mark.usefixtures("in_ranges")
def test_a_range_that_fails_leaves_all_for_the_next_time(hub: LoopbackHub, repo: Repo) -> None:
    repo.refused_from = 2_000_000
    with pytest.raises(ModelError, match=r"broke off \(HTTP 503\); .* are kept: run it again") as raised:
        pull(REPO, quiet)
    assert raised.value.kind == "network"
    ranges = noted()
    assert ranges[3] == [2_250_000, 3_000_000] and [end for _, end in ranges] == [*QUARTERS[1:], 3_000_000]
    assert dict(local_models.partial_downloads())[REPO] < 2_700_000, "what is missing takes no space"
    before = len(hub.file_requests(SHARDS[0]))
    repo.refused_from = None
    folder = pull(REPO, quiet)
    assert (folder / SHARDS[0]).read_bytes() == repo.files[SHARDS[0]]
    missing = [f"bytes={have}-{end - 1}" for have, end in ranges if have < end]
    assert sorted(map(str, hub.file_requests(SHARDS[0])[before:])) == sorted(missing)


@pytest.mark.usefixtures("in_ranges")
def test_a_server_without_ranges_sends_one_stream(hub: LoopbackHub, repo: Repo) -> None:
    repo.ignores_ranges = True
    folder = pull(REPO, quiet)
    assert all((folder / name).read_bytes() == repo.files[name] for name in SHARDS)
    assert hub.file_requests(SHARDS[0])[-1] is None
    assert len(hub.file_requests(SHARDS[0])) <= downloading.RANGES + 1


@pytest.mark.usefixtures("in_ranges")
def test_cancelling_keeps_what_came_of_each_range(hub: LoopbackHub, repo: Repo) -> None:
    repo.stall_after = {SHARDS[0]: 400_000}
    progress = Progress()

    def enough() -> bool:
        return bool(progress.downloading()) and progress.downloading()[-1][0] >= 1_600_000

    with pytest.raises(Cancelled):
        pull(REPO, progress, enough)
    repo.stalled.set()
    before = len(hub.file_requests(SHARDS[0]))
    repo.stall_after = {}
    again = Progress()
    folder = pull(REPO, again)
    assert (folder / SHARDS[0]).read_bytes() == repo.files[SHARDS[0]]
    assert sorted(begins(hub.file_requests(SHARDS[0])[before:])) == [start + 400_000 for start in QUARTERS]
    assert any(1_600_000 <= done < 1_601_000 for done, _ in again.downloading()), "what was here counts"


@pytest.mark.soak
def test_ranges_go_on_after_a_kill(hub: LoopbackHub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys\nfrom engine.models.store import downloading\n"
        "from engine.models.store.fetching import pull\n"
        "downloading.LARGE, downloading._NOTED, downloading._CHUNK = 1_000_000, 100_000, 50_000\n"
        "pull(sys.argv[1], lambda s, d, t, u: print(d, flush=True))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}

    def noted() -> list[int]:
        (note,) = partial_folder().glob(f"{Path(SHARDS[0]).stem}*.ranges.part")
        return [have for have, _ in json.loads(note.read_text())["ranges"]]

    here = QUARTERS
    for part in (200_000, 250_000):
        repo.stall_after = {SHARDS[0]: part}
        reached = sum(here) - sum(QUARTERS) + 4 * part
        with subprocess.Popen(
            [sys.executable, "-c", program, REPO], stdout=subprocess.PIPE, env=environment
        ) as process:
            assert process.stdout is not None
            while int(process.stdout.readline()) < reached:
                pass
            begun = here
            eventually(lambda: min(map(operator.sub, noted(), begun)) > part - 100_000)  # noqa: B023 (called here)
            process.send_signal(signal.SIGKILL)
        here = noted()
        repo.stalled.set()
        repo.stalled = threading.Event()
        assert local_models.resolve(REPO).folder is None
    repo.stall_after = {}
    before = len(hub.file_requests(SHARDS[0]))
    folder = pull(REPO, quiet)
    assert all((folder / name).read_bytes() == repo.files[name] for name in SHARDS)
    # The file was begun in ranges, so it goes on in them. What was not noted is fetched again.
    assert sorted(begins(hub.file_requests(SHARDS[0])[before:])) == here


@pytest.mark.usefixtures("in_ranges")
def test_a_damaged_file_in_ranges_is_removed_with_its_note(hub: LoopbackHub, repo: Repo) -> None:
    repo.wrong_digests = {SHARDS[1]}
    with pytest.raises(ModelError, match=r"arrived damaged .* was deleted"):
        pull(REPO, quiet)
    assert not list(partial_folder().glob(f"{SHARDS[1]}*"))


@pytest.mark.usefixtures("in_ranges")
@pytest.mark.parametrize(
    "note",
    [b"{", b"[" * 5000, b'{"size": 3000000, "ranges": [[0, 3000000]]}', b'{"size": 1, "ranges": []}'],
    ids=("no JSON", "nested", "whole", "another size"),
)
def test_a_note_that_cannot_be_is_not_believed(hub: LoopbackHub, repo: Repo, note: bytes) -> None:
    repo.cut_after = {SHARDS[0]: 0}
    with pytest.raises(ModelError):
        pull(REPO, quiet)
    (noted,) = partial_folder().glob("*.ranges.part")
    noted.write_bytes(note)
    repo.cut_after = {}
    # A file of the whole size is checked, and fetched again where it is none.
    with contextlib.suppress(ModelError):
        pull(REPO, quiet)
    folder = pull(REPO, quiet)
    assert (folder / SHARDS[0]).read_bytes() == repo.files[SHARDS[0]]


@pytest.mark.usefixtures("in_ranges")
def test_the_beginning_of_a_file_in_ranges_is_what_is_here_without_a_gap(
    hub: LoopbackHub, repo: Repo, tmp_path: Path
) -> None:
    name = SHARDS[0]
    file = hub_module.RemoteFile(name, 3_000_000, f"sha256:{hashlib.sha256(repo.files[name]).hexdigest()}")
    with hub_module.new_client() as client:
        address = f"{hub.address}/{REPO}/resolve/{REVISION}/{name}"
        task = downloading.Download(client, REPO, lambda name: address, lambda response: None, tmp_path, quiet, None)
        repo.refused_from = 1_000_000
        repo.cut_after = {name: 100_000}
        with pytest.raises(ModelError, match="broke off"):
            task.fetch([file], file.size)
        assert task.beginning(file, 50_000) == repo.files[name][:50_000]
        repo.refused_from, repo.cut_after = None, {}
        assert task.beginning(file, 900_000) == repo.files[name][:900_000]
        task.fetch([file], file.size)
    assert (tmp_path / name).read_bytes() == repo.files[name]


@pytest.mark.usefixtures("in_ranges")
def test_ranges_that_are_refused_at_once_are_all_asked_for_again_with_the_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    data = random_bytes(5, 3_000_000)
    all_refused = threading.Barrier(downloading.RANGES, timeout=20)

    def answer(request: httpx2.Request) -> httpx2.Response:
        if "Authorization" not in request.headers:
            all_refused.wait()
            return httpx2.Response(403)
        first, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1]
        return httpx2.Response(
            206, headers={"Content-Range": f"bytes {first}-{last}/*"}, stream=httpx2.ByteStream(part)
        )

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as client:
        task = downloading.Download(
            client,
            REPO,
            lambda name: f"https://hub.example/{name}",
            lambda response: hub_module.raise_for_status(response, REPO),
            tmp_path,
            quiet,
            None,
            unlock=lambda response: hub_module.unlock(client, response),
        )
        file = hub_module.RemoteFile(SHARDS[0], len(data), f"sha256:{hashlib.sha256(data).hexdigest()}")
        task.fetch([file], len(data))
    assert (tmp_path / SHARDS[0]).read_bytes() == data
