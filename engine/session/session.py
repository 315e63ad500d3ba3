"""A session: a loaded model whose cache holds the prefixes of conversations, so that only new tokens are run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from engine.errors import Cancelled, ModelError
from engine.generation.beams import BeamRule, BeamRun, BeamState, Hypothesis, check_beams
from engine.generation.drafts import PassCosts
from engine.generation.programs import MemoryWanted, Program
from engine.generation.reasoning import ReasoningParser, Separated, separate
from engine.generation.sampling import Logprobs, NotNumbersError, SamplingRule, TokenGuide, usual_limit
from engine.generation.text import StopStrings, first_stop
from engine.generation.tool_calls import ToolCallParser
from engine.ipc.messages import (
    Beam,
    BeamEstimate,
    BeamEstimates,
    CountTokens,
    EstimateBeams,
    Finished,
    FinishReason,
    Generate,
    ModelFacts,
    Notice,
    Progress,
    ReadAgain,
    RingChanged,
    Sampling,
    TokensCounted,
    Tool,
)
from engine.models.store.prefix_files import is_owner
from engine.models.text.reasoning_formats import template_variables
from engine.models.text.tool_formats import ToolFormat
from engine.moe.popularity import ProfileModel
from engine.planning.memory import ModelSizes, estimate_beams, extra_beam_memory, longest_answer
from engine.planning.units import byte_size
from engine.runtimes.protocol import (
    Interrupted,
    LoadedModel,
    Logits,
)
from engine.session.constrained import Constraining
from engine.session.disk_prefixes import DiskPrefixes
from engine.session.looking import Looking
from engine.session.prefix_cache import PrefixCache
from engine.session.reading_again import AROUND_TOKENS, cause_of, message_at, message_ends, told
from engine.session.refusals import check_samples, refuse_beside_beams, refuse_pictures, with_usable_tools
from engine.session.sampled_answers import SampleRun, samples_rules
from engine.session.scheduler import Scheduler
from engine.session.sharing import PassLog
from engine.session.token_history import ChatTokenizer, ConversationLine, TokenHistory
from engine.session.turn import Answer, Emit, Turn, TurnControl
from engine.session.turn_cache import TurnCache
from engine.system.free_memory import available_bytes, ran_out_of_memory

SHORTEST_BEAM_ANSWER = 64
"""Tokens that must fit in memory for a beam search without a requested maximum."""

CPU_SHARE, GPU_SHARE = 4, 8
"""Divisors of free memory that give the part for other conversations. On a GPU the experts use the rest."""

STOP_MARGIN = 8
"""Tokens decoded beyond the length of the longest stop string when a beam is checked for one."""

RENDERED_CHARACTERS = 200
"""Number of the prompt's last characters in which a template may begin thoughts or a call."""

RENDERED_BEGINNING = 16
"""Number of the rendered conversation's first characters by which its beginning is found among decoded tokens."""

MOST_COUNTED = 1_000_000
"""Maximum tokens of a question that are counted, even if the context is smaller."""

MOST_TOGETHER = 16
"""Maximum number of answers under way at the same time."""

SAMPLES_TOGETHER = 8
"""Maximum number of answers to one question that are generated at the same time: rows that the kernels read weights for
once."""

USUAL_ANSWER = 1024
"""Tokens of an answer for which there must be memory before it begins beside others."""

CONTEXT_TOKENS = 8
"""Number of the prompt's last tokens that are decoded together with an answer that continues them."""


@dataclass(frozen=True)
class _Question:
    """A request as the model reads it.

    ``line``: the conversation as the template rendered it; None without a template. ``context``: last tokens of a
    prompt whose text the answer continues. ``parser``: factory of the parser that separates thoughts from the answer;
    None if thoughts are not marked.
    """

    request: Generate
    prompt: list[int]
    line: ConversationLine | None
    context: list[int]
    parser: Callable[[], ReasoningParser] | None

    @property
    def end(self) -> str:
        """The last characters of the prompt, in which a template may begin thoughts or a call."""
        return "" if self.line is None else self.line.text[-RENDERED_CHARACTERS:]


