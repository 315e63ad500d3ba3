"""The answer after a loss is the answer without it, to the bit, whenever a machine is lost: in bfloat16, where a token
that is run with others than before is rounded otherwise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generation.sampling import Sampler
from engine.ipc.messages import Finished, Progress, Sampling
from engine.moe.kernels.bindings import choose
from engine.runtimes.protocol import Logits
from tests.engine.cluster.ring_chat import PROMPT, Chat, Setting
from tests.support.random_examples import examples

ANSWER = 5
GREEDY: dict[str, Any] = {"max_tokens": ANSWER}
SEEDED: dict[str, Any] = {"max_tokens": ANSWER, "sampling": Sampling(temperature=1.2, seed=3)}
BEAMS: dict[str, Any] = {"max_tokens": ANSWER, "beams": 3}


class Doomed(Setting):
    """The ring's last machine dies in the exchange of that number, counted from :meth:`dies_at`, and so on."""

    def __init__(self, folder: Path, runtime: str, stride: int) -> None:
        """``stride``: from one pass in which it dies to the next one."""
        super().__init__(folder, runtime, "bfloat16")
        self.stride = stride
        self.count = 0
        self._deaths: list[int] = []
        self._seen: list[str] = []
        form = self.former.form

        def formed(*given: Any) -> Any:
            made = form(*given)
            assign = made.layers.assign

            def counted(*call: Any, **more: Any) -> Any:
                if self._deaths and self.count >= self._deaths[0] and len(made.names) > 1:
                    del self._deaths[0]
                    self.former.names = self.former.names[:-1]
                    made.kill(len(made.names) - 1)
                self.count += 1
                return assign(*call, **more)

            made.layers.assign = counted
            return made

        self.former.form = formed  # type: ignore[method-assign]
        self.all_return()

    def note(self, logits: Logits) -> None:
        self._seen.append(hashlib.sha256(logits.tobytes()).hexdigest())

    def all_return(self) -> None:
        """The next question forms the ring anew, of all machines."""
        self.former.names = ["head", "attic", "cellar"]
        self.former._formed = []

    def said(self, chat: Chat, prompt: list[int], options: dict[str, Any], deaths: tuple[int, ...] = ()) -> Any:
        """What must be the same: tokens, logits, scores."""
        self.count, self._deaths, self._seen = 0, list(deaths), []
        found = chat(prompt, **options)
        assert not self._deaths, "nobody died"
        return found.token_ids, list(self._seen), [(beam.token_ids, beam.score) for beam in found.beams]


@pytest.fixture(
    scope="module",
    params=[("native", 1), ("torch", 7), pytest.param(("torch", 1), marks=pytest.mark.soak)],
    ids=["native", "torch", "torch-all"],
)
def setting(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[Doomed]:
    runtime, stride = request.param
    if runtime == "native" and not choose("bfloat16").native:
        pytest.skip("the native kernels are not built")
    made = Doomed(tiny_model("qwen3_moe", dtype="bfloat16"), runtime, stride)
    with pytest.MonkeyPatch.context() as patched:
        choose_token = Sampler.choose

        def noted(self: Sampler, logits: Logits) -> int:
            made.note(logits)
            return choose_token(self, logits)

        patched.setattr(Sampler, "choose", noted)
        yield made
    made.close()


def second_question(first: Finished) -> list[int]:
    """It goes on from an answer that was decoded, by more than one pass."""
    return [*PROMPT, *first.token_ids, 11, 12, 13, 14, 15, 16, 17, 18]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [pytest.param(GREEDY, marks=pytest.mark.soak), SEEDED, BEAMS],
    ids=["greedy", "seeded", "beams"],
)
def test_lost_at_any_moment(setting: Doomed, options: dict[str, Any]) -> None:
    """In every pass once, or in some of every kind: those of the prompt, those of the conversation before it, and those
    of the answer."""
    first = setting.alone(PROMPT, **GREEDY)
    prompt = second_question(first)
    expected = setting.said(setting.alone, prompt, options)
    setting.all_return()
    assert setting.ring(PROMPT, **GREEDY).token_ids == first.token_ids
    assert setting.said(setting.ring, prompt, options) == expected
    layers = len(setting.alone.session.facts.moe_layers)
    setting.all_return()
    assert setting.said(setting.ring, prompt, options) == expected, "made anew between two questions"
    whole = setting.count // layers
    again = 1 if setting.model.facts.runtime == "native" else ANSWER - 1
    assert whole >= 3 + again + 2 + (ANSWER - 1)
    for turn, number in enumerate(range(0, whole, setting.stride)):
        setting.all_return()
        died = number * layers + turn % layers
        assert setting.said(setting.ring, prompt, options, (died,)) == expected, f"lost in pass {number}"
        assert "Lost cellar" in setting.ring.notices


