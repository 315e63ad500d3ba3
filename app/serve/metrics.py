"""Figures of the server, as Prometheus reads them: a dozen lines of text, made here without a library."""

from __future__ import annotations

from engine.ipc.messages import Finished


class Metrics:
    """Sums since the start. They tell nothing of what was asked."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        """Number of requests by (path, status)."""
        self.answers: dict[str, int] = {}
        """Number of answers by the reason of their end."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.waiting_s = 0.0
        self.first_token_s = 0.0
        self.expert_hits = 0
        self.expert_misses = 0
        self.exchange_s = 0.0
        self.measured_tokens = 0
        self.answering_s = 0.0

    def requested(self, path: str, status: int) -> None:
        self.requests[path, status] = self.requests.get((path, status), 0) + 1

    def waited(self, seconds: float) -> None:
        self.waiting_s += seconds

    def cancelled(self) -> None:
        self.answers["cancelled"] = self.answers.get("cancelled", 0) + 1

    def answered(self, finished: Finished) -> None:
        self.answers[finished.finish_reason] = self.answers.get(finished.finish_reason, 0) + 1
        self.prompt_tokens += finished.prompt_tokens
        self.cached_tokens += finished.cached_tokens
        self.completion_tokens += finished.completion_tokens
        self.reasoning_tokens += finished.reasoning_tokens
        self.first_token_s += finished.ttft_s
        if finished.tokens_per_s > 0:
            self.answering_s += finished.completion_tokens / finished.tokens_per_s
        timing = finished.timing
        if timing is None:
            return
        if timing.movement is not None:
            self.expert_hits += timing.movement.hits
            self.expert_misses += timing.movement.misses
        for phase in (timing.prefill, timing.decode):
            self.measured_tokens += phase.tokens
            self.exchange_s += sum(layer.exchange for layer in phase.layers) * phase.tokens / 1000

    def text(self, *, waiting: int, running: int, loaded: bool) -> str:
        """The text format of Prometheus, version 0.0.4."""
        lines: list[str] = []

        def family(name: str, kind: str, about: str, *samples: tuple[str, float]) -> None:
            lines.append(f"# HELP privatellm_{name} {about}")
            lines.append(f"# TYPE privatellm_{name} {kind}")
            lines.extend(f"privatellm_{name}{labels} {value:.10g}" for labels, value in samples)

        family("model_loaded", "gauge", "Whether the model is loaded.", ("", loaded))
        family("requests_waiting", "gauge", "Requests that wait for the engine.", ("", waiting))
        family("requests_running", "gauge", "Requests that the engine answers now.", ("", running))
        family("requests_total", "counter", "Requests by path and HTTP status.", *(
            (f'{{path="{path}",status="{status}"}}', count) for (path, status), count in sorted(self.requests.items())
        ))  # fmt: skip
        family("answers_total", "counter", "Answers by the reason of their end.", *(
            (f'{{reason="{reason}"}}', count) for reason, count in sorted(self.answers.items())
        ))  # fmt: skip
        for name, value, about in (
            ("prompt_tokens_total", self.prompt_tokens, "Tokens of prompts."),
            ("prompt_tokens_cached_total", self.cached_tokens, "Tokens of prompts that were in the cache."),
            ("completion_tokens_total", self.completion_tokens, "Tokens of answers, thoughts included."),
            ("reasoning_tokens_total", self.reasoning_tokens, "Tokens of thoughts."),
            ("waiting_seconds_total", self.waiting_s, "Seconds that requests waited for the engine."),
            ("first_token_seconds_total", self.first_token_s, "Seconds from the engine's start to first tokens."),
            ("decoding_seconds_total", self.answering_s, "Seconds that the engine spent on tokens of answers."),
            ("expert_hits_total", self.expert_hits, "Active experts that were in GPU memory, where it is shared."),
            ("expert_misses_total", self.expert_misses, "Active experts that were not in GPU memory."),
            ("measured_tokens_total", self.measured_tokens, "Tokens of the steps whose parts were measured."),
            ("exchange_seconds_total", self.exchange_s, "Seconds of exchanges in a ring, for the measured tokens."),
        ):
            family(name, "counter", about, ("", value))
        return "\n".join(lines) + "\n"
