"""Where another machine computes everything, every place that tells of the ring names it."""

from __future__ import annotations

from typing import Any

import pytest

from app.commands.plan import ring_lines as plan_lines
from app.ring_words import is_slower, ring_name
from app.tui.panels.timing_panel import TimingView
from app.tui.render.ring_view import ring_lines
from engine.ipc.messages import LayerTimes, NodeShard, NodeTimes, PhaseTimes, RingFacts, Timing

GB = 10**9


def facts(epoch: str = "") -> RingFacts:
    here = NodeShard(rank=0, node_id="a" * 64, name="laptop", experts=0, expert_bytes=0, trunk_bytes=0, memory_free=GB)
    there = NodeShard(
        rank=1, node_id="b" * 64, name="studio", experts=96, expert_bytes=9 * GB, trunk_bytes=GB, memory_free=64 * GB
    )
    return RingFacts(
        epoch=epoch,
        mode="exact",
        exchange="tls",
        loading="selected",
        nodes=[here, there],
        tokens_per_s=20.0,
        alone_tokens_per_s=22.0,
        reason="studio computes alone.",
        elsewhere=True,
    )


def test_the_status_line_and_the_plan_name_the_machine() -> None:
    assert ring_name(facts()) == "computed by studio"
    assert ring_name(facts(), ("studio",)) == "studio is gone"
    assert not is_slower(facts())
    lines = plan_lines(facts())
    assert lines[0] == "studio alone: about 20 tokens/s"
    assert lines[1] == "sends tokens, receives logits; encrypted"
    assert "studio computes alone." in lines


@pytest.mark.parametrize("epoch", ["", "formed"])
def test_the_screen_of_machines_names_it(epoch: str) -> None:
    shown = "\n".join(line.plain for line in ring_lines(facts(epoch), 80, me="a" * 64))
    assert shown.startswith("No ring: studio alone")
    assert "studio computes alone." in shown
    assert "Even if slower" in shown
    assert "96 experts" in shown
    assert "laptop" not in shown
    assert ("to send" in shown) == (not epoch)


def test_the_timing_panel_names_it() -> None:
    phase = PhaseTimes(layers=[LayerTimes(experts=1.0)], per_token=1.5, steps=3, tokens=3)
    node = NodeTimes(rank=1, name="studio", prefill=phase, decode=phase)
    panel: Any = None
    view = TimingView(Timing(id=1, prefill=phase, decode=phase, nodes=[node]), panel)
    assert not view.has_nodes
    shown = view.make(80).plain
    assert shown.startswith("Computed by studio")
    assert "Decoding by layer" in shown
    view.change_node(1)
    assert view._node is None
