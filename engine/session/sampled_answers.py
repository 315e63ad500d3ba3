"""The answers to one question that are generated token by token, as many as were asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.generation.programs import Program, together
from engine.generation.reasoning import ReasoningParser
from engine.generation.sampling import Logprobs, Sampler, SamplingRule, TokenGuide, sampling_rule
from engine.generation.text import IncrementalDecoder, StopStrings
from engine.generation.tool_calls import ToolCallParser
from engine.ipc.messages import FinishReason, Generate, TokenLogprob
from engine.runtimes.protocol import Logits
from engine.session.token_history import ChatTokenizer
from engine.session.turn import Answer, Turn
from engine.session.turn_cache import TurnCache


def samples_rules(request: Generate, defaults: Mapping[str, Any]) -> list[SamplingRule]:
    """How the tokens of each answer to ``request`` are chosen. Raises ModelError (bad-input) for impossible values."""
    asked = [msgspec.structs.replace(request.sampling, temperature=each) for each in request.temperatures]
    asked = asked or [request.sampling] * request.samples
    return [sampling_rule(each, defaults).of_sample(index) for index, each in enumerate(asked)]


@dataclass(frozen=True)
class SampleRun:
    """The answers to one question, whose prompt is in the cache.

    ``context``: tokens before the answer, if its text continues theirs. ``parser``: factory of the parser that
    separates thoughts from the answer; None if thoughts are not marked.
    """

    turn: Turn
    cache: TurnCache
    tokenizer: ChatTokenizer | None
    ends: Collection[int]
    context: Sequence[int]
    parser: Callable[[], ReasoningParser] | None
    calls: Callable[[], ToolCallParser] | None = None
    """Factory of the parser that separates tool calls from the answer; None if no tools may be called."""
    most_together: int = 1
    """Maximum number of answers that are generated at the same time."""

    def answers(
        self,
        request: Generate,
        logits: Logits,
        prompt: list[int],
        rules: Sequence[SamplingRule],
        logprobs: Logprobs | None,
        guide: TokenGuide | None,
        most: int,
    ) -> Program[list[Answer]]:
        """Generate the answers from the ``logits`` [vocabulary] after the prompt, some at a time; fewer if cancelled.
        Each has one of ``rules``.

        All of them continue the same keys and values of the prompt. Each has at most ``most`` tokens; 0: the prompt is
        only read.
        """
        answers: list[Answer] = []
        following: Logits | None = logits
        while following is not None:
            count = min(self.most_together, request.samples - len(answers))
            branches = [self.cache.branch() for _ in range(count - 1)]
            samplers = [
                Sampler(rule, prompt, guide and guide.copy()) for rule in rules[len(answers) : len(answers) + count]
            ]
            programs = [
                self._answer(
                    cache, following, sampler, StopStrings(request.stop), logprobs, request.parallel_tool_calls, most
                )
                for cache, sampler in zip([self.cache, *branches], samplers, strict=True)
            ]
            try:
                answers += yield from together(programs)
            finally:
                for branch in branches:
                    branch.drop()
            if len(answers) == request.samples or self.turn.cancelled():
                break
            following = yield from self.cache.prefill(prompt)
        return answers

    def _answer(
        self,
        cache: TurnCache,
        logits: Logits,
        sampler: Sampler,
        stops: StopStrings,
        logprobs: Logprobs | None,
        parallel: bool,
        most: int,
    ) -> Program[Answer]:
        if most == 0:
            return Answer("", [], "length")
        turn = self.turn
        decoder: IncrementalDecoder | None = None
        if self.tokenizer is not None:
            decode = self.tokenizer.decode if self.calls is None else self.tokenizer.decode_with_calls
            decoder = IncrementalDecoder(decode, self.context)
        stream = turn.stream(decoder, stops, self.parser and self.parser(), self.calls and self.calls())
        token_logprobs: list[TokenLogprob] = []

        def choose(logits: Logits) -> int:
            token = sampler.choose(logits)
            if logprobs is not None:
                token_logprobs.append(logprobs.of(logits, token))
            return token

        # A guide and log-probabilities need the logits here.
        drawn_there = sampler if logprobs is None and sampler.guide is None else None
        tokens: list[int] = []
        reason: FinishReason | None = None
        following: int | None = choose(logits)
        try:
            while reason is None:
                if following is None:
                    reason = "cancelled"
                    break
                token = following
                tokens.append(token)
                stream.count_token()
                if token in self.ends:
                    reason = "stop"
                else:
                    stream.push(token, token_logprobs[-1] if token_logprobs else None)
                    if stops.stopped or sampler.over:
                        reason = "stop"
                    elif stream.calls and not parallel:
                        reason = "tool_calls"
                    elif len(tokens) >= most:
                        reason = "length"
                    elif turn.cancelled():
                        reason = "cancelled"
                if reason is None:
                    turn.watch()
                    following = yield from cache.step(token, choose, drawn_there)
                    turn.show_timing()
        finally:
            cache.settle()
        text = stream.finish(cut=reason == "length")
        return Answer(
            text,
            tokens,
            "tool_calls" if reason == "stop" and stream.calls else reason,
            thoughts=stream.thoughts,
            thought_tokens=stream.thought_tokens,
            thought_s=stream.thought_s,
            tool_calls=stream.calls,
            logprobs=token_logprobs[:-1] if tokens and tokens[-1] in self.ends else token_logprobs,
            stop_string=stops.found,
        )
