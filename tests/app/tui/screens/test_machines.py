"""The ring in the chat: machines found, paired, forgotten; forming and leaving; what the settings, the status line and
the timing panel show of it."""

from __future__ import annotations

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, RadioSet, Static

from app.chat.state import Phase, Status
from app.chat.words import slowest_by_layer
from app.ring_words import to_send
from app.tui.application import ChatApp
from app.tui.panels.charts import node_line, overview
from app.tui.panels.timing_panel import TimingPanel, TimingView
from app.tui.render.ring_view import peer_lines, ring_lines
from app.tui.render.status_line import status_line
from app.tui.screens.dialogues import AskText, Confirm
from app.tui.screens.machines import Here, MachinesScreen
from app.tui.screens.settings import Prediction, SettingRow, SettingsScreen, prediction
from engine.ipc.messages import (
    ForgetPeer,
    LayerTimes,
    LinkFacts,
    Load,
    NodeShard,
    NodeTimes,
    Notice,
    OpenNetwork,
    Pair,
    PhaseTimes,
    Plan,
    Planned,
    RingChanged,
    RingFacts,
    Timing,
)
from tests.app.fake_engine import FACTS, ME, PLANNED, STRANGER, STUDIO, FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, notice, ready, wait_until
from tests.app.tui.screens.test_screens_pictures import at_sizes
from tests.support.kept_screens import CheckScreen

LINK = LinkFacts(interface="en5", address="10.0.0.2:47821", latency_s=85e-6, bytes_per_s=2.3e9)
RING = RingFacts(
    mode="exact", exchange="tls", loading="selected", tokens_per_s=21.3, alone_tokens_per_s=14.2, exchange_s=140e-6,
    nodes=[
        NodeShard(rank=0, node_id=ME.node_id, name="laptop", experts=640, expert_bytes=11_300_000_000,
                  trunk_bytes=1_900_000_000, memory_free=24_000_000_000, expected_experts=2.1),
        NodeShard(rank=1, node_id=STUDIO.node_id, name="studio", experts=2432, expert_bytes=43_100_000_000,
                  trunk_bytes=1_900_000_000, memory_free=96_000_000_000, expected_experts=5.9),
    ],
)  # fmt: skip
FORMED = msgspec.structs.replace(RING, epoch="e1")
ON_A_RING = msgspec.structs.replace(FACTS, ring=FORMED)


def phase(factor: float, wait: float) -> PhaseTimes:
    """Eight layers; the first half is ``factor`` times the usual, the second half twice less that."""
    layers = [LayerTimes(1.0, 0.1, 4.0 * (factor if layer < 4 else 2 - factor), 0.4, wait, 0.2) for layer in range(8)]
    inside = sum(sum(msgspec.structs.astuple(layer)) for layer in layers)
    return PhaseTimes(layers=layers, outside_layers=1.0, per_token=inside + 1.0, steps=64, tokens=64)


NODES = [
    NodeTimes(rank=0, name="laptop", prefill=phase(1.0, 0.2), decode=phase(0.6, 1.5)),
    NodeTimes(rank=1, name="studio-in-the-attic", prefill=phase(1.0, 0.2), decode=phase(1.2, 0.3)),
    NodeTimes(rank=2, name="mini", prefill=PhaseTimes(), decode=phase(0.9, 0.9)),
]
TIMING = Timing(prefill=NODES[0].prefill, decode=NODES[0].decode, nodes=NODES)


async def machines(pilot: Pilot[int], app: ChatApp) -> MachinesScreen:
    """Open the screen of machines."""
    await ready(pilot, app)
    await pilot.press("f8")
    await wait_until(pilot, lambda: isinstance(app.screen, MachinesScreen) and controller(app).link.network.state)
    assert isinstance(app.screen, MachinesScreen)
    return app.screen


def listed(app: ChatApp) -> str:
    options = app.screen.query_one(OptionList)
    return "\n".join(str(options.get_option_at_index(index).prompt) for index in range(options.option_count))


def here(app: ChatApp) -> str:
    return app.screen.query_one(Here).render().plain


# --- machines -----------------------------------------------------------------------------------------------------


