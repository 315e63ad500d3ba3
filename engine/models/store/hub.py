"""The contents of a model repository on the Hugging Face hub, and the files of it that are needed.

Two plain HTTP requests with ``httpx2``, on which huggingface-hub is based, replace huggingface-hub's own downloader: it
reports no bytes, and it is switched off for the whole process because the engine promises to open no socket.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx2
import msgspec

from engine.errors import ModelError, shown
from engine.models.formats.json_files import MOST_TOKENIZER_BYTES, SMALL_FILE, read_object
from engine.system.processes import secrets

ENDPOINT = "https://huggingface.co"
WEIGHT_INDEX = "model.safetensors.index.json"
_ANSWER_LIMIT = 64 << 20
_DIGEST_CHUNK = 8 << 20
_WANTED = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|tokenizer\.model|spiece\.model|"
    r"special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|chat_template\.(jinja|json)|"
    r"LICEN[CS]E(\.(txt|md))?|model\.safetensors\.index\.json|quantize_config\.json|quant_config\.json|"
    r"hf_quant_config\.json|(pre)?processor_config\.json"
)
_LARGE_SETTINGS = dict.fromkeys(
    ("tokenizer.json", "tokenizer.model", "spiece.model", WEIGHT_INDEX), MOST_TOKENIZER_BYTES
)
"""Maximum bytes of the files beside the weights that may be larger than a configuration."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha1:[0-9a-f]{40}")
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository. ``digest``: ``sha256:…`` of large files, git's ``sha1:…`` of the blob of others.

    It is part of the names of files here, so anything that is no digest raises ModelError.
    """

    name: str
    size: int
    digest: str

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.digest):
            raise ModelError(
                f"The hub states an impossible checksum of {shown(self.name)} ({shown(self.digest)}); nothing was "
                "downloaded.",
                "network",
            )


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    repo: str
    revision: str
    files: dict[str, RemoteFile]


class _LargeFile(msgspec.Struct):
    sha256: str
    size: int


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    blobId: str | None = None
    lfs: _LargeFile | None = None


class _ModelInfo(msgspec.Struct):
    sha: str
    siblings: list[_Sibling] = []


def endpoint() -> str:
    """The hub's address; ``HF_ENDPOINT`` names a mirror."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or ENDPOINT


def stored_token() -> str | None:
    """The person's hub token: ``HF_TOKEN``, or what ``hf auth login`` stored."""
    token = secrets().get("HF_TOKEN", "").strip()
    if token:
        return token
    from huggingface_hub import constants

    try:
        return Path(constants.HF_TOKEN_PATH).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def new_client() -> httpx2.Client:
    """A client for one repository, without the person's token until :func:`unlock` is asked for it."""
    return httpx2.Client(
        headers={"User-Agent": "privatellm", "Accept-Encoding": "identity"},
        follow_redirects=True,
        timeout=httpx2.Timeout(20.0, connect=10.0),
        verify=_trusted(),
        event_hooks={"response": [_refuse_packed]},
    )


@functools.cache
def _trusted() -> ssl.SSLContext:
    """The certificate authorities of this process, read once: that takes longer than fetching a small file."""
    return httpx2.create_ssl_context()


def unlock(client: httpx2.Client, response: httpx2.Response) -> bool:
    """Whether the request that ``response`` refuses may be tried again, now with the person's token.

    The token is for the hub alone, and never goes over a connection that others can read. A redirect to another host
    (the file store) does not carry it along.
    """
    first = response.history[0].request if response.history else response.request
    hub = httpx2.URL(endpoint())
    to_the_hub = (first.url.scheme, first.url.host, first.url.port) == ("https", hub.host, hub.port)
    if response.status_code not in (401, 403) or not to_the_hub or "Authorization" in first.headers:
        return False
    # Another request, of those that are under way at once, may have been refused a moment ago.
    if "Authorization" not in client.headers:
        token = stored_token()
        if token is None:
            return False
        client.headers["Authorization"] = f"Bearer {token}"
    return True


def _refuse_packed(response: httpx2.Response) -> None:
    """Refuse compressed answers, which were not requested: a small one could unpack to gigabytes."""
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ModelError(f"{response.request.url.host} sends a packed answer, which was not asked for.", "network")


def file_url(repository: Repository, name: str) -> str:
    return f"{endpoint()}/{repository.repo}/resolve/{repository.revision}/{quote(name)}"


