"""A process in which the experts' files are locked, and so mapped a second time: see test_host_memory.py."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from engine.runtimes.torch.offload.host_memory import HostExperts
from tests.support.opened_experts import experts_of


def measure(folder: str) -> NoReturn:
    """Print the bytes of memory that locking and reading all experts takes, and those of the experts."""
    experts = experts_of(Path(folder))
    host = HostExperts(experts)
    before = anonymous_bytes()
    host.lock(lambda address, nbytes: None, lambda address: None, lambda *_: None)
    for layer in experts.layers:
        for expert in range(experts.count):
            for piece in host.pieces(layer, expert):
                piece.tensor[::4096].sum()
    print(anonymous_bytes() - before, experts.nbytes, flush=True)
    raise SystemExit(0)


def anonymous_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024
