"""Who may ask: names, pages, keys."""

from __future__ import annotations

import socket
from unittest.mock import AsyncMock

import msgspec
import pytest
from starlette.datastructures import Headers
from starlette.requests import Request

from app.commands.options import LoadFlags
from app.commands.output import WorkFailed
from app.commands.serve import ServeFlags, serve
from app.running_servers import RunningServer, announced, running_servers
from app.serve.application import client_of
from app.serve.gate import FIGURES, KEYLESS, RequestGate, Rules, hash_of, is_origin
from app.serve.listening import ListenAddress, ListenProblem, kept_hash, listen, new_key, parse_address
from app.serve.replies import Refused

PATH = "/v1/models"


def refusal(rules: Rules, path: str = PATH, **headers: str) -> int:
    """The status with which a request is refused; 200 if it is not."""

    async def nothing(*_: object) -> None:
        raise AssertionError("the application is not asked")

    raw = {"host": "localhost:8777", **headers}
    pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in raw.items() if value]
    try:
        RequestGate(nothing, rules).check(Headers(raw=pairs), path)
    except Refused as refused:
        return refused.status
    return 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:8777", 200), ("127.0.0.1:8777", 200), ("[::1]:8777", 200), ("10.0.0.7", 200),
        (socket.gethostname(), 200), ("proxy.example:443", 200), ("evil.example", 403), ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403), ("", 403), ("[", 403), ("localhost@evil.example", 403), ("évil", 403),
    ],
)  # fmt: skip
def test_a_name_that_is_not_this_machines_is_refused(host: str, status: int) -> None:
    assert refusal(Rules(hosts=["Proxy.example"]), host=host) == status


def test_a_web_page_may_not_ask() -> None:
    rules = Rules(origins=["app://notes"])
    assert refusal(rules, origin="app://notes") == 200
    for origin in ("http://evil.example", "null", "http://localhost:8777", "app://notes.evil"):
        assert refusal(rules, origin=origin) == 403
    for site, status in (("cross-site", 403), ("same-site", 403), ("none", 200), ("same-origin", 200)):
        assert refusal(rules, sec_fetch_site=site) == status


@pytest.mark.parametrize(
    ("origin", "one_page"),
    [
        ("https://notes.example", True), ("app://obsidian.md", True), ("http://localhost:3000", True),
        ("http://[::1]:3000", True), ("null", False), ("*", False), ("https://*.example", False), ("file://", False),
        ("https://notes.example/", False), ("https://Notes.example", False), ("http://[", False), ("", False),
    ],
)  # fmt: skip
def test_an_origin_names_one_page(origin: str, one_page: bool) -> None:
    assert is_origin(origin) is one_page
    with pytest.raises(Refused) as refused:
        RequestGate(AsyncMock(), Rules()).check(Headers({"host": "localhost", "origin": origin}), PATH)
    assert ("--allow-origin" in str(refused.value)) is one_page
    if not one_page:
        with pytest.raises(WorkFailed, match="--allow-origin takes SCHEME"):
            serve(ServeFlags(LoadFlags({}, ()), origins=[origin]))


def test_the_key_is_needed_everywhere_but_for_health() -> None:
    rules = Rules(key_hash=hash_of("right"), token_hash=hash_of("token"))
    assert refusal(rules) == refusal(rules, authorization="Bearer wrong") == refusal(rules, x_api_key="wrong") == 401
    assert refusal(rules, authorization="Basic right") == refusal(rules, authorization="Bearer é") == 401
    assert refusal(rules, authorization="Bearer right") == refusal(rules, x_api_key="right") == 200
    assert refusal(rules, KEYLESS) == refusal(rules, FIGURES, authorization="Bearer token") == 200
    assert refusal(rules, authorization="Bearer token") == 401


def test_a_key_is_shown_once_and_only_its_hash_is_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("network")
    assert kept_hash(folder) == ""
    key, where = new_key(folder)
    assert kept_hash(folder) == hash_of(key) and "file" in where and len(key) > 40
    (file,) = folder.iterdir()
    assert key not in file.read_text() and file.stat().st_mode & 0o077 == 0
    assert new_key(folder)[0] != key != kept_hash(folder)


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:1", "127.0.0.1", 1, True), (":9", "127.0.0.1", 9, True), ("9", "127.0.0.1", 9, True),
        ("localhost", "localhost", 8777, True), ("[::1]:9", "::1", 9, True), ("[::]", "::", 8777, False),
        ("0.0.0.0:9", "0.0.0.0", 9, False), ("127.0.0.1.example:9", "127.0.0.1.example", 9, False),
    ],
)  # fmt: skip
def test_addresses(text: str, host: str, port: int, loopback: bool) -> None:
    assert parse_address(text) == (address := ListenAddress(host, port)) and address.is_loopback is loopback


def test_addresses_that_cannot_be_used_are_said() -> None:
    with pytest.raises(ListenProblem, match="65536"):
        parse_address("localhost:70000")
    with listen(ListenAddress("127.0.0.1", 0)) as taken, pytest.raises(ListenProblem, match="is in use"):
        listen(ListenAddress("127.0.0.1", taken.getsockname()[1]))
    with pytest.raises(ListenProblem, match=r"192\.0\.2\.1"):
        listen(ListenAddress("192.0.2.1", 0))


def test_a_server_is_known_as_long_as_it_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("data") / "servers"
    assert running_servers(folder) == []
    here = RunningServer(
        pid=1, url="u", host="127.0.0.1", port=9, model="m", since=0.0, tls=False, key=False, token="t"
    )
    # Another address of this machine has a port 9 of its own.
    there = msgspec.structs.replace(here, pid=2, host="192.0.2.1")
    folder.mkdir()
    (folder / "3-9.json").write_bytes(msgspec.json.encode(here))  # of one that was killed
    with announced(folder, here), announced(folder, there):
        assert running_servers(folder) == [here, there]
        assert [file.stat().st_mode & 0o077 for file in folder.iterdir()] == [0, 0]
    assert running_servers(folder) == [] == list(folder.iterdir())


def test_clients_are_told_apart_and_their_keys_are_not_kept() -> None:
    def client(headers: dict[str, str], user: str | None = None) -> str:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        return client_of(Request({"type": "http", "client": ("127.0.0.1", 5000), "headers": raw}), user)

    seen = [
        client({"user-agent": "a"}),
        client({"user-agent": "b"}),
        client({"user-agent": "a"}, "someone"),
        client({"user-agent": "a", "authorization": "Bearer one"}),
        client({"user-agent": "a", "authorization": "Bearer two"}),
        client({"user-agent": "a", "x-api-key": "one"}),
    ]
    assert len(set(seen)) == len(seen)
    assert client({"user-agent": "a", "authorization": "Bearer one"}) == seen[3]
    assert not any("one" in each.replace("someone", "") for each in seen)
