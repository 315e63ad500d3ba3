"""The plain chat of a process: its store, settings, engine and signals."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from app.chat.starting import Start
from app.conversations.opening import DATABASE, open_store
from app.conversations.store import StoreError
from app.engine_client import EngineClient
from app.interrupts import leave_on_interrupt, raise_on_interrupt
from app.plain.chat import Leaving, PlainChat
from app.plain.console import Console, ReaderGone, standard_console
from app.settings.file import SettingsFile, open_settings


def run_plain(start: Start | None = None) -> int:
    """Chat in lines on stdin and stdout until the person leaves or stdin ends; the exit status. Raises SettingError."""
    from engine.system.locations import ensure

    if any(stream is None or stream.closed for stream in (sys.stdin, sys.stdout)):
        return 2
    try:
        store = open_store(ensure("data") / DATABASE)
    except (StoreError, OSError) as error:
        print(f"privatellm: {error}", file=sys.stderr)  # noqa: T201
        return 1
    with contextlib.closing(store), _signals():
        settings = open_settings()
        if start is not None:
            start.choose_model(settings)
        console = standard_console()
        try:
            fetches = _may_fetch(console, settings)
        except (EOFError, KeyboardInterrupt, ReaderGone):
            return 0
        except Leaving as leaving:
            return leaving.status
        chat = PlainChat(
            console,
            EngineClient(share=True),
            store,
            settings,
            lambda model: fetches and _is_missing(model),
        )
        return chat.run([*settings.notices, *store.notices], start)


def _may_fetch(console: Console, settings: SettingsFile) -> bool:
    """Ask whether the starter may be downloaded, where it is wanted and not on this machine. A script is not asked."""
    model = settings.settings.model
    if "model" in settings.refused or not _is_missing(model):
        return False
    if not console.interactive:
        return False
    console.write_line("The starter, a small model for first tests, is not on this machine yet (about 93 MB).")
    return console.read_line("Download it now? y or n: ").strip().lower() in ("y", "yes")


def _is_missing(model: str) -> bool:
    """Is ``model`` the starter, and not on this machine?"""
    from engine.models.store.catalogue import STARTER
    from engine.models.store.local_models import resolve

    return model.strip().casefold() == STARTER and resolve(STARTER).folder is None


@contextmanager
def _signals() -> Iterator[None]:
    """Inside, ctrl+c raises KeyboardInterrupt; SIGTERM and a closed terminal raise Leaving. A second one ends the
    program at once."""

    def leave(number: int, frame: FrameType | None) -> None:
        for known in wanted:
            signal.signal(known, signal.SIG_DFL)
        raise Leaving(128 + number)

    wanted = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in wanted}
    raise_on_interrupt()
    try:
        yield
    finally:
        leave_on_interrupt()
        for number, handler in before.items():
            signal.signal(number, handler)
