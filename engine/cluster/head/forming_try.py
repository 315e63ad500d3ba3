"""One try to form a ring: what its steps leave to later ones, and what may end it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from engine.cluster.epoch_links import EpochLinks
from engine.cluster.head.connecting_nodes import NothingConnected
from engine.cluster.head.epoch_specs import Ring
from engine.cluster.head.formed import FormedRing
from engine.cluster.head.forming_state import Failure
from engine.cluster.head.missing_links import ConnectedPlan
from engine.cluster.membership.control_messages import EpochSpec
from engine.cluster.membership.links import Tried
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused
from engine.cluster.transport.exchange import PeerLost
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName
from engine.ipc.progress import ProgressCallback


class FormingTry:
    """One try to form a ring of ``machines``, whose steps set the values that later steps use.

    ``undo`` ends what was begun with other machines if the try fails.
    """

    together: ConnectedPlan
    ring: Ring
    has: Mapping[int, int]
    """Bytes that the node of each rank had before."""
    spec: EpochSpec
    """Specification of the head."""
    links: EpochLinks
    exchange: ExchangeName
    exchange_s: float
    """Median seconds of an exchange."""
    formed: FormedRing

    def __init__(
        self,
        machines: Sequence[Candidate],
        notices: list[str],
        progress: ProgressCallback,
        undo: contextlib.ExitStack,
    ) -> None:
        self.machines = machines
        self.notices = notices
        self.progress = progress
        self.undo = undo


class LinksBroke(Exception):
    """Raised if links of the ring that is being formed no longer work."""

    def __init__(self, tried: Tried) -> None:
        super().__init__(", ".join(tried.broken.values()))
        self.tried = tried


class MachinesChanged(Exception):
    """Raised if the machine ``node_id`` stops answering while the ring is formed, or answers again."""

    def __init__(self, node_id: str) -> None:
        super().__init__(node_id)
        self.node_id = node_id


def explained(
    problem: PeerLost | LinksBroke | NothingConnected | MachinesChanged | NodeRefused,
) -> tuple[Failure, Exception]:
    """The failure for the plan, and the error to raise, or to name if the machine is left out."""
    match problem:
        case NodeRefused():
            return Failure("gone" if problem.gone else "refused", problem.node_id), problem
        case MachinesChanged():
            silence = NodeRefused(problem.node_id, "it does not answer any more.", gone=True)
            return Failure("changed", problem.node_id), silence
        case NothingConnected():
            return Failure("unconnected"), problem
        case LinksBroke():
            text = f"The links of the ring cannot be made: {problem}."
        case PeerLost():
            # The next survey finds out which machine is gone.
            text = f"The ring cannot be formed: {problem}"
    error = ModelError(text, kind="network")
    error.__cause__ = problem
    return Failure("lost"), error
