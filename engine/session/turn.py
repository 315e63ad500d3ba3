"""One question and its answer while it runs: measurements, and the rates of its events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from engine.generation.reasoning import ReasoningParser, Separated
from engine.generation.text import IncrementalDecoder, StopStrings
from engine.generation.tool_calls import CallsInThoughts, ToolCallParser
from engine.ipc.messages import (
    AnyEvent,
    Beam,
    BeamProgress,
    Finished,
    FinishReason,
    Generate,
    Notice,
    Piece,
    Prefill,
    ReadAgain,
    Sample,
    Sampling,
    Timing,
    TokenLogprob,
    ToolCall,
    ToolCallPiece,
    UnderWay,
)
from engine.ipc.progress import ProgressCallback, Reports
from engine.moe.timing import Recorder
from engine.runtimes.protocol import Interrupted
from engine.session.sharing import PassLog
from engine.system.free_memory import memory_in_use

PIECE_INTERVAL_S = 1 / 15
"""Minimum seconds between two pieces of an answer."""
BEAM_INTERVAL_S = 1 / 10
"""Minimum seconds between two lists of beam candidates."""
TIMING_INTERVAL_S = 1 / 4
"""Minimum seconds between two timing frames."""


Emit = Callable[[AnyEvent], None]


class TurnControl(Protocol):
    """Switches that another thread may change while a turn runs. The turn reads them at least once per step."""

    def cancelled(self) -> bool: ...

    def watching(self) -> bool:
        """Whether the timing panel is open."""
        ...

    @property
    def owner(self) -> object:
        """The client that asks. Another client's is never equal."""
        ...


