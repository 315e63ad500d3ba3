"""Machines that announce themselves, in this process or in one of their own, and what they hear."""

from __future__ import annotations

import json
import os
import queue
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Collection

from discovery.addresses import OwnAddress
from discovery.mdns import FoundNode, Intervals, Neighbourhood
from tests.discovery import announcing_process
from tests.support.engine_forks import forked
from tests.support.hooked_engine import hooked

LOOPBACK = OwnAddress("lo", "127.0.0.1", 8)
WITHIN = 120.0
"""Seconds a test waits at most; what it waits for comes in one or two."""
OFTEN = Intervals(wake=0.05, poll=0.2, retry=0.5, grace=0.5)
made: set[str] = set()
"""Node ids of all machines of the tests: others on this network are left out."""

Heard = dict[str, list[str]]
"""Node id to addresses."""


def ids() -> tuple[str, str]:
    """Node id and instance."""
    node_id, instance = secrets.token_hex(32), secrets.token_hex(8)
    made.add(node_id)
    return node_id, instance


class Process:
    """A machine in a process of its own."""

    def __init__(self, node_id: str, instance: str, port: int, only: str, space: str | None = None) -> None:
        """See :func:`announcing_process.run`."""
        options = {"node_id": node_id, "instance": instance, "port": port, "only": only, "space": space}
        self._process = forked(hooked(announcing_process.run, **options), os.environ)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.heard: Heard = {}

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def wait(self, condition: Callable[[Heard], bool]) -> bool:
        """Until what is heard fulfils ``condition``."""
        end = time.monotonic() + WITHIN
        while not condition(self.heard):
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return False
            self.heard = {node_id: texts for node_id, _, texts in json.loads(line)}
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WITHIN)

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(WITHIN)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(WITHIN)


class Listening:
    """A machine in this process; loopback unless told otherwise."""

    def __init__(
        self,
        node_id: str,
        instance: str,
        port: int,
        own: Callable[[], list[OwnAddress]] | None = None,
        paired: Callable[[], Collection[str]] = tuple,
        intervals: Intervals = OFTEN,
    ) -> None:
        self.node_id, self.instance = node_id, instance
        self._changed = threading.Condition()
        self.found: list[FoundNode] = []
        self.neighbourhood = Neighbourhood(
            node_id, instance, port, self._tell, own=own or (lambda: [LOOPBACK]), paired=paired, intervals=intervals
        )

    def _tell(self, found: list[FoundNode]) -> None:
        with self._changed:
            self.found = [one for one in found if one.node_id in made]
            self._changed.notify_all()

    def wait(self, condition: Callable[[list[FoundNode]], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: condition(self.found), WITHIN)

    def hears(self, node_id: str, texts: tuple[str, ...] | None = None) -> bool:
        return self.wait(lambda found: any(one.node_id == node_id and texts in (None, one.texts) for one in found))

    def hears_no_more_of(self, node_id: str) -> bool:
        return self.wait(lambda found: all(one.node_id != node_id for one in found))
