"""A machine of the mDNS tests, as a process: announces itself and prints, a line of JSON each, whom it hears of."""

from __future__ import annotations

import json
import sys
from typing import NoReturn

from discovery.addresses import OwnAddress, own_addresses
from discovery.mdns import FoundNode, Intervals, Neighbourhood
from tests.support.network_space import enter


def run(node_id: str, instance: str, port: int, only: str, space: str | None = None) -> NoReturn:
    """``only``: the address to use, or ``all``. ``space``: the network namespace in which it is. Ends when its standard
    input does."""
    if space is not None:
        enter(space)

    def own() -> list[OwnAddress]:
        return [one for one in own_addresses() if only in ("all", one.ip)]

    def told(found: list[FoundNode]) -> None:
        print(json.dumps([[one.node_id, one.instance, list(one.texts)] for one in found]), flush=True)

    often = Intervals(wake=0.05, poll=0.2, grace=0.5)
    neighbourhood = Neighbourhood(node_id, instance, port, told, own=own, intervals=often)
    sys.stdin.read()
    neighbourhood.close()
    raise SystemExit(0)
