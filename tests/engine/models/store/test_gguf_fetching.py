"""Downloading one GGUF file of a repository: that file whole and no other, refused by its header, chosen by its tag."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from engine.errors import Cancelled, ModelError
from engine.models.folders import model_folder
from engine.models.folders.opening import open_model
from engine.models.formats.gguf_file import GgufFile, HeaderGoesOn
from engine.models.store import downloading, gguf_fetching, local_models
from engine.models.store.fetching import pull
from engine.models.text.tokenizer import load_tokenizer
from engine.pictures.folders import read_sight
from tests.engine.models.store.loopback_hub import CONFIG, REVISION, LoopbackHub, Repo
from tests.support.progress import quiet
from tests.support.tiny_gguf import whole_blocks, write_tiny_gguf
from tests.support.tiny_gguf_tower import write_tiny_tower
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_seeing import write_tiny_seeing

REPO = "someone/M-GGUF"
EIGHT = "Q8_0/M-Q8_0-0000{}-of-00002.gguf"


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(downloading, "RETRY_DELAYS_S", (0.0, 0.0))
    monkeypatch.setattr(gguf_fetching, "FIRST_BYTES", 4096)
    monkeypatch.setattr(gguf_fetching, "LATER_BYTES", 512)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository as people publish them: some files of one model, a split one among them, and what is no model."""
    folder = tmp_path_factory.mktemp("published")
    source = write_tiny_model(folder / "source", "qwen3_moe", **whole_blocks("qwen3_moe"))
    files = {"README.md": b"hello", "mmproj-F16.gguf": b"GGUF", "imatrix.gguf": b"GGUF", "config.json": b"{}"}
    for name, kind, parts in (("M-Q4_K_M", "Q4_K", 1), ("M-Q8_0", "Q8_0", 2)):
        first = write_tiny_gguf(
            folder / f"{name}.gguf", source, "qwen3moe", quantised=GGMLQuantizationType[kind], parts=parts
        )
        for path in sorted(folder.glob(f"{name}*.gguf")):
            files[path.name if parts == 1 else f"Q8_0/{path.name}"] = path.read_bytes()
        assert first.exists()
    return files


@pytest.fixture
def repo(published: dict[str, bytes]) -> Repo:
    files = dict(published)
    return Repo(files, large={name for name in files if name.endswith(".gguf")})


