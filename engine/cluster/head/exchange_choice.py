"""The exchange of a head's ring: which ones the nodes open, which one is used, and which one after a loss."""

from __future__ import annotations

from collections.abc import Mapping

from engine.cluster.head.epoch_specs import Ring
from engine.cluster.transport.addresses import parse_address, plain_ip
from engine.cluster.transport.registry import TRANSPORTS, allowed_exchanges, available_exchanges, choose_exchange
from engine.ipc.messages import RuntimeName
from engine.ipc.messages.ring import ExchangeName, RingChoice

CERTAIN: tuple[ExchangeName, ...] = ("tls", "socket", "envoy")
"""Exchanges that can be opened wherever links can. The others belong to other libraries and may fail there."""


class ExchangeChoice:
    """Chooses by measurements when the ring is formed first. Formed again, a ring keeps its exchange or uses TLS.

    ``choice`` is the person's.
    """

    def __init__(self, choice: RingChoice) -> None:
        self._choice = choice
        self._chosen: ExchangeName | None = None
        self._fallen_back = ""

    @property
    def made(self) -> bool:
        """Whether a ring was formed before."""
        return self._chosen is not None

    def candidates(self, ring: Ring, runtime: RuntimeName, in_use: bool) -> list[ExchangeName]:
        """The exchanges that all nodes open. ``in_use``: a formed ring has the former one still.

        Raises ModelError if the wanted exchange is not allowed or not available.
        """
        used = {link.address for link in ring.survey.links.values()}
        hosts = sorted({plain_ip(parse_address(address)[0]) for address in used})
        available = [
            name
            for name in available_exchanges()
            if all(name in ring.survey.facts[one.node_id].exchanges for one in ring.followers.values())
        ]
        if ring.decision.mode == "central":
            available = [name for name in available if not TRANSPORTS[name].in_step_only]
        machines = [ring.survey.facts[node_id].machine for node_id in ring.decision.ranks]
        allowed = allowed_exchanges(
            self._choice.exchange,
            hosts,
            self._choice.trusted,
            available,
            runtime,
            together=len(set(machines)) < len(machines),
        )
        if allowed == ["mlx"]:
            # mlx may not be available a second time (see below). The ring must not fail because of that.
            allowed = ["tls", "mlx"]
        if self._chosen is not None:
            # Forming again must be quick: the former exchange is used without a comparison, or tls where it fails.
            # A process can open one mlx group in its life, so none after a loss or with other machines.
            again = self._chosen in allowed and (self._chosen != "mlx" or not in_use)
            return list(dict.fromkeys([self._chosen if again else allowed[0], "tls"]))
        # Exchanges that may fail come last: nodes that wait for them in vain have the others by then.
        return sorted(allowed, key=lambda name: CERTAIN.index(name) if name in CERTAIN else len(CERTAIN))

    def choose(
        self, medians: Mapping[ExchangeName, float], problems: Mapping[ExchangeName, str]
    ) -> tuple[ExchangeName, float]:
        """The exchange to use, and its median seconds, from the ``medians`` of those that every node opened.

        ``problems`` say why others could not be opened. Raises ModelError if there are no medians.
        """
        wanted = self._choice.exchange
        before = self._chosen or (wanted if wanted != "auto" else None)
        if before is not None and before not in medians:
            self._fallen_back = (
                f"The exchange “{before}” could not be made{' again' if self._chosen else ''} "
                f"({problems.get(before, 'not by every node, or not a second time').rstrip('.')})"
            )
        chosen = before if before is not None and before in medians else choose_exchange(medians)
        self._chosen = chosen
        return chosen, medians[chosen]

    def take_notices(self) -> list[str]:
        """A line if another exchange than the wanted or the former one is used, once."""
        line, self._fallen_back = self._fallen_back, ""
        return [f"{line}; {self._chosen} is used."] if line else []
