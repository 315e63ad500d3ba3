"""The epoch specification that each node of a new ring receives: its rank, and how it reaches the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.cluster.head.survey import Survey
from engine.cluster.membership.control_messages import EpochMember, EpochSpec
from engine.cluster.membership.node import Node, listener_addresses
from engine.cluster.membership.rpc_fanout import Candidate
from engine.cluster.transport.addresses import as_sent, own_ip_towards, parse_address
from engine.ipc.messages import Load, ModelOptions, values_of
from engine.ipc.messages.ring import ExchangeName, RingFacts
from engine.moe.expert_parallel import HEAD
from engine.planning.ring_plan import RingDecision


@dataclass(frozen=True)
class Trial:
    """Settings that only benchmarks change.

    ``one_by_one``: central mode calls experts one after the other, as the paper's naive version does. ``threads`` is
    the number of threads of every node. ``at_once`` is how many nodes' work one machine does in the time of one, where
    the nodes are processes of one machine.
    """

    one_by_one: bool = False
    threads: int | None = None
    at_once: float = 1.0


@dataclass(frozen=True)
class Ring:
    """A ring that is being formed. ``followers`` are by rank."""

    epoch: str
    decision: RingDecision
    facts: RingFacts
    survey: Survey
    followers: dict[int, Candidate]
    key: bytes


def epoch_specs(
    ring: Ring,
    node: Node,
    name: str,
    load: Load,
    exchanges: Sequence[ExchangeName],
    threads: int | None,
    trial: Trial,
    rehearse: bool,
) -> dict[int, EpochSpec]:
    """The specification for each rank, with the best addresses at which this rank reaches the others.

    ``threads`` is the followers' number of threads; None: their own choice. ``rehearse``: layers of the model's shape
    are rehearsed over each exchange.
    """
    decision = ring.decision
    sizes = decision.terms.model if rehearse and decision.terms is not None else None
    assert decision.placement is not None
    ids = dict(enumerate(decision.ranks))
    certificates = {
        rank: node.identity.certificate_pem if rank == HEAD else node.table.peer(node_id).certificate_pem.encode()
        for rank, node_id in ids.items()
    }
    options = ModelOptions(**values_of(ModelOptions, load) | {"model": name, "cpu_threads": threads})
    specs = {}
    for rank, node_id in ids.items():
        members = [
            EpochMember(
                rank=other,
                node_id=other_id,
                certificate=certificates[other],
                addresses=_best_first(ring, node, node_id, other_id, other),
            )
            for other, other_id in ids.items()
        ]
        specs[rank] = EpochSpec(
            epoch=ring.epoch,
            version=node.version,
            rank=rank,
            members=members,
            key=ring.key,
            trusted=list(load.ring.trusted),
            placement=decision.placement,
            mode=decision.mode,
            link=ring.survey.links.get((ids[HEAD], node_id)),
            one_by_one=trial.one_by_one,
            loading=decision.loading,
            weights=list(decision.weights),
            exchanges=list(exchanges),
            options=options,
            width=sizes.hidden if sizes is not None else 0,
            experts_per_token=sizes.experts_per_token if sizes is not None else 0,
            whole=decision.kind == "elsewhere",
        )
    return specs


def _best_first(ring: Ring, node: Node, from_id: str, to_id: str, rank: int) -> list[str]:
    """Addresses at which ``from_id`` reaches the link listener of ``to_id``, the best first."""
    survey = ring.survey
    if rank == HEAD:
        # The head dials, but transports that make their own connections need its address.
        own = listener_addresses(node.addresses)
        link = survey.links.get((to_id, from_id)) or next(iter(survey.links.values()))
        near = own_ip_towards(link.address)
        return sorted(own, key=lambda address: parse_address(address)[0] != near)
    reached, measured = survey.tried.reached.get((from_id, to_id)), survey.links.get((from_id, to_id))
    best = [*([measured.address] if measured is not None else []), *([reached] if reached else [])]
    others = ring.followers[rank].listeners
    return list(dict.fromkeys([*best, *(others if from_id == node.identity.node_id else as_sent(others))]))