@pytest.fixture
def hub(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with LoopbackHub({REPO: repo}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server


def asked_files(hub: LoopbackHub) -> set[str]:
    return {path.partition(f"/resolve/{REVISION}/")[2] for path, _, _ in hub.requests if "/resolve/" in path}


def bytes_asked(hub: LoopbackHub, name: str) -> list[str | None]:
    return hub.file_requests(name.rpartition("/")[2])


def test_the_file_that_the_tag_names_is_downloaded_and_no_other(hub: LoopbackHub, repo: Repo) -> None:
    folder = pull(f"{REPO}:q4_k_m", quiet)
    assert folder == local_models.locate("models") / "someone--M-GGUF--Q4_K_M"
    assert {path.name for path in folder.iterdir()} == {
        "M-Q4_K_M.gguf",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "origin.json",
    }
    assert (folder / "M-Q4_K_M.gguf").read_bytes() == repo.files["M-Q4_K_M.gguf"]
    origin = {"repo": REPO, "revision": REVISION, "file": "M-Q4_K_M.gguf"}
    assert json.loads((folder / "origin.json").read_text()) == origin
    assert asked_files(hub) == {"M-Q4_K_M.gguf"}
    assert local_models.resolve(f"{REPO}:Q4_K_M").folder == folder
    opened = open_model(folder)
    assert opened.experts is not None and opened.experts.dtype == "Q4_K"
    assert load_tokenizer(folder).encode("abc")
    requests = len(hub.requests)
    assert pull(f"{REPO}:Q4_K_M", quiet) == folder and len(hub.requests) == requests


@pytest.mark.parametrize("kind", ["whole", "another model's", "damaged"])
def test_a_model_that_can_see_is_downloaded_with_its_tower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    seeing = write_tiny_seeing(tmp_path / "seeing", "qwen3_5")
    model = write_tiny_gguf(tmp_path / "m.gguf", write_tiny_model(tmp_path / "l", "qwen3_5_text"), "qwen35")
    width = 64 if kind == "another model's" else None
    tower = write_tiny_tower(tmp_path / "t.gguf", seeing, GGMLQuantizationType.F16, width=width).read_bytes()
    tower = tower[:2000] if kind == "damaged" else tower
    files = {"M-F32.gguf": model.read_bytes(), "mmproj-F16.gguf": tower, "mmproj-F32.gguf": b"GGUF"}
    with LoopbackHub({REPO: Repo(files, large=set(files))}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        folder = pull(f"{REPO}:F32", quiet)
        assert asked_files(server) == {"M-F32.gguf", "mmproj-F16.gguf"}
    assert (read_sight(folder) is not None) == (kind == "whole")
    assert [path.name for path in folder.glob("*.gguf")] == ["M-F32.gguf"]
    assert load_tokenizer(folder).encode("abc") and open_model(folder).config["model_type"] == "qwen3_5_text"


def test_all_parts_of_a_split_file_are_downloaded_side_by_side(hub: LoopbackHub, repo: Repo) -> None:
    folder = pull(f"{REPO}:Q8_0", quiet)
    for part in (1, 2):
        name = EIGHT.format(part)
        assert (folder / name.rpartition("/")[2]).read_bytes() == repo.files[name]
    assert asked_files(hub) == {EIGHT.format(1), EIGHT.format(2)}
    opened = open_model(folder)
    assert opened.experts is not None and opened.experts.dtype == "Q8_0"
    assert [item.name for item in local_models.installed()] == [f"{REPO}:Q8_0"]


def test_a_file_is_named_whole_too(hub: LoopbackHub) -> None:
    name = f"{REPO}:M-Q8_0-00002-of-00002.gguf"
    assert pull(name, quiet) == pull(f"{REPO}:Q8_0", quiet) == local_models.resolve(name).folder


def test_no_byte_is_fetched_twice(hub: LoopbackHub, repo: Repo) -> None:
    pull(f"{REPO}:Q4_K_M", quiet)
    asked = bytes_asked(hub, "M-Q4_K_M.gguf")
    assert len(asked) > 2 and asked[0] == "bytes=0-4095" and all(wanted is not None for wanted in asked)
    assert asked[-1] is not None and asked[-1].endswith("-"), "the rest is one request"
    starts = [int(wanted.removeprefix("bytes=").partition("-")[0]) for wanted in asked if wanted]
    ends = [int(wanted.rpartition("-")[2]) + 1 for wanted in asked[:-1] if wanted]
    assert starts[1:] == ends


def test_without_a_tag_the_choices_are_named_with_their_sizes(hub: LoopbackHub, repo: Repo) -> None:
    repo.files["M-IQ2_KS.gguf"] = bytes(100)
    with pytest.raises(ModelError) as raised:
        pull(REPO, quiet)
    four = len(repo.files["M-Q4_K_M.gguf"]) // 1000
    eight = sum(len(repo.files[EIGHT.format(part)]) for part in (1, 2)) // 1000
    assert str(raised.value).startswith(f"{REPO} holds several GGUF files; choose one of ")
    assert raised.value.kind == "bad-input" and "\n" not in str(raised.value)
    assert "and 1 in formats that do not run here" in str(raised.value)
    assert str(raised.value).endswith(f"; the recommended one: privatellm models pull {REPO}:Q4_K_M")
    assert four < eight and str(raised.value).index("Q4_K_M (") < str(raised.value).index("Q8_0 (")
    assert asked_files(hub) == set()


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("Q6_K", r"no GGUF file called Q6_K; choose one of .*Q8_0 \(.* MB\); the recommended one: .*:Q4_K_M$"),
        ("M", r"several GGUF files that M could mean; choose one of Q4_K_M"),
        ("F16", r"no GGUF file called F16; "),
    ],
)
def test_a_tag_that_names_nothing_or_too_much(hub: LoopbackHub, tag: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        pull(f"{REPO}:{tag}", quiet)
    assert asked_files(hub) == set() and local_models.partial_downloads() == []


def test_a_repository_with_one_gguf_file_needs_no_tag(hub: LoopbackHub, repo: Repo) -> None:
    for part in (1, 2):
        del repo.files[EIGHT.format(part)]
    folder = pull(REPO, quiet)
    assert folder.name == "someone--M-GGUF--Q4_K_M"
    assert local_models.resolve(REPO).folder == folder and local_models.resolve(REPO).name == f"{REPO}:Q4_K_M"


def test_safetensors_come_first_where_there_are_some(hub: LoopbackHub, repo: Repo) -> None:
    repo.files["config.json"] = json.dumps(CONFIG).encode()
    repo.files["model.safetensors"] = b"weights"
    folder = pull(REPO, quiet)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "origin.json"}


def test_a_tag_where_there_is_no_gguf_file(hub: LoopbackHub, repo: Repo) -> None:
    repo.files = {"config.json": b"{}", "model.safetensors": b"weights"}
    with pytest.raises(ModelError, match=rf"no GGUF file, .*no Q4_K_M of it; .*run: privatellm models pull {REPO}$"):
        pull(f"{REPO}:Q4_K_M", quiet)


def test_a_file_that_lacks_a_part_is_refused(hub: LoopbackHub, repo: Repo) -> None:
    del repo.files[EIGHT.format(2)]
    with pytest.raises(ModelError, match=r"holds not all parts of Q8_0; choose one of Q4_K_M \(.*\); the recommended"):
        pull(f"{REPO}:Q8_0", quiet)


def test_where_nothing_runs_another_repository_is_advised(hub: LoopbackHub, repo: Repo) -> None:
    repo.files = {"M-IQ2_K.gguf": b"GGUF", "M-IQ1_KT.gguf": b"GG"}
    with pytest.raises(
        ModelError, match=r"several GGUF files, but IQ1_KT \(2 B\), IQ2_K \(4 B\) are in formats that do not run"
    ):
        pull(REPO, quiet)
    repo.files = {"M-Q8_0-00001-of-00002.gguf": b"GGUF"}
    with pytest.raises(ModelError, match=r"holds not all parts of Q8_0; choose another repository\.$"):
        pull(REPO, quiet)


def rewritten(data: bytes, old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new) and old in data
    return data.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"qwen3moe", b"qwen3xyz", "architecture qwen3xyz"),
        (b"gpt-2", b"gpt-x", "gpt-x"),
        (b"GGUF\x03", b"GGUF\x09", "version 9"),
        (b"GGUF", b"PK..", "does not begin with GGUF"),
        (b"blk.0.attn_q.weight", b"blk.0.attn_X.weight", "attn_[qX]"),
    ],
    ids=["architecture", "tokenizer", "version", "no GGUF", "tensor"],
)
def test_what_cannot_run_is_refused_by_its_header(
    hub: LoopbackHub, repo: Repo, old: bytes, new: bytes, message: str
) -> None:
    name = "M-Q4_K_M.gguf"
    repo.files[name] = rewritten(repo.files[name], old, new) + bytes(5_000_000)
    with pytest.raises(ModelError, match=message):
        pull(f"{REPO}:Q4_K_M", quiet)
    asked = bytes_asked(hub, name)
    assert asked and all(wanted and not wanted.endswith("-") for wanted in asked), "only the beginning was fetched"
    assert local_models.partial_downloads() == [], "nothing is kept of what cannot run"


