"""A session over the torch runtime: equal to transformers, and the cache always holds what the session says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ModelError
from engine.generation.reasoning import ReasoningParser, Separated, separate
from engine.ipc.messages import (
    BeamProgress,
    Constraint,
    CountTokens,
    EstimateBeams,
    Generate,
    Load,
    Message,
    PictureFile,
    Piece,
    Prefill,
    Sampling,
    Timing,
    Tool,
)
from engine.models.text.reasoning_formats import ReasoningFormat
from engine.session import session
from engine.session.loading import load_session, read_settings, stop_ids
from engine.session.session import Session
from engine.session.token_history import TokenHistory
from tests.engine.session.asking import Ask, LetterTokenizer
from tests.support.tiny_gguf import whole_blocks
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_zero_points import Form, write_zero_points

PROMPT = [5, 17, 101, 42, 9, 77, 30]
TOOLS: dict[str, Any] = {"tools": [Tool(name="clock")], "messages": [Message("user", "x")]}
NO_END = {"eos_token_id": None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(root / family, family) for family in ("mixtral", "minimax", "qwen3_moe")}


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folders["mixtral"], dtype=torch.float32).eval()


def open_session(folder: Path, **options: Any) -> Session:
    return load_session(Load(id=1, model=str(folder), runtime="torch", **options), lambda *_: None)


@pytest.fixture
def ask(folders: dict[str, Path]) -> Iterator[Ask]:
    session = open_session(folders["mixtral"], prefill_chunk=3)
    session._ends = frozenset()
    session._tokenizer = LetterTokenizer()
    session._history = TokenHistory(session._tokenizer)
    yield Ask(session)
    session.close()


def continuation(model: Any, prompt: list[int], **options: Any) -> list[int]:
    found = model.generate(torch.tensor([prompt]), do_sample=False, pad_token_id=0, **options)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["gptq", "pack-quantized"])
@pytest.mark.parametrize("runtime", ["native", "torch"])
def test_repacked_weights_are_taken_from_the_memory_for_conversations_once(
    tmp_path: Path, kind: str, runtime: str
) -> None:
    """They are no free memory any more, so that only what lies in the files is left to count."""
    source = write_tiny_model(tmp_path / "source", "qwen3_moe", **whole_blocks("qwen3_moe"))
    folder, _ = write_zero_points(tmp_path / "model", source, Form(kind, scales=torch.float16))
    file = folder / "model.safetensors"
    names = (".qweight", ".qzeros", ".scales", ".g_idx")
    read = file.stat().st_size - sum(
        tensor.nbytes for name, tensor in load_file(file).items() if name.endswith(names)
    )  # fmt: skip
    opened = load_session(Load(id=1, model=str(folder), runtime=runtime), lambda *_: None)
    opened._memory = lambda: 10**8
    assert opened._budget(0) == (10**8 - read) // session.CPU_SHARE
    assert opened.model.repacked.computed > 0
    opened.close()


def test_repacked_weights_that_were_unpacked_are_no_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without kernels torch keeps nothing of a model without experts in its files."""
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    source = write_tiny_model(tmp_path / "source", "llama", **whole_blocks("llama"))
    folder, _ = write_zero_points(tmp_path / "model", source, Form("gptq", scales=torch.float16))
    opened = open_session(folder)
    opened._memory = lambda: 10**8
    assert opened.model.mapped_files == () and opened._budget(0) == 10**8 // session.CPU_SHARE
    opened.close()


@pytest.mark.soak
def test_greedy_equals_transformers(ask: Ask, reference: Any) -> None:
    found = ask(PROMPT, max_tokens=30)
    assert found.token_ids == continuation(reference, PROMPT, max_new_tokens=30, eos_token_id=None)
    assert (found.finish_reason, found.prompt_tokens, found.completion_tokens) == ("length", 7, 30)
    assert found.text == LetterTokenizer().decode(found.token_ids)
    assert "".join(piece.text for piece in ask.of(Piece)) == found.text
    assert ask.of(Piece)[-1].tokens == 30
    assert found.ttft_s > 0 and found.tokens_per_s > 0


