"""A ring is formed: with whom, with whom not, and what happens when somebody fails meanwhile."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.head.connecting_nodes import NothingConnected
from engine.cluster.head.formed import FormedRing
from engine.cluster.head.forming import RingFormer
from engine.cluster.head.forming_state import Kind
from engine.cluster.head.forming_try import FormingTry
from engine.cluster.head.survey import (
    Candidate,
    NodeRefused,
    Survey,
    Surveyor,
    ask,
    candidates,
    decide,
)
from engine.cluster.membership.client import PeerClient, Unreachable
from engine.cluster.membership.node import Node
from engine.cluster.parts import Effort, EngineParts, Moment
from engine.cluster.transport.exchange import PeerLost
from engine.cluster.worker.lending import ClusterWorker
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Load, OpenNetwork
from engine.ipc.messages.ring import RingChoice
from engine.planning.ring_change import FORMING_S, Rerun, RingChange
from engine.runtimes import runtime_named
from engine.runtimes.model_headers import read_headers
from engine.system.locations import locate
from tests.engine.cluster.paired_nodes import Nodes, make_identity
from tests.engine.cluster.tests_models import facts, tiny_mixtral
from tests.support.eventually import eventually

pytestmark = pytest.mark.usefixtures("no_keyring")


def test_deciding_refuses_with_the_shortfall(tmp_path: Path) -> None:
    folder = tiny_mixtral(tmp_path)
    load = Load(id=0, model="tiny", runtime="native", ring=RingChoice(even_if_slower=True, shares={"a": 0, "b": 0}))
    survey = Survey(facts={"a": facts(), "b": facts(machine="two")})
    refused = decide(read_headers(folder, load), "tiny", load, [("a", "Anna"), ("b", "Bob")], survey)
    assert refused.kind == "refused"
    assert refused.shortfall > 0
    by_all = Load(id=0, model="tiny", runtime="native", ring=RingChoice(even_if_slower=True, overlap=False))
    formed = decide(read_headers(folder, by_all), "tiny", by_all, [("a", "Anna"), ("b", "Bob")], survey)
    assert formed.kind == "ring"
    assert formed.ranks == ("a", "b")


@pytest.mark.parametrize(
    ("error", "gone"), [(Unreachable("no"), True), (PeerLost("no"), True), (ModelError("no", kind="disk"), False)]
)
def test_a_nodes_failure_is_that_nodes(error: Exception, gone: bool) -> None:
    def fail() -> None:
        raise error

    one = Candidate("id", "Bob", None, (), "p")  # type: ignore[arg-type]
    with pytest.raises(NodeRefused) as refused:
        ask(one, fail)
    assert (refused.value.node_id, refused.value.gone) == ("id", gone)


def test_stopping_is_nobodys_failure() -> None:
    def stop() -> None:
        raise Cancelled("Stopped.")

    with pytest.raises(Cancelled):
        ask(Candidate("id", "Bob", None, (), "p"), stop)  # type: ignore[arg-type]


@pytest.fixture
def former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RingFormer]:
    """Of a head that knows nobody."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    folder = tiny_mixtral(tmp_path / "model")
    node = Node(*make_identity(tmp_path / "me"), OpenNetwork(id=1, name="me", listen="127.0.0.1:0"))
    load = Load(id=0, model="tiny", runtime="native", partitioning="cpu")
    surveyor = Surveyor(node.identity.node_id, folder, load)
    made = RingFormer(node, "tiny", folder, runtime_named("native"), load, surveyor)
    yield made
    made.close()
    node.close()


def test_forming_with_nobody_is_one_machine(former: RingFormer) -> None:
    formed = former.form(lambda *_: None)
    assert formed.names == {0: "me"}
    assert formed.command_links == {}
    assert len(formed.facts.nodes) == 1
    assert formed.lost() is None
    assert formed.layers.give_up() is False
    rows = formed.model.start()
    assert rows.extend([1, 2, 3]) is not None
    assert not former.changed(lambda *_: None, lambda text: None, Rerun())


