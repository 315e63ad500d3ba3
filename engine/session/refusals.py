"""Questions that are refused before anything is run for them."""

from __future__ import annotations

from engine.errors import ModelError
from engine.ipc.messages import MOST_SAMPLES, Generate


def check_samples(samples: int) -> None:
    """Raises ModelError (bad-input) for an impossible number of answers."""
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


def refuse_unknown(request: Generate) -> None:
    """Raises ModelError (bad-input) if ``request`` asks for what no runtime does yet."""
    messages = request.messages or []
    asked = {
        "tools": bool(request.tools or request.forced_tool or request.tool_choice == "required"),
        "results of tools": any(message.role == "tool" or message.tool_calls for message in messages),
    }
    for what, wanted in asked.items():
        if wanted:
            raise ModelError(f"This version of the engine cannot answer with {what}; leave that out.", "bad-input")