def test_ends_like_transformers(ask: Ask, reference: Any) -> None:
    end = continuation(reference, PROMPT, max_new_tokens=12, eos_token_id=None)[8]
    ask.session._ends = frozenset({end})
    found = ask(PROMPT, max_tokens=30)
    assert found.token_ids == continuation(reference, PROMPT, max_new_tokens=30, eos_token_id=end)
    assert found.finish_reason == "stop"
    assert found.text == LetterTokenizer().decode(found.token_ids[:-1])


def test_prefill_goes_in_chunks(ask: Ask) -> None:
    ask(PROMPT, max_tokens=1)
    assert [(event.done, event.total, event.reused) for event in ask.of(Prefill)] == [
        (0, 7, 0),
        (3, 7, 0),
        (6, 7, 0),
        (7, 7, 0),
    ]


def test_only_what_is_new_is_run(ask: Ask, reference: Any) -> None:
    first = ask(PROMPT, max_tokens=5)
    assert first.prefilled_tokens == 7
    # The last token of an answer was chosen but never run.
    longer = [*PROMPT, *first.token_ids, 3, 4]
    second = ask(longer, max_tokens=5)
    assert second.prefilled_tokens == 3
    assert second.token_ids == continuation(reference, longer, max_new_tokens=5, eos_token_id=None)
    same = ask(longer, max_tokens=5)
    assert same.prefilled_tokens == 0
    assert same.token_ids == second.token_ids
    branch = ask([*PROMPT[:4], 8, 9], max_tokens=5)
    assert branch.prefilled_tokens == 2
    assert branch.token_ids == continuation(reference, [*PROMPT[:4], 8, 9], max_new_tokens=5, eos_token_id=None)
    assert ask([1, 2, 3], max_tokens=1).prefilled_tokens == 3


def test_an_answer_is_not_run_again_whatever_its_tokens(ask: Ask, reference: Any) -> None:
    """Half of an untrained model's tokens are not those that the tokenizer has for their letters."""
    question = [Message("user", "hello")]
    first = ask(messages=question, max_tokens=8)
    tokenizer = LetterTokenizer()
    assert tokenizer.encode_rendered(first.text) != first.token_ids
    messages = [*question, Message("assistant", first.text), Message("user", "why")]
    second = ask(messages=messages, max_tokens=8)
    # The answer's last token was never run; then come the mark of its end, the question and its marks.
    assert second.prefilled_tokens == 1 + 1 + 5 + 1
    tokens = [*tokenizer.encode_chat(question), *first.token_ids, 159, *tokenizer.encode_chat(messages[2:])]
    assert second.token_ids == continuation(reference, tokens, max_new_tokens=8, eos_token_id=None)
    # Asked again: nothing is run again.
    assert ask(messages=messages, max_tokens=8).prefilled_tokens == 0
    # Another question in its place shares what was said before it, and its first letters.
    assert ask(messages=[*messages[:2], Message("user", "when")], max_tokens=1).prefilled_tokens == len("en ") + 1
    changed = [question[0], Message("assistant", "No."), messages[2]]
    assert ask(messages=changed, max_tokens=1).prompt_tokens == len(tokenizer.encode_chat(changed))


def test_stopping_keeps_the_prefix(ask: Ask, reference: Any) -> None:
    ask.cancel_when = lambda events: bool(events) and isinstance(events[-1], Piece)
    stopped = ask(PROMPT, max_tokens=200)
    assert stopped.finish_reason == "cancelled"
    assert 1 <= len(stopped.token_ids) < 200
    assert ask.session.cached_tokens == (*PROMPT, *stopped.token_ids[:-1])
    ask.cancel_when = lambda events: False
    prompt = [*PROMPT, *stopped.token_ids]
    resumed = ask(prompt, max_tokens=6)
    assert resumed.prefilled_tokens == 1
    assert resumed.token_ids == continuation(reference, prompt, max_new_tokens=6, eos_token_id=None)


