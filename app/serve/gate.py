"""The rules on who may use the server: no web page, and nobody without the key if there is one."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.serve.replies import Refused, protocol_of, refusal_response

KEYLESS = "/health"
"""The only path that needs no key: it says no more than that something is served."""

FIGURES = "/metrics"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")


@dataclass(frozen=True)
class Rules:
    """``hosts``: names besides this machine's by which clients may reach it. ``origins``: web pages that may ask.
    ``key_hash``: SHA-256 of the key in hexadecimal digits; empty: none is needed. ``token_hash``: that of what lets
    `serve --status` read the figures."""

    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    key_hash: str = ""
    token_hash: str = ""


class RequestGate:
    """Asks ``app`` only what the rules allow. A browser names the page in ``Origin``, and the name that led here in
    ``Host``: a page elsewhere whose own name was made to point here (DNS rebinding) shows in the latter."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules
        self._names = {name.lower().rstrip(".") for name in (*own_names(), *rules.hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self.check(Headers(scope=scope), scope["path"], scope.get("http_version", ""))
            except Refused as refused:
                await refusal_response(refused, protocol_of(scope["path"]))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def check(self, headers: Headers, path: str, version: str = "1.1") -> None:
        """Raises Refused. In ``version`` 1.0 of HTTP, which no browser speaks, a request may name no host."""
        host = headers.get("host", "")
        hosts = len(headers.getlist("host"))
        if not (hosts == 0 and version == "1.0") and (hosts != 1 or not self._is_ours(host)):
            name = host_name(host)
            raise Refused(
                f"{name[:200]!r} is not a name of this machine here: use its address, or start `privatellm serve` with "
                "--allow-host.",
                403,
            )
        origin = headers.get("origin")
        if origin is not None and origin not in self._rules.origins:
            advice = f": start `privatellm serve` with --allow-origin {origin[:200]} if this one may"
            raise Refused(f"Web pages may not ask here{advice if is_origin(origin) else ''}.", 403)
        if origin is None and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Refused("Web pages may not ask here.", 403)
        if self._rules.key_hash and path != KEYLESS:
            self._check_key(headers, path)

    def _is_ours(self, host: str) -> bool:
        name = host_name(host)
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True  # an address was not looked up, so no name can have been made to point here

    def _check_key(self, headers: Headers, path: str) -> None:
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if not given:
            raise Refused("This server needs its key as the API key.", 401, code="invalid_api_key")
        given_hash = hash_of(given)
        if path == FIGURES and hmac.compare_digest(given_hash, self._rules.token_hash):
            return
        if not hmac.compare_digest(given_hash, self._rules.key_hash):
            raise Refused("The API key is wrong.", 401, code="invalid_api_key")


def hash_of(key: str) -> str:
    """SHA-256 of ``key``. A key is random and long, so its hash cannot be reversed by trying."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def is_origin(text: str) -> bool:
    """Whether ``text`` names one web page or desktop app as browsers do: ``SCHEME://HOST`` and perhaps a port.

    ``null`` does not: it stands for any page in a sandbox.
    """
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return (
        bool(parts.scheme and parts.hostname) and text == f"{parts.scheme}://{parts.netloc}".lower() and "*" not in text
    )


def host_name(host: str) -> str:
    """The name or address of a ``Host`` header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_name(text: str) -> bool:
    """Whether ``text`` can be the name of a machine in a request and a certificate."""
    return _NAME.fullmatch(text) is not None


def own_names() -> set[str]:
    """The names by which this machine is reached from itself and from its own network."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return {"localhost", name, short, f"{short}.local"} - {""}