@dataclass(frozen=True)
class Answer:
    """The result of a turn. ``beams``: best first; empty without a beam search. ``thoughts`` are not in ``text``."""

    text: str
    tokens: list[int]
    reason: FinishReason
    beams: list[Beam] = field(default_factory=list)
    thoughts: str = ""
    thought_tokens: int = 0
    thought_s: float = 0.0
    """Seconds from the first token to the end of the thoughts."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    stop_string: str = ""
    """The stop string that ended the answer; empty if none did."""

    @property
    def sample(self) -> Sample:
        return Sample(
            text=self.text,
            token_ids=self.tokens,
            finish_reason=self.reason,
            reasoning=self.thoughts,
            reasoning_tokens=self.thought_tokens,
            tool_calls=self.tool_calls,
            logprobs=self.logprobs,
            stop_string=self.stop_string,
        )


class Turn:
    """The clocks and events of one turn.

    ``prefilled`` is the number of prompt tokens that were run. ``first_pass_s`` are the seconds of the first pass.
    """

    def __init__(
        self,
        request: Generate,
        recorder: Recorder,
        log: PassLog,
        emit: Emit,
        control: TurnControl,
        clock: Callable[[], float],
        prompt_tokens: int,
    ) -> None:
        self.id = request.id
        self.emit = emit
        self.cancelled = control.cancelled
        self.report: ProgressCallback = Reports(request.id, emit, control.cancelled)
        """Callback for the progress of work that delays the answer. Raises Cancelled."""
        self.prefilled = 0
        self.first_pass_s: float | None = None
        self.drafted_tokens = self.accepted_tokens = 0
        """Tokens that were guessed and run, and those of them that were right."""
        self.owner = request.conversation
        """Name under which the conversation's prefix may be kept on disk; empty: it may not be."""
        self.client = control.owner, request.conversation
        """The client that asks, and the conversation in which it does."""
        self.read_again: ReadAgain | None = None
        """Why more than the question was read of the prompt."""
        self.sampling: Sampling | None = None
        """The sampling values of the answer."""
        self._several = request.samples > 1
        self._always = request.with_timing
        self._control = control
        self._recorder = recorder
        self._log = log
        self._clock = clock
        self._prompt_tokens = prompt_tokens
        self._start = clock()
        self._first = self._last = 0.0
        self._count = 0
        self._measured = False
        self._due: dict[str, float] = {}
        self._streams: list[TextStream] = []

    # --- clocks ---------------------------------------------------------------------------------------------------

    def count_token(self) -> None:
        """Count one more token of the answer."""
        self._last = self._clock()
        self._first = self._first if self._count else self._last
        self._count += 1

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Encloses a forward pass over tokens of the prompt."""
        begun = self._clock()
        yield
        if self.first_pass_s is None:
            self.first_pass_s = self._clock() - begun

    def check(self) -> None:
        """Raises Interrupted if the turn is cancelled."""
        if self.cancelled():
            raise Interrupted

    def ran_of_prompt(self, first: int, end: int) -> None:
        """Record that tokens ``first`` to ``end`` were run. Only those of the prompt count."""
        self.prefilled += max(0, min(end, self._prompt_tokens) - first)

    @property
    def answering_s(self) -> float:
        """Seconds from the first token to the last one."""
        return self._last - self._first

    def tokens_per_s(self) -> float:
        """Tokens per second after the first token, whose time belongs to the prefill."""
        elapsed = self._last - self._first
        return (self._count - 1) / elapsed if elapsed > 0 else 0.0

    def due(self, what: str, interval: float) -> bool:
        """Whether ``interval`` seconds have passed since the last True for ``what``."""
        now = self._clock()
        if now < self._due.get(what, now):
            return False
        self._due[what] = now + interval
        return True

    def accept(self) -> None:
        """Count a guessed token that was right."""
        self.accepted_tokens += 1
        if self._recorder.enabled:
            self._recorder.another_token()

    # --- timing panel ---------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Measure the next step if the timing panel is open. If measuring slows steps down, only the steps shown are
        measured."""
        wanted = self._always or self._control.watching()
        # The first step of each phase is always measured.
        phase = "decode sample" if self._count else "prefill sample"
        self._recorder.enabled = wanted and (not self._recorder.sampled or self.due(phase, TIMING_INTERVAL_S))
        self._measured = self._measured or self._recorder.enabled
        self._emit_notices()

    def show_timing(self) -> None:
        if self._recorder.enabled and (self._recorder.sampled or self.due("timing", TIMING_INTERVAL_S)):
            self.emit(self._timing())

    def _timing(self) -> Timing:
        frame = self._recorder.frame(self.id)
        return msgspec.structs.replace(frame, rows_per_pass=self._log.rows_per_pass, shares=self._log.shares())

    # --- the answer -----------------------------------------------------------------------------------------------

    def stream(
        self,
        decoder: IncrementalDecoder | None,
        stops: StopStrings,
        parser: ReasoningParser | None = None,
        calls: ToolCallParser | None = None,
    ) -> TextStream:
        """A stream for the tokens of the next answer to the question. Without ``decoder`` only their number is emitted.

        ``parser`` separates thoughts, and ``calls`` separates tool calls, in which stop strings have no effect.
        """
        self._streams.append(TextStream(self, len(self._streams), decoder, stops, parser, calls))
        return self._streams[-1]

    @property
    def under_way(self) -> UnderWay | None:
        """The answers under way, if there are several."""
        return self._log.under_way(self._control)

    def show_prefill(self, done: int, total: int, reused: int) -> None:
        """Say that ``done`` of the prompt's ``total`` tokens are in the cache, ``reused`` of them from before."""
        self.emit(Prefill(id=self.id, done=done, total=total, reused=reused, under_way=self.under_way))

    def show_beams(self, step: int, beams: Callable[[], list[Beam]]) -> None:
        """Send the candidates, at most ten times a second; ``beams`` is called only then."""
        if self.due("beams", BEAM_INTERVAL_S):
            speed = self.tokens_per_s()
            self.emit(BeamProgress(id=self.id, step=step, beams=beams(), tokens_per_s=speed, under_way=self.under_way))

    def finished(self, answer: Answer, *others: Answer) -> Finished:
        """The turn's last event. Held pieces are sent before it. ``others`` are further samples."""
        self.close()
        samples = [answer, *others]
        return Finished(
            id=self.id,
            text=answer.text,
            token_ids=answer.tokens,
            finish_reason=answer.reason,
            prompt_tokens=self._prompt_tokens,
            prefilled_tokens=min(self.prefilled, self._prompt_tokens),
            read_again=self.read_again,
            completion_tokens=sum(len(sample.tokens) for sample in samples),
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            ttft_s=self._first - self._start if self._count else 0.0,
            tokens_per_s=self.tokens_per_s(),
            stop_string=answer.stop_string,
            tool_calls=answer.tool_calls,
            logprobs=answer.logprobs,
            samples=[sample.sample for sample in samples] if self._several else [],
            beams=answer.beams,
            reasoning=answer.thoughts,
            reasoning_tokens=answer.thought_tokens,
            reasoning_s=answer.thought_s,
            timing=self._timing() if self._measured else None,
            sampling=self.sampling,
            memory=memory_in_use(),
        )

    def _emit_notices(self) -> None:
        """Emit the runtime's notices for the person."""
        for text in self._recorder.take_notices():
            self.emit(Notice(text=text))

    def close(self) -> None:
        """Send held text and stop measuring. May be called twice."""
        self._emit_notices()
        for stream in self._streams:
            stream.send()
        self._recorder.enabled = False


