"""A node that dies while other libraries make their group: nobody waits for it longer than for any other loss."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.ipc.messages import Failed, Load, Loaded, Progress
from engine.ipc.messages.ring import ExchangeName
from tests.faults import hooks
from tests.faults.ring_faults import EXACT, OTHER_PROMPT, Oracle, Ring
from tests.support.engine_forks import with_libraries
from tests.support.eventually import PATIENCE_S, eventually
from tests.support.hooked_engine import hooked

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("exchange", "number"),
    [
        ("gloo", signal.SIGSTOP),
        ("mlx", signal.SIGKILL),
        pytest.param("gloo", signal.SIGKILL, marks=pytest.mark.soak),
        pytest.param("mlx", signal.SIGSTOP, marks=pytest.mark.soak),
    ],
)
def test_lost_while_a_group_is_made(model: Path, alone: Oracle, exchange: ExchangeName, number: signal.Signals) -> None:
    if find_spec({"gloo": "torch", "mlx": "mlx"}[exchange]) is None:
        pytest.skip(f"{exchange} cannot run here")
    with Ring(2, {1: hooked(hooks.dies_before_a_group, number=number)}, launch=with_libraries) as ring:
        gone = ring.followers[0]
        choice = replace(EXACT, exchange=exchange, trusted=["127.0.0.0/8"])
        request = Load(id=ring.engine.new_id(), model=str(model), partitioning="ring", ring=choice)
        ring.engine.send(request)
        if number is signal.SIGKILL:
            eventually(lambda: gone.engine.process.poll() is not None)
        else:
            ring.engine.wait(
                lambda event: isinstance(event, Progress) and event.stage.startswith("connecting"), PATIENCE_S
            )
        # Measuring begins anew as soon as it is noticed that this one is gone.
        since = ring.mark()
        ring.engine.wait(
            lambda event: (
                isinstance(event, (Loaded, Failed)) or (isinstance(event, Progress) and "measuring" in event.stage)
            ),
            PATIENCE_S,
            since,
        )
        loaded = ring.engine.wait(
            lambda event: isinstance(event, (Loaded, Failed)) and event.id == request.id, PATIENCE_S
        )
        assert isinstance(loaded, Loaded), loaded
        assert loaded.facts.ring is not None
        assert gone.identity.node_id not in [node.node_id for node in loaded.facts.ring.nodes]
        assert len(loaded.facts.ring.nodes) == 2
        assert ring.answer(12, OTHER_PROMPT).token_ids == alone(12, OTHER_PROMPT).token_ids


STUCK = """
import mlx.core as mx
from engine.cluster.transport import mlx_group as group
group.STUCK_S = 0.5
with group._ended_if_stuck():
    mx.distributed.init(strict=True, backend="ring")
print("made")
"""


def test_a_process_that_mlx_holds_ends(tmp_path: Path) -> None:
    """A node that died in the very moment in which all connect: mlx waits for it for ever, and nothing else runs."""
    pytest.importorskip("mlx.core")
    with socket.socket() as mine, socket.socket() as dead:
        mine.bind(("127.0.0.1", 0))
        dead.bind(("127.0.0.1", 0))
        ports = [mine.getsockname()[1], dead.getsockname()[1]]
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    run = subprocess.run(
        [sys.executable, "-c", STUCK],
        env=os.environ | {"MLX_RANK": "0", "MLX_HOSTFILE": str(hosts)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert "made" not in run.stdout
    assert "Timeout" in run.stderr