def test_stopping_during_prefill_keeps_the_chunks(ask: Ask) -> None:
    ask.cancel_when = lambda events: ask.of(Prefill)[-1].done >= 6
    stopped = ask([*PROMPT, *PROMPT], max_tokens=5)
    assert (stopped.finish_reason, stopped.token_ids, stopped.text) == ("cancelled", [], "")
    assert (stopped.prefilled_tokens, stopped.completion_tokens, stopped.ttft_s) == (6, 0, 0.0)
    assert ask.session.cached_tokens == tuple(PROMPT[:6])
    ask.cancel_when = lambda events: False
    assert ask([*PROMPT, *PROMPT], max_tokens=1).prefilled_tokens == 8


@pytest.mark.parametrize("layer", [0, 2])
def test_stopping_within_a_chunk_leaves_the_cache_as_it_was(
    folders: dict[str, Path], reference: Any, layer: int
) -> None:
    ask = Ask(open_session(folders["mixtral"]))
    ask.session._ends = frozenset()
    assert ask(PROMPT, max_tokens=1).prefilled_tokens == 7
    before, ask.checks = ask.session.cached_tokens, 0
    # Once before the chunk, then once before each layer.
    ask.cancel_when = lambda events: ask.checks > 1 + layer
    stopped = ask([*PROMPT, *PROMPT], max_tokens=5)
    assert (stopped.finish_reason, stopped.prefilled_tokens) == ("cancelled", 0)
    assert ask.session.cached_tokens == before
    ask.cancel_when = lambda events: False
    found = ask([*PROMPT, *PROMPT], max_tokens=5)
    assert found.prefilled_tokens == 7
    assert found.token_ids == continuation(reference, [*PROMPT, *PROMPT], max_new_tokens=5, eos_token_id=None)
    ask.session.close()


def test_cancelling_is_asked_every_step(ask: Ask) -> None:
    ask(PROMPT, max_tokens=20)
    assert ask.checks >= 3 + 19


def test_a_state_that_cannot_be_cut_starts_over(folders: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders["minimax"], dtype=torch.float32).eval()
    ask = Ask(open_session(folders["minimax"]))
    ask.session._ends = frozenset()
    first = ask(PROMPT, max_tokens=4)
    extended = [*PROMPT, *first.token_ids, 9]
    second = ask(extended, max_tokens=4)
    assert second.prefilled_tokens == 2
    assert second.token_ids == continuation(model, extended, max_new_tokens=4, eos_token_id=None)
    other = ask([*PROMPT, 3], max_tokens=4)
    assert other.prefilled_tokens == 8
    assert other.token_ids == continuation(model, [*PROMPT, 3], max_new_tokens=4, eos_token_id=None)
    ask.session.close()


# --- text -------------------------------------------------------------------------------------------------------------


def test_stop_strings(ask: Ask) -> None:
    whole = ask(PROMPT, max_tokens=30)
    stop = whole.text[9:13]
    cut = whole.text.index(stop)
    found = ask(PROMPT, max_tokens=30, stop=["\n", stop])
    assert found.finish_reason == "stop"
    assert found.text == whole.text[:cut]
    assert found.token_ids == whole.token_ids[: cut + 4]
    assert "".join(piece.text for piece in ask.of(Piece)) == found.text


def test_messages_and_continuing(ask: Ask) -> None:
    messages = [Message("user", "hello"), Message("assistant", "go")]
    whole = ask(messages=messages[:1], max_tokens=4)
    assert whole.prompt_tokens == 8
    begun = ask(messages=messages, max_tokens=4, continue_last=True)
    assert begun.prompt_tokens == len(LetterTokenizer().encode_chat(messages, continue_last=True))
    assert begun.text == LetterTokenizer().decode(begun.token_ids)
    beams = ask(messages=messages, max_tokens=4, continue_last=True, beams=2)
    assert beams.text == LetterTokenizer().decode(beams.token_ids)


