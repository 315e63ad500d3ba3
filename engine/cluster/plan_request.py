"""The ``Plan`` request for a ring: the placement and the predicted speed. Nothing is sent or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.cluster.head.missing_links import ConnectedPlan, plan_connected
from engine.cluster.head.ring_runtime import RuntimePlan, plan_by_runtime
from engine.cluster.head.survey import Survey, Surveyor, candidates
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused
from engine.cluster.network import ClusterNetwork
from engine.ipc.messages import DeviceMemory, Load, ModelFacts, NodeShard
from engine.moe.expert_parallel import HEAD, Mode
from engine.planning.hybrid import workspace_bytes
from engine.planning.memory import ModelSizes
from engine.planning.prediction import answers_per_s
from engine.planning.ring_nodes import beside_weights
from engine.planning.ring_plan import RingDecision
from engine.planning.ring_words import THIS_MACHINE, absent_lines
from engine.planning.runtime_choice import RuntimeChoice
from engine.runtimes.choosing import as_ring_node, rows_together
from engine.runtimes.model_headers import Headers


@dataclass(frozen=True)
class RingRequest:
    """A planned ring. ``memory``: an entry for each node, and for its GPU. ``choice``: the runtime it is planned by.
    ``answers_per_s``: see :class:`engine.planning.hybrid.HybridPlan`; empty if the ring is not formed."""

    decision: RingDecision
    memory: list[DeviceMemory]
    tokens_per_s: float | None
    choice: RuntimeChoice
    answers_per_s: tuple[float, ...]


def plan_ring_request(
    network: ClusterNetwork | None,
    headers: Headers,
    name: str,
    load: Load,
    choice: RuntimeChoice,
    loaded: ModelFacts | None,
    notices: list[str],
) -> RingRequest:
    """Plan a ring for the model ``name``. Raises ModelError.

    ``load``: as the person asked. ``choice``: the runtime without a look at the GPUs of the machines. ``loaded``: the
    model that makes room here. Lines for the person are added to ``notices``.
    """
    asked = load.runtime
    load = msgspec.structs.replace(as_ring_node(load, choice.name), runtime=choice.name)
    node = network.open_node() if network is not None else None
    if node is None:
        notices.append("The network is closed, so only this machine is planned with; open it to find others.")
    machines = candidates(node, load.ring.nodes) if node is not None else []
    if node is not None:
        notices += absent_lines(node.table.facts(), load.ring.nodes, {machine.node_id for machine in machines})
    me = node.me if node is not None else None
    my_id, my_name = (me.node_id, me.name) if me is not None else (THIS_MACHINE, THIS_MACHINE)
    surveyor = _surveyor(network, my_id, headers, load)
    order = (my_id, my_name)
    while True:
        try:
            planned = _planned(surveyor, node, machines, headers, name, order, load, choice, asked == "auto", loaded)
            break
        except NodeRefused as refused:
            notices.append(
                f"{next(machine.name for machine in machines if machine.node_id == refused.node_id)}: {refused}"
            )
            machines = [machine for machine in machines if machine.node_id != refused.node_id]
    survey, decision = planned.survey, planned.together.decision
    notices += planned.together.lines
    formed = decision.kind in ("ring", "elsewhere")
    tokens_per_s = decision.facts.tokens_per_s if decision.facts is not None and formed else None
    if decision.kind == "alone" and decision.alone_step is not None:
        tokens_per_s = decision.alone_step.tokens_per_s
    model = headers.sizes.as_loaded(load, load.runtime)
    shards = decision.facts.nodes if decision.facts is not None else []
    if decision.kind == "elsewhere":
        shards = shards[1:]  # the head holds no weights
    memory = [part for shard in shards for part in _memory(shard, survey, model, decision.mode)]
    several: tuple[float, ...] = ()
    if decision.kind == "ring" and decision.terms is not None and tokens_per_s:
        several = answers_per_s(decision.terms.rows_s, rows_together(planned.choice.name))
    return RingRequest(decision, memory, tokens_per_s, planned.choice, several)


def _planned(
    surveyor: Surveyor,
    node: Node | None,
    machines: Sequence[Candidate],
    headers: Headers,
    name: str,
    head: tuple[str, str],
    load: Load,
    choice: RuntimeChoice,
    may_switch_runtime: bool,
    loaded: ModelFacts | None,
) -> RuntimePlan:
    """The plan for ``machines`` with the ``head`` (its id and name).

    ``may_switch_runtime``: torch may replace ``choice``. Raises NodeRefused.
    """
    me = head[0]
    freed = loaded.trunk_bytes if loaded is not None and loaded.runtime != "native" else 0

    def survey(how: Load) -> Survey:
        measured = surveyor.survey(node, machines, how.runtime, lambda *_: None, to_send=False)
        mine = measured.facts[me]
        measured.facts[me] = msgspec.structs.replace(mine, memory_free=mine.memory_free + freed)
        return measured

    def plan(measured: Survey, how: Load) -> ConnectedPlan:
        order = [head, *((one.node_id, one.name) for one in machines)]
        return plan_connected(headers, name, how, order, measured)

    first = survey(load)
    plain = RuntimePlan(choice, load, first, plan(first, load))
    return plan_by_runtime(plain, plan, survey, me) if may_switch_runtime else plain


def _memory(shard: NodeShard, survey: Survey, model: ModelSizes, mode: Mode) -> list[DeviceMemory]:
    """The memory of a node, and of its GPU if it has one."""
    key_values, workspace = beside_weights(model, mode == "central" and shard.rank != HEAD)
    facts = survey.facts[shard.node_id]
    memory = DeviceMemory(
        device=shard.name,
        total=facts.memory_total,
        free=shard.memory_free,
        trunk=shard.trunk_bytes,
        experts=shard.expert_bytes - shard.gpu_expert_bytes,
        key_values=key_values,
        workspace=workspace,
    )
    if not shard.gpu or facts.gpu is None:
        return [memory]
    on_gpu = DeviceMemory(
        device=f"{shard.name}, {shard.gpu}",
        total=facts.gpu.memory_total,
        free=facts.gpu.memory_free,
        trunk=0,
        experts=shard.gpu_expert_bytes,
        key_values=0,
        workspace=workspace_bytes(model, gpu=True),
    )
    return [memory, on_gpu]


def _surveyor(network: ClusterNetwork | None, me: str, headers: Headers, load: Load) -> Surveyor:
    """The network's surveyor, which remembers its measurements, so that a settings screen measures only once."""
    if network is None:
        return Surveyor(me, headers.folder, load)
    return network.surveyor(me, headers.folder, load)
