"""``privatellm ask``: one question, one answer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any, cast

import msgspec

from app.attachments.attachment import Attachment
from app.attachments.figures import figures, tokens_of
from app.commands.engine_work import Interruption, do, run_with_engine, with_ring
from app.commands.output import ProgressLine, ReaderGoneError, WorkFailed, answer, as_json, notify
from app.commands.question import Question
from app.engine_client import EngineClient, EngineDied
from app.settings.ring import may_be_copied
from app.text_safety import Sanitizer, sanitize
from engine.errors import ModelError
from engine.ipc.messages import (
    Cancel,
    Failed,
    Finished,
    Loaded,
    ModelFacts,
    Notice,
    PhaseTimes,
    Piece,
    Prefill,
    Progress,
    Pull,
)
from engine.models.store.local_models import resolve


def ask(question: Question) -> int:
    """Print the answer on stdout and return the exit status. Raises WorkFailed."""
    if sys.stdout is None or sys.stdout.closed:
        raise WorkFailed("the answer has nowhere to go: stdout is closed")
    try:
        model = resolve(question.load.model)
        build_starter = model.kind == "starter" and model.folder is None
        may_copy = may_be_copied(question.load.model, question.load.partitioning)
        if model.kind == "hub" and not may_copy:
            model.require_folder()
    except ModelError as error:
        raise WorkFailed(str(error)) from error

    async def work(engine: EngineClient, interruption: Interruption) -> int:
        if build_starter:
            notify("The starter model is not on this machine yet; it is made once.")
            await do(engine, Pull(id=engine.new_id(), model=question.load.model), ProgressLine())
        loading = ProgressLine(quiet_elsewhere=True)
        load = await with_ring(engine, question.load, question.settings, question.peers)
        loaded = await do(engine, msgspec.structs.replace(load, id=engine.new_id()), loading)
        assert isinstance(loaded, Loaded)
        for notice in loaded.facts.notices:
            notify(f"note: {notice}")
        _name_pictures(question.attached, loaded.facts)
        return await _answer(engine, interruption, question, loaded.facts)

    return run_with_engine(work, share=True)


def _name_pictures(attached: Sequence[Attachment], facts: ModelFacts) -> None:
    """A note on the size and tokens of each picture that the model will see."""
    if facts.sight is None:
        return
    for file, tokens in zip(attached, tokens_of(attached, facts), strict=True):
        if file.picture is not None:
            notify(f"note: {' · '.join([file.name, *figures(file, tokens)])}")


async def _answer(engine: EngineClient, interruption: Interruption, question: Question, facts: ModelFacts) -> int:
    request = msgspec.structs.replace(question.generate, id=engine.new_id())
    cancelling: set[asyncio.Task[None]] = set()

    def cancel() -> None:
        cancelling.add(asyncio.ensure_future(_cancel(engine, request.id)))

    interruption.ask_first(cancel)
    # Text that turns out to be thoughts can be taken back neither from a file nor from a pipe.
    stream = facts.reasoning is None or (sys.stdout is not None and sys.stdout.isatty())
    shown = _Shown(stream=stream and not question.as_json)
    thinking = ProgressLine(quiet_elsewhere=True)  # also what the answer waits for
    try:
        async with aclosing(engine.stream(request)) as events:
            async for event in events:
                match event:
                    case Progress():
                        thinking.show(event)
                    case Prefill():
                        thinking.clear()
                    case Piece():
                        if event.reasoning and not event.text and not event.withdrawn:
                            thinking.show(Progress(stage="thinking", done=event.reasoning_tokens, unit="tokens"))
                            continue
                        thinking.clear()
                        shown.piece(event.text, event.withdrawn)
                    case Notice():
                        notify(f"note: {event.text}")
                    case Failed():
                        raise WorkFailed(event.error, status=2 if event.kind == "bad-input" else 1)
                    case Finished():
                        thinking.clear()
                        if question.as_json:
                            answer(as_json(result_object(event, facts)))
                        else:
                            shown.finish(event.text if facts.has_tokenizer else as_ids(event.token_ids))
                        if event.finish_reason == "length":
                            _say_what_is_missing(event, constrained=request.constraint is not None)
                    case _:
                        continue
    except ReaderGoneError:
        raise
    except BaseException:
        with suppress(ReaderGoneError, WorkFailed):
            shown.end_line()
        raise
    interruption.ask_first(None)
    return 0


def _say_what_is_missing(finished: Finished, constrained: bool) -> None:
    """A note on an answer that its length limit ended too early to be of use."""
    if finished.reasoning and not finished.text:
        notify("note: the length limit was reached before the answer began; raise --max-tokens, or use --thinking off")
    elif constrained:
        notify("note: the length limit was reached before the JSON was complete; raise --max-tokens")


async def _cancel(engine: EngineClient, target: int) -> None:
    with suppress(EngineDied):
        await engine.send(Cancel(id=engine.new_id(), target=target))


class _Shown:
    """The answer on stdout: sanitised, written as it arrives, ended by a newline."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._sanitizer = Sanitizer()
        self._received = ""
        self._last = ""

    def piece(self, text: str, withdrawn: bool = False) -> None:
        """``withdrawn``: what came before was no part of the answer. A terminal shows it already, so a line ends."""
        if not self._stream:
            return
        if withdrawn:
            self.end_line()
            self._received = ""
        self._received += text
        self._write(self._sanitizer.feed(text))

    def finish(self, text: str) -> None:
        """Write what was not streamed, such as the result of a beam search, and the newline."""
        if not self._received:
            self._write(sanitize(text))
        elif text.startswith(self._received):
            self._write(self._sanitizer.feed(text[len(self._received) :]))
        self.end_line()

    def end_line(self) -> None:
        if self._last and not self._last.endswith("\n"):
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            answer(text, self._last)
            self._last = (self._last + text)[-2:]


