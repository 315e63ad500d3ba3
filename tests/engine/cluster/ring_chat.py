"""A session over a ring in threads, and one over the same model on one machine, each with somebody at the controls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.cluster.head.head_model import RingModel
from engine.ipc.messages import AnyEvent, Finished, Generate, Load, Notice, Piece
from engine.session.session import Session
from tests.engine.cluster.thread_ring import ThreadFormer, loaded_model
from tests.support.opened_experts import experts_of

PROMPT = [5, 17, 101, 42, 9, 77, 30, 12, 64, 3, 88, 120, 7, 55, 90, 33]
ANSWER = 12


class Chat:
    """A session and somebody at the controls."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.events: list[AnyEvent] = []
        self.panel = False
        self.owner = "somebody"
        self.cancel_when: Callable[[list[AnyEvent]], bool] = lambda events: False
        self.on_event: Callable[[AnyEvent], None] = lambda event: None

    def cancelled(self) -> bool:
        return self.cancel_when(self.events)

    def watching(self) -> bool:
        return self.panel

    def __call__(self, prompt: list[int] = PROMPT, **options: object) -> Finished:
        self.events = []
        asked: dict[str, object] = {"max_tokens": ANSWER, **options}
        return self.session.generate(Generate(id=1, prompt_ids=prompt, **asked), self._take, self)  # type: ignore[arg-type]

    def _take(self, event: AnyEvent) -> None:
        self.events.append(event)
        self.on_event(event)

    @property
    def notices(self) -> str:
        return " ".join(event.text for event in self.events if isinstance(event, Notice))


def session_of(model: object) -> Session:
    return Session(model, None, ends=(), defaults={}, prefill_chunk=6, clock=iter(range(10**9)).__next__)  # type: ignore[arg-type]


class Setting:
    """The same model in a ring of three and on one machine, and somebody at each."""

    def __init__(self, folder: Path, runtime: str, dtype: str = "float32") -> None:
        request = Load(id=1, model="tiny", runtime=runtime, dtype=dtype, cpu_threads=1)  # type: ignore[arg-type]
        experts = experts_of(folder)
        self.former = ThreadFormer(folder, request, ["head", "attic", "cellar"], experts.layers, experts.count)
        self.model = RingModel("tiny", self.former, lambda *_: None)
        self.ring = Chat(session_of(self.model))
        self.alone = Chat(session_of(loaded_model(folder, request)))

    @property
    def formation(self):  # type: ignore[no-untyped-def]
        return self.former.formations[-1]

    def close(self) -> None:
        self.ring.session.close()
        self.alone.session.close()

    def kill_at(self, tokens: int, rank: int) -> None:
        """``rank`` dies when the answer has so many tokens."""
        doomed = self.formation

        def watch(event: AnyEvent) -> None:
            if isinstance(event, Piece) and event.tokens >= tokens and doomed is self.formation and not doomed.lost():
                self.former.names = [name for at, name in doomed.names.items() if at != rank]
                doomed.kill(rank)

        self.ring.on_event = watch
