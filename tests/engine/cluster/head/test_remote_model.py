"""A model that another machine runs by itself: a real one in a thread, and the head's session over it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.cluster import commands
from engine.cluster.commands import DONE, FAILED, NOT_NUMBERS, TOKEN, Answers, answer_limit, read_answer, read_logits
from engine.cluster.contributions import NodeFailed
from engine.cluster.head import head_model
from engine.cluster.head.head_model import RingModel
from engine.cluster.head.remote_model import RemoteModel, RemotePasses
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.worker.follower import Follower
from engine.errors import ModelError, PeerLost
from engine.ipc.messages import AnyEvent, Load, Piece, RingFacts, Sampling, Timing
from engine.ipc.messages.ring import NodeShard
from engine.ipc.progress import ProgressCallback
from engine.models.folders.opening import open_model
from engine.moe.expert_parallel import RankContext
from engine.moe.kernels.bindings import choose
from engine.planning.ring_change import Rerun
from engine.runtimes.protocol import Interrupted
from tests.engine.cluster.ring_chat import ANSWER, PROMPT, Chat, session_of
from tests.engine.cluster.thread_ring import ThreadFormation, link_pair, loaded_model, split
from tests.support.eventually import eventually
from tests.support.opened_experts import experts_of
from tests.support.tiny_models import write_tiny_model

PATIENCE_S = 120.0
Hostile = Callable[[int], bytes]
"""What is answered to a pass of so many rows whose logits are wanted (0: a token), instead of what comes of it."""


class LimitedLink:
    """The head's end, which refuses a frame that is too large as a link over a wire does."""

    def __init__(self, inner) -> None:  # type: ignore[no-untyped-def]
        self._inner = inner
        self.send, self.close = inner.send, inner.close
        self.received: list[int] = []
        """The bytes of each frame."""

    def receive(self, limit: int) -> memoryview:
        frame = self._inner.inbox.get(timeout=PATIENCE_S)
        if frame is None:
            raise PeerLost("the link was closed")
        self.received.append(len(frame))
        if len(frame) > limit:
            self.close()
            raise RingProtocolError(f"A frame of {len(frame)} bytes is over the limit of {limit}.")
        return memoryview(frame)


class Formed:
    """See :class:`engine.cluster.formation.Formation`: ``studio`` runs the model."""

    def __init__(self, folder: Path, request: Load, hostile: Hostile | None) -> None:
        experts = experts_of(folder)
        placement = split(experts.layers, experts.count, 1)
        self.context = RankContext("epoch", 0, placement)
        self.names = {0: "head", 1: "studio"}
        self.notices: list[str] = []
        self.newcomers: frozenset[str] = frozenset()
        self.without_links: frozenset[str] = frozenset()
        self.patience = 1.0
        nodes = [
            NodeShard(
                rank=rank, node_id=name, name=name, experts=rank, expert_bytes=0, trunk_bytes=0, memory_free=1 << 30
            )
            for rank, name in self.names.items()
        ]
        self.facts = RingFacts(mode="exact", exchange="tls", loading="selected", nodes=nodes, elsewhere=True)
        self.there = loaded_model(folder, request)
        mine, self.theirs = link_pair()
        self._inner = mine
        self.command_links = {1: LimitedLink(mine)}
        self.answers = Answers(self.theirs)
        self.there.between_layers = self.answers.check
        self.layers = RemotePasses(self.command_links[1], self.answers.stop)
        rows = self.there.start()
        self.model = RemoteModel(
            self.there.facts, self.layers, rows.can_truncate, rows.steps_together, self.there.rows_together
        )
        self.follower = Follower(self.there, self.answers)
        self._hostile = hostile
        self._lost: PeerLost | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            if self._hostile is None:
                self._follow_truly()
            while self._hostile is not None:
                command = commands.decode_command(self.theirs.receive(1 << 20))
                if isinstance(command, commands.Extend):
                    self.theirs.send(self._hostile(1) if command.want_logits else DONE)
                elif isinstance(command, commands.Choose):
                    self.theirs.send(self._hostile(0))
        except PeerLost:
            return

    def _follow_truly(self) -> None:
        try:
            self.follower.follow(self.theirs)
        except ModelError:
            self.theirs.close()

    def kill(self) -> None:
        self._lost = PeerLost("studio does not answer any more", [1], reason="does not answer any more")
        self._inner.close()

    def lost(self) -> PeerLost | None:
        return self._lost

    def why_lost(self, lost: PeerLost) -> PeerLost:
        return self._lost or lost

    def lose(self, ranks, why: str) -> None:  # type: ignore[no-untyped-def]
        self._lost = PeerLost(why, ranks)
        self._inner.close()

    def close(self) -> None:
        self._inner.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.there.close()


