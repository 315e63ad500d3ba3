"""The roles of nodes by the ring's mode: the layers of a model, and a follower's experts in central mode."""

from __future__ import annotations

from pathlib import Path

from engine.cluster.all_gather import RingLayers
from engine.cluster.central import CentralHead
from engine.cluster.transport.exchange import Exchange
from engine.ipc.messages import Load
from engine.ipc.progress import ProgressCallback
from engine.moe.expert_parallel import RankContext
from engine.moe.kernels.bindings import choose
from engine.runtimes import runtime_named
from engine.runtimes.common.node_experts import NodeExperts


def layers_for(context: RankContext, exchange: Exchange, one_by_one: bool = False) -> RingLayers | CentralHead:
    """The layer exchange for the model of the node at ``context``. In central mode only the head has a model.

    ``one_by_one``: the head calls experts one after the other, like the paper's naive version.
    """
    if context.mode == "central":
        return CentralHead(context, exchange, one_by_one=one_by_one)
    return RingLayers(context, exchange)


def load_experts(
    runtime: str, folder: Path, load: Load, context: RankContext, progress: ProgressCallback
) -> NodeExperts:
    """The experts of ``context`` without a trunk, in ``folder``, by ``runtime``; by torch where native kernels are
    wanted and cannot be used.

    Raises ModelError if they are not here, cannot be run, or do not fit.
    """
    progress("loading experts", 0, 0, "")
    if runtime == "native" and not choose("float32").native:
        runtime = "torch"
    return runtime_named(runtime).load_experts(folder, load, context, progress)
