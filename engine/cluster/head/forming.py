"""Forming a ring on its head: survey the machines, plan, send the weights, connect, load the model."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from engine.cluster.epoch_links import EpochLinks, epoch_of, rank_context_of
from engine.cluster.expert_runners import layers_for
from engine.cluster.formation import PassControl
from engine.cluster.head.capacity_wait import CapacityError, CapacityWait
from engine.cluster.head.connecting_nodes import ExchangeChoice, NothingConnected, connect_nodes
from engine.cluster.head.epoch_specs import Ring, Trial, epoch_specs
from engine.cluster.head.faster_links import FasterLinks, moved_line, slower_lines
from engine.cluster.head.formed import AloneLayers, FormedRing, end_epoch
from engine.cluster.head.forming_state import (
    FormingState,
    GiveUp,
    Kind,
    LeaveOut,
    Stage,
    Task,
    TryAgain,
    WaitFor,
    next_task,
)
from engine.cluster.head.forming_try import FormingTry, LinksBroke, MachinesChanged, explained
from engine.cluster.head.lacked_model import LackedModel
from engine.cluster.head.loading_nodes import LoadingNodes, notices_of
from engine.cluster.head.missing_links import ConnectedPlan, LinkRetry, plan_connected
from engine.cluster.head.rejoin_policy import RejoinPolicy
from engine.cluster.head.remote_model import load_remote
from engine.cluster.head.ring_runtime import RuntimePlan, plan_by_runtime
from engine.cluster.head.shard_upload import ShardUpload
from engine.cluster.head.survey import Survey, Surveyor, candidates
from engine.cluster.membership.heartbeat import FORMING, NOTIFIED_S, tolerate_silence
from engine.cluster.membership.links import Tried
from engine.cluster.membership.node import LentState, Node
from engine.cluster.membership.rpc_fanout import (
    POLL_S,
    Candidate,
    NodeRefused,
)
from engine.cluster.transport.exchange import PeerLost
from engine.cluster.transport.registry import TRANSPORTS
from engine.cluster.weights.source import FolderSource, Source
from engine.cluster.weights.transfer import offer
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Load
from engine.ipc.messages.ring import ExchangeName, RingFacts
from engine.ipc.progress import ProgressCallback
from engine.moe.expert_parallel import HEAD, RankContext
from engine.planning.placement import Placement
from engine.planning.ring_change import Rerun, RingChange, change_to, step_seconds
from engine.planning.ring_plan import RingDecision, bytes_sent, decided_again
from engine.planning.ring_speed import StepTerms, WireSpeed
from engine.planning.ring_words import absent_lines, change_sentence
from engine.planning.runtime_choice import RuntimeChoice
from engine.runtimes import runtime_named
from engine.runtimes.common.loading import Runtime, load_model
from engine.runtimes.protocol import LoadedModel, RingPlace

BACK_S = 10.0
"""Seconds that a machine of the first forming may be silent without being left out. Later an answer waits: lost
machines are not waited for, and others only until they count as lost."""

_NO_TRIAL = Trial()


class RingFormer:
    """See :class:`engine.cluster.formation.Former`.

    ``folder`` contains the whole model ``name``, or the head's shard of it if ``lacked`` is given. ``runtime`` runs it.
    """

    def __init__(
        self,
        node: Node,
        name: str,
        folder: Path,
        runtime: Runtime,
        load: Load,
        surveyor: Surveyor,
        trial: Trial = _NO_TRIAL,
        lacked: LackedModel | None = None,
        choice: RuntimeChoice | None = None,
    ) -> None:
        """``load`` describes how this machine loads its own shard; ``load.ring`` is the person's choice.

        ``choice``: the choice of ``runtime`` if nobody asked for it, which GPUs of the machines may change to torch;
        otherwise None.
        """
        self._node = node
        self._name = name
        self.folder = folder
        """Folder from which this machine loads."""
        self._lacked = lacked
        self._runtime = runtime
        self._load = load
        self._choice = load.ring
        self._surveyor = surveyor
        self._trial = trial
        self.decision: RingDecision | None = None
        """Decision of the last forming."""
        self.terms: StepTerms | None = None
        """Terms of the predicted step time, with what all nodes measured together."""
        self._formed: FormedRing | None = None
        self._considered: dict[str, str] = {}
        """Machines that the last forming or a later check has considered: node ids to processes."""
        self._rejoin_policy = RejoinPolicy(surveyor)
        self._exchange = ExchangeChoice(load.ring)
        self._notified: set[str] = set()
        self._notified_of_links: set[str] = set()
        self._notified_of_slower: set[str] = set()
        self._link_retry = LinkRetry(node, {}, self._present_machines)
        self._faster_links = FasterLinks(node, surveyor, {}, self._present_machines)
        self._makeshift = False
        """Whether the last plan was chosen only because an answer waited, to avoid sending weights."""
        self._change: RingChange | None = None
        """A planned change whose cost is not yet worth it."""
        self._change_with: frozenset[tuple[str, str]] = frozenset()
        """Node ids and processes of the machines that were present when :attr:`_change` was planned."""
        self._wanted: set[str] = set()
        """Node ids of the ring to which :attr:`_change` would lead."""
        self._measured_s: float | None = None
        """Seconds of an exchange as last measured by the machines together."""
        self._measured_with: set[str] = set()
        """Node ids of the machines in that measurement."""
        self._planned: set[str] = set()
        """Node ids of the last plan. Some of the machines may be gone since."""
        self._needed: set[str] = set()
        """Node ids of the machines without which the running forming cannot go on."""
        self._tried: Tried | None = None
        """Links that can be opened, if they were tried before the survey."""
        self._open_choice = choice
        """The runtime choice while it is still open, before the first ring. Afterwards the runtime never changes, so
        that answers stay the same."""
        node.on_forgotten(self._forgotten)

    # --- see Former -----------------------------------------------------------------------------------------------

    def form(self, progress: ProgressCallback, notify: Callable[[str], None] | None = None) -> FormedRing:
        before = self._formed
        if before is not None:
            before.close()
            self._rejoin_policy.put_off((node_id, self._considered.get(node_id, "")) for node_id in before.silent)
        members = set(self._rejoin_policy.members)
        self._change = None
        self._node.table.set_waiting({})
        self._link_retry.close()
        self._faster_links.close()
        self._node.lent = lambda: LentState(stage=FORMING)
        try:
            formed = self._formed = (
                self._form(progress)
                if notify is None
                else self._capacity_wait().form(lambda: self._form(progress), progress, notify)
            )
            self._rejoin_policy.accepted(formed.nodes.values())
            formed.newcomers = frozenset(
                name for rank, name in formed.names.items() if rank != HEAD and formed.nodes[rank] not in members
            )
        except Cancelled:
            if before is not None:
                self._rejoin_policy.put_off(
                    one for one in self._considered.items() if one[0] not in before.followers.values()
                )
            raise
        finally:
            # From now on the others need not tolerate long pauses of this head.
            self._node.lent = LentState
            self._node.table.send_heartbeats(NOTIFIED_S)
        return self._formed

    def changed(self, progress: ProgressCallback, notify: Callable[[str], None], again: Rerun) -> bool:
        formed = self._formed
        if formed is None or formed.lost() is not None:
            return True
        # Where the links cannot be made anew, the ring would have to be, and all of the conversation run again.
        may_move = formed.moves or not (again.read or again.passes)
        if self._faster_links.found.is_set() and may_move and not self._moved(formed, progress, notify):
            return True
        machines = self._present_machines()
        processes = frozenset((machine.node_id, machine.process) for machine in machines)
        due = [machine.node_id for machine in machines if self._rejoin_policy.take_due(machine.node_id)]
        known = self._change_with == processes and not due and not self._link_retry.restored.is_set()
        if self._change is not None and known:
            return self._change.pays(again)
        # Machines that left are forgotten, so that they count as new when they come back.
        now = {machine.node_id for machine in machines} | set(formed.followers.values())
        self._considered = {node_id: at for node_id, at in self._considered.items() if node_id in now}
        fresh = [
            machine
            for machine in machines
            if self._considered.get(machine.node_id) != machine.process or machine.node_id in due
        ]
        otherwise = self._link_retry.restored.is_set() or self._makeshift or self._change is not None
        if not fresh and not otherwise:
            return False
        with self._put_off_if_stopped(formed, fresh):
            regular, others = self._rejoin_policy.split(machines, formed.facts.mode == "central", progress)
        for line in self._rejoin_policy.lines(others):
            notify(line)
        if any(
            machine.node_id in formed.followers.values() and machine.node_id in self._considered for machine in fresh
        ):
            return True  # it started anew, and the ring is over
        self._considered.update((machine.node_id, machine.process) for machine in others)
        if not otherwise and not any(machine in regular for machine in fresh):
            return False
        try:
            with self._put_off_if_stopped(formed, fresh):
                self._change = self._plan_change(formed, regular, progress)
        except Cancelled:
            raise
        except (NodeRefused, PeerLost, ModelError) as error:
            # A machine that does not answer now is no reason to lose what was read. A later question asks it again.
            if isinstance(error, NodeRefused) and not error.gone:
                process = next((machine.process for machine in fresh if machine.node_id == error.node_id), "")
                self._rejoin_policy.refused(error.node_id, process)
                self._considered[error.node_id] = process
                notify(f"{self._node.table.name_of(error.node_id)} is left out of the ring: {error}")
            return False
        self._change_with = processes
        self._considered.update((machine.node_id, machine.process) for machine in fresh)
        if self._change is None:
            return False
        if self._change.pays(again):
            return True
        waiting = {
            machine.node_id: machine.name
            for machine in regular
            if machine.node_id in self._wanted - set(formed.nodes.values())
        }
        line = change_sentence(list(waiting.values()), self._change.nbytes, self._change.cost_s(again))
        self._node.table.set_waiting(dict.fromkeys(waiting, line))
        notify(line)
        return False

    @contextlib.contextmanager
    def _put_off_if_stopped(self, formed: FormedRing, fresh: Sequence[Candidate]) -> Iterator[None]:
        """After a cancelled forming, do not let later questions wait for ``fresh`` again."""
        try:
            yield
        except Cancelled:
            stopped = [(one.node_id, one.process) for one in fresh]
            self._considered.update(stopped)
            self._rejoin_policy.put_off(one for one in stopped if one[0] not in formed.followers.values())
            raise

    def _moved(self, formed: FormedRing, progress: ProgressCallback, notify: Callable[[str], None]) -> bool:
        """Use faster links, if any is clearly faster now. Returns False if the ring must be formed again for that.
        Raises Cancelled."""
        faster = self._faster_links.take(progress)
        if not faster:
            return True
        self._surveyor.took_links(faster)
        self._change_with = frozenset()  # what was weighed was slower links
        self._notified -= self._notified_of_slower
        me = self._node.identity.node_id
        try:
            if formed.moves:
                self._measured_again(formed, formed.move(self._node.links, faster))
        except (ModelError, PeerLost):
            return False
        for (first, second), link in faster.items():
            if first == me:
                self._node.table.set_link(second, link)
        notify(moved_line(faster, me, self._node.table.name_of))
        return formed.moves

    def _measured_again(self, formed: FormedRing, exchange_s: float) -> None:
        """Record that an exchange over the links in use now takes ``exchange_s`` seconds."""
        links = self._faster_links.in_use.values()
        slowest = WireSpeed.of_link(max(one.latency_s for one in links), min(one.bytes_per_s for one in links))
        if self.terms is not None:
            self.terms = replace(self.terms, wire=slowest).with_exchange(exchange_s)
        speed = None if self.terms is None else self.terms.step().tokens_per_s
        formed.facts = msgspec.structs.replace(formed.facts, exchange_s=exchange_s, tokens_per_s=speed)

    def _plan_change(
        self, formed: FormedRing, machines: Sequence[Candidate], progress: ProgressCallback
    ) -> RingChange | None:
        """The change to a ring of ``machines``; None if the ring would be the same.

        Raises NodeRefused, PeerLost, ModelError, Cancelled.
        """
        survey = self._surveyor.survey(self._node, machines, self._load.runtime, progress, threads=self._trial.threads)
        together = self.plan(survey, machines)
        decision, mine = together.decision, self._node.identity.node_id
        if self._link_retry.restored.is_set():
            self._watch_links(together)
        if decision.kind == "refused":
            return None
        planned = {mine} if decision.kind == "alone" else set(decision.ranks)
        self._wanted = planned
        same = planned == set(formed.nodes.values()) and (decision.kind == "elsewhere") == formed.facts.elsewhere
        if same and not (self._makeshift and bytes_sent(decision)):
            return None
        rates = {other: link.bytes_per_s for (first, other), link in survey.links.items() if first == mine}
        measured_s = self._measured_s if planned == self._measured_with else None
        return change_to(decision, self._token_s(), rates, self._choice, measured_s)

    def _token_s(self) -> float | None:
        """Predicted seconds of a token in the present ring, with the joint measurements."""
        decision = self.decision
        if decision is None:
            return None
        return self.terms.step().seconds if decision.kind == "ring" and self.terms else step_seconds(decision)

    def close(self) -> None:
        self._link_retry.close()
        self._faster_links.close()
        if self._formed is not None:
            self._formed.close()
        self._node.off_forgotten(self._forgotten)

    def announce_end(self) -> None:
        """Notify the machines of the ring that this machine's network closes. Thread-safe."""
        formed = self._formed
        if formed is not None:
            formed.announce_end()

    # --- the steps ------------------------------------------------------------------------------------------------

    def _present_machines(self) -> list[Candidate]:
        return candidates(self._node, self._choice.nodes)

    def _capacity_wait(self) -> CapacityWait:
        """Waits for machines while the present ones cannot hold the model."""

        def present() -> frozenset[object]:
            now: set[object] = {(machine.node_id, machine.process) for machine in self._present_machines()}
            return frozenset(now | ({"restored link"} if self._link_retry.restored.is_set() else set()))

        def absent() -> list[str]:
            ids = self._planned & {machine.node_id for machine in self._present_machines()}
            return [self._node.table.name_of(machine) for machine in sorted(self._rejoin_policy.members - ids)]

        return CapacityWait(present, absent, self._choice.wait_s)

    def _form(self, progress: ProgressCallback) -> FormedRing:
        machines, others = self._present_machines(), list[Candidate]()
        self._considered = {one.node_id: one.process for one in machines}
        notices = absent_lines(self._node.table.facts(), self._choice.nodes, self._considered)
        before = self.decision
        if self._formed is None:
            # The person asked for a ring of these machines. One that is lost during the forming is waited for, too.
            self._rejoin_policy.members.update(self._considered)
        else:
            machines, others = self._rejoin_policy.split(machines, self._formed.facts.mode == "central", progress)
        try:
            formed = self._form_of(machines, notices, progress)
        except ModelError:
            planned = self.decision
            if not others or planned is None or planned is before or not planned.shortfall:
                raise
            return self._form_of([*machines, *others], notices, progress)
        formed.notices += self._rejoin_policy.lines(others)
        return formed

    def _form_of(self, machines: Sequence[Candidate], notices: list[str], progress: ProgressCallback) -> FormedRing:
        """Form a ring of ``machines`` or fewer, over connections that survive failed heartbeats."""
        with contextlib.ExitStack() as connections:

            def apart(machine: Candidate) -> Candidate:
                client = self._node.table.apart(machine.node_id, machine.client)
                connections.callback(client.close)
                return replace(machine, client=client)

            return self._follow_plan([apart(machine) for machine in machines], notices, progress, apart)

    def _follow_plan(
        self,
        machines: Sequence[Candidate],
        notices: list[str],
        progress: ProgressCallback,
        apart: Callable[[Candidate], Candidate],
    ) -> FormedRing:
        """Do what :func:`next_task` says until the ring is formed or given up."""
        state = FormingState(self._formed is None, frozenset(machine.node_id for machine in machines))
        gone: set[str] = set()
        silent: dict[str, str] = {}
        """Lines about machines that did not answer, by their node ids."""
        error: Exception = ModelError("")
        while True:
            match next_task(state):
                case WaitFor(node_id):
                    back = self._back_again(node_id, progress)
                    state = state.waited_for(node_id, back is not None)
                    if back is not None:
                        # It kept what was sent.
                        if (line := silent.pop(node_id, None)) is not None:
                            notices.remove(line)
                        self._considered[node_id] = back.process
                        others = [machine for machine in machines if machine.node_id != node_id]
                        machines = sorted([*others, apart(back)], key=lambda machine: machine.node_id)
                case LeaveOut(node_id):
                    # The other machines may be enough without it; if not, the plan says what is missing.
                    line = f"{self._node.table.name_of(node_id)} is left out of the ring: {error}"
                    notices.append(line)
                    process = self._considered.get(node_id, "")
                    state = state.left_out(node_id)
                    machines = [machine for machine in machines if machine.node_id in state.machines]
                    if node_id not in state.silent:
                        self._rejoin_policy.refused(node_id, process)
                        continue
                    self._considered.pop(node_id, None)
                    silent[node_id] = line
                    if not state.first:
                        # The loss has a line of its own.
                        gone.add(line)
                case TryAgain():
                    state = state.tried_again()
                case GiveUp():
                    raise error
                case _:
                    try:
                        formed = self._try(state, machines, notices, progress)
                    except (PeerLost, LinksBroke, NothingConnected, MachinesChanged, NodeRefused) as problem:
                        if isinstance(problem, LinksBroke):
                            # They could be opened a moment ago. The other machines may be enough without them.
                            self._tried = problem.tried
                        failure, error = explained(problem)
                        state = state.failed(failure)
                        continue
                    formed.notices = [
                        line for line in formed.notices if line not in self._notified and line not in gone
                    ]
                    self._notified.update(formed.notices)
                    return formed

    def _try(
        self, state: FormingState, machines: Sequence[Candidate], notices: list[str], progress: ProgressCallback
    ) -> FormedRing:
        """Take one step of forming after the other while all ``machines`` answer and none of the awaited ones does.

        Otherwise raises MachinesChanged. Everything is undone if a step fails.
        """
        table = self._node.table
        watches = {machine.node_id: table.watch(machine.node_id) for machine in machines}
        awaited = {node_id: table.watch(node_id) for node_id in state.awaited}

        def watching(stage: str, done: int, total: int, unit: str) -> None:
            for node_id, watch in watches.items():
                if node_id in self._needed and (watch is None or not watch.view().reachable):
                    raise MachinesChanged(node_id)
            for node_id, watch in awaited.items():
                if self._needed and watch is not None and watch.view().client is not None:
                    raise MachinesChanged(node_id)
            progress(stage, done, total, unit)

        self._needed = set(watches)
        steps: Mapping[Task, Callable[[FormingTry], Kind | None]] = {
            Stage.PLAN: self._plan_try,
            Stage.REFUSE: self._refuse,
            Stage.SEND: self._send,
            Stage.CONNECT: self._connect,
            Stage.LOAD: self._load_together,
            Stage.LOAD_REMOTE: self._load_elsewhere,
            Stage.LOAD_ALONE: self._load_alone,
        }
        # Later an answer waits, and a machine that is lost is not waited for.
        tolerant = [watch for watch in watches.values() if watch is not None] if state.first else []
        with tolerate_silence(tolerant), contextlib.ExitStack() as undo:
            attempt = FormingTry(machines, list(notices), watching, undo)
            while (step := next_task(state)) is not Stage.FINISH:
                assert isinstance(step, Stage)
                state = state.did(step, steps[step](attempt))
            undo.pop_all()
            return self._with_link_retry(attempt.formed, attempt.together, machines)

    def _back_again(self, node_id: str, progress: ProgressCallback) -> Candidate | None:
        """The machine, if it answers again after a silence without loss; else None. Raises Cancelled."""
        watch = self._node.table.watch(node_id)
        if watch is None:
            return None
        asked = watch.send_heartbeats()
        first = self._formed is None
        # One that calls, but cannot be called, is alive for ever.
        until = time.monotonic() + (BACK_S if first else self._node.table.times.lost_s)
        while not watch.nobody_listens and time.monotonic() < until and (first or watch.view().alive):
            if watch.notified_since(asked):
                found = next((one for one in self._present_machines() if one.node_id == node_id), None)
                if found is not None:
                    return found
            progress(f"waiting for {self._node.table.name_of(node_id)}, which does not answer", 0, 0, "")
            time.sleep(POLL_S)
        return None

    def _plan_try(self, attempt: FormingTry) -> Kind:
        """Survey the machines and plan the ring. Returns the kind of the decision."""
        # After a loss an answer is waiting.
        hurry = self._formed is not None and self._formed.lost() is not None
        links_tried, self._tried = self._tried, None
        if self._lacked is not None and (fetched := self._lacked.fetched) is not None:
            self._has_whole(fetched)
        machines, progress = attempt.machines, attempt.progress
        survey = self._surveyor.survey(
            self._node,
            machines,
            self._load.runtime,
            progress,
            threads=self._trial.threads,
            hurry=hurry,
            links_tried=links_tried,
        )
        together = self.plan(survey, machines, waiting=hurry)
        if self._open_choice is not None and self._formed is None:
            survey, together, lines = self._by_runtime(self._open_choice, survey, together, machines, progress)
            attempt.notices += lines
        self._planned = {machine.node_id for machine in machines} - together.without_links.keys()
        decision = self.decision = together.decision
        self._makeshift = decision.instead is not None
        attempt.together = together
        attempt.notices += together.lines
        if decision.kind == "refused":
            return "refused"
        if self._formed is None:
            # Only once, as the figures differ a little each time.
            attempt.notices += decision.notices
        if decision.kind == "alone" or len(decision.ranks) == 1:
            return "alone"
        by_id = {machine.node_id: machine for machine in machines}
        self._needed = by_id.keys() & set(decision.ranks)
        self._rejoin_policy.members.update(node_id for node_id in decision.ranks if node_id in by_id)
        assert decision.facts is not None and decision.placement is not None
        ring = attempt.ring = Ring(
            epoch=secrets.token_hex(8),
            decision=decision,
            facts=decision.facts,
            survey=survey,
            followers={rank: by_id[node_id] for rank, node_id in enumerate(decision.ranks) if rank != HEAD},
            key=secrets.token_bytes(32),
        )
        followers = [machine.node_id for machine in ring.followers.values()]
        attempt.undo.callback(end_epoch, self._node.table, followers, ring.epoch)
        return decision.kind

    def _refuse(self, attempt: FormingTry) -> None:
        """Raises CapacityError if bytes are missing, else ModelError."""
        decision = attempt.together.decision
        text = " ".join([*attempt.notices, *decision.notices, decision.reason])
        if decision.shortfall:
            self._watch_links(attempt.together)
            raise CapacityError(text, decision.shortfall, attempt.together.lines)
        raise ModelError(text, kind="bad-input")

    def _with_link_retry(
        self, formed: FormedRing, together: ConnectedPlan, machines: Sequence[Candidate]
    ) -> FormedRing:
        """``formed``, with its missing links being tried again."""
        formed.without_links = frozenset(one.name for one in machines if one.node_id in together.without_links)
        self._watch_links(together)
        # A link that is restored and breaks again is reported again.
        self._notified -= self._notified_of_links - set(together.lines)
        self._notified_of_links = set(together.lines)
        return formed

    def _watch_links(self, together: ConnectedPlan) -> None:
        self._link_retry.close()
        self._link_retry = LinkRetry(self._node, together.without_links, self._present_machines)

    def plan(
        self, survey: Survey, machines: Sequence[Candidate], load: Load | None = None, waiting: bool = False
    ) -> ConnectedPlan:
        """The planner's result for the survey. ``load``: this machine's load request; None: its own. ``waiting``: an
        answer waits."""
        order = [(self._node.identity.node_id, self._node.name), *((one.node_id, one.name) for one in machines)]
        headers, load = self._surveyor.headers, load or self._load
        return plan_connected(headers, self._name, load, order, survey, self._trial.at_once, waiting)

    def _by_runtime(
        self,
        choice: RuntimeChoice,
        survey: Survey,
        together: ConnectedPlan,
        machines: Sequence[Candidate],
        progress: ProgressCallback,
    ) -> tuple[Survey, ConnectedPlan, list[str]]:
        """Survey and plan for the runtime that suits these machines, which is used from now on, and a line about it."""

        def survey_again(load: Load) -> Survey:
            return self._surveyor.survey(
                self._node,
                machines,
                load.runtime,
                progress,
                threads=self._trial.threads,
                hurry=True,
                links_tried=survey.tried,
            )

        me = self._node.identity.node_id
        planned = plan_by_runtime(
            RuntimePlan(choice, self._load, survey, together),
            lambda one, load: self.plan(one, machines, load),
            survey_again,
            me,
        )
        if planned.load.runtime != self._load.runtime:
            self._load, self._runtime = planned.load, runtime_named(planned.choice.name)
        said = [] if planned.choice == choice else [f"The ring runs by {planned.choice.name}: {planned.choice.reason}."]
        return planned.survey, planned.together, said

    def _load_alone(self, attempt: FormingTry) -> None:
        """Load the whole model here."""
        self._needed = set()
        assert self.decision is not None
        decision, progress = self.decision, attempt.progress
        attempt.notices.append(decision.reason)
        if self._lacked is not None:
            folder, line = self._lacked.take_whole(progress)
            self._has_whole(folder)
            attempt.notices.append(line)
        model = load_model(self._runtime, self._name, self.folder, self._load, progress)
        placement = decision.placement or Placement((), 1, ())
        facts = decision.facts or RingFacts(mode="exact", exchange="auto", loading="selected", nodes=[])
        me = self._node.identity.node_id
        facts = msgspec.structs.replace(facts, nodes=[shard for shard in facts.nodes if shard.node_id == me])
        attempt.formed = FormedRing(
            self._node.table,
            RankContext("", HEAD, placement),
            facts,
            model,
            AloneLayers(),
            None,
            {HEAD: me},
            {HEAD: self._node.name},
            attempt.notices,
        )

    def _has_whole(self, folder: Path) -> None:
        """Record that ``folder`` now contains the whole model."""
        self._lacked = None
        self.folder = self._surveyor.folder = folder

    def _send(self, attempt: FormingTry) -> None:
        """Send the other machines what they lack."""
        ring, progress = attempt.ring, attempt.progress
        attempt.has = ShardUpload(self._source(ring.decision, progress), ring.decision, ring.followers).send(progress)

    def _connect(self, attempt: FormingTry) -> Kind | None:
        """Connect the machines and measure the exchanges. Returns ``alone`` if this machine alone turns out to be
        faster."""
        ring = attempt.ring
        threads = self._trial.threads or self._threads(ring.decision)
        elsewhere = ring.decision.kind == "elsewhere"
        exchanges = [] if elsewhere else self._exchange.candidates(ring, self._load.runtime, self._formed is not None)
        # Forming again must be quick.
        rehearse = self._node.parts.effort.rehearse and not self._exchange.made and not elsewhere
        specs = epoch_specs(ring, self._node, self._name, self._load, exchanges, threads, self._trial, rehearse)
        attempt.spec = specs[HEAD]
        names = {rank: machine.name for rank, machine in ring.followers.items()}
        links = attempt.links = EpochLinks(epoch_of(attempt.spec, names))
        attempt.undo.callback(links.close)
        cpu_threads = self._load.cpu_threads
        medians = connect_nodes(self._node, ring, specs, links, cpu_threads, self._try_links, attempt.progress)
        if elsewhere:
            return None
        exchange, exchange_s = attempt.exchange, attempt.exchange_s = self._exchange.choose(medians, links.problems)
        self._measured_with, self._measured_s = set(ring.decision.ranks), exchange_s
        terms = ring.decision.terms
        self.terms = None if terms is None else terms.with_exchange(exchange_s, links.layer_s.get(exchange))
        if self._lacked is None:
            again = decided_again(ring.decision, self.terms, self._choice)
            if again.kind == "alone":
                attempt.undo.close()
                self.decision = again
                return "alone"
        return None

    def _load_together(self, attempt: FormingTry) -> None:
        """Have all nodes load their shards in parallel."""
        ring, table = attempt.ring, self._node.table
        context = rank_context_of(attempt.spec)
        layers = layers_for(context, attempt.links.keep(attempt.exchange), attempt.spec.one_by_one)
        watches = [watch for machine in ring.followers.values() if (watch := table.watch(machine.node_id)) is not None]
        with tolerate_silence(watches):
            model, ready = LoadingNodes(ring.followers, ring.epoch, attempt.exchange, table.record_contact).beside(
                lambda told: load_model(
                    self._runtime, self._name, self.folder, self._load, told, RingPlace(context, layers)
                ),
                attempt.progress,
            )
        for rank, machine in ready.items():
            attempt.notices += notices_of(ring.followers[rank].name, machine.notices)
        facts = msgspec.structs.replace(
            ring.facts,
            epoch=ring.epoch,
            exchange=attempt.exchange,
            exchange_s=attempt.exchange_s,
            tokens_per_s=None if self.terms is None else self.terms.step().tokens_per_s,
            encrypted=attempt.exchange in ("tls", "envoy"),
        )
        attempt.notices += self._exchange.take_notices()
        self._use(attempt, facts, model, layers)

    def _load_elsewhere(self, attempt: FormingTry) -> None:
        """Have one other machine load everything."""
        ring, sizes = attempt.ring, self._surveyor.headers.sizes
        model, passes, lines = load_remote(
            ring, attempt.links, self._node.table, self._name, sizes, self._load, attempt.progress
        )
        self.terms, attempt.exchange = None, "tls"
        attempt.notices += [ring.decision.reason, *lines]
        self._use(attempt, msgspec.structs.replace(ring.facts, epoch=ring.epoch, exchange="tls"), model, passes)

    def _use(self, attempt: FormingTry, facts: RingFacts, model: LoadedModel, layers: PassControl) -> None:
        """Make the formed ring of what was loaded."""
        ring, me = attempt.ring, self._node.identity.node_id
        shards = [
            msgspec.structs.replace(shard, has_bytes=attempt.has.get(shard.rank, shard.has_bytes))
            for shard in facts.nodes
        ]
        attempt.notices += self._watch_faster_links(ring, attempt.exchange)
        attempt.formed = FormedRing(
            self._node.table,
            rank_context_of(attempt.spec),
            msgspec.structs.replace(facts, nodes=shards),
            model,
            layers,
            attempt.links,
            {HEAD: me, **{rank: machine.node_id for rank, machine in ring.followers.items()}},
            {HEAD: self._node.name, **{rank: machine.name for rank, machine in ring.followers.items()}},
            attempt.notices,
        )

    def _watch_faster_links(self, ring: Ring, exchange: ExchangeName) -> list[str]:
        """Start to look for faster links than those of ``ring``. Returns lines about faster links that are gone."""
        in_use = {way: link for way, link in ring.survey.links.items() if set(way) <= set(ring.decision.ranks)}
        if TRANSPORTS[exchange].plain_text:
            # Which networks it may use, the person decides.
            in_use = {}
        self._faster_links = FasterLinks(self._node, self._surveyor, in_use, self._present_machines)
        lines = slower_lines(in_use, self._node.identity.node_id, self._node.table.name_of)
        self._notified_of_slower = set(lines)
        return lines

    def _threads(self, decision: RingDecision) -> int | None:
        """Number of threads of the other nodes; None: they decide."""
        return None if decision.mode == "central" else self._surveyor.threads_for(self._load.runtime)

    def _source(self, decision: RingDecision, progress: ProgressCallback) -> Source:
        """The source of the weights. On return this machine's own shard is here."""
        if self._lacked is None:
            return FolderSource(self._node.name, self.folder, offer(self.folder, progress, self._name))
        placement = None if decision.kind == "elsewhere" else decision.placement
        held = None if placement is None else {layer: placement.held(HEAD, layer) for layer in placement.layers}
        return self._lacked.take(held, progress)

    # --- links ----------------------------------------------------------------------------------------------------

    def _try_links(self, ring: Ring, progress: ProgressCallback) -> None:
        """Find out why links could not be opened. Raises LinksBroke if one of them no longer works."""
        tried = self._surveyor.try_links(self._node, list(ring.followers.values()), progress)
        if tried.broken:
            raise LinksBroke(tried)

    def _forgotten(self, node_id: str) -> None:
        if self._formed is not None:
            self._formed.forgotten(node_id)