def test_a_type_that_does_not_run_is_refused_in_any_part(hub: LoopbackHub, repo: Repo, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "qwen3_moe", **whole_blocks("qwen3_moe"))
    kinds = {"blk.1": GGMLQuantizationType.Q5_0}
    write_tiny_gguf(
        tmp_path / "M-Q8_0.gguf",
        source,
        "qwen3moe",
        quantised=lambda name: next((kind for part, kind in kinds.items() if part in name), GGMLQuantizationType.Q8_0),
        parts=2,
    )
    for part in (1, 2):
        name = EIGHT.format(part)
        # Q5_0 is 6; ggml has no type 137.
        repo.files[name] = (tmp_path / name.rpartition("/")[2]).read_bytes()
    second = repo.files[EIGHT.format(2)]
    at = second.index(b"blk.1.attn_output.weight") + len(b"blk.1.attn_output.weight") + 4 + 2 * 8
    assert second[at : at + 4] == (6).to_bytes(4, "little")
    repo.files[EIGHT.format(2)] = second[:at] + (137).to_bytes(4, "little") + second[at + 4 :]
    problem = r"blk\.1\.attn_output\.weight is stored as the unknown type 137, which cannot be run; "
    with pytest.raises(ModelError, match=rf"{problem}Q4_K_M of it \(.*\) runs: privatellm models pull {REPO}:Q4_K_M$"):
        pull(f"{REPO}:Q8_0", quiet)
    assert local_models.partial_downloads() == []
    assert model_folder.is_complete(pull(f"{REPO}:Q4_K_M", quiet)), "what was named runs"


def test_where_no_file_runs_none_is_named(hub: LoopbackHub, repo: Repo) -> None:
    kind = GGMLQuantizationType.Q4_K.to_bytes(4, "little")
    data = repo.files["M-Q4_K_M.gguf"]
    at = data.index(b"blk.1.attn_output.weight") + len(b"blk.1.attn_output.weight") + 4 + 2 * 8
    assert data[at : at + 4] == kind
    unreadable = data[:at] + (137).to_bytes(4, "little") + data[at + 4 :]
    repo.files = {"M-Q4_K_M.gguf": unreadable, "M-Q5_K_M.gguf": unreadable, "M-Q4_0.gguf": b"GGUF"}
    with pytest.raises(ModelError, match=r"the unknown type 137, which cannot be run; use a Q4_K_M, .* \(formats that"):
        pull(f"{REPO}:Q4_K_M", quiet)


