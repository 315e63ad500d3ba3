"""A stand-in for a network that is slow, loses what it carries, or was unplugged: a TCP proxy for a node's two ports.

Of a link without netem it shows what a program can see: bytes that come late, in bursts, or not any more, while nobody
closes the connection.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections import deque

READ = 1 << 16
WAITING = 1 << 22
"""Bytes on their way, per direction, before no more are taken."""
LOOK_S, STALLING_LOOK_S = 0.03, 0.005
"""Most seconds between two looks at what the wire is told."""
LEAST_S = 0.0005
"""Least seconds between two tries to hand on what a full socket did not take."""


class _Way:
    """One direction of a connection: bytes with the time at which they arrive."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.waiting: deque[tuple[float, memoryview]] = deque()
        self.nbytes = 0
        self.ended = False
        self.told = False
        self.back: _Way | None = None
        """The other direction."""


class PairProxy:
    """Listens at ``port`` and the port after it, and forwards to ``target`` and the one after that."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._delay = 0.0
        self._silent = False
        self._stalls: random.Random | None = None
        self._stalled_until = 0.0
        self._closed = False
        self._ways: list[_Way] = []
        self._listening = self._bind()
        self.port = self._listening[0].getsockname()[1]
        self.carried = 0
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def delay(self, seconds: float) -> None:
        """Everything arrives so much later."""
        self._delay = seconds

    def stall(self, seed: int | None) -> None:
        """Now and then nothing arrives for up to 0.6 s; None: no longer."""
        self._stalls = None if seed is None else random.Random(seed)

    def unplug(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        self._silent = True

    def plug_in(self) -> None:
        self._silent = False

    def behave(self) -> None:
        """As a cable does."""
        self._delay, self._silent, self._stalls = 0.0, False, None

    def reset(self) -> None:
        """Every connection is torn down."""
        with self._lock:
            ways, self._ways = self._ways, []
        for way in ways:
            with contextlib.suppress(OSError):
                way.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            way.source.close()

    def close(self) -> None:
        self._closed = True
        self._thread.join(5.0)
        for listener in self._listening:
            listener.close()
        self.reset()

    @staticmethod
    def _bind() -> list[socket.socket]:
        while True:
            first, second = socket.socket(), socket.socket()
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                first.close()
                second.close()
                continue
            for listener in (first, second):
                listener.listen(64)
                listener.setblocking(False)
            return [first, second]

    def _run(self) -> None:
        while not self._closed:
            now = time.monotonic()
            if self._stalls is not None and now > self._stalled_until and self._stalls.random() < 0.004:
                self._stalled_until = now + self._stalls.uniform(0.1, 0.6)
            blocked = self._silent or now < self._stalled_until
            with self._lock:
                ways = list(self._ways)
            self._wait(ways, now, blocked)
            self._accept()
            for way in ways:
                self._carry(way, blocked)
            with self._lock:
                self._ways = [way for way in self._ways if not way.told]

    def _wait(self, ways: list[_Way], now: float, blocked: bool) -> None:
        """Until there is something to do, or it is time to look whether the wire is to behave otherwise."""
        poll = select.poll()
        for listener in self._listening:
            poll.register(listener, select.POLLIN)
        most = LOOK_S if self._stalls is None else STALLING_LOOK_S
        if not blocked:
            for way in ways:
                if not way.ended and way.nbytes < WAITING and (descriptor := way.source.fileno()) >= 0:
                    poll.register(descriptor, select.POLLIN)
            most = min([most, *(max(LEAST_S, way.waiting[0][0] - now) for way in ways if way.waiting)])
        poll.poll(1000 * most)

    def _accept(self) -> None:
        for index, listener in enumerate(self._listening):
            with contextlib.suppress(BlockingIOError):
                near, _ = listener.accept()
                far = socket.socket()
                try:
                    far.connect(("127.0.0.1", self._target + index))
                except OSError:
                    near.close()
                    far.close()
                    continue
                for end in (near, far):
                    end.setblocking(False)
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                there, back = _Way(near, far), _Way(far, near)
                there.back, back.back = back, there
                with self._lock:
                    self._ways += [there, back]

    def _carry(self, way: _Way, blocked: bool) -> None:
        if blocked or way.told:
            return
        now = time.monotonic()
        try:
            while not way.ended and way.nbytes < WAITING:
                data = way.source.recv(READ)
                if not data:
                    way.ended = True
                    break
                way.waiting.append((now + self._delay, memoryview(data)))
                way.nbytes += len(data)
                self.carried += len(data)
        except BlockingIOError:
            pass
        except OSError:
            way.ended = True
        try:
            while way.waiting and way.waiting[0][0] <= now:
                due, data = way.waiting.popleft()
                count = way.target.send(data)
                way.nbytes -= count
                if count < len(data):
                    way.waiting.appendleft((due, data[count:]))
                    break
        except BlockingIOError:
            way.waiting.appendleft((due, data))
        except OSError:
            way.waiting.clear()
            way.ended = True
        if way.ended and not way.waiting:
            way.told = True
            with contextlib.suppress(OSError):
                way.target.shutdown(socket.SHUT_WR)
            if way.back is not None and way.back.told:
                way.source.close()
                way.target.close()