class Session:
    """A loaded model with its conversations. Not thread-safe; only :meth:`estimate_beams` may run beside an answer.

    Several answers may be under way (:meth:`answer`), whose passes one scheduler runs.

    ``ends``: token ids that end an answer. ``defaults``: the model's ``generation_config.json``. ``memory`` gives the
    bytes that are free for keys and values. ``prefix_bytes``: bytes that all conversations but the current one may
    take; None: a part of what is free. ``prefix_disk_bytes``: bytes on disk for prefixes kept between runs; 0: none.
    ``drafts``: whether tokens are guessed ahead. ``identity``: of the model and everything on which its bits depend.
    ``looking`` shows the model pictures; without, ``way_to_see`` is what to do so that they are seen.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: ChatTokenizer | None,
        *,
        ends: Collection[int],
        defaults: Mapping[str, Any],
        facts: ModelFacts | None = None,
        profile: ProfileModel | None = None,
        prefill_chunk: int = 512,
        prefix_bytes: int | None = 0,
        prefix_disk_bytes: int = 0,
        drafts: bool = True,
        identity: str = "",
        looking: Looking | None = None,
        way_to_see: str = "load a model that sees",
        memory: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.facts = facts or model.facts
        self.prefill_chunk = prefill_chunk
        self.profile = profile
        """Identity of the whole model, for the profile of its experts' use; None if it is not known."""
        self._model = model
        self._tokenizer = tokenizer
        self._history = TokenHistory(tokenizer) if tokenizer is not None else None
        self._ends = frozenset(ends)
        self._defaults = defaults
        self._memory = memory or self._free_memory
        self._clock = clock
        self._prefix_bytes = prefix_bytes
        self._drafts = drafts
        self._costs = PassCosts()
        self._disk: DiskPrefixes | None = None
        if prefix_disk_bytes and model.keeps_contents:
            self._disk = DiskPrefixes(model, identity, prefix_disk_bytes, self._memory)
        self._looking = looking
        self._way_to_see = way_to_see
        self._cache = PrefixCache(model, self._budget, self._disk)
        self._constraining: Constraining | None = None
        self._log = PassLog()
        self.first_pass_s: float | None = None
        """Seconds of the first pass of the answer that ended last; None if nothing was run for it."""

    def _free_memory(self) -> int:
        """Bytes free for keys and values."""
        shared = self._model.memory_for_rows()
        return available_bytes(self.facts.device) if shared is None else shared

    def _room(self) -> int:
        """Bytes for keys and values of answers, of which every machine of a ring holds its own."""
        ring, room = self.facts.ring, self._memory()
        if ring is None or ring.mode == "central":
            return room
        return min([room, *(node.bytes_for_rows for node in ring.nodes[1:])])

    @property
    def _sizes(self) -> ModelSizes:
        return ModelSizes.of_loaded(self.facts, self.prefill_chunk)

    def _budget(self, kept_bytes: int) -> int:
        """Bytes that all conversations but the current one may take. ``kept_bytes``: bytes that they take now."""
        if self._prefix_bytes is not None:
            return self._prefix_bytes
        if self._model.memory_for_rows() is not None:
            return (self._memory() + kept_bytes) // GPU_SHARE
        ring = self.facts.ring
        mapped = sum(file.size for file in self._model.mapped_files)
        repacked = self._model.repacked
        weights = mapped - repacked.spent
        if ring is not None:
            weights = self.facts.trunk_bytes + ring.nodes[0].expert_bytes - repacked.computed
        # Mapped weights count as free memory, but to drop them would slow every answer. Computed ones do not.
        return max(0, self._memory() + kept_bytes - max(0, weights)) // CPU_SHARE

    @property
    def model(self) -> LoadedModel:
        """The model, for measurements with rows of their own beside the conversation."""
        return self._model

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """The tokens of the latest conversation in the cache, which the next question can reuse."""
        return tuple(self._cache.tokens)

    def keep_prefixes(self, should_stop: Callable[[], bool], *, last: bool = False) -> list[str]:
        """Write prefixes to disk between two questions, until ``should_stop()``. ``last``: also those that have grown
        little.

        Returns sentences for the person.
        """
        return self._cache.write(should_stop, last=last)

    def forget_prefixes(self, conversations: Sequence[str]) -> None:
        """Delete what is kept on disk of ``conversations``; see :class:`ForgetPrefixes`. Thread-safe."""
        if self._disk is not None:
            self._disk.forget(conversations)

    def close(self) -> None:
        """Free the memory. The session cannot be used afterwards."""
        self._cache.forget()
        self._model.close()
        if self._looking is not None:
            self._looking.close()

    def resize(self, gpu_expert_bytes: int | None) -> ModelFacts:
        """Give the experts ``gpu_expert_bytes`` of GPU memory (None: all that is free). Returns the new facts.

        Raises ModelError if no GPU shares the experts (bad-input), or it has too little memory (memory).
        """
        found = self._model.resize_experts(gpu_expert_bytes)
        self.facts = msgspec.structs.replace(
            self.facts, gpu_expert_bytes=found.gpu_expert_bytes, executor=found.executor
        )
        return self.facts

    def scheduler(self) -> Scheduler:
        """A scheduler for this session's answers."""
        return Scheduler(self._model, self._room, self._clock, self._log, self._costs)

    def generate(self, request: Generate, emit: Emit, control: TurnControl) -> Finished:
        """Answer ``request`` alone; see :meth:`answer`."""
        return self.scheduler().run(self.answer(request, emit, control), control)

    def answer(self, request: Generate, emit: Emit, control: TurnControl) -> Program[Finished]:
        """Answer ``request``. Emits Prefill, Piece, BeamProgress and Timing, and returns the final event.

        When ``control`` cancels, the answer ends with the text so far, and the cache keeps what was computed. Raises
        ModelError (bad-input, context, memory, model); events emitted before it remain valid.
        """
        request, left_out = with_usable_tools(request, self._call_format)
        for sentence in left_out:
            emit(Notice(id=request.id, text=sentence))
        try:
            question = self._question(request, control.cancelled)
            request = question.request
            rules, logprobs = self._rules(request)
            guide = self._guide(question, control.cancelled)
        except Cancelled:
            return cancelled_answer(request.id)
        prompt, rule = question.prompt, rules[0]
        most = self._most_tokens(request, len(prompt))
        if not self._log.answers:
            self._model.recorder.reset()
        turn = Turn(request, self._model.recorder, self._log, emit, control, self._clock, len(prompt))
        turn.sampling = Sampling(repetition_penalty=rule.repetition_penalty) if request.beams > 1 else rule.used
        repeatable = request.beams > 1 or rule.greedy or rule.seed is not None
        cache = TurnCache(
            self._cache, self._model, turn, self.prefill_chunk, repeatable, self._look, drafts=self._drafts
        )
        self._log.begin(control, request.program)
        try:
            yield MemoryWanted(
                self._likely_bytes(request, len(prompt), most),
                turn.cancelled,
                lambda: emit(Progress(id=request.id, stage="waiting for other answers")),
            )
            with self._consistent(cache):
                try:
                    cache.take_back_peers(prompt)
                except Cancelled:
                    return turn.finished(Answer("", [], "cancelled"))
                self._keep_facts(emit)
                logits = yield from cache.prefill(prompt)
                if logits is None:
                    return turn.finished(Answer("", [], "cancelled"))
                turn.read_again = self._reading_again(question, cache, turn.client)
                if request.beams > 1:
                    answers = [(yield from self._search(question, turn, cache, logits, most, rule, guide))]
                else:
                    run = SampleRun(
                        turn,
                        cache,
                        self._tokenizer,
                        self._ends,
                        question.context,
                        question.parser,
                        self._calling(question),
                        self._samples_together(request, len(prompt), most),
                    )
                    answers = yield from run.answers(request, logits, prompt, rules, logprobs, guide, most)
            answer = answers[0]
            if self._history is not None and question.line is not None:
                ended = bool(answer.tokens) and answer.tokens[-1] in self._ends
                tokens = answer.tokens[:-1] if ended else answer.tokens
                self._history.answered(question.line, answer.text, tokens)
            return turn.finished(*answers)
        finally:
            self._log.end(control)
            cache.close()
            if self._looking is not None and not self._log.answers:
                self._looking.turn_over()
            turn.close()
            self.first_pass_s = turn.first_pass_s
            self._keep_facts(emit)

    def _question(self, request: Generate, cancelled: Callable[[], bool]) -> _Question:
        """``request`` with its prompt. Raises ModelError, Cancelled."""
        prompt, line = self._prompt(request, request.tools, cancelled)
        if request.tools and self._tokenizer is not None and not self._tokenizer.takes_several_calls(cancelled):
            request = msgspec.structs.replace(request, parallel_tool_calls=False)
        # Text that continues the prompt's is decoded together with it: a word's space may be part of its first token.
        last = prompt[-CONTEXT_TOKENS:] if request.continue_last or request.prompt is not None else []
        question = _Question(request, prompt, line, [token for token in last if token >= 0], None)
        return replace(question, parser=self._parsing(question))

    def _rules(self, request: Generate) -> tuple[list[SamplingRule], Logprobs | None]:
        """How the tokens of each answer to ``request`` are chosen. Raises ModelError (bad-input) if it asks for what
        cannot be."""
        check_beams(request.beams, request.length_penalty)
        if request.beams > 1:
            refuse_beside_beams(request)
        check_samples(request.samples, request.temperatures)
        if request.conversation and not is_owner(request.conversation):
            raise ModelError(f"{request.conversation[:50]!r} is no name of a conversation.", kind="bad-input")
        rules = samples_rules(request, self._defaults)
        rule = rules[0]
        wrong = next((token for token in rule.bias if token >= self.facts.vocabulary), None)
        if wrong is not None:
            raise ModelError(
                f"Token id {wrong} has a bias, and the model's vocabulary has {self.facts.vocabulary} tokens.",
                kind="bad-input",
            )
        StopStrings(request.stop)
        return rules, None if request.logprobs is None else Logprobs(request.logprobs, self._bytes_of)

    def _likely_bytes(self, request: Generate, prompt_tokens: int, most: int) -> int:
        """Bytes of keys and values that an answer of usual length takes."""
        answered = min(most, USUAL_ANSWER) * max(request.beams, 1)
        return (prompt_tokens + answered) * self.facts.key_value_bytes_per_token + self.facts.state_bytes

    def _samples_together(self, request: Generate, prompt_tokens: int, most: int) -> int:
        """Number of answers to one question that are generated at the same time, for which there is memory."""
        if request.samples == 1:
            return 1
        each = self._likely_bytes(request, prompt_tokens, most)
        return max(1, min(SAMPLES_TOGETHER, 1 + self._room() // max(1, each)))

    def _reading_again(self, question: _Question, cache: TurnCache, client: object) -> ReadAgain | None:
        """Why more than the question was read; None if there is nothing to tell ``client``."""
        closest, prompt, messages = cache.closest, question.prompt, question.request.messages or []
        place: int | None = None
        texts: tuple[str, str] | None = None
        if (
            closest is not None
            and 0 < closest.shared < min(len(prompt), closest.length)
            and self._tokenizer is not None
        ):
            around = prompt[max(0, closest.shared - AROUND_TOKENS) : closest.shared + AROUND_TOKENS]
            # Tokens of pictures have no text.
            if question.line is not None and min(prompt[: closest.shared]) >= 0:
                rendered = question.line.text
                ends = message_ends(rendered, [message.content for message in messages])
                read = self._tokenizer.decode_exactly(prompt[: closest.shared])
                place = message_at(len(read) - max(0, read.find(rendered[:RENDERED_BEGINNING])), ends)
            if question.request.quotes and closest.client == client and min((*around, *closest.around)) >= 0:
                texts = self._tokenizer.decode_exactly(closest.around), self._tokenizer.decode_exactly(around)
        cause = cause_of(
            closest,
            len(prompt),
            cache.reused or 0,
            own=closest is not None and closest.client == client,
            last_message=place is not None and place == len(messages) - 1,
            first=cache.first,
            answers=any(message.role == "assistant" for message in messages),
        )
        if cause is None:
            return None
        return told(cause, closest, place, messages[place].role if place is not None else "", texts)

    def _look(self, tokens: Sequence[int], turn: Turn) -> None:
        if self._looking is not None:
            self._looking.look(tokens, turn.report)

    def _keep_facts(self, emit: Emit) -> None:
        """Take over the facts of a newly formed ring, and emit RingChanged."""
        found = self._model.facts
        if (found.ring, found.executor) != (self.facts.ring, self.facts.executor):
            self.facts = msgspec.structs.replace(self.facts, ring=found.ring, executor=found.executor)
            emit(RingChanged(ring=found.ring, executor=found.executor))

    def estimate_beams(self, request: EstimateBeams) -> BeamEstimates:
        """The cost of beams. Raises ModelError (bad-input) for an impossible width or context."""
        for width in request.widths:
            check_beams(width, 1.0)
        if request.context_tokens < 0:
            raise ModelError(f"A context of {request.context_tokens} tokens means nothing.", kind="bad-input")
        available = self._memory()
        costs = estimate_beams(
            self._sizes, request.widths, request.context_tokens, len(self._cache.newest_tokens), available
        )
        return BeamEstimates(
            id=request.id,
            estimates=[BeamEstimate(c.width, c.memory_bytes, c.fits, c.relative_step_time) for c in costs],
            available_bytes=available,
        )

    def count_tokens(self, request: CountTokens) -> TokensCounted:
        """Number of tokens of each text, and of a question.

        Raises ModelError (bad-input) if the model has no tokenizer, or the question cannot be asked.
        """
        if self._tokenizer is None and (request.question is None or request.question.prompt_ids is None):
            raise ModelError(f"{self.facts.name} has no tokenizer.", kind="bad-input")
        tokenizer = self._tokenizer
        counts = [len(tokenizer.encode_rendered(text, beginning=False)) for text in request.texts] if tokenizer else []
        asked = request.question
        if asked is not None and asked.messages is None:
            counts.append(len(self._prompt(asked, (), lambda: False)[0]))
        elif asked is not None:
            assert tokenizer is not None
            asked, _ = with_usable_tools(asked, self._call_format)
            text = self._rendered(tokenizer, asked, asked.tools, lambda: False, MOST_COUNTED)
            tokens = tokenizer.encode_rendered(text)
            counts.append(len(tokens) if self._looking is None else self._looking.count(tokens, asked.messages or []))
        return TokensCounted(id=request.id, counts=counts)

    @property
    def _call_format(self) -> ToolFormat | None:
        return self._tokenizer.tool_format if self._tokenizer is not None else None

    # --- before the first token -----------------------------------------------------------------------------------

    def _prompt(
        self, request: Generate, tools: Sequence[Tool], cancelled: Callable[[], bool]
    ) -> tuple[list[int], ConversationLine | None]:
        """The tokens of ``request``, and the conversation that a template rendered them from, if one did."""
        given = [each for each in (request.messages, request.prompt, request.prompt_ids) if each is not None]
        if len(given) != 1:
            raise ModelError("A question is messages, text or token ids, exactly one of them.", kind="bad-input")
        least = 1 if request.beams > 1 else 0
        if request.max_tokens is not None and request.max_tokens < least:
            raise ModelError(f"Max tokens is {request.max_tokens}; an answer takes at least {least}.", kind="bad-input")
        line: ConversationLine | None = None
        if request.prompt_ids is not None:
            prompt = list(request.prompt_ids)
            wrong = next((token for token in prompt if not 0 <= token < self.facts.vocabulary), None)
            if wrong is not None:
                raise ModelError(
                    f"Token id {wrong} is not in the model's vocabulary of {self.facts.vocabulary}.", kind="bad-input"
                )
        elif self._history is None or self._tokenizer is None:
            raise ModelError(
                f"{self.facts.name} has no tokenizer, so it takes token ids only (--prompt-ids); "
                "add its tokenizer.json to the folder to ask in words.",
                kind="bad-input",
            )
        elif request.prompt is not None:
            self._refuse_if_it_exceeds(request.prompt)
            prompt = self._tokenizer.encode(request.prompt)
        elif not request.messages:
            raise ModelError("There is no message to answer.", kind="bad-input")
        else:
            line = self._history.prompt(self._rendered(self._tokenizer, request, tools, cancelled))
            prompt = list(line.tokens)
            if self._looking is not None:
                prompt = self._looking.prompt(prompt, request.messages, cancelled)
        if not prompt:
            raise ModelError("The prompt is empty: the model needs at least one token to go on from.", kind="bad-input")
        return prompt, line

    def _rendered(
        self,
        tokenizer: ChatTokenizer,
        request: Generate,
        tools: Sequence[Tool],
        cancelled: Callable[[], bool],
        most: int = 0,
    ) -> str:
        """``request``'s messages and ``tools``, rendered by the chat template: all text that is tokenized.

        Raises ModelError (context) if it exceeds both the context and ``most`` tokens.
        """
        messages = request.messages or []
        if self._looking is None:
            refuse_pictures(messages, self.facts.name, self._way_to_see)
        # A text that is too long by itself is not rendered, either.
        self._refuse_if_it_exceeds("\n".join(message.content for message in messages), most)
        variables = template_variables(request.thinking, request.effort)
        text = tokenizer.render_chat(messages, request.continue_last, cancelled, variables, tools)
        if self._looking is not None:
            text = self._looking.written(text, messages, tokenizer.decode_exactly)
        self._refuse_if_it_exceeds(text, most)
        return text

    def _refuse_if_it_exceeds(self, text: str, most: int = 0) -> None:
        """Raises ModelError (context) if a text exceeds both the context and ``most`` tokens, before all of it is
        tokenized."""
        limit = max(self.facts.context_limit, most)
        if self._tokenizer is not None and self._tokenizer.exceeds(text, limit):
            held = (
                f"at most {limit:,} tokens are counted"
                if most
                else f"the context holds {limit:,} tokens, answer included"
            )
            raise ModelError(
                f"The prompt has {len(text):,} characters, and {held}: "
                "shorten it, start a new conversation, or load the model with a larger context limit.",
                kind="context",
            )

    def _parsing(self, question: _Question) -> Callable[[], ReasoningParser] | None:
        """Factory of the parser of the answer's thoughts. Without a template, thoughts are plain text."""
        form = self._tokenizer.reasoning if self._tokenizer is not None else None
        if form is None or question.line is None:
            return None
        request, calls = question.request, self._call_format
        recipients = bool(request.tools) and calls is not None and calls.shape == "parts"
        return lambda: ReasoningParser(form, question.end, request.continue_last, recipients)

    def _guide(self, question: _Question, cancelled: Callable[[], bool]) -> TokenGuide | None:
        """The guide of the answer, if it must have a form. Raises Cancelled."""
        request = question.request
        forced = bool(request.forced_tool) or request.tool_choice == "required"
        if request.constraint is None and not forced:
            return None
        if self._constraining is None:
            self._constraining = Constraining(self._tokenizer, self.facts.vocabulary, self._ends)
        if request.constraint is None:
            return self._constraining.call_guide(request, question.parser, cancelled)
        return self._constraining.guide(request, request.constraint, question.parser, cancelled)

    def _calling(self, question: _Question) -> Callable[[], ToolCallParser] | None:
        """Factory of the parser of tool calls in the answer.

        None without tools, unless the prompt ends with the mark of a call. Templates that name the reader of each part
        of an answer end so.
        """
        form, request, rendered = self._call_format, question.request, question.end
        tools = request.tools
        if form is None or not (tools or (form.begin and request.messages and rendered.endswith(form.begin))):
            return None
        return lambda: ToolCallParser(form, tools, None if request.parallel_tool_calls else 1, rendered)

    def _most_tokens(self, request: Generate, prompt_tokens: int) -> int:
        """Maximum tokens of the answer. Raises ModelError if there is no room for one."""
        limit = self.facts.context_limit
        room = limit - prompt_tokens
        if room < 1:
            raise ModelError(
                f"The prompt is {prompt_tokens:,} tokens and the context holds {limit:,}, answer included: shorten it, "
                "start a new conversation, or load the model with a larger context limit.",
                kind="context",
            )
        wanted = usual_limit(self._defaults) if request.max_tokens is None else request.max_tokens
        most = room if wanted is None else min(room, wanted)
        if request.beams == 1:
            return most
        per_token = self.facts.key_value_bytes_per_token
        state = self.facts.state_bytes - self._sizes.dropped_bytes(prompt_tokens)
        available, cached = self._memory(), len(self._cache.tokens)
        fits = longest_answer(request.beams, prompt_tokens, available, per_token, cached, state)
        if fits < most and self._cache.kept_tokens:
            self._cache.forget_others()
            available = self._memory()
            fits = longest_answer(request.beams, prompt_tokens, available, per_token, cached, state)
        if fits >= most:
            return most
        if request.max_tokens is None and fits >= SHORTEST_BEAM_ANSWER:
            return fits
        asked = most if request.max_tokens is not None else min(most, SHORTEST_BEAM_ANSWER)
        if fits >= asked:
            return asked
        needed = extra_beam_memory(request.beams, prompt_tokens, asked, per_token, cached, state)
        raise ModelError(
            f"{request.beams} beams of {asked} tokens after a prompt of {prompt_tokens} need "
            f"{byte_size(needed, fine=True)} more memory for keys and values, but {byte_size(available, fine=True)} is "
            "free; use fewer beams or fewer tokens.",
            kind="memory",
        )

    # --- the answer -----------------------------------------------------------------------------------------------

    def _search(
        self,
        question: _Question,
        turn: Turn,
        cache: TurnCache,
        logits: Logits,
        most: int,
        sampling: SamplingRule,
        guide: TokenGuide | None,
    ) -> Program[Answer]:
        assert cache.rows is not None
        request = question.request
        rule = BeamRule(
            width=request.beams,
            max_tokens=most,
            length_penalty=request.length_penalty,
            early_stopping=request.early_stopping,
            ends=self._ends,
            hits_stop=self._stop_check(question),
            repetition_penalty=sampling.repetition_penalty,
            prompt=sampling.penalised_of(question.prompt),
            # Only transformers' own kind of penalty must have the same effect as there.
            penalises_logits=not sampling.penalises_prompt,
            guide=guide,
        )
        state = BeamState(rule)
        run = BeamRun(state, cache.rows, cache.rows_again, turn.check)
        cancelled = False
        turn.watch()
        run.begin(logits)
        try:
            while True:
                turn.count_token()
                turn.show_beams(state.step, lambda: self._beams(question, state))
                turn.show_timing()
                if state.done:
                    break
                if turn.cancelled():
                    cancelled = True
                    break
                turn.watch()
                yield from run.step()
        except Interrupted:
            cancelled = True
        best = state.hypotheses()[0]
        beams = self._beams(question, state)
        reason: FinishReason = "cancelled" if cancelled else "stop" if self._ended(question, best) else "length"
        return Answer(beams[0].text, beams[0].token_ids, reason, beams, beams[0].reasoning)

    def _beams(self, question: _Question, state: BeamState) -> list[Beam]:
        return [self._beam(question, entry) for entry in state.hypotheses()]

    def _beam(self, question: _Question, entry: Hypothesis) -> Beam:
        found, stops = self._separated(question, entry.tokens), question.request.stop
        text = found.answer[: first_stop(found.answer, stops)] if stops else found.answer
        return Beam(text, list(entry.tokens), entry.score, entry.finished, found.thoughts)

    def _separated(self, question: _Question, tokens: Sequence[int]) -> Separated:
        text = self._whole_text(question, tokens)
        return Separated(answer=text) if question.parser is None else separate(question.parser(), text)

    def _ended(self, question: _Question, best: Hypothesis) -> bool:
        """Whether a finished hypothesis ended by itself, not at the maximum length."""
        check = self._stop_check(question)
        return best.over or best.tokens[-1] in self._ends or (check is not None and check(best.tokens))

    def _stop_check(self, question: _Question) -> Callable[[Sequence[int]], bool] | None:
        stops = question.request.stop
        if not stops or self._tokenizer is None:
            return None
        window = max(len(stop) for stop in stops) + STOP_MARGIN

        def reached(tokens: Sequence[int]) -> bool:
            if first_stop(self._decode(question, tokens[-window:]), stops) is None:
                return False
            # Among thoughts a stop string means nothing.
            return question.parser is None or first_stop(self._separated(question, tokens).answer, stops) is not None

        return reached

    def _whole_text(self, question: _Question, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        return self._decode(question, tokens[:-1] if tokens and tokens[-1] in self._ends else tokens)

    def _bytes_of(self, token: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes.of(token)

    def _decode(self, question: _Question, tokens: Sequence[int]) -> str:
        assert self._tokenizer is not None
        before = len(self._tokenizer.decode(question.context)) if question.context else 0
        return self._tokenizer.decode([*question.context, *tokens])[before:]

    # --- keeping the cache honest ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _consistent(self, cache: TurnCache) -> Iterator[None]:
        """Empty the cache if a forward pass inside fails, because its contents are then unknown."""
        try:
            yield
        except BaseException as error:
            cache.forget()
            ring = self.facts.ring
            if isinstance(error, NotNumbersError) and ring is not None and len(ring.nodes) > 1:
                names = ", ".join(node.name for node in ring.nodes[1:])
                raise ModelError(
                    f"What the ring computed is no number: results of {names} are wrong, or the model's weights are "
                    "damaged; leave the ring and ask again to see which.",
                    kind="network",
                ) from error
            if not isinstance(error, ModelError) and ran_out_of_memory(error):
                raise ModelError(
                    f"Memory ran out while {self.facts.name} was answering, with "
                    f"{byte_size(self._memory(), fine=True)} free; use fewer beams, a shorter conversation, or a "
                    "smaller model.",
                    kind="memory",
                ) from error
            raise


def cancelled_answer(request_id: int) -> Finished:
    """The result of a question that was cancelled before the model ran for it."""
    return Finished(
        id=request_id,
        text="",
        token_ids=[],
        finish_reason="cancelled",
        prompt_tokens=0,
        prefilled_tokens=0,
        completion_tokens=0,
        ttft_s=0.0,
        tokens_per_s=0.0,
    )