async def test_nothing_is_opened_before_it_is_asked_for(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await machines(pilot, app)
        assert "No socket is open" in here(app)
        assert "studio" in listed(app) and "10.0.0.3" not in listed(app)
        await pilot.press("p", "c")
        await wait_until(pilot, lambda: "Press l to look for machines first" in _problem(app))
        assert not engine.sent(OpenNetwork)
        await pilot.press("l")
        await wait_until(pilot, lambda: "10.0.0.3" in listed(app))
        assert "listening on 10.0.0.1:47820" in here(app)
        await pilot.press("l")
        await wait_until(pilot, lambda: engine.network.opened is None)
        await wait_until(pilot, lambda: "No socket is open" in here(app))


def _problem(app: ChatApp) -> str:
    return str(app.screen.query_one("#machines-problem", Static).visual)


@pytest.mark.soak
async def test_pairing_asks_for_the_code_and_says_what_went_wrong(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await machines(pilot, app)
        await pilot.press("l")
        await wait_until(pilot, lambda: "found, not paired" in listed(app))
        for code in ("0000", engine.network.codes[STRANGER.node_id]):
            app.screen.query_one(OptionList).highlighted = 1
            await pilot.press("p")
            await wait_until(pilot, lambda: isinstance(app.screen, AskText))
            app.screen.query_one(Input).value = code
            await pilot.press("enter")
            await wait_until(pilot, lambda: isinstance(app.screen, MachinesScreen))
            if code == "0000":
                await wait_until(pilot, lambda: "The code is wrong; 2 tries are left." in _problem(app))
        await wait_until(pilot, lambda: "mini" in listed(app))
        assert [(request.peer, request.code) for request in engine.sent(Pair) if isinstance(request, Pair)] == [
            (STRANGER.node_id, "0000"), (STRANGER.node_id, "4711-2208"),
        ]  # fmt: skip


async def test_a_machine_that_is_not_found_is_paired_by_its_address(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await machines(pilot, app)
        await pilot.press("l")
        await wait_until(pilot, lambda: engine.network.opened)
        options = app.screen.query_one(OptionList)
        await wait_until(pilot, lambda: options.option_count == 3)
        options.highlighted = 2
        await pilot.press("enter")
        for text in ("10.0.0.9:47820", "1111 1111"):
            await wait_until(pilot, lambda: isinstance(app.screen, AskText) and not app.screen.query_one(Input).value)
            app.screen.query_one(Input).value = text
            await pilot.press("enter")
        await wait_until(pilot, lambda: engine.sent(Pair))
        (request,) = engine.sent(Pair)
        assert isinstance(request, Pair) and (request.peer, request.code) == ("10.0.0.9:47820", "1111 1111")


async def test_a_code_is_shown_and_counts_down(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await machines(pilot, app)
        await pilot.press("l")
        await wait_until(pilot, lambda: engine.network.opened)
        await pilot.press("c")
        await wait_until(pilot, lambda: "1234-5678" in here(app) and "118 s, 3 tries" in here(app))


async def test_forgetting_is_confirmed(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await machines(pilot, app)
        for answer in ("n", "y"):
            await pilot.press("x")
            await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
            assert not engine.sent(ForgetPeer)
            await pilot.press(answer)
            await wait_until(pilot, lambda: isinstance(app.screen, MachinesScreen))
        await wait_until(pilot, lambda: engine.sent(ForgetPeer) and "studio" not in listed(app))


@pytest.mark.soak
@pytest.mark.usefixtures("few_settings")
async def test_forming_a_ring_loads_the_model_on_it_and_leaving_closes_the_network(
    make_app: MakeApp, engine: FakeEngine
) -> None:
    app = make_app(ring_mode="exact", ring_name="attic")
    async with app.run_test(size=(120, 40)) as pilot:
        await machines(pilot, app)
        await pilot.press("r")
        await pilot.press("f")
        await wait_until(pilot, lambda: "Press l to look for machines first" in _problem(app))
        await pilot.press("l")
        await wait_until(pilot, lambda: "ready" in listed(app))
        engine.facts = ON_A_RING
        await pilot.press("f")
        await wait_until(pilot, lambda: len(engine.sent(Load)) == 2)
        await ready(pilot, app)
        load = engine.sent(Load)[-1]
        assert isinstance(load, Load) and load.partitioning == "ring" and load.ring.mode == "exact"
        assert engine.network.opened is not None and engine.network.opened.name == "attic"
        assert "ring of 2 · tls, encrypted" in status_line(controller(app).status, 120).plain
        await ask(pilot, app, "Where are you?")
        await pilot.press("f8")
        await wait_until(pilot, lambda: isinstance(app.screen, MachinesScreen))
        assert "Ring of 2" in here(app) and "laptop (here)" in here(app)
        await pilot.press("r")
        await wait_until(pilot, lambda: len(engine.sent(Load)) == 3)
        await ready(pilot, app)
        again = engine.sent(Load)[-1]
        assert isinstance(again, Load) and again.partitioning == "ring"
        await pilot.press("f8")
        await wait_until(pilot, lambda: isinstance(app.screen, MachinesScreen))
        await pilot.press("l")
        await wait_until(pilot, lambda: "The ring needs the network" in _problem(app))
        controller(app).link.looking = False
        engine.facts = FACTS
        await pilot.press("f")
        await wait_until(pilot, lambda: len(engine.sent(Load)) == 4)
        await wait_until(pilot, lambda: engine.network.opened is None)
        assert app.settings.partitioning == "auto"


async def test_a_ring_that_cannot_be_formed_leaves_what_worked(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        engine.network.refusal = "Port 47820 is in use: choose another under Listen on."
        controller(app).change_settings({"partitioning": "ring", "ring_mode": "fast"})
        await wait_until(pilot, lambda: "Port 47820 is in use" in notice(app))
        await ready(pilot, app)
        assert app.settings.partitioning == "auto" and app.settings.ring_mode == "fast"
        engine.network.refusal = ""
        controller(app).change_settings({"partitioning": "ring", "ring_nodes": "attic"})
        await wait_until(pilot, lambda: "No paired machine is called attic" in notice(app))
        await wait_until(pilot, lambda: engine.network.opened is None)


async def test_settings_of_the_ring_load_nothing_while_there_is_none(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        controller(app).change_settings({"ring_mode": "fast", "ring_shares": "here=4"})
        await pilot.pause()
        assert len(engine.sent(Load)) == 1 and controller(app).status.phase is Phase.READY


async def test_an_engine_that_dies_has_its_network_opened_again(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app(partitioning="ring")
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        assert len(engine.sent(OpenNetwork)) == 1
        engine.dies_at = 2
        controller(app).submit("Will you live?")
        await wait_until(pilot, lambda: len(engine.sent(OpenNetwork)) == 2)
        await ready(pilot, app)
        assert engine.starts == 2 and engine.network.opened is not None


async def test_losing_a_machine_is_one_line_above_the_field(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        assert engine.on_notice is not None
        engine.on_notice(Notice(text="studio is gone;\nthe ring goes on with 2 machines."))
        await wait_until(pilot, lambda: "studio is gone; the ring goes on with 2 machines." in notice(app))
        engine.on_notice(Notice(text="studio is back."))
        await wait_until(pilot, lambda: "studio is back." in notice(app) and "studio is gone" in notice(app))
        for number in range(5):
            engine.on_notice(Notice(text=f"line {number}"))
        await wait_until(pilot, lambda: "line 4" in notice(app))
        assert len(notice(app).splitlines()) == 3
        await ask(pilot, app, "Still there?")
        assert "line" not in notice(app)


async def test_another_ring_is_shown_at_once(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        status = controller(app).status
        assert status.facts is not None
        status.facts = msgspec.structs.replace(status.facts, ring=FORMED)
        engine.network.opened = OpenNetwork(id=1)
        engine.network.peers = [msgspec.structs.replace(STUDIO, state="ring")]
        engine.tell_network()
        assert status.away == () and "ring of 2 · tls, encrypted" in status_line(status, 120).plain
        engine.network.peers = [msgspec.structs.replace(STUDIO, state="lost")]
        engine.tell_network()
        assert status.away == ("studio",) and "ring of 2, studio is gone" in status_line(status, 120).plain
        await wait_until(pilot, lambda: "studio is gone. The next answer comes from a ring without it." in notice(app))
        engine.network.peers = [msgspec.structs.replace(STUDIO, state="ready")]
        engine.tell_network()
        await wait_until(pilot, lambda: "studio is back." in notice(app))
        assert engine.on_ring is not None
        alone = msgspec.structs.replace(FORMED, epoch="", nodes=FORMED.nodes[:1])
        engine.on_ring(RingChanged(ring=alone, executor="local (torch, cpu)"))
        assert status.facts.ring == alone
        assert "no ring: this machine alone" in status_line(status, 120).plain


async def test_what_becomes_of_a_ring_is_the_engines_to_say_while_it_answers(
    make_app: MakeApp, engine: FakeEngine
) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        status = controller(app).status
        assert status.facts is not None
        status.facts, status.phase = msgspec.structs.replace(status.facts, ring=FORMED), Phase.ANSWERING
        engine.network.opened = OpenNetwork(id=1)
        engine.network.peers = [msgspec.structs.replace(STUDIO, state="lost")]
        engine.tell_network()
        await pilot.pause()
        assert status.away == ("studio",) and "studio" not in notice(app)


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.usefixtures("few_settings")
async def test_a_ring_is_predicted_before_it_is_applied(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.planned = msgspec.structs.replace(PLANNED, ring=RING)
    app = make_app()
    async with app.run_test(size=(100, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: isinstance(app.screen, SettingsScreen))
        assert not engine.sent(OpenNetwork)
        choose(app, "partitioning", 3)
        await wait_until(pilot, lambda: engine.network.opened)
        await wait_until(pilot, lambda: "Ring of 2, planned" in app.screen.query_one(Prediction).render().plain)
        row(app, "ring_shares").focus_control()
        await pilot.press(*"studio=20")
        await wait_until(pilot, lambda: _planned_shares(engine) == {STUDIO.node_id: 20 << 30})
        await pilot.press("f6")
        await wait_until(pilot, lambda: engine.network.opened is None)
        assert len(engine.sent(Load)) == 1


def row(app: ChatApp, key: str) -> SettingRow:
    return next(row for row in app.screen.query(SettingRow) if row.setting.key == key)


def choose(app: ChatApp, key: str, index: int) -> None:
    buttons = row(app, key).query_one(RadioSet).children
    buttons[index].value = True  # type: ignore[attr-defined]


def _planned_shares(engine: FakeEngine) -> dict[str, int]:
    plans = engine.sent(Plan)
    return plans[-1].load.ring.shares if plans and isinstance(plans[-1], Plan) else {}


@pytest.mark.parametrize("width", [34, 76, 116])
def test_a_planned_ring_says_what_each_node_holds(width: int) -> None:
    slower = msgspec.structs.replace(RING, tokens_per_s=9.0, reason="One machine alone is faster.")
    text = prediction(msgspec.structs.replace(PLANNED, ring=slower), width).plain
    assert "one machine alone 14.2 tok/s" in text and "One machine alone is faster." in text
    assert "2,432 experts 43.1 GB" in text and "up to 45.0 GB to send" in text and "trunk 1.9 GB on each" in text
    assert all(len(line) <= width for line in text.splitlines() if not _prose(line))


def _prose(line: str) -> bool:
    """Sentences, and the parts of a memory, are wrapped where they are drawn."""
    return any(mark in line for mark in (" · ", " – ", "measured"))


def test_one_machine_instead_of_a_ring_says_why() -> None:
    alone = msgspec.structs.replace(RING, nodes=RING.nodes[:1], reason="laptop alone is predicted to be faster.")
    text = "\n".join(line.plain for line in ring_lines(alone, 80))
    assert text.startswith("No ring: this machine alone") and "laptop alone is predicted to be faster." in text
    assert "exact" not in text and "experts" not in text


def test_what_is_sent_is_the_most_as_long_as_nobody_was_asked() -> None:
    first, second = RING.nodes
    assert to_send(first) == ""
    assert to_send(second) == "up to 45.0 GB to send"
    assert to_send(msgspec.structs.replace(second, has_bytes=1_900_000_000)) == "43.1 GB to send"
    assert to_send(msgspec.structs.replace(second, has_bytes=45_000_000_000)) == ""


def test_unequal_trunks_and_too_little_memory_are_said() -> None:
    nodes = [RING.nodes[0], msgspec.structs.replace(RING.nodes[1], trunk_bytes=0, memory_free=1_000_000_000)]
    lines = ring_lines(msgspec.structs.replace(RING, nodes=nodes, alone_tokens_per_s=None), 100)
    text = "\n".join(line.plain for line in lines)
    assert "does not fit on one machine" in text and "trunk 0 B" in text
    assert any("error" in str(span.style) for line in lines for span in line.spans)


def test_a_machine_in_lines() -> None:
    peer = msgspec.structs.replace(STUDIO, link=LINK, state="refused", problem="runs version 0.1\x1b[2J")
    text = peer_lines(peer, 40).plain
    assert "studio" in text and "en5, 85 µs, 2.3 GB/s" in text and "runs version 0.1" in text and "\x1b" not in text
    assert peer_lines(STRANGER, 40).plain.startswith("○ c3c3c3c3")


# --- timing by node -----------------------------------------------------------------------------------------------


def test_the_slowest_node_of_each_layer() -> None:
    slowest = slowest_by_layer([node.decode.layers for node in NODES])
    assert [layer.node for layer in slowest] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert slowest[0].gap == pytest.approx(4.0 * 0.6)
    assert slowest_by_layer([]) == [] and slowest_by_layer([[], []]) == []


@pytest.mark.parametrize("width", [30, 34, 76, 116])
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_the_overview_fits(width: int, name: str) -> None:
    text = overview(NODES, name, width).plain
    assert all(len(line) <= width for line in text.splitlines())
    assert ("Slowest:" in text) == (name == "decode")
    assert "[all]" in node_line(NODES, None, width).plain and "[3 mini]" in node_line(NODES, 2, width).plain


@pytest.mark.soak
async def test_a_key_goes_through_the_nodes(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.timing = TIMING
    app = make_app(show_timing=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await wait_until(pilot, lambda: app.screen.query(TimingPanel) and engine.watching)
        await ask(pilot, app, "How long?")
        view = app.screen.query_one(TimingView)
        await wait_until(pilot, lambda: "Decoding by node" in view.render().plain)
        app.screen.query_one(TimingPanel).focus()
        await pilot.press("n", "n")
        assert "[2 studio-in-t…]" in view.render().plain and "Decoding by layer" in view.render().plain
        await pilot.press("n", "n")
        assert "[all]" in view.render().plain
        await pilot.press("N")
        assert "[3 mini]" in view.render().plain


@pytest.mark.parametrize("sampled", [False, True])
async def test_a_panel_that_samples_says_so(make_app: MakeApp, engine: FakeEngine, sampled: bool) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f5")
        await wait_until(pilot, lambda: app.screen.query(TimingPanel))
        view = app.screen.query_one(TimingView)
        view.show(Timing(id=1, prefill=PhaseTimes(), decode=PhaseTimes(), sampled=sampled))
        assert ("Only a few steps a second are measured" in view.render().plain) == sampled


# --- the status line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0, 20, 40, 80, 120])
def test_the_status_line_with_a_ring_fits(width: int) -> None:
    plain = msgspec.structs.replace(ON_A_RING, ring=msgspec.structs.replace(FORMED, exchange="socket", encrypted=False))
    status = Status(phase=Phase.READY, model="starter", facts=plain, context_used=9, probe_s=0.041)
    line = status_line(status, width)
    assert line.cell_length <= width
    if width == 120:
        assert "ring of 2 · socket, plain text" in line.plain and "first token 41 ms" in line.plain


# --- pictures -----------------------------------------------------------------------------------------------------


@at_sizes((80, 24), (120, 40), (40, 20))
def test_the_machines_of_a_ring(
    check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]
) -> None:
    engine.network.peers = [msgspec.structs.replace(STUDIO, link=LINK, state="ring"), STRANGER]
    engine.facts = ON_A_RING
    app = make_app(partitioning="ring")

    async def before(pilot: Pilot[int]) -> None:
        await machines(pilot, app)
        await wait_until(pilot, lambda: "Ring of 2" in here(app) and "10.0.0.3" in listed(app))

    check_screen(app, size, before)


@at_sizes((80, 24), (120, 40), (40, 20))
def test_timing_by_node(
    check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]
) -> None:
    engine.timing = TIMING
    app = make_app()

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot, app)
        assert app.chat is not None
        await pilot.press("f5")
        await wait_until(pilot, lambda: engine.watching)
        controller(app).submit("How long?")
        await wait_until(pilot, lambda: not controller(app).busy and controller(app).thread.path)
        await wait_until(pilot, lambda: "by node" in app.screen.query_one(TimingView).render().plain)
        await wait_until(pilot, lambda: app.chat and not app.chat.transcript.query_one(".tail").display)

    check_screen(app, size, before)


@pytest.mark.soak
def test_a_ring_in_the_settings(check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine) -> None:
    planned: Planned = msgspec.structs.replace(PLANNED, ring=RING)
    engine.planned = planned
    app = make_app(partitioning="ring")

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot, app)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: isinstance(app.screen, SettingsScreen))
        await wait_until(pilot, lambda: "Ring of 2" in app.screen.query_one(Prediction).render().plain)
        row(app, "ring_shares").focus_control()
        await wait_until(pilot, lambda: app.screen.query("Input:focus"))

    check_screen(app, (80, 24), before)