@pytest.mark.soak
def test_thoughts_are_no_part_of_the_answer(ask: Ask) -> None:
    messages = [Message("user", "hello")]
    whole = ask(messages=messages, max_tokens=30)
    assert (whole.reasoning, whole.reasoning_tokens, whole.reasoning_s) == ("", 0, 0.0)
    begin, thoughts, end, rest = whole.text[:2], whole.text[2:12], whole.text[12:15], whole.text[15:]
    # The stop string occurs among the thoughts, where it means nothing, and in the answer.
    stop = next((rest[at : at + 1] for at in range(3, 12) if rest[at] in thoughts), rest[8])
    tokenizer = LetterTokenizer()
    tokenizer.reasoning = ReasoningFormat(name="letters", begin=begin, end=end)
    ask.session._tokenizer = tokenizer
    ask.session._history = TokenHistory(tokenizer)
    found = ask(messages=messages, max_tokens=30, stop=[stop])
    assert (found.reasoning, found.text) == (thoughts, rest[: rest.index(stop)])
    assert found.reasoning_tokens == 14
    assert found.reasoning_s > 0
    pieces = ask.of(Piece)
    assert "".join(piece.reasoning for piece in pieces) == thoughts
    assert "".join(piece.text for piece in pieces) == found.text
    beams = ask(messages=messages, max_tokens=20, beams=2)
    letters = tokenizer.decode(beams.token_ids)
    assert separate(ReasoningParser(tokenizer.reasoning), letters) == Separated(beams.reasoning, beams.text)
    raw = ask(tokenizer.encode_chat(messages), max_tokens=30)
    assert (raw.reasoning, raw.text) == ("", whole.text)


def test_a_stop_string_among_thoughts_ends_no_beam(ask: Ask) -> None:
    messages = [Message("user", "hello")]
    whole = ask(messages=messages, max_tokens=20, beams=2).text
    tokenizer = LetterTokenizer()
    tokenizer.reasoning = ReasoningFormat(name="letters", begin=whole[:2], end="\0")
    ask.session._tokenizer = tokenizer
    ask.session._history = TokenHistory(tokenizer)
    found = ask(messages=messages, max_tokens=20, beams=2, stop=[whole[5]])
    assert (found.reasoning, found.text, found.finish_reason) == (whole[2:], "", "length")


def test_an_end_without_a_beginning_makes_thoughts_of_what_was_sent(ask: Ask) -> None:
    messages = [Message("user", "hello")]
    whole = ask(messages=messages, max_tokens=30).text
    tokenizer = LetterTokenizer()
    # A lone end counts at the beginning of a line only.
    decode = tokenizer.decode
    tokenizer.decode = lambda ids: decode(ids).replace(whole[11], "\n")  # type: ignore[method-assign]
    text = whole.replace(whole[11], "\n")
    tokenizer.reasoning = ReasoningFormat(name="letters", begin="\0", end=text[12:15])
    ask.session._tokenizer = tokenizer
    ask.session._history = TokenHistory(tokenizer)
    found = ask(messages=messages, max_tokens=30)
    assert (found.reasoning, found.text, found.reasoning_tokens) == (text[:12].strip(), text[15:].lstrip("\n"), 15)
    pieces = ask.of(Piece)
    (withdrawn,) = [place for place, piece in enumerate(pieces) if piece.withdrawn]
    assert pieces[withdrawn].reasoning == found.reasoning
    assert "".join(piece.text for piece in pieces[withdrawn:]) == found.text


@pytest.mark.parametrize("beams", [1, 2])
def test_a_penalty_for_the_answer_alone_leaves_the_prompt_out(ask: Ask, beams: int) -> None:
    def first_token(**defaults: Any) -> int:
        ask.session._defaults = defaults
        return ask(PROMPT, max_tokens=1, beams=beams).token_ids[0]

    # Below 1 the penalty favours what was said, so a token of the prompt comes first where the prompt counts.
    assert first_token(repetition_penalty=0.1) in PROMPT
    alone = first_token(repetition_penalty=0.1, repetition_penalty_counts_prompt=False)
    assert alone == first_token() and alone not in PROMPT


def test_a_penalty_for_the_answer_alone_is_as_strong_in_a_beam_search(ask: Ask) -> None:
    plain = ask(PROMPT, max_tokens=16, beams=2).token_ids
    ask.session._defaults = {"repetition_penalty": 4.0, "repetition_penalty_counts_prompt": False}
    assert len(set(ask(PROMPT, max_tokens=16, beams=2).token_ids)) == 16 > len(set(plain))


