"""The ``Plan`` request for a ring: who would hold what, and the predicted speed. Nothing is sent or loaded."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.cluster.head.missing_links import plan_connected
from engine.cluster.head.survey import Survey, Surveyor, candidates, planned_model
from engine.cluster.membership.rpc_fanout import NodeRefused
from engine.cluster.network import ClusterNetwork
from engine.ipc.messages import DeviceMemory, Load, ModelFacts, NodeShard
from engine.moe.rank_context import HEAD, Mode
from engine.planning.absent_machines import absent_lines
from engine.planning.ring_nodes import RingModelFacts, beside_weights
from engine.planning.ring_plan import RingDecision
from engine.planning.ring_words import THIS_MACHINE
from engine.runtimes.model_headers import Headers


@dataclass(frozen=True)
class RingRequest:
    """A planned ring. ``memory``: one entry per node."""

    decision: RingDecision
    memory: list[DeviceMemory]
    tokens_per_s: float | None


def plan_ring_request(
    network: ClusterNetwork | None,
    headers: Headers,
    name: str,
    load: Load,
    loaded: ModelFacts | None,
    notices: list[str],
) -> RingRequest:
    """Plan a ring for the model ``name``. Raises ModelError.

    ``load``: how this machine would load its own shard. ``loaded``: the model that makes room here. Lines for the
    person are added to ``notices``.
    """
    node = network.open_node() if network is not None else None
    if node is None:
        notices.append("The network is closed, so only this machine is planned with; open it to find others.")
    there = candidates(node, load.ring.nodes) if node is not None else []
    if node is not None:
        notices += absent_lines(node.table.facts(), load.ring.nodes, {one.node_id for one in there})
    me = node.me if node is not None else None
    my_id, my_name = (me.node_id, me.name) if me is not None else (THIS_MACHINE, THIS_MACHINE)
    surveyor = _surveyor(network, my_id, headers, load)
    while True:
        try:
            survey = surveyor.survey(node, there, load.runtime, lambda *_: None, to_send=False)
            break
        except NodeRefused as refused:
            notices.append(f"{next(one.name for one in there if one.node_id == refused.node_id)}: {refused}")
            there = [one for one in there if one.node_id != refused.node_id]
    mine = survey.facts[my_id]
    freed = loaded.trunk_bytes if loaded is not None and loaded.runtime != "native" else 0
    survey.facts[my_id] = msgspec.structs.replace(mine, memory_free=mine.memory_free + freed)
    order = [(my_id, my_name), *((one.node_id, one.name) for one in there)]
    together = plan_connected(headers, name, load, order, survey)
    decision = together.decision
    notices += together.lines
    formed = decision.kind in ("ring", "elsewhere")
    tokens_per_s = decision.facts.tokens_per_s if decision.facts is not None and formed else None
    if decision.kind == "alone" and decision.alone_step is not None:
        tokens_per_s = decision.alone_step.tokens_per_s
    model = planned_model(headers, name, load)
    shards = decision.facts.nodes if decision.facts is not None else []
    if decision.kind == "elsewhere":
        shards = shards[1:]  # the head holds nothing
    return RingRequest(decision, [_memory(shard, survey, model, decision.mode) for shard in shards], tokens_per_s)


def _memory(shard: NodeShard, survey: Survey, model: RingModelFacts, mode: Mode) -> DeviceMemory:
    key_values, workspace = beside_weights(model, mode == "central" and shard.rank != HEAD)
    return DeviceMemory(
        device=shard.name,
        total=survey.facts[shard.node_id].memory_total,
        free=shard.memory_free,
        trunk=shard.trunk_bytes,
        experts=shard.expert_bytes,
        key_values=key_values,
        workspace=workspace,
    )


def _surveyor(network: ClusterNetwork | None, me: str, headers: Headers, load: Load) -> Surveyor:
    """The network's surveyor, which remembers its measurements, so that a settings screen measures only once."""
    if network is None:
        return Surveyor(me, headers.folder, load)
    return network.surveyor(me, headers.folder, load)
