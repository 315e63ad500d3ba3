"""Finding a wheel as pip and uv do: their settings, and the pages of package indexes.

This is needed because an installation by ``uv tool`` has no pip. The results are not trusted: the wheel's digest is
known to the caller.
"""

from __future__ import annotations

import configparser
import os
import re
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import url2pathname

import httpx2
import msgspec

PYPI = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_PAGE_LIMIT = 16 << 20
_TRUE = ("1", "true", "yes", "on")
_SECTIONS = ("global", "install", "download")
"""Sections of pip's configuration files; later ones override earlier ones."""


@dataclass(frozen=True)
class IndexSettings:
    """``links`` are folders, files and pages that list wheels; ``certificate`` is a file of authorities to trust."""

    indexes: tuple[str, ...] = (PYPI,)
    links: tuple[str, ...] = ()
    certificate: str | None = None
    proxy: str | None = None


def index_settings(environment: Mapping[str, str], files: Sequence[Path] = ()) -> IndexSettings:
    """The settings of ``environment`` and of pip's configuration ``files``, of which later ones win; PyPI by
    default."""
    from_files = _read_files(files)

    def setting(key: str, *names: str) -> str:
        """The value of the first variable that is set, else of the files."""
        pip = "PIP_" + key.upper().replace("-", "_")
        return next((environment[name] for name in (pip, *names) if environment.get(name)), from_files.get(key, ""))

    main = setting("index-url", "UV_DEFAULT_INDEX", "UV_INDEX_URL") or PYPI
    extra = setting("extra-index-url", "UV_INDEX", "UV_EXTRA_INDEX_URL").split()
    links = [*setting("find-links").split(), *filter(None, environment.get("UV_FIND_LINKS", "").split(","))]
    closed = setting("no-index", "UV_NO_INDEX").lower() in _TRUE
    return IndexSettings(
        indexes=() if closed else tuple(_without_name(each) for each in (main, *extra)),
        links=tuple(links),
        certificate=setting("cert", "SSL_CERT_FILE") or None,
        proxy=setting("proxy") or None,
    )


def config_files(environment: Mapping[str, str]) -> list[Path]:
    """pip's configuration files on this machine, in the order in which they override each other."""
    own = environment.get("PIP_CONFIG_FILE", "")
    if own == os.devnull:
        return []
    home = Path.home()
    if sys.platform == "darwin":
        shared = [Path("/Library/Application Support/pip")]
        mine = home / "Library/Application Support/pip"
        mine = mine if mine.is_dir() else home / ".config/pip"
    else:
        folders = environment.get("XDG_CONFIG_DIRS") or "/etc/xdg"
        shared = [Path(folder) / "pip" for folder in reversed(folders.split(os.pathsep))]
        mine = Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "pip"
    found = [*(folder / "pip.conf" for folder in shared), Path("/etc/pip.conf")]
    if not own:
        found += [home / ".pip" / "pip.conf", mine / "pip.conf"]
    found.append(Path(sys.prefix) / "pip.conf")
    return [*found, *([Path(own)] if own else [])]


def new_client(settings: IndexSettings) -> httpx2.Client:
    """A client with pip's certificates and proxies. Raises OSError if the file of authorities cannot be read."""
    trust: Any = ssl.create_default_context(cafile=settings.certificate) if settings.certificate else True
    headers = {"User-Agent": "privatellm", "Accept-Encoding": "identity"}
    timeout = httpx2.Timeout(20.0, connect=10.0)
    return httpx2.Client(
        headers=headers, follow_redirects=True, timeout=timeout, verify=trust, proxy=settings.proxy or None
    )


def locate(client: httpx2.Client, settings: IndexSettings, package: str, filename: str) -> Iterator[Path | str]:
    """Every place of the file ``filename`` of ``package``, nearest first: files of this machine, then addresses.

    Raises httpx2.HTTPError when a page cannot be fetched and nothing was found before it.
    """
    seen: set[str] = set()
    failure: httpx2.HTTPError | None = None
    name = re.sub(r"[-_.]+", "-", package).lower()
    for page in (*settings.links, *(f"{index.rstrip('/')}/{name}/" for index in settings.indexes)):
        folder = _local(page)
        if folder is not None:
            found = folder if folder.name == filename else folder / filename
            if found.is_file():
                yield found
            continue
        try:
            addresses = _listed(client, page, filename)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            failure = failure or (error if isinstance(error, httpx2.HTTPError) else httpx2.HTTPError(str(error)))
            continue
        for address in addresses:
            if address not in seen:
                seen.add(address)
                yield address
    if failure is not None and not seen:
        raise failure


def addresses_in(body: bytes, kind: str, page: str, filename: str) -> list[str]:
    """The addresses of ``filename`` that an index's ``page`` lists. ``kind`` is the content type of ``body``; a damaged
    page lists nothing."""
    if "json" in kind:
        try:
            files = msgspec.json.decode(body, type=_Page).files
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return []
        return [urljoin(page, file.url) for file in files if file.filename == filename]
    anchors = _Anchors()
    anchors.feed(body.decode("utf-8", "replace"))
    base = urljoin(page, anchors.base)
    found = [urljoin(base, link) for link in anchors.links]
    # Its digest may follow, which is not believed anyway.
    return [link.partition("#")[0] for link in found if unquote(urlsplit(link).path.rpartition("/")[2]) == filename]


class _IndexFile(msgspec.Struct):
    filename: str
    url: str


class _Page(msgspec.Struct):
    files: list[_IndexFile]


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href") or ""
        if tag == "a" and target:
            self.links.append(target)
        elif tag == "base" and not self.base:
            self.base = target


def _listed(client: httpx2.Client, page: str, filename: str) -> list[str]:
    with client.stream("GET", page, headers={"Accept": _ACCEPT}) as response:
        response.raise_for_status()
        body = b""
        for piece in response.iter_bytes():
            body += piece
            if len(body) > _PAGE_LIMIT:
                return []
        return addresses_in(body, response.headers.get("Content-Type", ""), str(response.url), filename)


def _read_files(files: Sequence[Path]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for path in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue
        for section in _SECTIONS:
            if parser.has_section(section):
                settings |= {key.replace("_", "-"): value or "" for key, value in parser.items(section)}
    return settings


def _local(page: str) -> Path | None:
    """The folder or file that ``page`` names on this machine; None if it is an address."""
    parts = urlsplit(page)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return None if parts.scheme in ("http", "https") else Path(page).expanduser()


def _without_name(index: str) -> str:
    """uv's ``name=address`` as the address."""
    name, found, address = index.partition("=")
    return address if found and re.fullmatch(r"[A-Za-z0-9_.-]+", name) else index