class Former:
    """First ``studio`` computes, then the head does."""

    def __init__(self, folder: Path, request: Load, hostile: Hostile | None) -> None:
        self._folder, self._request = folder, request
        self.studio = Formed(folder, request, hostile)
        self.formed = 0

    def form(self, progress: ProgressCallback, say: Callable[[str], None] | None = None):  # type: ignore[no-untyped-def]
        self.formed += 1
        if self.formed == 1:
            return self.studio
        return ThreadFormation(self._folder, self._request, ["head"], self.studio.context.placement)

    def changed(self, progress: ProgressCallback, say: Callable[[str], None], again: Rerun) -> bool:
        return False

    def close(self) -> None:
        return


class Setting:
    def __init__(self, folder: Path, runtime: str, hostile: Hostile | None = None, dtype: str = "float32") -> None:
        request = Load(id=1, model="tiny", runtime=runtime, dtype=dtype, cpu_threads=1)  # type: ignore[arg-type]
        self.former = Former(folder, request, hostile)
        self.studio = self.former.studio
        self.there = Chat(session_of(RingModel("tiny", self.former, lambda *_: None)))
        self.alone = Chat(session_of(loaded_model(folder, request)))

    def in_step(self) -> None:
        """The machine has the tokens that the head takes it to have."""
        rows = self.there.session._cache.rows

        def is_in_step() -> bool:
            # A pass that nobody waits for any more ends over there a moment later.
            held, prefixes = self.studio.follower._rows[rows._number]  # type: ignore[union-attr]
            return held.length == rows.length and prefixes.state == rows._prefixes.state  # type: ignore[union-attr]

        eventually(is_in_step, PATIENCE_S)

    def close(self) -> None:
        self.there.session.close()
        self.alone.session.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("elsewhere"), "qwen3_moe")


@pytest.fixture(params=["native", "torch"])
def setting(request: pytest.FixtureRequest, folder: Path) -> Iterator[Setting]:
    if request.param == "native" and not choose("float32").native:
        pytest.skip("the native kernels are not built")
    made = Setting(folder, request.param)
    yield made
    made.close()


@pytest.fixture
def hostile(folder: Path) -> Iterator[Callable[[Hostile], Setting]]:
    made: list[Setting] = []

    def make(answer: Hostile) -> Setting:
        made.append(Setting(folder, "torch", answer))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_conversation_and_beams_are_those_of_the_machine_alone(setting: Setting) -> None:
    found, expected = setting.there(), setting.alone()
    assert found.token_ids == expected.token_ids
    setting.in_step()
    longer = [*PROMPT, *found.token_ids[:5], 11, 12]
    assert setting.there(longer).token_ids == setting.alone(longer).token_ids
    beams, others = setting.there(beams=4), setting.alone(beams=4)
    assert [(one.token_ids, one.score) for one in beams.beams] == [(one.token_ids, one.score) for one in others.beams]
    setting.in_step()
    assert setting.former.formed == 1


