"""The interface between the control plane, which forms a ring, and the head's model, which uses it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from engine.cluster.contributions import Waits
from engine.cluster.transport.exchange import Link, PeerLost
from engine.ipc.messages.ring import RingFacts
from engine.ipc.progress import ProgressCallback
from engine.moe.expert_parallel import RankContext
from engine.planning.ring_change import Rerun
from engine.runtimes.protocol import LoadedModel


class PassControl(Protocol):
    """The head's control over passes: beginning a pass, and ending one that is no longer wanted."""

    @property
    def waits(self) -> Waits:
        """The current wait of the thread that runs the passes. Thread-safe."""
        ...

    def begin_pass(self) -> None:
        """Begin a pass of the model. Must be called on every node before each pass."""
        ...

    def abort(self) -> None:
        """End the running pass on all nodes at its next layer, with Interrupted. Thread-safe."""
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
        """The head's own model, loaded with its :class:`engine.runtimes.protocol.RingPlace`, or an
        :class:`engine.cluster.head.remote_model.RemoteModel` if another machine computes."""
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
    def patience(self) -> float:
        """Factor on the seconds that a :class:`engine.cluster.contributions.Wait` allows."""
        ...

    @property
    def notices(self) -> list[str]:
        """Lines for the person about how the ring was formed."""
        ...

    @property
    def newcomers(self) -> Collection[str]:
        """The members of :attr:`names` that were in no ring of this model before."""
        ...

    @property
    def without_links(self) -> Collection[str]:
        """Names of live machines that are left out because of their links, as :attr:`notices` explain."""
        ...

    def why_lost(self, lost: PeerLost) -> PeerLost:
        """The cause of ``lost``, which a pass raised: a lost machine, or LinkLost. May ask the others, for a second at
        most."""
        ...

    def lost(self) -> PeerLost | None:
        """The loss that heartbeats or a closed link have shown. The exchange is then closed, so nobody waits.
        Thread-safe."""
        ...

    def lose(self, ranks: Sequence[int], why: str) -> None:
        """End the epoch because of ``ranks``, which are alive but failed as ``why`` describes. From any thread.

        The exchange is closed, and :meth:`lost` reports it. The next ring leaves these nodes out unless it needs them.
        ``ranks`` is empty if no node in particular failed.
        """
        ...

    def close(self) -> None:
        """End the epoch on all nodes: followers unload, the links and the head's model close. May be called twice."""
        ...


class Former(Protocol):
    """Forms a model's ring from the wanted nodes that are present, as often as requested."""

    def form(self, progress: ProgressCallback, notify: Callable[[str], None] | None = None) -> Formation:
        """Form a new epoch with the present machines. The former formation must be closed.

        Plans, sends each node the weights it lacks, has every node load its shard, and measures and chooses the
        exchange. If one machine alone is faster (and the person did not exclude that), the ring has one node, no link
        and no exchange.

        With ``notify`` it waits while the present machines cannot hold the model, and calls ``notify`` once about that.

        A later forming takes in the machines that were in the ring before or that have their weights. It takes in
        others only if the model does not fit without them. A machine whose first forming was stopped by Cancelled
        counts as one of the others until it leaves and comes back, so that the conversation goes on with the former
        machines.

        Raises ModelError if the model does not fit (memory, with the missing gigabytes) or a node refused (network).
        Raises Cancelled from ``progress``.
        """
        ...

    def changed(self, progress: ProgressCallback, notify: Callable[[str], None], again: Rerun) -> bool:
        """Whether the ring should be formed again: one of its nodes left, or a member came back or a machine came that
        has its weights, and that saves more time than running ``again`` what is lost takes.

        Calls ``notify`` once for each other machine that is present, and for one that waits until that pays. Raises
        Cancelled from ``progress``.
        """
        ...

    def close(self) -> None:
        """End the forming of rings."""
        ...