@pytest.mark.parametrize(("again", "failures", "formed"), [(True, 3, True), (True, 4, False), (False, 1, False)])
def test_a_ring_that_was_there_is_connected_again_when_all_failed_at_once(
    former: RingFormer, monkeypatch: pytest.MonkeyPatch, again: bool, failures: int, formed: bool
) -> None:
    """Machines that are too busy for a moment do not end an answer."""
    form, left = former._try, iter(range(failures))

    def failing(*arguments: Any) -> FormedRing:
        if next(left, None) is not None:
            raise NothingConnected("The link to Bob cannot be made.", "network")
        return form(*arguments)

    if again:
        former.form(lambda *_: None)
    monkeypatch.setattr(former, "_try", failing)
    if formed:
        assert former.form(lambda *_: None).names == {0: "me"}
        return
    with pytest.raises(ModelError, match="link to Bob"):
        former.form(lambda *_: None)


class Lent:
    """A head with a model, and machines that are lent to it and have nothing of it."""

    def __init__(self, folder: Path, *names: str) -> None:
        model = tiny_mixtral(folder / "model")
        self.nodes = Nodes(folder / "nodes", "Anna", *names, lend=True)
        self.head, *self.others = self.nodes.nodes
        for node in self.nodes.nodes:
            node.parts = EngineParts(effort=Effort(link_s=0.01, exchange_rounds=5, rehearse=False))
        self.lenders = [ClusterWorker(node) for node in self.others]
        load = Load(
            id=0,
            model="tiny",
            runtime="native",
            partitioning="cpu",
            ring=RingChoice(even_if_slower=True, exchange="tls"),
        )
        surveyor = Surveyor(self.head.identity.node_id, model, load)
        self.former = RingFormer(self.head, "tiny", model, runtime_named("native"), load, surveyor)
        eventually(self.nodes.ready)

    def close(self) -> None:
        self.former.close()
        for lender in self.lenders:
            lender.close()
        self.nodes.close()


@pytest.fixture
def lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Lent]]:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    with contextlib.ExitStack() as opened:

        def make(*names: str) -> Lent:
            made = Lent(tmp_path, *names)
            opened.callback(made.close)
            return made

        yield make


def test_no_failed_heartbeat_ends_a_transfer_and_forgetting_the_machine_does(lent: Callable[..., Lent]) -> None:
    """First the connection of the heartbeats to Bob is given up while weights are on their way to him."""
    made = lent("Bob")
    head, (bob,) = made.head, made.others
    offered: list[str] = []
    dropped: list[PeerClient] = []

    def drop() -> None:
        watch = head.table.watch(bob.identity.node_id)
        assert watch is not None
        client = watch.view().client
        if client is not None and not dropped:
            dropped.append(client)
            watch._drop(client, refused=False)

    def forget() -> None:
        if head.peers.get(bob.identity.node_id) is not None:
            head.peers.forget(bob.identity.node_id)
            head.forget(bob.identity.node_id)

    happens = [drop]

    def observe(moment: Moment, *subjects: object) -> None:
        if moment == "offered":
            offered.append("offered")
        if moment == "piece":
            happens[0]()

    bob.parts = replace(bob.parts, observe=observe)
    formed = made.former.form(lambda *_: None)
    assert list(formed.names.values()) == ["Anna", "Bob"]
    assert dropped and dropped[0].closed
    assert offered == ["offered"]
    watch = head.table.watch(bob.identity.node_id)
    assert watch is not None and watch._apart and all(one.closed for one in watch._apart), "nothing is left open"
    happens[0] = forget
    shutil.rmtree(locate("models"))
    eventually(lambda: watch.view().client is not None)
    formed.lose((), "all is formed again")
    assert list(made.former.form(lambda *_: None).names.values()) == ["Anna"]
    assert head.peers.get(bob.identity.node_id) is None


