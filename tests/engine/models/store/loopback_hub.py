"""An HTTP server on loopback that speaks as much of the hub's interface as fetching needs, and can misbehave."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
}
"""A config.json that gives all sizes."""
REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repo:
    """Files of a repository. Those named in ``large`` are kept as LFS objects (with a sha256)."""

    files: dict[str, bytes]
    large: set[str] = field(default_factory=set)
    wrong_digests: set[str] = field(default_factory=set)
    said_digests: dict[str, str] = field(default_factory=dict)
    """What is said to be the digest of a file."""
    unknown: str = "[]"
    """JSON of a field of which nobody knows anything."""
    cut_after: dict[str, int] = field(default_factory=dict)
    """Close the connection after so many bytes of a file, every time it is asked for; counted per request."""
    ignores_ranges: bool = False
    gated: bool = False
    busy_times: int = 0
    """Answer so many file requests with HTTP 503 first."""
    extra_bytes: int = 0
    stall_after: dict[str, int] = field(default_factory=dict)
    """Send so many bytes of a file and then nothing, until ``stalled`` is set or half a minute has passed."""
    stalled: threading.Event = field(default_factory=threading.Event)
    waited_in_vain: bool = False
    together: int = 0
    """Answer requests for a range only once so many are here."""
    at_once: list[int] = field(default_factory=list)
    """How many requests for a file were answered at once, at the beginning of each."""
    refused_from: int | None = None
    """Answer 503 to requests for a range that begins at this byte or later."""
    wants_token: bool = False
    """Answer 401 to whoever does not say who they are."""
    packed: bool = False
    """Answer with a small piece that unpacks to half a gigabyte."""
    padding: int = 0
    """Bytes of blanks in what is said of the repository."""
    redirect_to: str = ""
    """Files lie on another server, as the hub's do."""

    answering: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Inside, the request for a file is counted."""
        with self._changed:
            self.answering += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.answering -= 1

    def wait_for_others(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.answering >= self.together, 20):
                raise TimeoutError(f"there are {self.answering} requests at once, not {self.together}")
        self.together = 0


class LoopbackHub:
    """``with LoopbackHub({"owner/name": Repo(...)}) as hub: hub.address``; ``requests`` is what was asked."""

    def __init__(self, repos: dict[str, Repo]) -> None:
        self.repos = repos
        self.requests: list[tuple[str, str | None, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                hub.requests.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
                hub.answer(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LoopbackHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def file_requests(self, name: str) -> list[str | None]:
        """The Range headers with which ``name`` was asked for."""
        return [wanted for path, wanted, _ in self.requests if path.endswith("/" + name)]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        for name, repo in self.repos.items():
            if path.startswith((f"/api/models/{name}/", f"/{name}/")) and repo.wants_token:
                return _send(handler, 401, b"{}", {"X-Error-Code": "GatedRepo"})
            if path == f"/api/models/{name}/revision/main":
                if repo.packed:
                    packed = gzip.compress(bytes(1 << 20)) * 512
                    return _send(handler, 200, packed, {"Content-Encoding": "gzip"})
                info = json.dumps(_info(repo))[:-1] + f', "unknown": {repo.unknown}}}'
                return _send(handler, 200, info.encode() + b" " * repo.padding)
            prefix = f"/{name}/resolve/{REVISION}/"
            if path.startswith(prefix):
                return _send_file(handler, repo, path[len(prefix) :])
        return _send(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"})


def git_blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _info(repo: Repo) -> dict[str, Any]:
    siblings = []
    for name, data in repo.files.items():
        shown = b"something else" if name in repo.wrong_digests else data
        said = repo.said_digests.get(name)
        entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": said or git_blob_id(shown)}
        if name in repo.large:
            sha256 = said or hashlib.sha256(shown).hexdigest()
            entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
        siblings.append(entry)
    return {"id": "ignored", "sha": REVISION, "siblings": siblings, "tags": ["unknown fields are ignored"]}


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    handler.send_response(status)
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _send_file(handler: BaseHTTPRequestHandler, repo: Repo, name: str) -> None:
    if repo.redirect_to:
        return _send(handler, 302, b"", {"Location": repo.redirect_to + handler.path})
    if repo.gated:
        return _send(handler, 403, b"", {"X-Error-Code": "GatedRepo"})
    if repo.busy_times:
        repo.busy_times -= 1
        return _send(handler, 503, b"busy")
    if name not in repo.files:
        return _send(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})
    with repo.answered():
        repo.at_once.append(repo.answering)
        return _send_data(handler, repo, name)


def _send_data(handler: BaseHTTPRequestHandler, repo: Repo, name: str) -> None:
    data = repo.files[name] + b"x" * repo.extra_bytes
    wanted = handler.headers.get("Range")
    start, end = 0, len(data)
    if wanted and not repo.ignores_ranges:
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1 if last else end, end)
        if repo.refused_from is not None and start >= repo.refused_from:
            return _send(handler, 503, b"busy")
        repo.wait_for_others()
        if start >= len(data):
            return _send(handler, 416, b"")
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
    else:
        handler.send_response(200)
    body = data[start:end]
    handler.send_header("Content-Length", str(len(body)))
    handler.send_header("X-Repo-Commit", REVISION)
    handler.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
    handler.end_headers()
    if name in repo.stall_after:
        handler.wfile.write(body[: repo.stall_after[name]])
        handler.wfile.flush()
        repo.waited_in_vain = not repo.stalled.wait(30)
        handler.close_connection = True
        return None
    cut = repo.cut_after.get(name)
    if cut is not None and cut < len(body):
        handler.wfile.write(body[:cut])
        handler.wfile.flush()
        handler.close_connection = True
        return None
    handler.wfile.write(body)
    return None