@pytest.mark.sampled
@settings(max_examples=examples(2), deadline=None)
@given(first=st.integers(0, 14), more=st.integers(0, 14), beams=st.booleans())
def test_lost_again_while_it_is_run_again(setting: Doomed, first: int, more: int, beams: bool) -> None:
    options = BEAMS if beams else SEEDED
    prompt = second_question(setting.alone(PROMPT, **GREEDY))
    expected = setting.said(setting.alone, prompt, options)
    setting.all_return()
    setting.ring(PROMPT, **GREEDY)
    assert setting.said(setting.ring, prompt, options) == expected
    setting.all_return()
    # The second machine is lost in what is run again after the first, or in what comes after that.
    assert setting.said(setting.ring, prompt, options, (first, first + more)) == expected


@pytest.mark.sampled
def test_lost_between_two_questions(setting: Doomed) -> None:
    """A question that was never asked goes on from the same passes as it would have."""
    prompt = [*second_question(setting.alone(PROMPT, **GREEDY)), 19]
    expected = setting.said(setting.alone, prompt, SEEDED)
    setting.all_return()
    setting.ring(PROMPT, **GREEDY)
    setting.former.names = ["head", "attic"]
    setting.formation.kill(2)
    assert setting.said(setting.ring, prompt, SEEDED) == expected


@pytest.mark.sampled
def test_what_nobody_can_ask_again_is_not_run_token_by_token(setting: Doomed) -> None:
    drawn = {"max_tokens": ANSWER, "sampling": Sampling(temperature=1.0)}
    layers = len(setting.alone.session.facts.moe_layers)
    setting.all_return()
    setting.ring([3, *PROMPT], **drawn)
    setting.all_return()
    tokens, _, _ = setting.said(setting.ring, [3, *PROMPT], drawn, ((3 + ANSWER - 2) * layers,))
    assert len(tokens) == ANSWER
    # Prompt and answer are 17 + 4 tokens, in chunks of six.
    assert setting.count == (3 + ANSWER - 2) * layers + 1 + 4 * layers


@pytest.mark.sampled
def test_decoded_tokens_are_run_again_in_passes_of_several(setting: Doomed) -> None:
    """A loss at the end of a long answer costs few passes, and how far they are is said."""
    # Torch runs them one by one, whatever their number.
    tokens = 40 if setting.model.facts.runtime == "native" else 12
    prompt, greedy = [4, *PROMPT], {"max_tokens": tokens}
    layers = len(setting.alone.session.facts.moe_layers)
    expected = setting.said(setting.alone, prompt, greedy)
    setting.all_return()
    setting.ring([5, 4], max_tokens=1)
    assert setting.said(setting.ring, prompt, greedy) == expected
    passes = setting.count // layers
    assert passes == 3 + tokens - 1, "17 tokens in chunks of six, and each token of the answer but the last"
    setting.all_return()
    assert setting.said(setting.ring, prompt, greedy, ((passes - 1) * layers,)) == expected
    together = max(setting.model.start().steps_together, 1)
    assert (together > 1) == (setting.model.facts.runtime == "native")
    assert setting.count == (passes - 1) * layers + 1 + (3 + -(-(tokens - 1) // together)) * layers
    told = [event for event in setting.ring.events if isinstance(event, Progress)]
    assert [event for event in told if event.stage == "running the answer again" and 0 < event.done < event.total]
