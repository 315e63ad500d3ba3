"""Fields that OpenAI's chat completions and completions share, and what their answers have in common."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from app.serve.asking import (
    AnswerFormat,
    Count,
    Defaults,
    NaturalOrAll,
    Share,
    Switch,
    Temperature,
    sampling_of,
)
from app.serve.replies import Refused, error_object, event_frame
from engine.ipc.messages import MOST_SAMPLES, Constraint, Finished, Sample, Sampling

DONE = b"data: [DONE]\n\n"
Choices = Annotated[int, msgspec.Meta(ge=1, le=MOST_SAMPLES)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]


_OTHER_FORMS = (
    *("json_schema", "grammar", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class SampledRequest(msgspec.Struct, kw_only=True):
    """How answers are sampled, and their form. The fields after ``user`` are not OpenAI's, but what other servers
    have; the last ones are their own spellings of a form, which are refused."""

    model: str | None = None
    stream: Switch | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    max_tokens: NaturalOrAll | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: Choices | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[int, Bias] | None = None
    response_format: AnswerFormat | None = None
    user: str | None = None
    top_k: NaturalOrAll | None = None
    min_p: Share | None = None
    repetition_penalty: float | None = None
    beams: Count | None = None
    length_penalty: float | None = None
    json_schema: Any = None
    grammar: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, defaults: Defaults) -> Sampling:
        """Beams do not sample, so the person's own values do not hold for them."""
        names = (
            *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
            *("seed", "frequency_penalty", "presence_penalty", "logit_bias"),
        )
        return sampling_of(
            defaults if self.beams in (None, 1) else Defaults(), {name: getattr(self, name) for name in names}
        )

    def constraint(self) -> Constraint | None:
        """The form of the answer. Raises Refused."""
        for name in _OTHER_FORMS:
            if getattr(self, name) not in (None, "", {}, []):
                raise Refused(
                    f"The form of an answer is given as response_format here: leave {name} out, and use the type "
                    "json_schema, regex or grammar.",
                    parameter=name,
                )
        return self.response_format.constraint("response_format") if self.response_format is not None else None

    def widths(self) -> tuple[int, int]:
        """Beams and samples. Raises Refused."""
        beams, choices = self.beams or 1, self.n or 1
        if beams > 1 and choices > beams:
            raise Refused(f"{beams} beams give {beams} answers at most, not {choices}.", parameter="n")
        return beams, choices if beams == 1 else 1


def finish_reason(answer: Sample) -> str:
    return "stop" if answer.finish_reason == "cancelled" else answer.finish_reason


def reasoning_tokens(finished: Finished) -> int:
    return sum(one.reasoning_tokens for one in finished.samples) or finished.reasoning_tokens


def usage(finished: Finished) -> dict[str, object]:
    """The tokens of all answers; the prompt counts once."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens(finished)},
    }


def failure(refused: Refused) -> bytes:
    """An error in the middle of a stream, which OpenAI's clients raise."""
    return event_frame(error_object(refused, "openai"))
