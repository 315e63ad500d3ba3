"""What forming a ring gives to the head's model: the border between control plane and model."""

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
        """What the thread of the passes waits for. From any thread."""
        ...

    def begin_pass(self) -> None:
        """Begin a pass of the model. Must be called on every node before each pass."""
        ...

    def abort(self) -> None:
        """End the running pass on all nodes at its next layer, with Interrupted. From any thread."""
        ...

    def give_up(self, reason: str = "") -> bool:
        """Notify the others, who wait in the next layer, that the pass ended here between two layers.

        Returns False if all layers were through, so that the others finish the pass.
        """
        ...


class Formation(Protocol):
    """One epoch of a ring on its head. Everything in it is invalid once :meth:`close` was called."""

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
        """Links to every follower, by rank; empty in a ring of one and in central mode."""
        ...

    @property
    def names(self) -> Mapping[int, str]:
        """Names of all nodes by rank, the head included."""
        ...

    @property
    def notices(self) -> list[str]:
        """Lines for the person about how the ring was formed."""
        ...

    @property
    def newcomers(self) -> Collection[str]:
        """Those of :attr:`names` that were in no ring of this model before."""
        ...

    @property
    def apart(self) -> Collection[str]:
        """Names of machines that are there but left out because of their links, as :attr:`notices` explain."""
        ...

    def why_lost(self, lost: PeerLost) -> PeerLost:
        """The cause of ``lost``, which a pass raised: a lost machine, or LinkLost. May ask the others, for a second at
        most."""
        ...

    def lost(self) -> PeerLost | None:
        """The loss that heartbeats or a closed link have shown. The exchange is closed by then, so nobody waits. From
        any thread."""
        ...

    def lose(self, ranks: Sequence[int], why: str) -> None:
        """End the epoch because of ``ranks``, which are there but failed as ``why`` describes. From any thread.

        The exchange is closed, and :meth:`lost` reports it. These nodes are not taken into the next ring unless it
        needs them. Without ranks nobody is to blame.
        """
        ...

    def close(self) -> None:
        """End the epoch everywhere: followers unload, links close, and so does the head's model. May be called
        twice."""
        ...


class Former(Protocol):
    """Forms a model's ring with the wanted nodes that are there, as often as requested."""

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
        """End the forming of rings."""
        ...
