"""A machine of the mDNS tests, as a process: announces itself and prints, a line of JSON each, whom it hears of.

Arguments: node id, instance, port, the only address to use (or ``all``). Ends when its standard input does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from discovery.addresses import OwnAddress, own_addresses
from discovery.mdns import Found, Intervals, Neighbourhood


def main() -> None:
    node_id, instance, port, only = sys.argv[1:]

    def own() -> list[OwnAddress]:
        return [one for one in own_addresses() if only in ("all", one.ip)]

    def told(found: list[Found]) -> None:
        print(json.dumps([[one.node_id, one.instance, list(one.texts)] for one in found]), flush=True)

    often = Intervals(wake=0.05, poll=0.2, grace=0.5)
    neighbourhood = Neighbourhood(node_id, instance, int(port), told, own=own, intervals=often)
    sys.stdin.read()
    neighbourhood.close()


if __name__ == "__main__":
    main()
