"""Models of other programs are found where they lie, whatever state their folders are in, and nothing is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from engine.errors import ModelError
from engine.ipc.messages import Load, Plan
from engine.models.folders import model_folder
from engine.models.folders.opening import open_model
from engine.models.folders.prepare import prepare
from engine.models.store import found_elsewhere, local_models
from engine.models.store.fetching import pull
from engine.models.store.found_elsewhere import FoundModel, Places, find, find_all, find_repo, in_llama_cpp, places
from engine.session.loading import find_folder
from engine.session.plan_model import plan_model
from tests.support.progress import quiet
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import write_tiny_model

REVISION = "0123456789abcdef0123456789abcdef01234567"
DIGEST = "a" * 64


def write(path: Path, data: bytes | str = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def manifest(digest: str = DIGEST, size: Any = 1000, **more: str) -> str:
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "b" * 64, "size": 3},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": size},
        *({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": d, "size": 1} for kind, d in more.items()),
    ]
    return json.dumps({"schemaVersion": 2, "layers": layers})


@pytest.fixture
def ollama(tmp_path: Path) -> Path:
    root = tmp_path / "ollama"
    write(root / "blobs" / f"sha256-{DIGEST}", bytes(1000))
    library = root / "manifests" / "registry.ollama.ai" / "library"
    write(library / "qwen3" / "30b", manifest())
    write(library / "llama3.2" / "latest", manifest())
    return root


def safetensors(folder: Path, family: str = "mixtral", shards: int = 2, missing: bool = False) -> Path:
    names = [f"model-{part:05}-of-{shards:05}.safetensors" for part in range(1, shards + 1)]
    for name in names[missing:]:
        write(folder / name, bytes(100))
    write(folder / "model.safetensors.index.json", json.dumps({"weight_map": {str(i): n for i, n in enumerate(names)}}))
    write(folder / "config.json", json.dumps({"model_type": family}))
    write(folder / "tokenizer.json", "{}")
    return folder


def snapshot(cache: Path, repo: str, revision: str = REVISION, main: bool = True) -> Path:
    folder = cache / f"models--{repo.replace('/', '--')}"
    if main:
        write(folder / "refs" / "main", revision)
    path = folder / "snapshots" / revision
    path.mkdir(parents=True)
    return path


def names(models: tuple[FoundModel, ...]) -> list[str]:
    return [model.name for model in models]


def test_where_each_program_keeps_its_models(tmp_path: Path) -> None:
    linux, mac = places({}, tmp_path, "linux"), places({}, tmp_path, "darwin")
    assert linux.ollama == (tmp_path / ".ollama/models", Path("/usr/share/ollama/.ollama/models"))
    assert linux.lmstudio == (tmp_path / ".lmstudio/models", tmp_path / ".cache/lm-studio/models")
    assert linux.llama_cpp == (tmp_path / ".cache/llama.cpp",)
    assert mac.llama_cpp == (tmp_path / "Library/Caches/llama.cpp",)
    assert linux.huggingface == mac.huggingface == (tmp_path / ".cache/huggingface/hub",)
    moved = {"OLLAMA_MODELS": "/a", "LLAMA_CACHE": "/b", "HF_HOME": "/c", "XDG_CACHE_HOME": "/d"}
    chosen = places(moved, tmp_path, "linux")
    assert chosen.ollama[0] == Path("/a") and chosen.llama_cpp == (Path("/b"),)
    assert chosen.huggingface == (Path("/c/hub"),)
    assert places({**moved, "HF_HUB_CACHE": "/e", "LLAMA_CACHE": " "}, tmp_path, "linux") == Places(
        chosen.ollama, linux.lmstudio, (Path("/d/llama.cpp"),), (Path("/e"),)
    )


def test_lm_studio_says_itself_where_its_models_are(tmp_path: Path) -> None:
    usual = (tmp_path / ".lmstudio/models", tmp_path / ".cache/lm-studio/models")
    write(tmp_path / ".lmstudio-home-pointer", "/disk/studio\n")
    write(tmp_path / ".lmstudio" / "settings.json", json.dumps({"downloadsFolder": "/disk/models"}))
    moved = places({}, tmp_path, "linux").lmstudio
    assert moved == (Path("/disk/studio/models"), Path("/disk/models"), *usual)
    for pointer, settings in ((b"relative", "{}"), (b"\xff", "["), (b"/a\0b", '{"downloadsFolder": 3}')):
        write(tmp_path / ".lmstudio-home-pointer", pointer)
        write(tmp_path / ".lmstudio" / "settings.json", settings)
        assert places({}, tmp_path, "linux").lmstudio[-2:] == usual
        assert find_all(Places(lmstudio=places({}, tmp_path, "linux").lmstudio)) == ()


def test_ollamas_models_are_blobs_that_manifests_name(ollama: Path) -> None:
    write(ollama / "manifests" / "hf.co" / "someone" / "M-GGUF" / "Q4_K_M", manifest())
    write(ollama / "manifests-v2" / "ollama.com" / "someone" / "mine" / "latest", manifest())
    where = Places(ollama=(ollama,))
    found = find_all(where)
    assert names(found) == [
        "ollama:hf.co/someone/M-GGUF:Q4_K_M",
        "ollama:llama3.2:latest",
        "ollama:qwen3:30b",
        "ollama:someone/mine:latest",
    ]
    blob = ollama / "blobs" / f"sha256-{DIGEST}"
    assert {(model.path, model.nbytes, model.title) for model in found} == {(blob, 1000, "ollama")}
    for name in ("ollama:qwen3:30b", "OLLAMA:Qwen3:30B", "ollama:qwen3", "ollama:llama3.2", "ollama:llama3.2:latest"):
        assert find(name, where) is not None, name
    for name in ("ollama:qwen3:8b", "ollama:", "ollama", "qwen3:30b", "ollama:qwen", "nothing:qwen3"):
        assert find(name, where) is None, name


BROKEN: dict[str, bytes | str] = {
    "no JSON": "{",
    "no table": "[]",
    "no layers": "{}",
    "layers of another kind": '{"layers": [1]}',
    "not text": b"\xff\xfe",
    "nested": "[" * 100_000,
    "a way out": manifest("../../../etc/passwd"),
    "a digest of another kind": manifest("a" * 40),
    "a blob that is not there": manifest("c" * 64),
    "half a blob": manifest(size=2000),
    "a size of another kind": manifest(size="1000"),
    "an adapter": manifest(adapter="sha256:" + "d" * 64),
    "two models": manifest(model="sha256:" + DIGEST),
    "too long": " " * (1 << 20) + manifest(),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_manifest_is_left_out(ollama: Path, what: str) -> None:
    library = ollama / "manifests" / "registry.ollama.ai" / "library"
    write(library / "broken" / "latest", BROKEN[what])
    write(library / "b\x1broken" / "latest", manifest())
    write(library / ".hidden", manifest())
    assert names(find_all(Places(ollama=(ollama,)))) == ["ollama:llama3.2:latest", "ollama:qwen3:30b"]


def test_lm_studio_keeps_files_by_owner_and_name(tmp_path: Path) -> None:
    write(tmp_path / "someone" / "M-GGUF" / "M-Q4_K_M.gguf", bytes(10))
    write(tmp_path / "someone" / "M-GGUF" / "mmproj-M-F16.gguf", bytes(10))
    for part in (1, 2):
        write(tmp_path / "someone" / "L-GGUF" / f"L-Q8_0-0000{part}-of-00002.gguf", bytes(10))
    write(tmp_path / "someone" / "half" / "L-Q8_0-00001-of-00002.gguf")
    safetensors(tmp_path / "mlx-community" / "M-4bit")
    write(tmp_path / "a file")
    where = Places(lmstudio=(tmp_path / "absent", tmp_path))
    found = {model.name: model for model in find_all(where)}
    assert {name: (model.path.name, model.nbytes) for name, model in found.items()} == {
        "lmstudio:mlx-community/M-4bit": ("M-4bit", 200),
        "lmstudio:someone/L-GGUF:Q8_0": ("L-Q8_0-00001-of-00002.gguf", 20),
        "lmstudio:someone/M-GGUF:Q4_K_M": ("M-Q4_K_M.gguf", 10),
    }
    assert find("lmstudio:someone/m-gguf", where) == found["lmstudio:someone/M-GGUF:Q4_K_M"]


def test_llama_cpp_keeps_files_side_by_side(tmp_path: Path) -> None:
    write(tmp_path / "someone_M-GGUF_M-Q4_K_M.gguf", bytes(10))
    write(tmp_path / "someone_M-GGUF_M-Q8_0.gguf.downloadInProgress")
    write(tmp_path / "manifest=someone=M-GGUF=latest.json", "{}")
    (found,) = find_all(Places(llama_cpp=(tmp_path,)))
    assert (found.name, found.nbytes) == ("llama.cpp:someone_M-GGUF_M-Q4_K_M", 10)
    assert find("llama.cpp:someone_m-gguf_m-q4_k_m", Places(llama_cpp=(tmp_path,))) == found


def test_the_hugging_face_cache(tmp_path: Path) -> None:
    blob = write(tmp_path / "models--a--M" / "blobs" / "1", bytes(50))
    weights = snapshot(tmp_path, "a/M")
    (weights / "model.safetensors").symlink_to(blob)
    write(weights / "config.json", json.dumps({"model_type": "mixtral"}))
    write(weights / "tokenizer.json", "{}")
    files = snapshot(tmp_path, "a/M-GGUF")
    write(files / "Q8_0" / "M-Q8_0.gguf", bytes(7))
    write(files / "M-Q4_K_M.gguf", bytes(5))
    (files / "M-Q6_K.gguf").symlink_to(tmp_path / "gone")
    safetensors(snapshot(tmp_path, "a/encoder"), family="bert")
    safetensors(snapshot(tmp_path, "a/half"), missing=True)
    (safetensors(snapshot(tmp_path, "a/mute")) / "tokenizer.json").unlink()
    snapshot(tmp_path, "a/empty")
    write(tmp_path / "datasets--a--D" / "refs" / "main", REVISION)
    where = Places(huggingface=(tmp_path,))
    found = {model.name: model for model in find_all(where)}
    assert {name: (model.path, model.nbytes) for name, model in found.items()} == {
        "huggingface:a/M": (weights, 50),
        "huggingface:a/M-GGUF:Q4_K_M": (files / "M-Q4_K_M.gguf", 5),
        "huggingface:a/M-GGUF:Q8_0": (files / "Q8_0" / "M-Q8_0.gguf", 7),
    }
    assert find_repo("a/M", "", where) == found["huggingface:a/M"]
    assert find_repo("a/M-GGUF", "q8_0", where) == found["huggingface:a/M-GGUF:Q8_0"]
    for absent in ("a/M:Q4_K_M", "a/M-GGUF:", "a/M-GGUF:Q6_K", "a/half:", "b/M:", "x:"):
        repo, _, tag = absent.partition(":")
        assert find_repo(repo, tag, where) is None, absent


def test_a_repository_with_one_gguf_file_needs_no_tag(tmp_path: Path) -> None:
    for part in (1, 2):
        write(snapshot(tmp_path / str(part), "a/M") / "M-Q4_K_M.gguf")
    where = Places(huggingface=(tmp_path / "1", tmp_path / "2"))
    found = find_repo("a/M", "", where)
    assert found is not None and found.name == "huggingface:a/M:Q4_K_M" and tmp_path / "1" in found.path.parents


def test_main_is_used_and_without_it_the_newest_revision(tmp_path: Path) -> None:
    older, newer = "1" * 40, "2" * 40
    for when, revision in enumerate((older, newer)):
        folder = snapshot(tmp_path, "a/M", revision, main=revision == older)
        write(folder / "M.gguf")
        os.utime(folder, ns=(0, when * 10**9))
    where = Places(huggingface=(tmp_path,))
    first = find_repo("a/M", "", where)
    assert first is not None and first.path.parent.name == older
    for said in ("no revision", "../" * 10, "3" * 40):
        write(tmp_path / "models--a--M" / "refs" / "main", said)
        second = find_repo("a/M", "", where)
        assert second is not None and second.path.parent.name == newer


def test_a_huge_folder_is_not_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(100):
        write(tmp_path / f"M{number:03}-Q8_0.gguf")
    monkeypatch.setattr(found_elsewhere, "MOST_ENTRIES", 30)
    assert len(find_all(Places(llama_cpp=(tmp_path,)))) == 30
    write(tmp_path / "deep" / "a" / "b" / "c" / "d" / "M-Q8_0.gguf")
    assert find_all(Places(lmstudio=(tmp_path / "deep",))) == ()


def test_links_in_circles_end(tmp_path: Path) -> None:
    (tmp_path / "someone").mkdir()
    (tmp_path / "someone" / "again").symlink_to(tmp_path)
    (tmp_path / "someone" / "itself").symlink_to(tmp_path / "someone" / "itself")
    where = Places((tmp_path,), (tmp_path,), (tmp_path,), (tmp_path,))
    assert find_all(where) == ()


def test_no_pipe_is_waited_for(ollama: Path, tmp_path: Path) -> None:
    library = ollama / "manifests" / "registry.ollama.ai" / "library"
    weights = safetensors(snapshot(tmp_path / "hub", "a/M"))
    pipes = [
        library / "piped" / "latest",
        tmp_path / "home" / ".lmstudio-home-pointer",
        tmp_path / "home" / ".lmstudio" / "settings.json",
        tmp_path / "llama" / "M-Q8_0.gguf",
        snapshot(tmp_path / "hub", "a/N", main=False) / "config.json",
        tmp_path / "hub" / "models--a--N" / "refs" / "main",
    ]
    for pipe in pipes:
        pipe.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(pipe)
    studio = places({}, tmp_path / "home", "linux").lmstudio
    found = find_all(Places((ollama,), studio, (tmp_path / "llama",), (tmp_path / "hub",)))
    assert names(found) == ["ollama:llama3.2:latest", "ollama:qwen3:30b", "huggingface:a/M"]
    assert found[-1].path == weights and [model.problem for model in found] == ["", "", ""]


def test_what_cannot_be_read_is_left_out(ollama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", closed)
    monkeypatch.setattr(Path, "stat", closed)
    everywhere = (ollama,)
    assert find_all(Places(everywhere, everywhere, everywhere, everywhere)) == ()
    assert find_repo("a/M", "", Places(huggingface=everywhere)) is None


def test_nothing_is_written(ollama: Path, tmp_path: Path) -> None:
    safetensors(snapshot(tmp_path / "hub", "a/M"))
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    where = Places((ollama,), (ollama,), (ollama,), (tmp_path / "hub",))
    assert len(find_all(where)) == 3
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(("architecture", "problem"), [("llama", ""), ("gemma9", "gemma9 is not supported")])
def test_an_architecture_that_does_not_run_is_said(tmp_path: Path, architecture: str, problem: str) -> None:
    writer = GGUFWriter(tmp_path / "M-Q8_0.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (found,) = in_llama_cpp(tmp_path)
    assert found.problem.endswith(problem) and bool(found.problem) == bool(problem)


@pytest.mark.parametrize(
    "data", [b"", b"GGUF", b"GGUF\x03", b"PK" * 50, b"GGUF" + b"\xff" * 100, b"GGUF\x03" + bytes(500)]
)
def test_a_header_that_tells_nothing_is_no_problem(tmp_path: Path, data: bytes) -> None:
    write(tmp_path / "M-Q8_0.gguf", data)
    (found,) = in_llama_cpp(tmp_path)
    assert found.problem == ""


# --- by name ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_model_of_another_program_is_named_like_any_other(
    ollama: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(ollama))
    model = local_models.resolve("ollama:Qwen3:30b")
    assert (model.kind, model.name, model.source.parent) == ("gguf", "ollama:qwen3:30b", ollama / "blobs")
    assert model.plain_folder.parent == local_models.locate("models")
    assert model.plain_folder.name.startswith("gguf--qwen3-30b--")
    with pytest.raises(ModelError, match="no whole model gemma4:26b among the files of ollama; `privatellm models`"):
        local_models.resolve("ollama:gemma4:26b")
    weights = safetensors(snapshot(hub_cache, "a/M"))
    model = local_models.resolve("huggingface:a/M")
    assert (model.kind, model.name, model.folder) == ("folder", "huggingface:a/M", weights)
    assert model.prepared_folder.parent == local_models.locate("models"), (
        "nothing is written beside another program's files"
    )
    with pytest.raises(ModelError, match="Nothing of huggingface:a/M"):
        local_models.remove("huggingface:a/M")
    assert model_folder.is_complete(weights)


def test_a_repo_that_the_hugging_face_cache_holds_is_used_from_there(hub_cache: Path) -> None:
    assert local_models.resolve("a/M").kind == "hub" and local_models.resolve("a/M").elsewhere == ""
    weights = safetensors(snapshot(hub_cache, "a/M"))
    model = local_models.resolve("a/M")
    assert (model.kind, model.name, model.folder) == ("folder", "a/M", weights)
    assert model.elsewhere == f"a/M is in the Hugging Face cache already, and is used from there: {weights}"
    assert pull("a/M", quiet) == weights, "nothing is downloaded"
    file = write(snapshot(hub_cache, "a/M-GGUF") / "M-Q4_K_M.gguf")
    model = local_models.resolve("a/M-GGUF:q4_k_m")
    assert (model.kind, model.name, model.source) == ("gguf", "a/M-GGUF:Q4_K_M", file)
    assert local_models.resolve("a/M-GGUF:Q8_0").kind == "hub"


def test_the_own_download_comes_before_the_cache(hub_cache: Path) -> None:
    safetensors(snapshot(hub_cache, "a/M"))
    own = safetensors(local_models.locate("models") / "a--M")
    assert local_models.resolve("a/M").folder == own
    assert local_models.remove("a/M") > 0 and not own.exists()


def test_what_was_begun_of_a_cached_repo_can_be_removed(hub_cache: Path) -> None:
    safetensors(snapshot(hub_cache, "a/M"))
    begun = write(local_models.locate("models") / "a--M.partial" / "config.json", "{}")
    assert local_models.remove("a/M") > 0 and not begun.exists()


def test_what_ollama_holds_is_opened_where_it_lies(
    tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_model(tmp_path / "source", "llama"), "llama")
    root = tmp_path / "ollama"
    blob = write(root / "blobs" / f"sha256-{DIGEST}", file.read_bytes())
    described = manifest(size=blob.stat().st_size)
    write(root / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest", described)
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    before = {path: path.lstat().st_mtime_ns for path in root.rglob("*")}
    for _ in range(2):
        name, folder = find_folder("ollama:tiny", quiet, None)
        assert name == "ollama:tiny:latest" and open_model(folder).trunk_bytes > 0
        assert [path.readlink() for path in folder.iterdir() if path.is_symlink()] == [blob]
    assert pull("ollama:tiny", quiet) == folder
    assert [item.linked for item in local_models.installed()] == [blob]
    planned = plan_model(Plan(id=1, load=Load(id=1, model="ollama:tiny", runtime="native")), None)
    assert planned.model == "ollama:tiny:latest" and planned.family == "llama"
    assert {path: path.lstat().st_mtime_ns for path in root.rglob("*")} == before
    assert local_models.remove("ollama:tiny") > 0 and not folder.exists() and blob.exists()


def test_what_the_hugging_face_cache_holds_is_opened_where_it_lies(tmp_path: Path, hub_cache: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "qwen3_moe")
    write(source / "tokenizer.json", "{}")
    weights = snapshot(hub_cache, "a/M")
    blobs = weights.parents[1] / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / str(number))
        (weights / path.name).symlink_to(Path("../../blobs") / str(number))
    before = {path: path.lstat().st_mtime_ns for path in hub_cache.rglob("*")}
    name, folder = find_folder("a/M", quiet, None)
    opened = open_model(folder)
    assert (name, folder) == ("a/M", weights) and opened.experts is not None
    prepare(folder, local_models.resolve("a/M").prepared_folder, quiet)
    assert find_folder("a/M", quiet, None)[1].parent == local_models.locate("models")
    assert [folder for folder, _ in local_models.prepared_elsewhere()] == [
        local_models.resolve("a/M").prepared_folder.name
    ]
    assert {path: path.lstat().st_mtime_ns for path in hub_cache.rglob("*")} == before
