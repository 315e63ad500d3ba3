"""The certificate for ordinary clients: it names the machine and is kept as long as it is good."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest

from discovery.identity import load_identity, new_identity
from discovery.server_certificate import SERVER_CERTIFICATE, server_certificate, server_context

NAMES = {"desk.local", "127.0.0.1"}


def test_it_is_kept_as_long_as_it_has_the_key_and_the_names(tmp_path: Path) -> None:
    identity = load_identity(tmp_path)
    made, is_new = server_certificate(tmp_path, identity, NAMES)
    assert is_new and b"PRIVATE KEY" not in made
    assert server_certificate(tmp_path, identity, {"127.0.0.1"}) == (made, False)
    wider, is_new = server_certificate(tmp_path, identity, {*NAMES, "proxy.example"})
    assert is_new and wider != made
    (tmp_path / SERVER_CERTIFICATE).write_bytes(b"damaged")
    assert server_certificate(tmp_path, identity, NAMES)[1]
    assert server_certificate(tmp_path, new_identity(tmp_path), NAMES)[1]


@pytest.mark.parametrize(("name", "trusted"), [("127.0.0.1", True), ("desk.local", True), ("other.local", False)])
def test_a_client_that_has_it_verifies_the_server(tmp_path: Path, name: str, trusted: bool) -> None:
    identity = load_identity(tmp_path)
    certificate, _ = server_certificate(tmp_path, identity, NAMES)
    mine, theirs = socket.socketpair()

    def answer() -> None:
        try:
            with server_context(identity, certificate).wrap_socket(theirs, server_side=True) as wrapped:
                wrapped.sendall(b"hello")
        except OSError:
            theirs.close()

    thread = threading.Thread(target=answer)
    thread.start()
    context = ssl.create_default_context(cadata=certificate.decode())
    try:
        with context.wrap_socket(mine, server_hostname=name) as wrapped:
            assert trusted and wrapped.recv(5) == b"hello"
    except ssl.SSLCertVerificationError:
        assert not trusted
    finally:
        mine.close()
        thread.join()