def test_a_machine_that_does_not_pay_yet_waits_and_is_named(
    lent: Callable[..., Lent], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lent("Bob")
    former, head, bob = made.former, made.head, made.others[0].identity.node_id
    monkeypatch.setattr(former, "_present_machines", list)
    assert list(former.form(lambda *_: None).names.values()) == ["Anna"]
    monkeypatch.setattr(former, "_present_machines", lambda: candidates(head, []))
    former._rejoin_policy.members.add(bob)
    planned: list[RingChange] = []

    def plan(*given: Any) -> RingChange:
        """As planned, but for the speeds, which nobody measured here."""
        found = former_plan(*given)
        assert found is not None and former._wanted == {head.identity.node_id, bob}
        planned.append(replace(found, now_s=0.12, then_s=0.08, read_s=0.005, asked=False))
        return planned[-1]

    former_plan = former._plan_change
    monkeypatch.setattr(former, "_plan_change", plan)
    said: list[str] = []
    for _ in range(2):
        assert not former.changed(lambda *_: None, said.append, Rerun(read=100_000))
    assert len(planned) == 1 and len(said) == 1, "planned once, said once"
    assert said[0].startswith("Bob is there and not used yet: this conversation would be run again and ")
    assert f"about {round(500 + planned[0].send_s + FORMING_S)} s" in said[0]
    (facts_of_bob,) = head.table.facts()
    assert (facts_of_bob.state, facts_of_bob.problem) == ("ready", said[0])
    # A new conversation has nothing to run again.
    assert former.changed(lambda *_: None, said.append, Rerun())
    assert list(former.form(lambda *_: None).names.values()) == ["Anna", "Bob"]
    assert [one.problem for one in head.table.facts()] == [""] and len(said) == 1


def test_a_machine_whose_taking_in_was_stopped_is_not_waited_for_again(
    lent: Callable[..., Lent], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lent("Bob")
    former, head = made.former, made.head
    monkeypatch.setattr(former, "_present_machines", list)
    former.form(lambda *_: None)
    monkeypatch.setattr(former, "_present_machines", lambda: candidates(head, []))
    former._rejoin_policy.members.add(made.others[0].identity.node_id)
    planned: list[int] = []

    def plan(*_: object) -> None:
        planned.append(len(planned))
        if len(planned) == 1:
            raise Cancelled("stopped")

    monkeypatch.setattr(former, "_plan_change", plan)
    with pytest.raises(Cancelled):
        former.changed(lambda *_: None, lambda _: None, Rerun())
    assert not former.changed(lambda *_: None, lambda _: None, Rerun()) and len(planned) == 1
    # A link that is back is looked at whatever was planned before.
    former._link_retry.restored.set()
    assert not former.changed(lambda *_: None, lambda _: None, Rerun()) and len(planned) == 2


def test_a_machine_that_was_left_out_as_silent_is_asked_again_when_it_answers(lent: Callable[..., Lent]) -> None:
    made = lent("Bob", "Carl")
    former, bob = made.former, made.others[0]
    plan, back = former._plan_try, former._back_again
    asked: list[set[str]] = []

    def planning(attempt: FormingTry) -> Kind:
        asked.append({machine.name for machine in attempt.machines})
        match len(asked):
            case 1:
                raise NodeRefused(bob.identity.node_id, "it cannot be reached.", gone=True)
            case 2:
                assert [line for line in attempt.notices if line.startswith("Bob is left out of the ring")]
                attempt.progress("sending weights", 0, 0, "")
                pytest.fail("it was not asked again while weights are on their way to Carl")
        assert attempt.notices == []
        attempt.machines = []
        return plan(attempt)

    former._plan_try = planning  # type: ignore[method-assign]
    # It is silent for as long as it is waited for, and then answers.
    former._back_again = lambda *given: back(*given) if len(asked) > 1 else None  # type: ignore[method-assign]
    former.form(lambda *_: None)
    assert asked == [{"Bob", "Carl"}, {"Carl"}, {"Bob", "Carl"}]
