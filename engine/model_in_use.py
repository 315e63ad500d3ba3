"""The one model that an engine has loaded: loading it, answering with it, and making room for the next.

Results of answering are kept: the popularity of experts, and prefixes.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.errors import ModelError
from engine.ipc.messages import AnyEvent, Finished, Generate, Load, ModelFacts, Notice
from engine.ipc.progress import ProgressCallback

if TYPE_CHECKING:
    from pathlib import Path

    from engine.cluster.network import ClusterNetwork
    from engine.generation.programs import Program
    from engine.moe.popularity import PopularityWriter
    from engine.residency.resident_model import Residency
    from engine.session.session import Session
    from engine.session.turn import TurnControl

LAST_WRITE_S = 5.0
"""Maximum time for writing what was read to disk before the model makes place for another, in seconds."""


class ModelInUse:
    """See the module. ``send`` tells all programs. One thread loads and answers; it alone calls what says nothing else.

    ``session`` is None while no model is loaded. It may be read from any thread.
    """

    def __init__(self, send: Callable[[AnyEvent], None]) -> None:
        self.session: Session | None = None
        self._send = send
        self._popularity_writer: PopularityWriter | None = None
        self._residency: Residency | None = None

    @property
    def loaded(self) -> Session:
        """The session of the loaded model. Raises ModelError (bad-input) if there is none."""
        if self.session is None:
            raise ModelError("No model is loaded; choose one first.", kind="bad-input")
        return self.session

    def load(
        self,
        request: Load,
        progress: ProgressCallback,
        cancelled: Callable[[], bool],
        release: Callable[[], None],
        network: ClusterNetwork | None,
    ) -> ModelFacts:
        """Load a model by :func:`engine.session.loading.load_session`; ``release`` calls :meth:`release`."""
        from engine.session.loading import load_session

        loaded = None if self.session is None else self.session.facts
        self.session = load_session(request, progress, cancelled, release, network, loaded)
        self._popularity_writer = popularity_writer_for(self.session, request.model, self._notice)
        self._make_resident(self.session, request, network)
        return self.session.facts

    def release(self) -> None:
        """Free the loaded model, so that two never have to fit at once."""
        self.keep_popularity()
        end = time.monotonic() + LAST_WRITE_S
        self.keep_prefixes(lambda: time.monotonic() > end, last=True)
        self._popularity_writer = None
        if self._residency is not None:
            self._residency.release()
        session, self.session = self.session, None
        if session is not None:
            session.close()

    def answer(self, request: Generate, emit: Callable[[AnyEvent], None], control: TurnControl) -> Program[Finished]:
        """Answer ``request`` by :meth:`engine.session.session.Session.answer`, while :meth:`undisturbed`."""
        session = self.loaded
        try:
            finished = yield from session.answer(request, emit, control)
            return finished if self._residency is None else self._residency.probed(finished, session.first_pass_s)
        finally:
            if self._popularity_writer is not None:
                self._popularity_writer.save_if_due()

    def undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Ensure that only the model touches the weights until the end of the context."""
        return contextlib.nullcontext() if self._residency is None else self._residency.answering()

    def leave_out_popularity(self) -> None:
        """Do not count what was run since the popularity counts were stored."""
        if self._popularity_writer is not None:
            self._popularity_writer.leave_out()

    def keep_popularity(self) -> None:
        """Store the loaded model's popularity counts. From any thread."""
        writer = self._popularity_writer
        if writer is not None:
            writer.save()

    def keep_prefixes(self, should_stop: Callable[[], bool], *, last: bool = False) -> None:
        """Write to disk what the session may keep there, until ``should_stop()``. It never fails."""
        session = self.session
        if session is None:
            return
        try:
            for text in session.keep_prefixes(should_stop, last=last):
                self._notice(text)
        except Exception:
            traceback.print_exc()

    def _make_resident(self, session: Session, request: Load, network: ClusterNetwork | None) -> None:
        """Bring the loaded model's weights into memory and keep them there, in the background."""
        from engine.models.store.local_models import resolve
        from engine.residency.resident_model import Residency

        if self._residency is None:
            self._residency = Residency(self._send)

        def folder() -> Path:
            in_ring = None if network is None else network.loaded_from
            return in_ring or resolve(request.model).require_folder()

        self._residency.loaded(session.model, folder, request)

    def _notice(self, text: str) -> None:
        self._send(Notice(text=text))


def popularity_writer_for(session: Session, model: str, notice: Callable[[str], None]) -> PopularityWriter | None:
    """The writer of ``session``'s use of experts; None for a dense model, or a runtime that does not count it."""
    from engine.models.store.local_models import profile_key, resolve
    from engine.moe.popularity import PopularityWriter
    from engine.system.locations import profile_paths

    popularity, profile = session.model.popularity, session.profile
    if popularity is None or profile is None:
        return None
    resolved = resolve(model)
    path, _ = profile_paths(profile_key(resolved.folder or resolved.plain_folder))
    return PopularityWriter(path, profile, popularity, session.facts.experts_per_token, notice)
