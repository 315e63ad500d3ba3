"""Rendering of chat templates in a separate process, which is killed when it takes too long or is cancelled."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import selectors
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import Cancelled, ModelError, shown
from engine.system.processes import start_module

CPU_S = 5.0
"""Maximum seconds of CPU time for an answer of the renderer."""
DEADLINE_S = 30.0
"""Maximum seconds for an answer of the renderer, if it does not reach its limit of CPU time before."""
LOOK_S = 0.02
"""Seconds between two checks whether to stop."""
MEMORY_BYTES = 768 << 20
"""Maximum bytes of a renderer's memory, after which it is killed if the system cannot limit it."""
ANSWER_BYTES = 256 << 20
"""Maximum bytes of one answer."""

_SYSTEM_LIMITS_MEMORY = platform.system() == "Linux"

StopCheck = Callable[[], bool]


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
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self._process = _start()
        self._facts: TemplateFacts | None = None
        self._finalizer = weakref.finalize(self, _end, self._process)

    def close(self) -> None:
        self._finalizer()

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
            "cpu_s": self._cpu_s,
        }
        with self._lock:
            if self._process.poll() is not None:
                self._begin_again()
            try:
                answer = self._exchange(json.dumps(request).encode() + b"\n", should_stop)
            except BaseException:
                # It may be in the middle of something: the next question needs one that listens.
                self._begin_again()
                raise
        if "error" in answer:
            raise _refused(str(answer["error"]))
        return answer

    def _begin_again(self) -> None:
        self._finalizer()
        self._process = _start()
        self._finalizer = weakref.finalize(self, _end, self._process)

    def _exchange(self, request: bytes, should_stop: StopCheck) -> dict[str, Any]:
        """Send ``request`` and wait for the line that answers it."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        to_send, received = memoryview(request), bytearray()
        deadline = time.monotonic() + DEADLINE_S
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if should_stop():
                    raise Cancelled("Stopped while the chat template was being rendered.")
                if time.monotonic() > deadline:
                    raise _refused(f"it does not end within {DEADLINE_S:g} seconds")
                if len(received) > ANSWER_BYTES or _memory_of(process.pid) > MEMORY_BYTES:
                    raise _refused(f"it needs more than {MEMORY_BYTES >> 20} MB of memory")
                for key, _ in selector.select(LOOK_S):
                    if key.fileobj is process.stdin:
                        to_send = to_send[_write(process.stdin.fileno(), to_send) :]
                        if not to_send:
                            selector.unregister(process.stdin)
                        continue
                    piece = os.read(process.stdout.fileno(), 1 << 20)
                    if not piece:
                        raise _refused(_why_ended(process, self._cpu_s))
                    received += piece
        answer: dict[str, Any] = json.loads(received)
        return answer


def _start() -> subprocess.Popen[bytes]:
    process = start_module(
        "engine.models.text.template_sandbox",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()


def _write(descriptor: int, data: memoryview) -> int:
    """How many bytes were taken; all of them if nobody listens any more, which shows when reading."""
    try:
        return os.write(descriptor, data[: 1 << 16])
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)


def _why_ended(process: subprocess.Popen[bytes], cpu_s: float) -> str:
    import signal

    status = process.wait()
    if status == -signal.SIGVTALRM:
        return f"it does not end within {cpu_s:g} seconds"
    return f"its process ended by itself (status {status})"


def _memory_of(pid: int) -> int:
    """Bytes that the process has in memory; 0 where that is limited by the system, or it is gone."""
    if _SYSTEM_LIMITS_MEMORY:
        return 0
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _refused(reason: str) -> ModelError:
    return ModelError(f"The model's chat template refuses this conversation: {shown(reason, 300)}", "bad-input")
