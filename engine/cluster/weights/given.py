"""A model of this machine that another one may copy: found by the name that was asked for, offered as shares are."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.transfer import Offer, Wanted, offer_of_share, offer_whole, stream
from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models import store
from engine.models.locations import locate
from engine.models.share_files import read_share

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_NEVER = (store.PARTIAL, store.SHARE, store.PREPARED)


@dataclass(frozen=True)
class Given:
    """A folder that may be copied. ``name``: what the asking machine calls the model."""

    folder: Path
    name: str
    whole: bool
    """Not a share."""

    def offer(self, progress: ProgressCallback) -> Offer:
        """Everything in it. The first time all of it is read; ``progress`` may raise Cancelled. Raises ModelError."""
        return offer_whole(self.folder, progress, self.name) if self.whole else offer_of_share(self.folder)

    def chunks(
        self, layout: str, weights: str, wanted: Sequence[Wanted], progress: ProgressCallback
    ) -> Iterator[bytes]:
        """What is ``wanted`` of the offer with these fingerprints of its layout and its weights, as
        :func:`engine.cluster.weights.transfer.stream`. Raises RingProtocolError if that is not what is here."""
        offered = self.offer(progress)
        if (offered.layout, offered.identity.weights) != (layout, weights):
            raise RingProtocolError("weights of another model were wanted than are here")
        return stream(self.folder, offered, wanted)


def find_given(key: str, name: str, caller: str) -> Given | None:
    """The model whose folder in the models folder is called ``key``, its bank if it has one; else the share that the
    machine with the node id ``caller`` once sent here of what it calls ``name``. None if neither is here.

    Shares of other heads are not given: what a head sent is used with that head only.
    """
    if not _KEY.fullmatch(key) or key.endswith(_NEVER) or key.startswith("local--"):
        return None
    found = store.resolve_installed(key)
    if found is not None and found.folder is not None:
        return Given(found.folder, name, True)
    for path in sorted(locate("models").glob(f"*{store.SHARE}")):
        with contextlib.suppress(ModelError):
            manifest = read_share(path)
            if manifest.head == caller and manifest.identity.name == name:
                return Given(path, name, False)
    return None
