"""What is said of machines that cannot be used yet, of a ring that would be slower, and where there is little room."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static, TextArea

from app.chat.state import NetworkChanged, Phase, Status
from app.commands.plan import ring_lines as plan_lines
from app.ring_words import other_link, peer_address, speed_words, state_words
from app.tui.application import ChatApp
from app.tui.lending import lending_view
from app.tui.render.ring_view import peer_lines, ring_lines
from app.tui.render.status_line import status_line
from app.tui.screens.dialogues import AskText
from app.tui.screens.machines import MachinesScreen
from app.tui.screens.settings import SettingRow, SettingsScreen
from engine.ipc.messages import LendingFacts, NetworkState, NodeShard, Pair, Progress, RingFacts
from tests.app.fake_engine import FACTS, ME, STRANGER, STUDIO, FakeEngine
from tests.app.tui.screen_helpers import MakeApp, controller, ready, wait_until

WORDS = "prism saddle cabin walrus fiddle kitchen"
NODES = [
    NodeShard(rank=rank, node_id=node_id, name=name, experts=640, expert_bytes=11_300_000_000,
              trunk_bytes=1_900_000_000, memory_free=24_000_000_000)
    for rank, (node_id, name) in enumerate([(ME.node_id, "laptop"), (STUDIO.node_id, "studio")])
]  # fmt: skip
RING = RingFacts(epoch="e1", mode="exact", exchange="tls", loading="selected", nodes=NODES, tokens_per_s=21.3,
                 alone_tokens_per_s=44.0)  # fmt: skip


async def _open(pilot: Pilot[int], app: ChatApp) -> OptionList:
    """The screen of machines, with the network open and everybody found."""
    await ready(pilot, app)
    await pilot.press("f8")
    await wait_until(pilot, lambda: isinstance(app.screen, MachinesScreen))
    await pilot.press("l")
    machines = app.screen.query_one(OptionList)
    await wait_until(pilot, lambda: machines.option_count == 3)
    return machines


def _problem(app: ChatApp) -> str:
    return str(app.screen.query_one("#machines-problem", Static).visual)


# --- in words -----------------------------------------------------------------------------------------------------


def test_a_machine_that_is_not_paired_is_known_by_its_words() -> None:
    lines = peer_lines(STRANGER, 76).plain.split("\n")
    assert lines == ["○ c3c3c3c3  found, not paired", f"  {WORDS}", "  10.0.0.3:47820"]
    narrow = peer_lines(STRANGER, 30).plain.split("\n")
    assert max(map(len, narrow)) <= 30 and " ".join(" ".join(narrow).split()).count(WORDS) == 1


def test_a_machine_that_is_there_and_not_lent_is_not_called_ready() -> None:
    chatting = msgspec.structs.replace(STUDIO, lends=False)
    assert (state_words(STUDIO), state_words(chatting), state_words(chatting, of_head=True)) == (
        "ready", "reachable, not lent", "reachable",
    )  # fmt: skip
    assert peer_lines(chatting, 76).plain.startswith("○ studio  reachable, not lent")
    assert peer_lines(chatting, 76, of_head=True).plain.startswith("● studio  reachable\n")


def test_addresses_that_are_shown_can_be_typed_elsewhere() -> None:
    local, wide = "[fe80::fc:ff:fe00:1%254]:47820", "192.168.1.7:47820"
    assert peer_address(msgspec.structs.replace(STRANGER, addresses=[local, wide])) == wide
    assert peer_address(msgspec.structs.replace(STRANGER, addresses=[local])) == "[fe80::fc:ff:fe00:1]:47820"
    assert peer_address(msgspec.structs.replace(STRANGER, addresses=[])) == ""
    assert other_link("en0 [fe80::1%en0]:47821: 118 µs") == "en0 [fe80::1]:47821: 118 µs"


def test_a_prediction_that_leaves_something_out_is_an_upper_bound() -> None:
    best = msgspec.structs.replace(RING, at_best=True)
    assert speed_words(RING, "21.3 tok/s", "44 tok/s") == "about 21.3 tok/s; the best machine alone 44 tok/s"
    assert speed_words(best, "21.3 tok/s", "44 tok/s") == "up to 21.3 tok/s; the best machine alone up to 44 tok/s"
    assert "one machine alone up to" in ring_lines(best, 100)[0].plain
    assert "up to 21.3 tok/s" in ring_lines(best, 100)[0].plain and "about 21.3" in ring_lines(RING, 100)[0].plain


def test_one_machine_that_is_used_instead_says_how_to_have_the_ring() -> None:
    alone = msgspec.structs.replace(RING, nodes=NODES[:1], reason="laptop alone is predicted to be faster.")
    text = "\n".join(line.plain for line in ring_lines(alone, 76))
    assert "laptop alone is predicted to be faster." in text and "Even if slower" in text
    nobody = msgspec.structs.replace(alone, tokens_per_s=None, reason="There is no other machine to share with.")
    assert "Even if slower" not in "\n".join(line.plain for line in ring_lines(nobody, 76))


@pytest.mark.parametrize(("width", "shown"), [(78, "ring of 2 · tls, encrypted"), (52, "ring of 2")])
def test_that_it_is_a_ring_matters_more_than_the_first_token_after_idle(width: int, shown: str) -> None:
    status = Status(phase=Phase.READY, model="starter", facts=msgspec.structs.replace(FACTS, ring=RING))
    status.beams, status.probe_s, status.context_used, status.tokens_per_s = 4, 0.471, 1551, 8.3
    line = status_line(status, width).plain
    assert shown in line and "471 ms" not in line and "1551/" in line and len(line) <= width
    assert "first token 471 ms" in status_line(status, 140).plain


def test_a_lent_machine_shows_first_what_one_needs() -> None:
    state = NetworkState(me=ME, open=True, code="1234 5678", code_seconds=100, code_tries=3)
    shown = lending_view(state, False, 34).plain
    assert shown.index("1234 5678") < shown.index("listening on") and len(shown[: shown.index("tries")].split("\n")) < 9
    forming = LendingFacts(head="desk", model="", rank=0, nodes=0, experts=0, expert_bytes=0, stage="comparing weights")
    shown = lending_view(msgspec.structs.replace(state, code="", lending=forming), False, 76).plain
    assert "desk\n" in shown and "comparing weights" in shown
    assert not any(word in shown for word in ("rank 0", "0 B", "Model", "Share"))


# --- on the screens -----------------------------------------------------------------------------------------------


async def test_the_mark_stays_where_it_is_when_the_network_changes(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        machines = await _open(pilot, app)
        for index in (2, 1):
            machines.highlighted = index
            assert isinstance(app.screen, MachinesScreen)
            app.screen.handle_update(NetworkChanged())
            assert machines.highlighted == index


async def test_what_is_no_address_is_refused_before_a_code_is_asked_for(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        machines = await _open(pilot, app)
        machines.highlighted = 2
        await pilot.press("p")
        await wait_until(pilot, lambda: isinstance(app.screen, AskText))
        app.screen.query_one(Input).value = "7954 2612"
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, MachinesScreen) and "not an address" in _problem(app))
        assert "“7954 2612” is not an address. Type HOST:PORT" in " ".join(_problem(app).split())
        assert not engine.sent(Pair)


async def test_the_code_is_asked_for_with_the_words_of_the_machine(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        machines = await _open(pilot, app)
        machines.highlighted = 1
        await pilot.press("p")
        await wait_until(pilot, lambda: isinstance(app.screen, AskText))
        asked = str(app.screen.query_one(".dialogue-title", Static).visual)
        assert " ".join(asked.split()) == f"Code shown by c3c3c3c3 ({WORDS})"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lends": False}, "studio is there but not lent: run `privatellm join` on it."),
        ({"state": "busy"}, "studio is lent to the ring of another machine."),
        ({"state": "paired"}, "studio is paired but does not answer"),
    ],
)
async def test_forming_says_why_nobody_can_be_used(
    make_app: MakeApp, engine: FakeEngine, change: dict[str, object], said: str
) -> None:
    engine.network.peers = [msgspec.structs.replace(STUDIO, **change), STRANGER]
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await _open(pilot, app)
        await pilot.press("f")
        await wait_until(pilot, lambda: said in " ".join(_problem(app).split()))
        assert app.settings.partitioning == "auto"


async def test_forming_again_in_the_middle_of_an_answer_is_said(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.turn_progress = Progress(id=0, stage="sending weights to studio", done=3, total=10, unit="bytes")
    engine.gate = asyncio.Event()
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        status = controller(app).status
        controller(app).submit("Why?")
        await wait_until(pilot, lambda: "sending weights to studio" in status_line(status, 80).plain)
        assert "30% of 10 B" in status_line(status, 80).plain and status.phase is Phase.ANSWERING
        engine.gate.set()
        await wait_until(pilot, lambda: status.phase is Phase.READY)
        assert status.progress is None and "sending" not in status_line(status, 80).plain


@pytest.mark.soak
@pytest.mark.usefixtures("few_settings")
async def test_the_settings_go_from_group_to_group(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: isinstance(app.screen, SettingsScreen) and app.focused is not None)
        seen = []
        for _ in range(4):
            await pilot.press("f7")
            row = next(row for row in app.screen.query(SettingRow) if row.has_focus_within)
            seen.append(row.setting.group)
            if seen[-1] == "answer":
                assert isinstance(app.focused, TextArea)  # which has that key for something else
        assert seen == ["answer", "ring", "screen", "model"]


def test_the_gpu_of_a_machine_is_named_with_what_it_keeps() -> None:
    """What is on it needs no other memory: the machine is not short of any."""
    first, *others = RING.nodes
    name = "NVIDIA\x1b[31m L4"
    held = first.trunk_bytes + first.expert_bytes
    with_gpu = msgspec.structs.replace(first, gpu=name, gpu_expert_bytes=3 * 10**9, memory_free=held - 3 * 10**9)
    ring = msgspec.structs.replace(RING, epoch="", nodes=[with_gpu, *others])
    for text in ("\n".join(plan_lines(ring)), "\n".join(line.plain for line in ring_lines(ring, 200))):
        assert text.count("3.0 GB of them on NVIDIA") == 1
        assert "\x1b" not in text
    assert "of them on" not in "\n".join(plan_lines(RING))
    short = [span for line in ring_lines(ring, 200) for span in line.spans if "text-error" in str(span.style)]
    assert short == []
