"""Rendering of chat templates in a separate process, which is killed when it takes too long or is cancelled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError, shown
from engine.system.confined import ConfinedProcess, GaveUp, StopCheck

CPU_S = 5.0
"""Maximum seconds of CPU time for an answer of the renderer."""
MEMORY_BYTES = 512 << 20
"""Maximum bytes that rendering may add to the process."""


@dataclass(frozen=True)
class TemplateFacts:
    """What a template writes of its own."""

    literals: list[str]
    """All text that it writes or compares with."""
    after_answers: list[str]
    """What it writes after an assistant's message, the last one or an earlier one."""


class TemplateProcess:
    """A process that renders one model's chat template. It is started at once, and again after it was killed.

    From any thread, one rendering at a time. It ends with this object, and with this process. An answer may take
    ``cpu_s`` seconds of CPU time.
    """

    def __init__(self, template: str, cpu_s: float = CPU_S) -> None:
        self._template = template
        self._renderer = ConfinedProcess("engine.models.text.template_sandbox", cpu_s=cpu_s, memory_bytes=MEMORY_BYTES)
        self._facts: TemplateFacts | None = None

    def close(self) -> None:
        self._renderer.close()

    def facts(self, variables: Mapping[str, Any], should_stop: StopCheck = lambda: False) -> TemplateFacts:
        """What the template writes whatever is said. ``variables`` as of :meth:`render`, the same at every call. Raises
        ModelError and Cancelled as :meth:`render`."""
        if self._facts is None:
            found = self._ask(None, variables, False, should_stop)
            self._facts = TemplateFacts([*map(str, found["literals"])], [*map(str, found["after_answers"])])
        return self._facts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        continue_last: bool = False,
        should_stop: StopCheck = lambda: False,
    ) -> str:
        """The conversation as text. ``variables``: what the template may name beside the messages.

        Raises ModelError (bad-input) with the template's reason, or if it takes too much time or memory; Cancelled as
        soon as ``should_stop()``.
        """
        text = str(self._ask(list(messages), variables, continue_last, should_stop)["text"])
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _refused("it writes half of a surrogate pair, which is no text") from error
        return text

    def _ask(
        self,
        messages: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        continue_last: bool,
        should_stop: StopCheck,
    ) -> dict[str, Any]:
        request = {
            "template": self._template,
            "messages": messages,
            "variables": dict(variables),
            "continue_last": continue_last,
        }
        try:
            answer: dict[str, Any] = json.loads(self._renderer.ask(json.dumps(request).encode(), should_stop))
        except GaveUp as reason:
            raise _refused(str(reason)) from reason
        if "error" in answer:
            raise _refused(str(answer["error"]))
        return answer


def _refused(reason: str) -> ModelError:
    return ModelError(f"The model's chat template refuses this conversation: {shown(reason, 300)}", "bad-input")
