"""Forming where one other machine computes everything: it loads the whole model, the head none of it."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

from discovery.names import plain_text
from engine.cluster.epoch_links import EpochLinks
from engine.cluster.head.epoch_specs import Ring
from engine.cluster.head.loading_nodes import LoadingNodes, told_by
from engine.cluster.head.remote_model import RANK, ElsewhereModel, Passes
from engine.cluster.membership.client import Unreachable
from engine.cluster.membership.control_messages import MOST_TEXT, EmptyBody, Forming, StopPass
from engine.cluster.membership.heartbeat import patience
from engine.cluster.membership.peer_table import PeerTable
from engine.cluster.membership.rpc_fanout import Candidate
from engine.cluster.transport.exchange import PeerLost
from engine.errors import ModelError
from engine.ipc.messages import Load, ModelFacts
from engine.ipc.progress import ProgressCallback
from engine.models.sizes import Sizes

STOP_S = 1.0
_MATRICES = 3
"""Of an expert, each of the hidden size times the inner one."""


def load_elsewhere(
    ring: Ring, links: EpochLinks, table: PeerTable, name: str, sizes: Sizes, load: Load, progress: ProgressCallback
) -> tuple[ElsewhereModel, Passes, list[str]]:
    """The machine loads the model ``name``; the head's side of it, and lines for the person. Raises NodeRefused,
    ModelError, PeerLost, and what ``progress`` raises."""
    one = ring.followers[RANK]
    loading = LoadingNodes(ring.followers, ring.epoch, "tls", table.record_contact)
    watch = table.watch(one.node_id)
    with patience([watch] if watch is not None else []), ThreadPoolExecutor(1, "loading elsewhere") as pool:
        asked = {RANK: pool.submit(loading.follow, RANK)}
        try:
            loading.wait(asked, progress)
        except BaseException:
            loading.cancel()
            raise
    ready = asked[RANK].result()

    def stop(number: int) -> None:
        with contextlib.suppress(ModelError, PeerLost, Unreachable):
            one.client.call("StopPass", StopPass(epoch=ring.epoch, number=number), EmptyBody, STOP_S)

    passes = Passes(links.commands[RANK], stop)
    model = ElsewhereModel(_facts(ring, one, ready, name, sizes, load), passes, ready.can_truncate)
    return model, passes, told_by(one.name, ready.notices)


def _facts(ring: Ring, one: Candidate, ready: Forming, name: str, sizes: Sizes, load: Load) -> ModelFacts:
    """From the model's own files here; what the machine says of itself is only how it computes. Nothing of the model
    takes memory here."""
    assert ring.decision.placement is not None
    assert load.runtime != "auto"
    executor = plain_text(ready.executor, MOST_TEXT)
    return ModelFacts(
        name=name,
        family=sizes.family,
        runtime=load.runtime,
        executor=executor,
        device=plain_text(one.name, MOST_TEXT),
        dtype=sizes.dtype,
        layers=sizes.layers,
        experts=sizes.experts,
        experts_per_token=sizes.experts_per_token,
        moe_layers=list(ring.decision.placement.layers),
        vocabulary=sizes.vocabulary,
        hidden=sizes.hidden,
        context_limit=min(sizes.context_limit, load.context_limit or sizes.context_limit),
        trunk_bytes=0,
        expert_bytes=0,
        key_value_bytes_per_token=0,
        parameters=sizes.trunk_bytes // sizes.width
        + sizes.experts * sizes.moe_layers * _MATRICES * sizes.hidden * sizes.ffn,
        trunk=executor,
    )