def list_repository(client: httpx2.Client, repo: str) -> Repository:
    """The current contents of ``repo``. Raises ModelError (network; bad-input for a missing or closed repo)."""
    try:
        body = _answer_about(client, repo) or _answer_about(client, repo)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise no_connection(error) from error
    try:
        info = msgspec.json.decode(body or b"", type=_ModelInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(
            f"{endpoint()} does not answer like a model hub ({error}); check HF_ENDPOINT.", "network"
        ) from error
    if not re.fullmatch(r"[0-9a-zA-Z]{1,64}", info.sha):
        raise ModelError(f"The hub names an impossible revision of {repo}; nothing was downloaded.", "network")
    files = {}
    for sibling in info.siblings:
        size = sibling.lfs.size if sibling.lfs else sibling.size
        digest = f"sha256:{sibling.lfs.sha256}" if sibling.lfs else f"sha1:{sibling.blobId}"
        if size is not None and size >= 0 and (sibling.lfs or sibling.blobId):
            files[sibling.rfilename] = RemoteFile(sibling.rfilename, size, digest.lower())
    return Repository(repo, info.sha, files)


def _answer_about(client: httpx2.Client, repo: str) -> bytes | None:
    """The hub's answer about ``repo``, read up to a limit; None if the request must be repeated with the token."""
    body = bytearray()
    address = f"{endpoint()}/api/models/{repo}/revision/main"
    with client.stream("GET", address, params={"blobs": "true"}) as response:
        if unlock(client, response):
            return None
        raise_for_status(response, repo)
        for piece in response.iter_raw():
            body += piece
            if len(body) > _ANSWER_LIMIT:
                raise ModelError(f"The hub's answer about {repo} is too large; it was not used.", "network")
    return bytes(body)


def small_files(repository: Repository) -> list[RemoteFile]:
    """Config, tokenizer, licence and weight index. Raises ModelError if the repo cannot be a usable model."""
    names = repository.files
    if "config.json" not in names:
        raise ModelError(
            f"{repository.repo} has neither config.json nor a GGUF file, so it is no model; name another repository.",
            "bad-input",
        )
    if not has_safetensors(repository):
        pickled = any(name.endswith(_PICKLED) for name in names)
        what = "only pickled weights, which can run code" if pickled else "no weights"
        raise ModelError(f"{repository.repo} holds {what}; use a repository with *.safetensors.", "bad-input")
    wanted = [names[name] for name in sorted(names) if _WANTED.fullmatch(name)]
    for file in wanted:
        limit = _LARGE_SETTINGS.get(file.name, SMALL_FILE)
        if file.size > limit:
            raise ModelError(
                f"{file.name} of {repository.repo} has {file.size} bytes, over {limit}; no model needs so many, and it "
                "was not fetched.",
                "bad-input",
            )
    return wanted


def has_safetensors(repository: Repository) -> bool:
    """Whether there are weights that :func:`weight_files` would take."""
    return any(_SHARD.fullmatch(name) for name in repository.files)


def weight_files(repository: Repository, index: Path | None) -> list[RemoteFile]:
    """The safetensors files of the model: those of the index, if there is one, as some repositories contain the weights
    a second time in another layout. Raises ModelError if the index names a file that is missing or not safe.
    """
    if index is None:
        whole = repository.files.get("model.safetensors")
        if whole is not None:
            return [whole]
        shards = [name for name in sorted(repository.files) if _SHARD.fullmatch(name)]
        return [repository.files[name] for name in shards if not name.startswith("consolidated")]
    try:
        names = set(read_object(index, MOST_TOKENIZER_BYTES)["weight_map"].values())
    except (ModelError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"The weight index of {repository.repo} is damaged; tell its owner.") from error
    for name in sorted(map(str, names)):
        if not _SHARD.fullmatch(name):
            raise ModelError(
                f"The weight index of {repository.repo} names the unsafe file {name!r}; it was not fetched."
            )
        if name not in repository.files:
            raise ModelError(f"The weight index of {repository.repo} names {name}, which the repository does not hold.")
    return [repository.files[str(name)] for name in sorted(names)]


def digest_of(path: Path, like: str, check_stop: Callable[[], None] = lambda: None) -> str:
    """The digest of a file, of the same kind as ``like``. ``check_stop`` is called now and then and may raise."""
    kind = like.partition(":")[0]
    with path.open("rb") as file:
        if kind == "sha256":
            digest = hashlib.sha256()
        else:
            # git's own identity of a small file, not a signature; its integrity rests on HTTPS as well.
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        while piece := file.read(_DIGEST_CHUNK):
            check_stop()
            digest.update(piece)
    return f"{kind}:{digest.hexdigest()}"


def total_bytes(files: Iterable[RemoteFile]) -> int:
    return sum(file.size for file in files)


def no_connection(error: Exception) -> ModelError:
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    return ModelError(
        f"There is no connection to {endpoint()} ({reason}); check the network and try again. "
        f"Models that are already on this machine work without it.",
        "network",
    )


def raise_for_status(response: httpx2.Response, repo: str) -> None:
    """Raises ModelError with one line for a status that is not a success."""
    status = response.status_code
    if status < 400:
        return
    code = response.headers.get("X-Error-Code", "")
    page = f"{endpoint()}/{repo}"
    gated = code == "GatedRepo"
    over_http = status in {401, 403} and response.request.url.scheme != "https" and stored_token() is not None
    if over_http:
        raise ModelError(
            f"{endpoint()} asks who you are, and your hub token is only sent over https; check HF_ENDPOINT.",
            "bad-input",
        )
    if gated or (status == 403 and code != "RepoNotFound"):
        raise ModelError(
            f"{repo} is only for people who accepted its terms: accept them at {page}, then set HF_TOKEN.",
            "bad-input",
        )
    if status == 401 and "Authorization" in response.request.headers:
        raise ModelError(f"The hub knows no {repo}, or refuses your token; check the name, and HF_TOKEN.", "bad-input")
    if status in {401, 404}:
        raise ModelError(
            f"The hub knows no model {repo} that is open to everybody; check the name (a private one needs HF_TOKEN).",
            "bad-input",
        )
    if status == 429:
        raise ModelError("The hub asks to wait (too many requests); try again in a few minutes.", "network")
    raise ModelError(f"The hub answers with an error (HTTP {status}) for {repo}; try again later.", "network")