RULES = {
    "greedy": {},
    "drawn": {"temperature": 1.3, "seed": 11},
    "filtered": {"temperature": 2.0, "seed": 2**64 - 1, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "all": {"temperature": 1.1, "seed": 5, "top_k": 60, "repetition_penalty": 1.2, "frequency_penalty": -0.5},
}


@pytest.mark.sampled
@pytest.mark.parametrize("rule", RULES)
def test_the_machine_that_computes_draws_the_heads_tokens(setting: Setting, rule: str) -> None:
    sampling = Sampling(**RULES[rule], logit_bias={7: 3.0, 9: -50.0} if rule == "all" else {})  # type: ignore[arg-type]
    assert setting.there(sampling=sampling).token_ids == setting.alone(sampling=sampling).token_ids
    tokens = [size for size in setting.studio.command_links[1].received if size == 1 + TOKEN.itemsize]
    assert len(tokens) == ANSWER - 1, "the first one is drawn from the logits of the prompt"
    setting.in_step()


def test_several_answers_share_the_passes_over_there(setting: Setting) -> None:
    sampling = Sampling(temperature=1.3, seed=11)
    expected = setting.alone(samples=3, sampling=sampling)
    before = len(setting.studio.command_links[1].received)
    found = setting.there(samples=3, sampling=sampling)
    assert [each.token_ids for each in found.samples] == [each.token_ids for each in expected.samples]
    passes = len(setting.studio.command_links[1].received) - before
    prompt = -(-len(PROMPT) // 6)
    together = setting.studio.there.rows_together
    assert passes == prompt + (ANSWER - 1) * (1 if together > 1 else 3)
    setting.in_step()
    assert setting.there().token_ids == setting.alone().token_ids, "a token is chosen there again"


def test_what_needs_logits_gets_them(setting: Setting) -> None:
    found, expected = setting.there(logprobs=3), setting.alone(logprobs=3)
    assert found.logprobs == expected.logprobs and len(found.logprobs) == ANSWER
    assert 1 + TOKEN.itemsize not in setting.studio.command_links[1].received


def test_a_prompt_is_given_up_between_two_layers(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_model, "STOPPED_S", PATIENCE_S)
    setting.there()
    computing, stopped = threading.Event(), threading.Event()
    answers, stop = setting.studio.answers, setting.studio.answers.stop
    layers: list[int] = []

    def check() -> None:
        layers.append(answers._number)
        if layers.count(answers._number) == 2:
            computing.set()
            assert stopped.wait(PATIENCE_S)
        answers.check()

    def told(number: int) -> None:
        stop(number)
        stopped.set()

    setting.studio.there.between_layers = check
    setting.studio.layers._stop = told
    setting.there.cancel_when = lambda events: computing.is_set()
    prompt = [90, 91, *PROMPT, 4]
    assert setting.there(prompt).finish_reason == "cancelled"
    assert len(layers) == 2  # of one pass, which went no further
    setting.there.cancel_when = lambda events: False
    assert setting.there(prompt).token_ids == setting.alone(prompt).token_ids
    setting.in_step()
    assert setting.former.formed == 1


def test_an_answer_is_stopped(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_model, "STOPPED_S", PATIENCE_S)
    setting.there.cancel_when = lambda events: any(isinstance(event, Piece) for event in events)
    assert setting.there().finish_reason == "cancelled"
    setting.there.cancel_when = lambda events: False
    setting.in_step()
    assert setting.there([*PROMPT, 8]).token_ids == setting.alone([*PROMPT, 8]).token_ids
    assert setting.former.formed == 1


@pytest.mark.sampled
@pytest.mark.parametrize("rule", ["greedy", "all"])
def test_the_machine_dies_and_the_answer_goes_on(setting: Setting, rule: str) -> None:
    sampling = Sampling(**RULES[rule])  # type: ignore[arg-type]

    def watch(event: AnyEvent) -> None:
        if isinstance(event, Piece) and event.tokens >= 4 and setting.studio.lost() is None:
            setting.studio.kill()

    setting.there.on_event = watch
    assert setting.there(sampling=sampling).token_ids == setting.alone(sampling=sampling).token_ids
    assert "Lost studio" in setting.there.notices
    assert "going on with this machine alone" in setting.there.notices.lower()
    assert setting.former.formed == 2


def test_a_machine_that_cannot_go_on_says_why(setting: Setting) -> None:
    expected = setting.alone()
    setting.studio.follower._memory = 0
    assert setting.there().token_ids == expected.token_ids
    assert "keys and values would take" in setting.there.notices


def test_the_panel_shows_the_machine_that_computes(setting: Setting) -> None:
    setting.there.panel = True
    finished = setting.there()
    frames = [event for event in setting.there.events if isinstance(event, Timing)]
    assert finished.timing is not None
    for frame in [*frames[-1:], finished.timing]:
        assert [node.name for node in frame.nodes] == ["studio"]
        assert frame.decode == frame.nodes[0].decode
        assert frame.decode.steps > 0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda rows: DONE, r"sent 1 bytes where an answer of \d+ was expected"),
        (lambda rows: DONE + bytes(4), r"sent 5 bytes where an answer of \d+ was expected"),
        (lambda rows: b"", "sent 0 bytes"),
        (lambda rows: b"\x07" + bytes(8), "sent 9 bytes"),
        (lambda rows: DONE + bytes(1 << 22), "over the limit"),
    ],
    ids=["no logits", "too few", "nothing", "no answer", "too large"],
)
def test_what_is_no_answer_ends_in_a_sentence(
    hostile: Callable[[Hostile], Setting], answer: Hostile, said: str
) -> None:
    setting = hostile(answer)
    with pytest.raises(ModelError, match=said):
        setting.there()
    assert setting.there().token_ids == setting.alone().token_ids


