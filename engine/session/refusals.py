"""Models and questions that are refused before anything is run for them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.errors import ModelError
from engine.ipc.messages import MOST_SAMPLES, Generate, Load, Message, ModelFacts
from engine.models.architectures.families import FAMILIES
from engine.models.text.tool_formats import ToolFormat, offered_tools
from engine.pictures.sight import TOWERS


def check_request(request: Load) -> None:
    """Raises ModelError (bad-input) for impossible numbers."""
    if request.prefill_chunk < 1:
        raise ModelError(f"The prefill chunk is {request.prefill_chunk} tokens; it takes at least 1.", kind="bad-input")
    if request.context_limit is not None and request.context_limit < 2:
        raise ModelError(f"A context limit of {request.context_limit} leaves no room for an answer.", kind="bad-input")


def check_samples(samples: int, temperatures: Sequence[float]) -> None:
    """Raises ModelError (bad-input) for an impossible number of answers, or of their ``temperatures``."""
    if len(temperatures) not in (0, samples):
        raise ModelError(f"{len(temperatures)} temperatures were given for {samples} answers.", kind="bad-input")
    if not 1 <= samples <= MOST_SAMPLES:
        raise ModelError(
            f"{samples} answers were asked for, which is not between 1 and {MOST_SAMPLES}.", kind="bad-input"
        )


def refuse_beside_beams(request: Generate) -> None:
    """Raises ModelError (bad-input) if ``request`` asks a beam search for what only sampling does."""
    sampling = request.sampling
    if (sampling.temperature or 0.0) > 0.0:
        raise ModelError(
            f"Beam search does not sample, but the temperature is {sampling.temperature}; "
            "use 1 beam, or leave the temperature out.",
            kind="bad-input",
        )
    asked = {
        "several samples": request.samples != 1,
        "log-probabilities of single tokens": request.logprobs is not None,
        "presence and frequency penalties": bool(sampling.presence_penalty or sampling.frequency_penalty),
        "a bias of logits": bool(sampling.logit_bias),
    }
    for what, wanted in asked.items():
        if wanted:
            raise ModelError(f"Beam search cannot do {what}; use 1 beam, or leave that out.", kind="bad-input")


def refuse_pictures(messages: Sequence[Message], model: str, way_out: str) -> None:
    """Raises ModelError (bad-input) if there are pictures, which ``model`` does not see. ``way_out``: what to do."""
    count = sum(len(message.pictures) for message in messages)
    if count:
        what = "a picture" if count == 1 else f"{count} pictures"
        raise ModelError(
            f"The question holds {what}, and {model} sees none: leave that out, or {way_out}.", "bad-input"
        )


def way_to_see(facts: ModelFacts, *, in_ring: bool) -> str:
    """What to do so that pictures are seen, for the model of ``facts`` that sees none."""
    whole = FAMILIES[facts.family].whole if facts.family in FAMILIES else ""
    if whole not in TOWERS:
        *models, last = dict.fromkeys(tower.models for tower in TOWERS.values())
        return f"load a model that sees: {', '.join(models)} or {last}"
    if in_ring:
        return "load it on this machine alone, as a ring shows it none"
    return (
        "put its mmproj file beside the GGUF file, or load its safetensors files as published, as these files lack the "
        "part that sees"
    )


def with_usable_tools(request: Generate, form: ToolFormat | None) -> tuple[Generate, list[str]]:
    """``request`` with the tools that its answer may call in ``form``, and a sentence on each that was left out.

    Raises ModelError (bad-input) if they are malformed, or cannot be had together with what else is asked for.
    """
    if request.tool_choice == "none" and not request.forced_tool:
        return msgspec.structs.replace(request, tools=[]), []
    tools, left_out = offered_tools(request.tools, request.forced_tool, form)
    if not tools:
        if request.tool_choice == "required":
            raise ModelError("A tool must be called, but none is given that the model can call.", "bad-input")
        return msgspec.structs.replace(request, tools=[]), left_out
    asked = {
        "a question without messages": request.messages is None,
        "an answer that is continued": request.continue_last,
        "a constraint": request.constraint is not None,
        "beams": request.beams > 1,
    }
    for what, wanted in asked.items():
        if wanted:
            raise ModelError(f"Tools and {what} cannot be had together; leave one of them out.", "bad-input")
    return msgspec.structs.replace(request, tools=tools), left_out
