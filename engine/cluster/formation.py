"""What forming a ring gives to the head's model, and what asks for it: the border between control plane and model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from engine.cluster.transport.exchange import Link, PeerLost
from engine.cluster.waiting import Waits
from engine.ipc.messages.ring import RingFacts
from engine.ipc.progress import ProgressCallback
from engine.moe.rank_context import RankContext
from engine.runtimes.protocol import LoadedModel


class PassControl(Protocol):
    """The head's side of every pass: its beginning, and the ways out of one that is not wanted any more."""

    @property
    def waits(self) -> Waits:
        """What the thread of the passes waits for of other nodes; from any thread."""
        ...

    def begin_pass(self) -> None:
        """A pass of the model begins; to be called on every node before each."""
        ...

    def abort(self) -> None:
        """From any thread: the running pass ends on all nodes at its next layer, with Interrupted."""
        ...

    def give_up(self, reason: str = "") -> bool:
        """The pass ended here between two layers: tell the others, who wait in the next one. Returns False if there was
        nobody to tell, because all layers were through: the others finish the pass."""
        ...


class Formation(Protocol):
    """One epoch of a ring, as the head has it. Everything in it is void once :meth:`close` was called."""

    @property
    def context(self) -> RankContext: ...

    @property
    def facts(self) -> RingFacts: ...

    @property
    def model(self) -> LoadedModel:
        """The head's own, loaded with its :class:`engine.runtimes.protocol.RingPlace`; an
        :class:`engine.cluster.head.elsewhere.ElsewhereModel` where another machine computes."""
        ...

    @property
    def layers(self) -> PassControl: ...

    @property
    def command_links(self) -> Mapping[int, Link]:
        """To every follower, by rank; empty in a ring of one, and in central mode."""
        ...

    @property
    def names(self) -> Mapping[int, str]:
        """Every node's name by rank, the head's too."""
        ...

    @property
    def notices(self) -> list[str]:
        """What the person should know of how it was formed, a line each."""
        ...

    @property
    def newcomers(self) -> Collection[str]:
        """Of :attr:`names`, who was in no ring of this model before."""
        ...

    @property
    def apart(self) -> Collection[str]:
        """Names of machines that are there and left out because of their links: :attr:`notices` says so."""
        ...

    def why_lost(self, lost: PeerLost) -> PeerLost:
        """What is behind ``lost``, which came out of a pass: who is gone, or LinkLost. May ask the others, a second at
        most."""
        ...

    def lost(self) -> PeerLost | None:
        """The loss that heartbeats or a closed link have shown. The exchange is closed by then, so nobody waits. From
        any thread."""
        ...

    def lose(self, ranks: Sequence[int], why: str) -> None:
        """From any thread: the epoch cannot go on, because of ``ranks``, which are there and of whom ``why`` tells; the
        exchange is closed and :meth:`lost` says so. They are not taken into the next one unless it needs them. With no
        ranks nobody is to blame."""
        ...

    def close(self) -> None:
        """End the epoch everywhere: followers unload, links close, the head's model too. May be called twice."""
        ...


class Former(Protocol):
    """Forms a model's ring with whoever of the wanted nodes is there, as often as it is asked."""

    def form(self, progress: ProgressCallback, say: Callable[[str], None] | None = None) -> Formation:
        """A new epoch with those who are there now; the formation before must be closed. With ``say``, which hears of
        it once, it waits until those who are there can hold the model.

        Forming again takes those who were in it before or have their weights already, all others only if it cannot be
        without them. Machines whose taking in was stopped by Cancelled are left out like those until they go and come
        back, so that the conversation goes on with those who were there.

        Plans, sends what a node lacks, has every node load its share, measures and chooses the exchange. If one
        machine alone is faster (and that was not excluded), a ring of one: no link, no exchange.
        Raises ModelError: it does not fit (memory, naming the missing gigabytes), a node refused (network), or
        Cancelled.
        """
        ...

    def changed(self, progress: ProgressCallback, say: Callable[[str], None]) -> bool:
        """Whether a node of the wanted ones came back since :meth:`form`, or one of the ring went, or one is there that
        has its weights already. Of others that are there ``say`` hears once each. Raises Cancelled from ``progress``.
        """
        ...

    def close(self) -> None:
        """Nothing more will be formed."""
        ...
