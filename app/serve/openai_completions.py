"""OpenAI's older ``/v1/completions``: text that goes on as it stands, without a chat template."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

import msgspec

from app.serve.asking import Defaults, Natural, answers_of, most_tokens, stops_of
from app.serve.model_service import ModelService
from app.serve.openai_fields import DONE, SampledRequest, finish_reason, usage
from app.serve.replies import TOO_LONG, Refused, event_frame
from engine.ipc.messages import MOST_LOGPROBS, Finished, Generate, Piece, Sample, TokenLogprob

USUAL_LENGTH = 16
"""Tokens of an answer where a request says nothing, as OpenAI documents it."""
_MOST_PROMPTS = 64


class CompletionRequest(SampledRequest, kw_only=True):
    """The body. A prompt is text or token ids, and there may be several."""

    prompt: str | Annotated[list[str | int | list[Natural]], msgspec.Meta(min_length=1, max_length=2**20)]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def generates(self, defaults: Defaults) -> list[Generate]:
        """One for each prompt. Raises Refused for what is not offered."""
        if self.suffix:
            raise Refused("Text is continued here and not filled in: leave suffix out.", parameter="suffix")
        if self.echo:
            raise Refused("The prompt is not repeated here: leave echo out.", parameter="echo")
        if self.best_of is not None and self.best_of > (self.n or 1):
            raise Refused("All answers are returned here: leave best_of out, or use beams.", parameter="best_of")
        beams, samples = self.widths()
        base = Generate(
            id=0,
            sampling=self.sampling(defaults),
            max_tokens=most_tokens(self.max_tokens, usual=USUAL_LENGTH),
            stop=stops_of(self.stop),
            constraint=self.constraint(),
            samples=samples,
            logprobs=self.logprobs,
            beams=beams,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
        )
        return [msgspec.structs.replace(base, **given) for given in self._prompts()]

    def _prompts(self) -> list[dict[str, object]]:
        if isinstance(self.prompt, str):
            return [{"prompt": self.prompt}]
        ids = [token for token in self.prompt if isinstance(token, int)]
        if len(ids) == len(self.prompt):
            return [{"prompt_ids": ids}]
        if ids or len(self.prompt) > _MOST_PROMPTS:
            raise Refused(
                f"The prompt is one text, one list of token ids, or at most {_MOST_PROMPTS} of them.",
                parameter="prompt",
            )
        return [{"prompt": one} if isinstance(one, str) else {"prompt_ids": one} for one in self.prompt]


class Completions:
    """The completions of one request, as a whole or as chunks."""

    def __init__(self, service: ModelService, request: CompletionRequest, defaults: Defaults, client: str) -> None:
        self._model = service.check_name(request.model)
        self._service = service
        self._client = client
        self._generates = request.generates(defaults)
        self._choices = request.n or 1
        self._beams = self._generates[0].beams > 1
        self._with_usage = request.wants_usage
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> bytes:
        """The completion. Raises Refused."""
        await self._check_prompts()
        finished = [await self._service.finished(generate, self._client) for generate in self._generates]
        answers = [answer for one in finished for answer in answers_of(one, self._choices)]
        choices = [
            self._choice(number, full_text(answer), answer.logprobs, finish_reason(answer))
            for number, answer in enumerate(answers)
        ]
        return msgspec.json.encode({**self._head(), "choices": choices, "usage": summed(finished)})

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. Raises Refused."""
        await self._check_prompts()
        finished: list[Finished] = []
        ends: dict[int, int] = {}
        for place, generate in enumerate(self._generates):
            first = place * self._choices
            async with aclosing(self._service.answer(generate, self._client)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        finished.append(event)
                        for number, answer in enumerate(answers_of(event, self._choices), first):
                            text = answer.text if self._beams else ""
                            yield self._chunk(self._choice(number, text, [], finish_reason(answer)))
                    elif isinstance(event, Piece) and not self._beams:
                        text = event.text if event.withdrawn else event.reasoning + event.text
                        number = first + event.sample
                        if text or event.logprobs:
                            yield self._chunk(self._choice(number, text, event.logprobs, None, ends.get(number, 0)))
                        ends[number] = ends.get(number, 0) + sum(len(one.text) for one in event.logprobs)
        if self._with_usage:
            yield event_frame({**self._head(), "choices": [], "usage": summed(finished)})
        yield DONE

    async def _check_prompts(self) -> None:
        """Raises Refused for one of several prompts before the first is answered."""
        if len(self._generates) == 1:
            return
        for generate in self._generates:
            tokens, facts = await self._service.prompt_tokens(generate), self._service.facts
            if facts is not None and tokens >= facts.context_limit:
                raise Refused(
                    f"One of the prompts is {tokens:,} tokens, and the context holds {facts.context_limit:,}, answer "
                    "included: shorten it.",
                    code=TOO_LONG,
                    parameter="prompt",
                )

    def _chunk(self, choice: dict[str, object]) -> bytes:
        usage_yet: dict[str, object] = {"usage": None} if self._with_usage else {}
        return event_frame({**self._head(), "choices": [choice], **usage_yet})

    def _choice(
        self, number: int, text: str, logprobs: list[TokenLogprob], reason: str | None, begin: int = 0
    ) -> dict[str, object]:
        found = logprobs_object(logprobs, begin) if logprobs else None
        return {"text": text, "index": number, "logprobs": found, "finish_reason": reason}

    def _head(self) -> dict[str, object]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}


def full_text(answer: Sample) -> str:
    """Thoughts are text like any other here: nothing of the prompt said that there would be some."""
    return answer.reasoning + answer.text


def logprobs_object(logprobs: list[TokenLogprob], begin: int) -> dict[str, object]:
    """``begin``: characters of the answer before the first of these tokens."""
    offsets, end = [], begin
    for token in logprobs:
        offsets.append(end)
        end += len(token.text)
    return {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [token.logprob for token in logprobs],
        "top_logprobs": [{other.text: other.logprob for other in token.top} for token in logprobs],
        "text_offset": offsets,
    }


def summed(finished: list[Finished]) -> dict[str, object]:
    """The usage of all prompts."""
    total = usage(finished[0])
    for one in finished[1:]:
        for name, value in usage(one).items():
            before = total[name]
            if isinstance(before, int) and isinstance(value, int):
                total[name] = before + value
            elif isinstance(before, dict) and isinstance(value, dict):
                total[name] = {key: count + value[key] for key, count in before.items()}
    return total
