"""The first start: no model is on this machine, and none is downloaded before the person chooses one. No Textual."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from app.chat.controller import ChatController
from app.chat.engine_link import EngineLink
from app.chat.offers import MachineFigures, ModelOffer, offers
from app.chat.state import DownloadsChanged, Update
from engine.errors import ModelError


class FirstRun:
    """The choices on a first start, and the choice made. The first model that arrives is loaded.

    ``on_change`` is called when the offers or the state of a download changed.
    """

    def __init__(self, controller: ChatController, on_change: Callable[[], None] = lambda: None) -> None:
        self.controller = controller
        self.on_change = on_change
        self.machine: MachineFigures | None = None
        """Figures of this machine; None until it was measured."""
        self.offers: list[ModelOffer] = []
        self.arrived = ""
        """The model that arrived and is loaded now."""

    async def look(self) -> None:
        """Look at this machine, and find the models to offer."""
        self.machine = await machine_figures(self.controller.link)
        from engine.models.store.catalogue import offered_here

        self.offers = offers(offered_here(), self.machine)
        self.on_change()

    def choose(self, name: str) -> None:
        """Download ``name``, or continue its download, and load it when it is here."""
        self.controller.pulling.start(name)
        self.on_change()

    async def pause_or_resume(self, name: str) -> None:
        """Pause the download of ``name`` if it is going on; otherwise begin or continue it."""
        if name in self.controller.pulling.active:
            await self.controller.pulling.cancel(name)
        else:
            self.choose(name)

    def handle_update(self, update: Update) -> None:
        """A download changed: load the model if it is here."""
        if not isinstance(update, DownloadsChanged):
            return
        here = next(iter(self.controller.pulling.finished), "")
        if here and not self.arrived and self.controller.status.facts is None:
            self.arrived = here
            if here == self.controller.options.model:
                self.controller.load_again()
            else:
                self.controller.change_settings({"model": here})
        self.on_change()


async def machine_figures(link: EngineLink) -> MachineFigures:
    """Figures that decide which models fit this machine; zeros for what the engine cannot measure."""
    measured = await link.measure_machine()
    return MachineFigures(
        memory_bytes=measured.memory_bytes if measured is not None else 0,
        memory_read=measured.memory_read if measured is not None else 0.0,
        disk_bytes=_free_disk(),
    )


def begun(name: str) -> int:
    """Bytes that an earlier start has downloaded of ``name``, which is not complete. Reads the disk."""
    from engine.models.store.local_models import begun_bytes, resolve

    try:
        return begun_bytes(resolve(name))
    except (ModelError, OSError):
        return 0


def _free_disk() -> int:
    from engine.system.locations import ensure

    try:
        return shutil.disk_usage(ensure("models")).free
    except OSError:
        return 0