def test_logits_that_are_no_numbers_name_the_machine(hostile: Callable[[Hostile], Setting], folder: Path) -> None:
    vocabulary = open_model(folder).config["vocab_size"]
    logits = DONE + np.full(vocabulary, np.nan, np.float32).tobytes()
    with pytest.raises(ModelError, match="results of studio are wrong"):
        hostile(lambda rows: logits).there()
    good = DONE + bytes(4 * vocabulary)
    with pytest.raises(ModelError, match="results of studio are wrong"):
        hostile(lambda rows: good if rows else NOT_NUMBERS + b"nan").there()


def test_logits_that_are_no_numbers_are_found_where_they_are(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(event: AnyEvent) -> None:
        if isinstance(event, Piece):
            ((rows, _),) = setting.studio.follower._rows.values()
            step = rows.step
            monkeypatch.setattr(rows, "step", lambda tokens: step(tokens) * np.float32(np.nan))

    setting.there.on_event = watch
    with pytest.raises(ModelError, match="results of studio are wrong"):
        setting.there()
    setting.there.on_event = lambda event: None
    assert setting.there().token_ids == setting.alone().token_ids
    setting.in_step()
    assert setting.former.formed == 1


@pytest.mark.parametrize("token", [-1, 1 << 30])
def test_a_token_of_no_vocabulary_ends_in_a_sentence(
    hostile: Callable[[Hostile], Setting], folder: Path, token: int
) -> None:
    logits = DONE + bytes(4 * open_model(folder).config["vocab_size"])
    setting = hostile(lambda rows: logits if rows else DONE + np.array(token, TOKEN).tobytes())
    with pytest.raises(ModelError, match=f"chose token {token} of a vocabulary"):
        setting.there()


def test_a_machine_with_mlx_begins_the_next_step_before_it_is_asked_for(folder: Path) -> None:
    pytest.importorskip("mlx.core")
    setting = Setting(folder, "mlx")
    try:
        found = setting.there()
        assert found.token_ids == setting.alone().token_ids
        ((rows, _),) = setting.studio.follower._rows.values()
        chosen, _, _ = rows._ahead  # type: ignore[attr-defined]
        assert chosen == found.token_ids[-1]
    finally:
        setting.close()


def test_an_answer_is_as_large_as_its_logits() -> None:
    assert answer_limit(16_000) == 1 + 16_000
    logits = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = read_logits(read_answer(memoryview(DONE + logits.tobytes()), 24, 1), 2, 3)
    assert np.array_equal(found, logits)
    assert found.flags.writeable
    with pytest.raises(NodeFailed, match="memory") as failed:
        read_answer(memoryview(FAILED + b"no \x1b[31mmemory"), 24, 1)
    assert "\x1b" not in str(failed.value)


def test_a_pass_that_was_stopped_before_it_began() -> None:
    mine, theirs = link_pair()
    answers = Answers(theirs)
    answers.stop(2)
    answers.begin_pass()
    answers.check()
    answers.done(None)
    answers.begin_pass()
    with pytest.raises(Interrupted):
        answers.check()
    answers.gave_up()
    assert not answers.give_up("too late")
    assert [bytes(mine.receive(9)), bytes(mine.receive(9))] == [DONE, b"\x01"]
