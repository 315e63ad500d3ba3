"""Conversations over a ring in threads: the answers of one machine, whatever happens to the others meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cluster.head.head_model import RingRows
from engine.errors import ModelError, PeerLost
from engine.ipc.messages import AnyEvent, Notice, Piece, Prefill, Progress, RingChanged, Timing
from engine.moe.kernels.bindings import choose
from engine.session.kept_rows import FORK_TOKENS
from tests.engine.cluster.ring_chat import ANSWER, PROMPT, Setting
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("ring"), "qwen3_moe")


both = pytest.mark.parametrize("setting", ["native", "torch"], indirect=True)
"""Where the runtimes do something of their own; elsewhere torch is left to ``make test-soak``: it takes far longer."""


@pytest.fixture(params=["native", pytest.param("torch", marks=pytest.mark.soak)])
def setting(request: pytest.FixtureRequest, folder: Path) -> Iterator[Setting]:
    if request.param == "native" and not choose("float32").native:
        pytest.skip("the native kernels are not built")
    made = Setting(folder, request.param)
    yield made
    made.close()


def in_step(setting: Setting) -> None:
    """Every follower holds the rows the head holds, with the same tokens."""
    rows = setting.ring.session._cache.rows
    assert rows is not None
    setting.model.recorder.enabled = True  # a command, and its reply: the followers are through with what came before
    setting.model.recorder.frame(0)
    setting.model.recorder.enabled = False
    for follower in setting.formation.followers.values():
        held, prefixes = follower._rows[rows._number]  # type: ignore[attr-defined]
        assert held.length == rows.length
        assert prefixes.state == rows._prefixes.state  # type: ignore[attr-defined]


@pytest.mark.sampled
@both
def test_a_conversation_says_what_one_machine_says(setting: Setting) -> None:
    alone, ring = setting.alone(), setting.ring()
    assert ring.token_ids == alone.token_ids
    assert len(ring.token_ids) == ANSWER
    in_step(setting)
    longer = [*PROMPT, *ring.token_ids[:5], 11, 12, 13]
    assert setting.ring(longer).token_ids == setting.alone(longer).token_ids
    assert setting.ring.session.cached_tokens == setting.alone.session.cached_tokens
    in_step(setting)
    # What a change of the ring would lose is weighed before each question: of the second one, what was read and said.
    rows = setting.ring.session._cache.rows
    assert rows is not None
    first, second = setting.former.again
    assert (first.read, first.passes) == (0, 0)
    assert (second.read, second.passes) == (len(PROMPT), -(-5 // max(rows.steps_together, 1)))
    assert second.pass_s is not None and second.pass_s > 0
    setting.ring([PROMPT[0] + 1, 4, 3])
    assert (setting.former.again[-1].read, setting.former.again[-1].passes) == (0, 0), "a new conversation"
    assert not setting.formation.failures


@pytest.mark.sampled
@both
def test_beams_are_those_of_one_machine(setting: Setting) -> None:
    alone, ring = setting.alone(beams=4), setting.ring(beams=4)
    assert [(beam.token_ids, beam.score) for beam in ring.beams] == [(b.token_ids, b.score) for b in alone.beams]
    in_step(setting)
    assert setting.ring([*PROMPT, 4, 5]).token_ids == setting.alone([*PROMPT, 4, 5]).token_ids
    # Rows of the search that nobody uses any more are given up on every node.
    assert {len(follower._rows) for follower in setting.formation.followers.values()} == {1}


def test_two_conversations_are_kept_on_every_node(setting: Setting) -> None:
    for chat in (setting.alone, setting.ring):
        chat.session._prefix_bytes = 1 << 30
    talks = [list(PROMPT), [token + 1 for token in PROMPT]]
    for turn in range(2):
        for talk in talks:
            alone, ring = setting.alone(talk), setting.ring(talk)
            assert (ring.token_ids, ring.prefilled_tokens) == (alone.token_ids, alone.prefilled_tokens)
            assert ring.prefilled_tokens == (3 if turn else len(PROMPT))
            talk += [*ring.token_ids, 11, 12]
    in_step(setting)
    assert {len(follower._rows) for follower in setting.formation.followers.values()} == {2}
    setting.formation.kill(2)
    for talk in talks:
        assert setting.ring(talk).token_ids == setting.alone(talk).token_ids


@pytest.mark.parametrize("rank", [1, 2])
def test_a_lost_machine_does_not_change_the_answer(setting: Setting, rank: int) -> None:
    expected = setting.alone()
    setting.kill_at(4, rank)
    found = setting.ring()
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason
    gone = setting.former.formations[0].names[rank]
    assert f"Lost {gone}" in setting.ring.notices
    assert "2 machines" in setting.ring.notices
    changed = [event for event in setting.ring.events if isinstance(event, RingChanged)]
    assert changed and changed[-1].ring == setting.formation.facts == setting.ring.session.facts.ring
    assert len(setting.former.formations) == 2
    in_step(setting)


def test_both_machines_lost_one_after_the_other(setting: Setting) -> None:
    expected = setting.alone()
    setting.kill_at(3, 1)
    kill = setting.ring.on_event

    def twice(event: AnyEvent) -> None:
        kill(event)
        second = setting.formation
        if isinstance(event, Piece) and event.tokens >= 8 and len(setting.former.formations) == 2 and not second.lost():
            setting.former.names = ["head"]
            second.kill(1)

    setting.ring.on_event = twice
    assert setting.ring().token_ids == expected.token_ids
    assert "this machine alone" in setting.ring.notices


def test_a_machine_lost_in_the_prompt(setting: Setting) -> None:
    expected = setting.alone()
    doomed = setting.formation

    def watch(event: AnyEvent) -> None:
        if isinstance(event, Prefill) and event.done >= 6 and doomed.lost() is None:
            setting.former.names = ["head", "attic"]
            doomed.kill(2)

    setting.ring.on_event = watch
    assert setting.ring().token_ids == expected.token_ids
    assert "Lost cellar" in setting.ring.notices


@pytest.mark.sampled
@both
def test_a_machine_lost_in_a_beam_search(setting: Setting) -> None:
    expected = setting.alone(beams=3)
    doomed = setting.formation

    def watch(event: AnyEvent) -> None:
        if getattr(event, "step", 0) >= 4 and doomed.lost() is None:
            setting.former.names = ["head", "cellar"]
            doomed.kill(1)

    setting.ring.on_event = watch
    found = setting.ring(beams=3)
    assert [(beam.token_ids, beam.score) for beam in found.beams] == [(b.token_ids, b.score) for b in expected.beams]
    assert "Lost attic" in setting.ring.notices


def test_too_few_are_left(setting: Setting) -> None:
    setting.former.least = 3
    setting.kill_at(4, 2)
    with pytest.raises(ModelError, match="1 GB are missing") as found:
        setting.ring()
    assert found.value.kind == "memory"
    assert any(isinstance(event, Piece) and event.tokens >= 4 for event in setting.ring.events)
    setting.former.names = ["head", "attic", "cellar"]
    setting.ring.on_event = lambda event: None
    assert setting.ring().token_ids == setting.alone().token_ids


def test_a_machine_that_returns_is_taken_back(setting: Setting) -> None:
    setting.kill_at(4, 1)
    setting.ring()
    assert len(setting.formation.names) == 2
    setting.former.names = ["head", "attic", "cellar"]
    setting.ring.on_event = lambda event: None
    prompt = [*PROMPT, 8, 9]
    assert setting.ring(prompt).token_ids == setting.alone(prompt).token_ids
    assert "attic came back" in setting.ring.notices
    assert len(setting.formation.names) == 3
    in_step(setting)


def test_a_machine_that_comes_for_the_first_time_joins(setting: Setting) -> None:
    setting.ring()
    setting.former.names = ["head", "cellar", "studio"]
    prompt = [*PROMPT, 8, 9]
    assert setting.ring(prompt).token_ids == setting.alone(prompt).token_ids
    assert setting.ring.notices == "Lost attic; studio joined; going on with 3 machines."


def stop_in_progress(events: list[AnyEvent]) -> bool:
    return any(isinstance(event, Notice) and event.text.startswith("Lost") for event in events)


@pytest.mark.parametrize("options", [{}, {"beams": 3}], ids=["sampled", "beams"])
def test_stopped_while_the_ring_is_formed_again_in_an_answer(setting: Setting, options: dict[str, int]) -> None:
    """What was written stays; the next question forms the ring, and says what became of it without repeating itself."""
    expected = setting.alone()
    doomed = setting.formation

    def watch(event: AnyEvent) -> None:
        if (getattr(event, "step", 0) >= 4 or getattr(event, "tokens", 0) >= 4) and doomed.lost() is None:
            setting.former.names = ["head", "cellar"]
            doomed.kill(1)

    setting.ring.on_event = watch
    setting.ring.cancel_when = stop_in_progress
    found = setting.ring(**options)
    assert found.finish_reason == "cancelled"
    assert len(found.token_ids) >= 4
    if not options:
        assert found.token_ids == expected.token_ids[: len(found.token_ids)]
    assert setting.ring.notices == "Lost attic: killed; forming the ring again."
    assert len(setting.former.formations) == 1
    setting.ring.cancel_when = lambda events: False
    assert setting.ring().token_ids == expected.token_ids
    assert setting.ring.notices == "Going on with 2 machines."
    in_step(setting)


def test_stopped_while_the_ring_is_formed_again_before_an_answer(setting: Setting) -> None:
    setting.ring()
    setting.former.names = ["head", "cellar"]
    setting.formation.kill(1)
    setting.ring.cancel_when = stop_in_progress
    found = setting.ring()
    assert (found.finish_reason, found.token_ids, found.prefilled_tokens) == ("cancelled", [], 0)
    setting.former.names = ["head", "attic", "cellar"]
    setting.ring.cancel_when = lambda events: False
    prompt = [*PROMPT, 8, 9]
    assert setting.ring(prompt).token_ids == setting.alone(prompt).token_ids
    assert setting.ring.notices == "attic came back; going on with 3 machines."
    progress = [event for event in setting.ring.events if isinstance(event, Progress)]
    assert [(event.id, event.stage) for event in progress] == [(1, "loading")]
    in_step(setting)


def test_a_loss_is_told_before_anything_is_loaded(setting: Setting) -> None:
    setting.kill_at(4, 1)
    setting.ring()
    told = [event for event in setting.ring.events if isinstance(event, (Notice, Progress, RingChanged))]
    assert [type(event) for event in told[:4]] == [Notice, Progress, Notice, RingChanged]


@pytest.mark.parametrize("after", [1, 5, 9, 14])
def test_a_prompt_given_up_leaves_all_in_step(setting: Setting, after: int) -> None:
    setting.ring()
    checks = iter(range(10**6))
    setting.ring.cancel_when = lambda events: next(checks) >= after
    stopped = setting.ring([90, 91, *PROMPT, *PROMPT])
    assert stopped.finish_reason == "cancelled"
    setting.ring.cancel_when = lambda events: False
    in_step(setting)
    prompt = [90, 91, *PROMPT, 4]
    assert setting.ring(prompt).token_ids == setting.alone(prompt).token_ids
    assert not setting.formation.failures
    assert len(setting.former.formations) == 1


@pytest.mark.sampled
@both
def test_a_stale_cache_is_refused_and_made_anew(setting: Setting) -> None:
    setting.ring()
    in_step(setting)
    follower = setting.formation.followers[1]
    number, (rows, prefixes) = next(iter(follower._rows.items()))
    follower._rows[number] = (rows, prefixes.truncated(rows.length - 1))
    prompt = [*setting.ring.session.cached_tokens, 9, 8]
    expected = setting.alone(prompt)
    first = setting.formation
    assert setting.ring(prompt).token_ids == expected.token_ids
    assert "goes on from other tokens" in str(first.failures[1])
    assert len(setting.former.formations) == 2


def test_a_node_that_fails_says_why(setting: Setting) -> None:
    expected = setting.alone()
    first = setting.formation
    model = first.followers[2]._model
    rows = type(model.start())
    run, patched = rows.step, pytest.MonkeyPatch()
    calls = iter(range(10**6))

    def step(self, tokens):  # type: ignore[no-untyped-def]
        if self._model is model and next(calls) == 3:
            raise ModelError("its memory ran out", kind="memory")
        return run(self, tokens)

    with patched.context() as context:
        context.setattr(rows, "step", step)
        assert setting.ring().token_ids == expected.token_ids
    assert "its memory ran out" in setting.ring.notices


def test_the_panel_shows_every_node(setting: Setting) -> None:
    setting.ring.panel = True
    finished = setting.ring()
    frames = [event for event in setting.ring.events if isinstance(event, Timing)]
    assert finished.timing is not None
    for frame in [*frames[-1:], finished.timing]:
        assert [node.name for node in frame.nodes] == ["head", "attic", "cellar"]
        for node in frame.nodes:
            assert node.decode.steps > 0
            assert len(node.decode.layers) == len(frame.decode.layers)
            assert sum(layer.experts for layer in node.decode.layers) > 0
    setting.ring.panel = False
    setting.ring()
    assert not any(isinstance(event, Timing) for event in setting.ring.events)


def test_a_machine_lost_while_a_conversation_is_copied(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier message was changed, so that the kept conversation is copied before anything is run."""
    for chat in (setting.alone, setting.ring):
        chat.session._prefix_bytes = 1 << 30
        chat([*PROMPT, *PROMPT], max_tokens=FORK_TOKENS)
    fan_out, doomed = RingRows.fan_out, setting.formation

    def dying(self: RingRows, rows: int) -> RingRows:
        if doomed.lost() is None:
            setting.former.names = ["head", "attic"]
            doomed.kill(2)
            raise PeerLost("cellar is gone", [2])
        return fan_out(self, rows)

    monkeypatch.setattr(RingRows, "fan_out", dying)
    assert setting.ring([*PROMPT, 4]).token_ids == setting.alone([*PROMPT, 4]).token_ids
    assert len(setting.former.formations) == 2
    in_step(setting)
