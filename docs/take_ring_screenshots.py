"""Takes the pictures of a ring: three engines on this machine, each with a folder of its own, paired and sharing the
starter model.

    python docs/take_ring_screenshots.py

Needs the starter model on this machine. Identities, shares and the conversation are kept in a temporary folder, private
keys in memory.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from take_screenshots import DOCS, SIZE, ask, until
from textual.app import App
from textual.pilot import Pilot

from app.chat.state import Phase
from app.conversations.opening import open_store
from app.engine_client import EngineClient
from app.engine_process import host_command
from app.settings.file import SettingsFile, open_settings
from app.tui.application import ChatApp
from app.tui.lending import LendingApp
from engine.ipc.messages import OpenNetwork
from engine.system.locations import locate

HEAD = "laptop"
LENT = ("studio", "attic")
PLACE = "127.0.0.1:0"
SMALL = (96, 22)
MACHINES = (110, 22)
CHOICES = {
    "ring_name": HEAD,
    "ring_listen": PLACE,
    "ring_even_if_slower": True,
    "ring_overlap": False,
    "max_tokens": 160,
    "temperature": 0.0,
}
"""One machine alone would be faster, and each could hold everything: the ring is formed, and shares, all the same."""


def engine(home: Path) -> EngineClient:
    """An engine as of another machine: what it keeps is in ``home``."""
    surroundings = (f"PRIVATELLM_HOME={home}", "PYTHON_KEYRING_BACKEND=docs.memory_keyring.MemoryKeyring")
    return EngineClient(("env", *surroundings, *host_command()))


def save(app: App[int], name: str, title: str) -> None:
    (DOCS / name).write_text(app.export_screenshot(title=title), encoding="utf-8")


class Lent:
    """``privatellm join`` under way as ``name``, in a task of its own: a screen belongs to the context it runs in."""

    def __init__(self, home: Path, name: str) -> None:
        self._engine = engine(home)
        self.app = LendingApp(self._engine, OpenNetwork(id=0, name=name, listen=PLACE, peers=[], lend=True))
        self.ready = asyncio.Event()
        self._wanted: asyncio.Queue[str] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name=name)

    async def _run(self) -> None:
        async with self.app.run_test(size=SMALL) as pilot:
            await until(pilot, lambda: self.app.lender.state is not None and bool(self.app.lender.state.code))
            await pilot.pause(0.5)
            self.ready.set()
            while wanted := await self._wanted.get():
                save(self.app, wanted, "privatellm join")
            await self.app.lender.leave()
        await self._engine.close()

    def picture(self, name: str) -> None:
        """Taken soon."""
        self._wanted.put_nowait(name)

    async def leave(self) -> None:
        self._wanted.put_nowait("")
        await self._task


async def share_a_model(app: ChatApp, pilot: Pilot[int], others: list[Lent]) -> None:
    """Look for machines, pair with all of them by their codes, form the ring, as a person does with l, p and f."""
    assert app.chat is not None
    chat = app.chat.controller
    await pilot.press("f8", "l")
    network = chat.link.network
    await until(pilot, lambda: network.is_open and network.state is not None)
    for other in others:
        state = other.app.lender.state
        assert state is not None
        await network.pair(state.me.listening[0], state.code)
    await until(pilot, lambda: [one.state for one in network.paired] == ["ready"] * len(others))
    await pilot.press("f")
    await until(pilot, lambda: chat.status.facts is not None and chat.status.facts.ring is not None)
    await until(pilot, lambda: chat.status.phase is Phase.READY)


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / HEAD).mkdir()
        (folder / HEAD / "models").symlink_to(locate("models"))
        settings: SettingsFile = open_settings(folder / "settings.toml")
        for key, value in CHOICES.items():
            settings.change(key, value)
        store = open_store(folder / "conversations.sqlite")
        own = engine(folder / HEAD)
        app = ChatApp(own, store, settings)
        others = [Lent(folder / name, name) for name in LENT]
        for other in others:
            await other.ready.wait()
        others[0].picture("join.svg")
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: app.chat is not None)
            assert app.chat is not None
            await share_a_model(app, pilot, others)
            await pilot.press("f5")
            await ask(pilot, app, app.chat.controller, "Why is the sky blue?")
            save(app, "ring.svg", "privatellm")
            await pilot.resize_terminal(*MACHINES)
            await pilot.press("f8")
            await pilot.pause(1.0)
            save(app, "machines.svg", "privatellm")
            others[0].picture("lent.svg")
        for other in others:
            await other.leave()
        await own.close()
        store.close()


if __name__ == "__main__":
    asyncio.run(main())