def result_object(finished: Finished, facts: ModelFacts) -> dict[str, Any]:
    """The object that ``--json`` prints. Scripts depend on it: add keys, do not change them."""
    return {
        "text": finished.text,
        "token_ids": finished.token_ids,
        "finish_reason": finished.finish_reason,
        "prompt_tokens": finished.prompt_tokens,
        "prefilled_tokens": finished.prefilled_tokens,
        "completion_tokens": finished.completion_tokens,
        "ttft_s": finished.ttft_s,
        "tokens_per_s": finished.tokens_per_s,
        "load_s": facts.load_s,
        "model": facts.name,
        "runtime": facts.runtime,
        "executor": facts.executor,
        "beams": [msgspec.to_builtins(beam) for beam in finished.beams],
        "timing": _timing_object(finished),
        "family": facts.family,
        "device": facts.device,
        "dtype": facts.dtype,
        "notices": facts.notices,
        "trunk": facts.trunk,
        "policy": facts.policy,
        "gpu_expert_bytes": facts.gpu_expert_bytes,
        "movement": _movement_object(finished),
        "probe_s": finished.probe_s,
        "reasoning": finished.reasoning,
        "reasoning_tokens": finished.reasoning_tokens,
        "reasoning_s": finished.reasoning_s,
        "ring": None if facts.ring is None else msgspec.to_builtins(facts.ring),
    }


def _movement_object(finished: Finished) -> dict[str, Any] | None:
    """Bytes moved and times of the experts that GPU and CPU share; None where they are not shared."""
    movement = finished.timing.movement if finished.timing else None
    return None if movement is None else cast(dict[str, Any], msgspec.to_builtins(movement))


def _timing_object(finished: Finished) -> dict[str, Any]:
    """Times in milliseconds per token: decode at the top level, then prefill, the use of experts and the nodes."""
    timing = finished.timing
    decode = timing.decode if timing else PhaseTimes()
    prefill = timing.prefill if timing else PhaseTimes()
    return {
        "layers": [msgspec.to_builtins(layer) for layer in decode.layers],
        "per_token_ms": decode.per_token,
        "outside_layers_ms": decode.outside_layers,
        "steps": decode.steps,
        "prefill": {
            "layers": [msgspec.to_builtins(layer) for layer in prefill.layers],
            "per_token_ms": prefill.per_token,
            "outside_layers_ms": prefill.outside_layers,
            "steps": prefill.steps,
            "tokens": prefill.tokens,
        },
        "moe_layers": timing.moe_layers if timing else [],
        "expert_use": timing.expert_use if timing else [],
        "nodes": [msgspec.to_builtins(node) for node in timing.nodes] if timing else [],
    }


def as_ids(token_ids: list[int]) -> str:
    """The answer of a model without a tokenizer, in the form of ``--prompt-ids``."""
    return ",".join(map(str, token_ids))