@pytest.mark.parametrize("beams", [1, 2])
def test_the_models_own_limit_ends_an_answer_unless_another_was_asked_for(ask: Ask, beams: int) -> None:
    ask.session._defaults = {"max_new_tokens": 3}
    found = ask(PROMPT, beams=beams)
    assert (found.completion_tokens, found.finish_reason) == (3, "length")
    assert ask(PROMPT, beams=beams, max_tokens=5).completion_tokens == 5


@pytest.mark.sampled
@pytest.mark.parametrize("beams", [1, 3])
def test_the_models_repetition_penalty_equals_transformers(ask: Ask, reference: Any, beams: int) -> None:
    plain = ask(PROMPT, max_tokens=16, beams=beams).token_ids
    ask.session._defaults = {"repetition_penalty": 4.0}
    found = ask(PROMPT, max_tokens=16, beams=beams).token_ids
    theirs = reference.generate(
        torch.tensor([PROMPT]), num_beams=beams, do_sample=False, max_new_tokens=16, repetition_penalty=4.0,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert found == theirs[0, len(PROMPT) :].tolist() != plain


def test_seeds_repeat(ask: Ask) -> None:
    def draw(seed: int) -> list[int]:
        return ask(PROMPT, max_tokens=20, sampling=Sampling(temperature=2.0, seed=seed)).token_ids

    assert draw(1) == draw(1) != draw(2)


def test_an_answer_says_by_which_values_its_tokens_were_chosen(ask: Ask) -> None:
    ask.session._defaults = {"do_sample": True, "top_k": 20, "repetition_penalty": 1.1}
    drawn = ask(PROMPT, max_tokens=2, sampling=Sampling(temperature=0.7, seed=3)).sampling
    assert drawn == Sampling(temperature=0.7, top_p=1.0, top_k=20, min_p=0.0, repetition_penalty=1.1, seed=3)
    greedy = ask(PROMPT, max_tokens=2, sampling=Sampling(temperature=0.0)).sampling
    assert greedy == Sampling(temperature=0.0, repetition_penalty=1.1)
    assert ask(PROMPT, max_tokens=2, beams=2).sampling == Sampling(repetition_penalty=1.1)


# --- beams ------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("penalty", [1.0, 0.3])
def test_beams_equal_transformers(ask: Ask, reference: Any, width: int, penalty: float) -> None:
    free = ask(PROMPT, max_tokens=12, beams=width)
    end = free.token_ids[5]
    ask.session._ends = frozenset({end})
    found = ask(PROMPT, max_tokens=12, beams=width, length_penalty=penalty)
    theirs = reference.generate(
        torch.tensor([PROMPT]),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=12,
        length_penalty=penalty,
        eos_token_id=end,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    for beam, row, score in zip(found.beams, theirs.sequences, theirs.sequences_scores, strict=True):
        tokens = row[len(PROMPT) :].tolist()
        cut = tokens.index(end) + 1 if end in tokens else len(tokens)
        assert beam.token_ids == tokens[:cut]
        assert beam.score == pytest.approx(float(score), rel=1e-4)
        assert beam.text == LetterTokenizer().decode([token for token in beam.token_ids if token != end])
    assert found.token_ids == found.beams[0].token_ids
    assert found.text == found.beams[0].text
    assert found.prefilled_tokens == 0


def test_a_search_leaves_the_prompt_in_the_cache(ask: Ask, reference: Any) -> None:
    found = ask(PROMPT, max_tokens=10, beams=4)
    assert ask.session.cached_tokens == tuple(PROMPT)
    prompt = [*PROMPT, *found.token_ids, 11]
    after = ask(prompt, max_tokens=6)
    assert after.prefilled_tokens == 11
    assert after.token_ids == continuation(reference, prompt, max_new_tokens=6, eos_token_id=None)


def test_beams_can_be_watched_and_cancelled(ask: Ask) -> None:
    ask.cancel_when = lambda events: len(ask.of(BeamProgress)) >= 2
    found = ask(PROMPT, max_tokens=400, beams=3)
    assert found.finish_reason == "cancelled"
    assert found.completion_tokens < 400
    assert len(found.beams) == 3
    assert found.text == found.beams[0].text != ""
    shown = ask.of(BeamProgress)[-1]
    assert [len(beam.token_ids) for beam in shown.beams] == [shown.step] * 3
    assert ask.session.cached_tokens == tuple(PROMPT)
    ask.cancel_when = lambda events: False
    assert ask([*PROMPT, *found.token_ids], max_tokens=2).prefilled_tokens == len(found.token_ids)


def test_beams_with_a_stop_string(ask: Ask) -> None:
    whole = ask(PROMPT, max_tokens=14, beams=3)
    stop = whole.text[4:6]
    found = ask(PROMPT, max_tokens=14, beams=3, stop=[stop], length_penalty=-1.0)
    assert all(stop not in beam.text for beam in found.beams)
    assert any(len(beam.token_ids) < 14 for beam in found.beams)


def test_beams_do_not_sample(ask: Ask) -> None:
    refused(ask, "bad-input", "does not sample", PROMPT, beams=2, sampling=Sampling(temperature=0.5))
    assert ask(PROMPT, max_tokens=2, beams=2, sampling=Sampling(temperature=0.0)).beams


# --- limits -----------------------------------------------------------------------------------------------------------


def refused(ask: Ask, kind: str, text: str, prompt: list[int] | None = None, **options: Any) -> None:
    with pytest.raises(ModelError, match=text) as caught:
        ask(prompt, **options)
    assert caught.value.kind == kind
    ask.check_cache()


@pytest.mark.soak
def test_prompt_longer_than_the_context(ask: Ask) -> None:
    refused(ask, "context", r"600 tokens and the context holds 512", [1] * 600)
    refused(ask, "context", r"512 tokens and the context holds 512", [1] * 512)
    found = ask([1] * 510, max_tokens=50)
    assert (found.finish_reason, found.completion_tokens) == ("length", 2)


def test_no_rendered_text_is_tokenized_whole_that_cannot_fit(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever made it long: a message, thoughts, a call, or the description of a tool."""
    monkeypatch.setattr(session, "MOST_COUNTED", 2_000)

    class Rendering(LetterTokenizer):
        def render_chat(self, *given: object, **more: object) -> str:
            return "x" * 100_000

        def encode_rendered(self, text: str, beginning: bool = True) -> list[int]:
            raise AssertionError("tokenized")

    tokenizer = Rendering()
    ask.session._tokenizer, ask.session._history = tokenizer, TokenHistory(tokenizer)
    question = [Message("user", "hi")]
    refused(ask, "context", "100,000 characters, and the context holds 512", messages=question)
    with pytest.raises(ModelError, match="100,000 characters, and at most 2,000 tokens are counted") as caught:
        ask.session.count_tokens(CountTokens(id=3, question=Generate(id=0, messages=question)))
    assert caught.value.kind == "context"


def test_a_message_that_cannot_fit_is_not_rendered(ask: Ask) -> None:
    class Unrendered(LetterTokenizer):
        def render_chat(self, *given: object, **more: object) -> str:
            raise AssertionError("rendered")

    tokenizer = Unrendered()
    ask.session._tokenizer, ask.session._history = tokenizer, TokenHistory(tokenizer)
    long = [Message("user", "x" * 60_000), Message("assistant", "y"), Message("user", "x" * 60_000)]
    refused(ask, "context", "characters, and the context holds 512", messages=long)


def test_more_than_the_context_holds_is_counted(ask: Ask) -> None:
    tokenizer = LetterTokenizer()
    ask.session._tokenizer, ask.session._history = tokenizer, TokenHistory(tokenizer)
    question = Generate(id=0, messages=[Message("user", "x" * 60_000)])
    (count,) = ask.session.count_tokens(CountTokens(id=3, question=question)).counts
    assert count >= 60_000


def test_context_limit_of_the_request(folders: dict[str, Path]) -> None:
    ask = Ask(open_session(folders["mixtral"], context_limit=20))
    ask.session._ends = frozenset()
    assert ask.session.facts.context_limit == 20
    assert ask(PROMPT).completion_tokens == 13
    refused(ask, "context", "context holds 20", [1] * 20)
    with pytest.raises(ModelError, match="no room"):
        open_session(folders["mixtral"], context_limit=1)


@pytest.mark.soak
def test_beams_beyond_memory(ask: Ask) -> None:
    per_token = ask.session.facts.key_value_bytes_per_token
    ask.session._memory = lambda: 200 * per_token
    refused(ask, "memory", r"8 beams of 300 tokens after a prompt of 7 need 1\.1 MB", PROMPT, beams=8, max_tokens=300)
    refused(ask, "memory", "16 beams of 64 tokens", PROMPT, beams=16)
    assert ask(PROMPT, beams=8, max_tokens=15).completion_tokens == 15
    ask.session._memory = lambda: 1000 * per_token
    limited = ask(PROMPT, beams=4)
    assert limited.finish_reason == "length"
    assert 64 <= limited.completion_tokens < 300


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 12 GB")])
def test_running_out_of_memory_is_said_and_survived(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    expected = ask(PROMPT, max_tokens=6).token_ids
    rows = type(ask.session._cache.rows)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(rows, "step", fail)
        refused(ask, "memory", "Memory ran out", PROMPT, max_tokens=6)
    assert ask.session.cached_tokens == ()
    assert ask(PROMPT, max_tokens=6).token_ids == expected


def test_other_errors_pass_and_the_cache_starts_over(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(PROMPT, max_tokens=2)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(type(ask.session._cache.rows), "extend", fail)
        with pytest.raises(RuntimeError, match="a bug"):
            ask([*PROMPT, 1], max_tokens=2)
    assert ask([*PROMPT, 1], max_tokens=2).prefilled_tokens == 8


@pytest.mark.parametrize(
    ("text", "prompt", "options"),
    [
        ("exactly one", None, {}),
        ("exactly one", [1], {"messages": [Message("user", "x")]}),
        ("no message", None, {"messages": []}),
        ("prompt is empty", [], {}),
        ("Token id 160 is not", [1, 160], {}),
        ("Token id -1 is not", [-1], {}),
        ("Max tokens is -1", [1], {"max_tokens": -1}),
        ("Beam width is 17", [1], {"beams": 17}),
        ("stop string is empty", [1], {"stop": [""]}),
        ("Temperature is -1", [1], {"sampling": Sampling(temperature=-1)}),
        ("0 answers were asked for", [1], {"samples": 0}),
        ("17 answers were asked for", [1], {"samples": 17}),
        ("21 likeliest tokens", [1], {"logprobs": 21}),
        ("Presence penalty is 3", [1], {"sampling": Sampling(presence_penalty=3)}),
        ("Frequency penalty is nan", [1], {"sampling": Sampling(frequency_penalty=float("nan"))}),
        ("bias of token 5 is 101", [1], {"sampling": Sampling(logit_bias={5: 101})}),
        ("Token id 160 has a bias", [1], {"sampling": Sampling(logit_bias={160: 1})}),
        ("cannot do several samples", [1], {"samples": 2, "beams": 2}),
        ("cannot do log-probabilities", [1], {"logprobs": 2, "beams": 2}),
        ("Tools and a question without messages", [1], {"tools": [Tool(name="clock")]}),
        ("A tool must be called, but none is given", [1], {"tool_choice": "required"}),
        ("Tools and a constraint", None, {**TOOLS, "constraint": Constraint(kind="json")}),
        ("Tools and beams", None, {**TOOLS, "beams": 2}),
    ],
)
def test_bad_input(ask: Ask, text: str, prompt: list[int] | None, options: dict[str, Any]) -> None:
    refused(ask, "bad-input", text, prompt, **options)


def test_words_without_a_tokenizer(folders: dict[str, Path]) -> None:
    ask = Ask(open_session(folders["mixtral"]))
    assert not ask.session.facts.has_chat_template
    refused(ask, "bad-input", "no tokenizer", None, messages=[Message("user", "hello")])
    found = ask(PROMPT, max_tokens=5)
    assert (found.text, found.completion_tokens) == ("", 5)
    assert ask.of(Piece)[-1].tokens == 5


# --- timing, estimates, loading ---------------------------------------------------------------------------------------


def test_measured_only_when_somebody_looks(ask: Ask) -> None:
    assert ask(PROMPT, max_tokens=4).timing is None
    assert ask.of(Timing) == []
    ask.panel_open = True
    found = ask([*PROMPT, 3], max_tokens=4)
    assert found.timing is not None and ask.of(Timing)
    assert (found.timing.prefill.tokens, found.timing.decode.tokens) == (found.prefilled_tokens, 3)
    assert len(found.timing.decode.layers) == ask.session.facts.layers
    ask.panel_open = False
    assert ask(PROMPT, max_tokens=4).timing is None
    measured = ask(PROMPT, max_tokens=4, with_timing=True, beams=2).timing
    assert measured is not None and measured.decode.steps == 3


def test_estimates(ask: Ask) -> None:
    ask.session._memory = lambda: 5000 * ask.session.facts.key_value_bytes_per_token
    found = ask.session.estimate_beams(EstimateBeams(id=3, widths=[1, 4, 16], context_tokens=400))
    assert found.id == 3
    assert [estimate.fits for estimate in found.estimates] == [True, True, False]
    assert found.estimates[0].relative_step_time == 1.0
    assert found.estimates[1].memory_bytes == 5 * 400 * ask.session.facts.key_value_bytes_per_token
    with pytest.raises(ModelError, match="Beam width"):
        ask.session.estimate_beams(EstimateBeams(id=3, widths=[0], context_tokens=4))
    with pytest.raises(ModelError, match="context of -1"):
        ask.session.estimate_beams(EstimateBeams(id=3, widths=[1], context_tokens=-1))


def test_tokens_are_counted_without_a_template(ask: Ask) -> None:
    tokenizer = LetterTokenizer()
    ask.session._tokenizer = tokenizer
    texts = ["some words", "", "more of them\n"]
    found = ask.session.count_tokens(CountTokens(id=3, texts=texts))
    assert found.id == 3 and found.counts == [len(tokenizer.encode_rendered(text, False)) for text in texts]
    ask.session._tokenizer = None
    with pytest.raises(ModelError, match="has no tokenizer"):
        ask.session.count_tokens(CountTokens(id=3, texts=["x"]))


def test_a_model_that_sees_nothing_refuses_pictures_and_goes_on(ask: Ask) -> None:
    picture = PictureFile(b"\x89PNG", 3)
    seen = [Message("user", "who", pictures=[picture, picture]), Message("assistant", "me"), Message("user", "why")]
    with pytest.raises(ModelError, match=f"holds 2 pictures, and {ask.session.facts.name} sees none") as refused:
        ask(messages=seen, max_tokens=2)
    assert refused.value.kind == "bad-input"
    with pytest.raises(ModelError, match="holds a picture"):
        question = Generate(id=1, messages=[Message("user", "who", pictures=[picture])])
        ask.session.count_tokens(CountTokens(id=3, question=question))
    assert ask(messages=[Message("user", "who")], max_tokens=2).completion_tokens == 2


def test_ends_come_from_the_models_files(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "mixtral", eos_token_id=[4, 9])
    assert open_session(folder)._ends == {4, 9}
    assert stop_ids({"eos_token_id": 3}) == {3}
    assert stop_ids({}) == stop_ids({"eos_token_id": None}) == frozenset()
    assert read_settings(tmp_path / "absent.json") == {}


def test_a_runtime_that_had_to_stand_in_is_said(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.runtimes import choosing

    assert load_session(Load(id=1, model=str(folders["mixtral"])), lambda *_: None).facts.notices == []
    monkeypatch.setattr(choosing, "on_apple_silicon", lambda: True)
    monkeypatch.setattr(choosing, "mlx_installed", lambda: False)
    notices = load_session(Load(id=1, model=str(folders["mixtral"])), lambda *_: None).facts.notices
    assert "Running on native: mlx-lm is not installed" in notices[0]


@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_damaged_generation_settings(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match="generation_config"):
        read_settings(tmp_path / "generation_config.json")
