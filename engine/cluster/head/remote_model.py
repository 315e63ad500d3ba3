"""A model that one other machine runs alone: the head has no weights, and its passes wait for logits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from discovery.names import plain_text
from engine.cluster.commands import FLOAT, TOKEN, answer_limit, read_answer, read_logits, read_token
from engine.cluster.contributions import LIMIT_S, Wait, Waits
from engine.cluster.epoch_links import EpochLinks
from engine.cluster.head.epoch_specs import Ring
from engine.cluster.head.loading_nodes import LoadingNodes, notices_of
from engine.cluster.membership.client import Unreachable
from engine.cluster.membership.control_messages import MOST_TEXT, EmptyBody, Forming, StopPass
from engine.cluster.membership.heartbeat import tolerate_silence
from engine.cluster.membership.peer_table import PeerTable
from engine.cluster.membership.rpc_fanout import Candidate
from engine.cluster.transport.exchange import Link, PeerLost, RingProtocolError
from engine.errors import ModelError
from engine.generation.sampling import Sampler
from engine.ipc.messages import Load, ModelFacts
from engine.ipc.progress import ProgressCallback
from engine.moe.timing import Recorder
from engine.planning.memory import ModelSizes
from engine.runtimes.protocol import LoadedModel, Logits, TokenRows

Read = TypeVar("Read")

RANK = 1
"""Rank of the computing machine."""
TOKEN_S = 2.0
"""Additional seconds that a pass may take for each token after the first."""
LOADING_S = 10 * LIMIT_S
"""Additional seconds for the first pass of an epoch, whose weights may come from a cold disk."""


class RemotePasses:
    """Implements :class:`engine.cluster.formation.PassControl`. A pass waits for one answer.

    ``stop(number)`` cancels a pass, counted from one, by other means than ``link``.
    """

    def __init__(self, link: Link, stop: Callable[[int], None]) -> None:
        self.waits = Waits()
        self._link = link
        self._stop = stop
        self._number = 0
        self._lock = threading.Lock()
        self._waiting = False
        self._stopped = 0

    def begin_pass(self) -> None:
        self._number += 1

    def logits(self, rows: int, vocabulary: int, tokens: int) -> Logits:
        """The logits [rows, vocabulary] of the running pass over ``tokens`` tokens.

        Raises as :meth:`_answer`.
        """
        return self._answer(
            rows * vocabulary * FLOAT.itemsize, tokens, lambda data: read_logits(data, rows, vocabulary)
        )

    def token(self, vocabulary: int) -> int:
        """The token chosen after the running pass over one token. Raises as :meth:`_answer`, and NotNumbersError."""
        return self._answer(TOKEN.itemsize, 1, lambda data: read_token(data, vocabulary))

    def _answer(self, nbytes: int, tokens: int, read: Callable[[memoryview], Read]) -> Read:
        """The result of ``read`` for the ``nbytes`` that answer the running pass over ``tokens`` tokens.

        Raises Interrupted, PeerLost, and RingProtocolError for an invalid answer, after which the link is closed.
        """
        allowed = LIMIT_S + TOKEN_S * (tokens - 1) + (LOADING_S if self._number == 1 else 0.0)
        with self._lock:
            self._waiting = True
        try:
            with self.waits.on(lambda: (RANK,), allowed):
                frame = self._link.receive(answer_limit(nbytes))
        except RingProtocolError:
            self._link.close()
            raise
        finally:
            with self._lock:
                self._waiting = False
                self.waits.now = None
        try:
            return read(read_answer(frame, nbytes, RANK))
        except RingProtocolError:
            self._link.close()
            raise

    def abort(self) -> None:
        """End the running pass before its next layer. Thread-safe."""
        with self._lock:
            wait, number = self.waits.now, self._number
            if not self._waiting or wait is None or self._stopped == number:
                return
            self._stopped = number
            # The time limit of a stopped pass begins now.
            self.waits.now = Wait(time.monotonic(), wait.allowed_s, wait.missing)
        self._stop(number)

    def give_up(self, reason: str = "") -> bool:
        return True


class RemoteModel(LoadedModel):
    """A model that another machine runs.

    Its user sends each command to that machine before it runs a pass or changes rows here. ``can_truncate`` and
    ``steps_together`` describe the other machine's rows, and ``rows_together`` its model.
    """

    def __init__(
        self,
        facts: ModelFacts,
        passes: RemotePasses,
        can_truncate: bool,
        steps_together: int = 0,
        rows_together: int = 1,
    ) -> None:
        self._facts = facts
        self._recorder = Recorder(facts.layers, facts.moe_layers, facts.experts)
        self._passes = passes
        self._can_truncate = can_truncate
        self._steps_together = steps_together
        self._rows_together = rows_together

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def recorder(self) -> Recorder:
        return self._recorder

    def start(self) -> RemoteRows:
        return RemoteRows(self._passes, self.facts.vocabulary, self._can_truncate, self._steps_together)

    @property
    def rows_together(self) -> int:
        return self._rows_together

    def step_together(self, steps: Sequence[tuple[TokenRows, Sequence[int]]]) -> list[Logits]:
        counts = [len(tokens) for _, tokens in steps]
        found = self._passes.logits(sum(counts), self.facts.vocabulary, 1)
        for rows, _ in steps:
            assert isinstance(rows, RemoteRows)
            rows.stepped()
        return np.split(found, np.cumsum(counts)[:-1])

    def close(self) -> None:
        """Nothing to release."""


class RemoteRows(TokenRows):
    """The number and the length of the rows that the other machine holds."""

    def __init__(
        self,
        passes: RemotePasses,
        vocabulary: int,
        can_truncate: bool,
        steps_together: int = 0,
        rows: int = 1,
        length: int = 0,
    ) -> None:
        self._rows = rows
        self._length = length
        self._can_truncate = can_truncate
        self._steps_together = steps_together
        self._passes = passes
        self._vocabulary = vocabulary

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def length(self) -> int:
        return self._length

    @property
    def can_truncate(self) -> bool:
        return self._can_truncate

    @property
    def steps_together(self) -> int:
        return self._steps_together

    def replay(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        return self.extend(tokens, want_logits)

    def extend(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        found = self._passes.logits(int(want_logits), self._vocabulary, len(tokens))
        self._length += len(tokens)
        return found[0] if want_logits else None

    def step(self, tokens: Sequence[int]) -> Logits:
        found = self._passes.logits(self.rows, self._vocabulary, 1)
        self.stepped()
        return found

    def stepped(self) -> None:
        """Count a token that each row has more."""
        self._length += 1

    def step_choosing(self, token: int, sampler: Sampler) -> int:
        found = self._passes.token(self._vocabulary)
        self.stepped()
        return found

    def truncate(self, length: int) -> None:
        if self.rows != 1 or not self.can_truncate or not 0 <= length <= self.length:
            raise ValueError(f"{self.rows} rows of {self.length} tokens cannot be cut to {length}")
        self._length = length

    def fan_out(self, rows: int) -> RemoteRows:
        return RemoteRows(self._passes, self._vocabulary, self.can_truncate, self.steps_together, rows, self.length)

    def reorder(self, parents: Sequence[int]) -> int:
        """Keep the number of rows. No bytes are moved here."""
        self._rows = len(parents)
        return 0


# --- forming it ------------------------------------------------------------------------------------------------------

STOP_S = 1.0
"""Timeout in seconds for the call that stops a pass."""


def load_remote(
    ring: Ring,
    links: EpochLinks,
    table: PeerTable,
    name: str,
    sizes: ModelSizes,
    load: Load,
    progress: ProgressCallback,
) -> tuple[RemoteModel, RemotePasses, list[str]]:
    """Have the machine load the model ``name``.

    Returns the head's side of the model, its passes, and lines for the person. Raises NodeRefused, ModelError,
    PeerLost, and what ``progress`` raises.
    """
    machine = ring.followers[RANK]
    loading = LoadingNodes(ring.followers, ring.epoch, "tls", table.record_contact)
    watch = table.watch(machine.node_id)
    with tolerate_silence([watch] if watch is not None else []):
        _, reports = loading.beside(lambda told: None, progress)
    ready = reports[RANK]

    def stop(number: int) -> None:
        with contextlib.suppress(ModelError, PeerLost, Unreachable):
            view = table.view(machine.node_id)
            if view is not None and view.client is not None:
                view.client.call("StopPass", StopPass(epoch=ring.epoch, number=number), EmptyBody, STOP_S)

    passes = RemotePasses(links.commands[RANK], stop)
    facts = _facts(ring, machine, ready, name, sizes, load)
    model = RemoteModel(facts, passes, ready.can_truncate, ready.steps_together, ready.rows_together)
    return model, passes, notices_of(machine.name, ready.notices)


def _facts(ring: Ring, machine: Candidate, ready: Forming, name: str, sizes: ModelSizes, load: Load) -> ModelFacts:
    """Facts from the model's files on this machine. Only executor and device come from the other machine.

    Byte counts are zero, as the model takes no memory here.
    """
    assert ring.decision.placement is not None
    assert load.runtime != "auto"
    executor = plain_text(ready.executor, MOST_TEXT)
    return ModelFacts(
        name=name,
        family=sizes.family,
        runtime=load.runtime,
        executor=executor,
        device=plain_text(machine.name, MOST_TEXT),
        dtype=sizes.for_runtime(load.runtime).dtype,
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
        parameters=(sizes.trunk_bytes // sizes.width if sizes.trunk_numbers is None else sizes.trunk_numbers.total)
        + sizes.expert_weights,
        trunk=executor,
    )
