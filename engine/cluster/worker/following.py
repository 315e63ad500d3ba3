"""A follower's epoch: its share of the model, loaded, and a thread that works until the epoch ends."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from engine.cluster.epoch_links import EpochLinks
from engine.cluster.membership.control_messages import EpochSpec, Forming
from engine.cluster.transport.exchange import PeerLost
from engine.cluster.weights.transfer import outline
from engine.cluster.worker.follower_work import (
    Busy,
    CentralWork,
    FollowerTask,
    ModelWork,
    TimedExchange,
    TimedLink,
    WholeWork,
    Work,
)
from engine.errors import ModelError
from engine.ipc.messages import ExchangeName, LendTerms
from engine.ipc.progress import ProgressCallback
from engine.moe.rank_context import HEAD

JOIN_S = 3.0


class Following:
    """Loads when it is made; raises ModelError, Cancelled from ``progress``, PeerLost."""

    def __init__(
        self,
        spec: EpochSpec,
        links: EpochLinks,
        exchange: ExchangeName,
        folder: Path,
        progress: ProgressCallback,
        terms: LendTerms,
        notice: Callable[[str], None],
    ) -> None:
        """``notice`` hears from any thread what the person here should know."""
        self.ended: str | None = None
        """Why it ended; None while it goes on."""
        self.failed_here = False
        """It ended because of this machine; the others were told."""
        self.broken: list[str] = []
        """Node ids to which its link broke, which ended it."""
        self.tokens = 0
        self.warming: tuple[int, int] | None = None
        """Bytes of the weights that were brought into memory, of how many; None before and after."""
        self.expert_bytes = outline(folder).expert_bytes * spec.placement.count_of(spec.rank)
        self._members = spec.members
        self._links = links
        self._busy = Busy()
        task = FollowerTask(spec, folder, terms, progress, self._ran, self._warm, notice)
        self._work: Work
        self._whole: WholeWork | None = None
        if spec.whole:
            self._work = self._whole = WholeWork(task, TimedLink(links.commands[HEAD], self._busy))
        elif spec.mode == "central":
            central = TimedExchange(links.keep(exchange), self._busy)
            self._work = CentralWork(task, central)
        else:
            link = TimedLink(links.commands[HEAD], self._busy)
            self._work = ModelWork(task, links.keep(exchange), link)
        self._thread = threading.Thread(target=self._run, name="following", daemon=True)

    def ready(self) -> Forming:
        return Forming(
            stage="ready",
            ready=True,
            executor=self._work.executor,
            can_truncate=self._whole is None or self._whole.can_truncate,
            notices=self._work.notices,
        )

    def stop_pass(self, number: int) -> None:
        """The head gives up pass ``number`` of a model that runs here as a whole. From any thread."""
        if self._whole is not None:
            self._whole.answers.stop(number)

    def start(self) -> None:
        self._thread.start()

    @property
    def probe_s(self) -> float | None:
        """Seconds of the first pass after idling, as last measured."""
        return self._work.probe_s

    def busy(self) -> float:
        """Share of the last seconds in which it did something for the head."""
        return self._busy.share()

    def close(self) -> None:
        """End the links and the thread, and free the model."""
        self._links.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._work.close()
        # What refers to itself would keep the files mapped, and their memory, until it happens to be collected.
        gc.collect()

    def _run(self) -> None:
        try:
            self._work.run()
        except PeerLost as error:
            self.broken = [one.node_id for one in self._members if one.rank in error.ranks]
            self.ended = str(error)
        except ModelError as error:
            self.failed_here = True
            self.ended = str(error)
        except BaseException as error:
            self.ended = f"this machine failed with {type(error).__name__}"
            traceback.print_exc()
        finally:
            self._links.close()

    def _warm(self, done: int, total: int) -> None:
        self.warming = (done, total) if done < total else None

    def _ran(self, tokens: int) -> None:
        self.tokens += tokens
