"""A module for a confined process: it does what a request says."""

from __future__ import annotations

import socket
from pathlib import Path

from engine.system.confined import answer_requests


def answer(request: bytes) -> bytes:
    match request.partition(b" ")[0]:
        case b"loop":
            while True:
                pass
        case b"grow":
            return b"x" * int(request.split()[1])
        case b"die":
            raise SystemExit(3)
        case b"open":
            try:
                return Path(__file__).read_bytes()[:3]
            except OSError as error:
                return str(error.strerror).encode()
        case b"connect":
            try:
                socket.socket().close()
            except OSError as error:
                return str(error.strerror).encode()
            return b"a socket"
        case _:
            return request[::-1]


if __name__ == "__main__":
    answer_requests(answer, opens_files=False)