class TextStream:
    """Emits an answer's text in pieces, the first one at once and then at most fifteen per second."""

    def __init__(
        self,
        turn: Turn,
        sample: int,
        decoder: IncrementalDecoder | None,
        stops: StopStrings,
        parser: ReasoningParser | None,
        calls: ToolCallParser | None,
    ) -> None:
        """``sample``: index of the answer, if there are several."""
        self._turn = turn
        self._sample = sample
        self._tokens = 0
        self._decoder = decoder
        self._stops = stops
        self._parser = parser
        self._calls = calls
        self._calls_in_thoughts = CallsInThoughts(calls) if calls is not None and parser is not None else None
        self._sent_calls = 0
        self._sent_arguments: int | None = None
        """Number of characters sent of the next call's arguments; None if it was not begun."""
        self._sent: list[str] = []
        self._thoughts: list[str] = []
        self._waiting = Separated()
        self._logprobs: list[TokenLogprob] = []
        """Log-probabilities that were not sent yet."""
        self._counted = 0
        self.thought_tokens = 0
        """Tokens up to the end of the thoughts."""
        self.thought_s = 0.0
        """Seconds from the first token to the end of the thoughts."""

    @property
    def thoughts(self) -> str:
        """The thoughts sent so far."""
        return "".join(self._thoughts)

    @property
    def calls(self) -> list[ToolCall]:
        """The complete tool calls."""
        return [] if self._calls is None else self._calls.calls

    def count_token(self) -> None:
        """Count one more token of the answer."""
        self._turn.count_token()
        self._tokens += 1

    def push(self, token: int, logprob: TokenLogprob | None = None) -> None:
        if logprob is not None:
            self._logprobs.append(logprob)
        if self._decoder is not None:
            self._add(self._decoder.push(token))
        if self._turn.due(f"piece {self._sample}", PIECE_INTERVAL_S):
            self.send()

    def finish(self, cut: bool = False) -> str:
        """The whole text of the answer, including text held back for stop strings or unfinished characters.

        ``cut``: the answer reached its limit, perhaps in the middle of a call.
        """
        if self._decoder is not None:
            self._add(self._decoder.flush())
            if self._parser is not None:
                self._wait(self._settled(self._parser.flush()))
                if self._calls_in_thoughts is not None:
                    self._wait(Separated(*self._calls_in_thoughts.flush(cut)))
            if self._calls is not None:
                self._wait(Separated(answer=self._calls.flush(cut).text), last_of_calls=True)
            self._wait(Separated(answer=self._stops.flush()), stops=False, last_of_calls=True)
        self.send(last=True)
        return "".join(self._sent)

    def _add(self, text: str) -> None:
        if self._parser is None:
            self._wait(Separated(answer=text))
            return
        for piece in text if self._parser.has_parts else [text]:
            for_user = self._parser.for_user
            self._wait(self._settled(self._parser.push(piece)), for_user=for_user)
        if self._parser.thinking and not (self._calls_in_thoughts and self._calls_in_thoughts.holding):
            self.thought_tokens, self.thought_s = self._tokens, self._turn.answering_s

    def _settled(self, separated: Separated) -> Separated:
        """``separated`` without text that may turn out to be a call in thoughts that are never closed."""
        if self._parser is None or self._calls_in_thoughts is None:
            return separated
        thoughts = self._calls_in_thoughts.push(separated.thoughts)
        if not self._parser.thinking:
            thoughts += self._calls_in_thoughts.closed()
        return Separated(thoughts, separated.answer, separated.withdrawn)

    def _wait(
        self, separated: Separated, stops: bool = True, last_of_calls: bool = False, for_user: bool = False
    ) -> None:
        """Queue new text, after separating calls (unless it is the ``last_of_calls``) and cutting it at ``stops``.

        Text ``for_user`` contains no calls.
        """
        if separated.withdrawn:
            self._stops.flush()
            self.thought_tokens, self.thought_s = self._tokens, self._turn.answering_s
            self._waiting = Separated(withdrawn=True)
        before = self._waiting
        answer = separated.answer
        if self._calls is not None and not last_of_calls:
            answer = self._calls.pass_on(answer) if for_user else self._calls.push(answer).text
        answer = self._stops.push(answer) if stops else answer
        self._waiting = Separated(before.thoughts + separated.thoughts, before.answer + answer, before.withdrawn)

    def _call_pieces(self) -> list[ToolCallPiece]:
        """The unsent parts of the calls, including the one that is being written."""
        pieces = []
        for call in self.calls[self._sent_calls :]:
            pieces += self._call_piece(call.id, call.name, call.arguments)
            self._sent_calls, self._sent_arguments = self._sent_calls + 1, None
        begun = self._calls.begun if self._calls is not None else None
        return pieces if begun is None else pieces + self._call_piece(begun.id, begun.name, begun.arguments.text)

    def _call_piece(self, id_: str, name: str, arguments: str) -> list[ToolCallPiece]:
        """The unsent part of the next call."""
        sent, self._sent_arguments = self._sent_arguments, len(arguments)
        if sent is None:
            return [ToolCallPiece(index=self._sent_calls, id=id_, name=name, arguments=arguments)]
        return [ToolCallPiece(index=self._sent_calls, arguments=arguments[sent:])] if sent < len(arguments) else []

    def send(self, last: bool = False) -> None:
        """Send the pending piece, if any. Log-probabilities wait for the text of their tokens, except for the
        ``last``."""
        new, turn = self._waiting, self._turn
        pieces = self._call_pieces()
        empty = not new.answer and not new.thoughts and not pieces and not (last and self._logprobs)
        if empty and (self._decoder is not None or self._counted == self._tokens):
            return
        self._waiting = Separated()
        logprobs, self._logprobs = self._logprobs, []
        self._counted = self._tokens
        if new.withdrawn:
            self._sent.clear()
        self._sent.append(new.answer)
        self._thoughts.append(new.thoughts)
        turn.emit(
            Piece(
                id=turn.id,
                text=new.answer,
                tokens=self._tokens,
                tokens_per_s=turn.tokens_per_s(),
                reasoning=new.thoughts,
                reasoning_tokens=self.thought_tokens,
                reasoning_s=self.thought_s,
                withdrawn=new.withdrawn,
                sample=self._sample,
                tool_calls=pieces,
                logprobs=logprobs,
                under_way=turn.under_way,
            )
        )