def test_a_header_is_read_from_a_beginning_that_holds_it_and_from_no_shorter_one(published: dict[str, bytes]) -> None:
    data = published["M-Q4_K_M.gguf"]
    whole = GgufFile(Path("M.gguf"), [(data, len(data))])
    end = min(tensor.offset for tensor in whole.tensors.values())
    for length in (*range(0, end - 32, 997), end - 32):
        with pytest.raises(HeaderGoesOn):
            GgufFile(Path("M.gguf"), [(data[:length], len(data))])
        with pytest.raises(ModelError, match="ends in the middle of its header"):
            GgufFile(Path("M.gguf"), [(data[:length], length)])
    for length in (end, end + 1, len(data)):
        found = GgufFile(Path("M.gguf"), [(data[:length], len(data))])
        assert (found.metadata, found.tensors) == (whole.metadata, whole.tensors)


def test_a_header_without_end_is_not_fetched(hub: LoopbackHub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_fetching, "MOST_HEADER_BYTES", 4096)
    with pytest.raises(ModelError, match="a header of over 4096 bytes"):
        pull(f"{REPO}:Q4_K_M", quiet)


def test_the_machine_may_refuse_the_model_before_its_weights(hub: LoopbackHub, repo: Repo) -> None:
    seen: list[tuple[object, int]] = []

    def refuse(config: object, nbytes: int) -> None:
        seen.append((config, nbytes))
        raise ModelError("Too large.", "memory")

    with pytest.raises(ModelError, match="Too large"):
        pull(f"{REPO}:Q4_K_M", quiet, None, refuse)
    ((config, nbytes),) = seen
    assert isinstance(config, dict) and config["model_type"] == "qwen3_moe"
    assert nbytes == len(repo.files["M-Q4_K_M.gguf"])


def test_too_small_a_disk_is_found_before_the_weights(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 64 * 1024 * 1024))
    with pytest.raises(ModelError, match="67 MB free") as raised:
        pull(f"{REPO}:Q4_K_M", quiet)
    assert raised.value.kind == "disk"
    assert all(wanted and not wanted.endswith("-") for wanted in bytes_asked(hub, "M-Q4_K_M.gguf"))


def test_a_file_with_the_wrong_digest_is_refused_and_removed(hub: LoopbackHub, repo: Repo) -> None:
    repo.wrong_digests = {EIGHT.format(2)}
    with pytest.raises(ModelError, match=r"M-Q8_0-00002-of-00002.gguf of .* arrived damaged .* was deleted"):
        pull(f"{REPO}:Q8_0", quiet)
    partial = local_models.locate("models") / "someone--M-GGUF--Q8_0.partial"
    assert (partial / "M-Q8_0-00001-of-00002.gguf").exists() and not list(partial.glob("M-Q8_0-00002*"))
    repo.wrong_digests = set()
    before = len(bytes_asked(hub, EIGHT.format(1)))
    assert model_folder.is_complete(pull(f"{REPO}:Q8_0", quiet))
    assert len(bytes_asked(hub, EIGHT.format(1))) == before, "a verified part is not fetched again"


def test_a_download_that_was_stopped_goes_on(hub: LoopbackHub, repo: Repo) -> None:
    seen: list[int] = []

    def note(stage: str, done: int, total: int, unit: str) -> None:
        if stage == "downloading":
            seen.append(done)

    with pytest.raises(Cancelled):
        pull(f"{REPO}:Q4_K_M", note, lambda: bool(seen))
    assert [name for name, _ in local_models.partial_downloads()] == [f"{REPO}:Q4_K_M"]
    folder = pull(f"{REPO}:Q4_K_M", quiet)
    assert (folder / "M-Q4_K_M.gguf").read_bytes() == repo.files["M-Q4_K_M.gguf"]


def test_a_server_that_ignores_ranges_still_gives_the_right_file(hub: LoopbackHub, repo: Repo) -> None:
    repo.ignores_ranges = True
    folder = pull(f"{REPO}:Q8_0", quiet)
    for part in (1, 2):
        assert (folder / EIGHT.format(part).rpartition("/")[2]).read_bytes() == repo.files[EIGHT.format(part)]
