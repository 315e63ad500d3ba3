"""The engine process: ``python -m engine.host`` reads requests from its stdin and writes events to its stdout.

The main thread only reads, so that cancelling and the end of the screen are noticed whatever the model does; one
thread loads and generates, in order; another one fetches and prepares models, so that a chat goes on meanwhile. The
process ends with its stdin.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import msgspec

from engine.cluster.parts import THE_PRODUCT, EngineParts
from engine.cluster.transport.grpc_environment import ONLY_TLS_1_3
from engine.errors import ErrorKind, ModelError
from engine.ipc.messages import (
    PROTOCOL_VERSION,
    AnyEvent,
    AnyRequest,
    Bench,
    Cancel,
    CloseNetwork,
    CountTokens,
    Done,
    EstimateBeams,
    Failed,
    ForgetPeer,
    Generate,
    Hello,
    ListPeers,
    Load,
    Loaded,
    MachineMeasured,
    MeasureMachine,
    Notice,
    OpenNetwork,
    Pair,
    Plan,
    Prepare,
    ProtocolError,
    Pull,
    Resize,
    ShowCode,
    Shutdown,
    Watch,
    request_reader,
)
from engine.ipc.pipes import EventWriter, Pipes, claim_standard_streams
from engine.ipc.progress import Reports
from engine.models.locations import locate
from engine.models.privacy import keep_to_owner
from engine.models.starter_defaults import renew_defaults
from engine.moe.kernels.cpu_threads import within_this_machine
from engine.moe.kernels.pool import physical_cores
from engine.system.awake import AWAKE
from engine.system.own_memory import memory_in_use
from engine.system.temporary_folders import is_remover

if TYPE_CHECKING:
    from pathlib import Path

    from engine.cluster.network import ClusterNetwork
    from engine.moe.popularity_file import PopularityWriter
    from engine.residency.resident_model import Residency
    from engine.session.session import Session

READ_BYTES = 1 << 16

SPINS = 2000
"""Spin iterations of an idle OpenMP thread before it sleeps (libgomp only; elsewhere the wait policy alone counts)."""
KERNELS_KEPT = 128
"""Maximum compiled kernels that torch and oneDNN keep: enough for decoding and for the row counts of prompts."""

LAST_SAVE_S = 1.0
"""Maximum time that the end of the process waits for a disk, in seconds."""

EXIT_BAD_FRAME = 3
"""Exit status after a frame that is not a request."""
EXIT_THREAD_FAILED = 4
"""Exit status after an uncaught exception in one of our threads."""


class Task:
    """A request in progress, and whether it was cancelled."""

    def __init__(self, request: AnyRequest, host: Host) -> None:
        self.request = request
        self._host = host
        self._stop = threading.Event()
        self.report = Reports(request.id, host.send, self.cancelled)

    def cancel(self) -> None:
        self._stop.set()

    def cancelled(self) -> bool:
        return self._stop.is_set()

    def watching(self) -> bool:
        return self._host.watching


class Host:
    """Takes requests and emits events. ``send`` must be callable from any thread."""

    def __init__(
        self,
        send: Callable[[AnyEvent], None],
        between_tasks: Callable[[], None] = lambda: None,
        parts: EngineParts = THE_PRODUCT,
    ) -> None:
        self.send = send
        self._parts = parts
        self.watching = False
        self._between_tasks = between_tasks
        self._session: Session | None = None
        self._popularity_writer: PopularityWriter | None = None
        self._residency: Residency | None = None
        self._network: ClusterNetwork | None = None
        self._networking = threading.Lock()
        self._tasks: dict[int, Task] = {}
        self._lock = threading.Lock()
        self._answering: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._fetching: queue.SimpleQueue[Task] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the two working threads."""
        for name, tasks in (("answering", self._answering), ("fetching", self._fetching)):
            threading.Thread(target=self._work, args=(tasks,), name=name, daemon=True).start()

    def take(self, request: AnyRequest) -> bool:
        """Accept a request, from the reading thread; false if it asks to end the process."""
        match request:
            case Shutdown():
                return False
            case Watch(timing=timing):
                self.watching = timing
            case Cancel(target=target):
                with self._lock:
                    task = self._tasks.get(target)
                if task is not None:
                    task.cancel()
            case Pull() | Prepare():
                self._fetching.put(self._accept(request))
            case Plan() | OpenNetwork() | CloseNetwork() | ShowCode() | Pair() | ForgetPeer() | ListPeers():
                # The screen asks this while an answer is running.
                self._finish_beside(self._accept(request))
            case EstimateBeams() | CountTokens() if self._session is not None:
                # The screen asks this while an answer is running.
                self._finish_beside(self._accept(request))
            case _:
                self._answering.put(self._accept(request))
        return True

    def _accept(self, request: AnyRequest) -> Task:
        task = Task(request, self)
        with self._lock:
            self._tasks[request.id] = task
        return task

    def _work(self, tasks: queue.SimpleQueue[Task]) -> None:
        while True:
            self._finish(tasks.get())
            self._between_tasks()

    def _finish_beside(self, task: Task) -> None:
        """Run in a thread of its own, or in this one if the system cannot start another."""
        try:
            threading.Thread(target=self._finish, args=(task,), daemon=True).start()
        except RuntimeError:
            self._finish(task)

    def _finish(self, task: Task) -> None:
        event = self._answer(task)
        with self._lock:
            if self._tasks.get(task.request.id) is task:
                del self._tasks[task.request.id]
        try:
            self.send(event)
        except ProtocolError as error:
            self.send(Failed(id=task.request.id, error=f"The answer could not be sent: {error}."))

    def _answer(self, task: Task) -> AnyEvent:
        """Run a request to its last event; whatever goes wrong becomes one."""
        try:
            with AWAKE.held():
                return self._run(task)
        except ModelError as error:
            return Failed(id=task.request.id, error=str(error), kind=error.kind)
        except BaseException as error:
            traceback.print_exc()
            return Failed(id=task.request.id, error=_sentence(error), kind=_kind(error))

    def _run(self, task: Task) -> AnyEvent:
        request = task.request
        self._parts.observe("request", request, task.report)
        match request:
            case Load():
                return self._load(task, request)
            case Resize():
                return self._resize(request)
            case Generate():
                return self._generate(task, request)
            case Plan():
                return self._plan(request)
            case Bench():
                return self._bench(task, request)
            case EstimateBeams() | CountTokens():
                return self._told_by_model(request)
            case MeasureMachine():
                return _measured(request)
            case Pull():
                return self._pull(task, request)
            case Prepare():
                return _prepare(task, request)
            case OpenNetwork() | CloseNetwork() | ShowCode() | Pair() | ForgetPeer() | ListPeers():
                return self._the_network().answer(request)
            case _:
                raise ProtocolError(f"{type(request).__name__} is not answered")

    def _told_by_model(self, request: EstimateBeams | CountTokens) -> AnyEvent:
        session = self._loaded()
        if isinstance(request, CountTokens):
            return session.count_tokens(request)
        return session.estimate_beams(request)

    def _load(self, task: Task, request: Load) -> AnyEvent:
        from engine.session.loading import load_session

        task.report("loading", 0, 0, "")
        request, said = within_this_machine(request)
        if said:
            self.send(Notice(text=said))
        network = self._the_network() if request.partitioning == "ring" else None
        self._session = load_session(request, task.report, task.cancelled, self._release, network)
        self._popularity_writer = popularity_writer_for(
            self._session, request.model, lambda text: self.send(Notice(text=text))
        )
        self._make_resident(request)
        for text in self._session.model.recorder.take_notices():
            self.send(Notice(text=text))
        return Loaded(id=request.id, facts=self._session.facts, memory=memory_in_use())

    def _pull(self, task: Task, request: Pull) -> AnyEvent:
        from engine.models import store

        resolved = store.resolve(request.model)
        node = self._network.open_node() if self._network is not None else None
        if node is not None and resolved.folder is None and resolved.kind in ("hub", "starter"):
            from engine.cluster.head.model_download import Copier

            taken = Copier(node, resolved, task.report).run()
            if taken is not None:
                return Done(id=request.id, path=str(taken[0]), detail=taken[1])
        if resolved.kind == "starter":
            from engine.models.starter import build_starter

            return Done(id=request.id, path=str(build_starter(task.report, task.cancelled)))
        from engine.models.fetching import pull
        from engine.runtimes.choosing import refuse_download

        folder = pull(request.model, task.report, task.cancelled, refuse_download)
        return Done(id=request.id, path=str(folder), detail=resolved.elsewhere)

    def _make_resident(self, request: Load) -> None:
        """Have the loaded model's weights brought into memory and looked after, in the background."""
        from engine.models.store import resolve
        from engine.residency.resident_model import Residency

        if self._residency is None:
            self._residency = Residency(self.send)

        def folder() -> Path:
            in_ring = self._network.loaded_from if self._network is not None else None
            return in_ring if request.partitioning == "ring" and in_ring else resolve(request.model).require_folder()

        self._residency.loaded(self._loaded().model, folder, request)

    def _the_network(self) -> ClusterNetwork:
        """Made when it is first asked for; it opens no socket by itself."""
        with self._networking:
            if self._network is None:
                from engine.cluster.network import ClusterNetwork

                self._network = ClusterNetwork(self.send, parts=self._parts)
            return self._network

    def close_network(self) -> None:
        """Say goodbye to the other machines, if there are any. From any thread."""
        network = self._network
        if network is not None:
            network.close()

    def _resize(self, request: Resize) -> AnyEvent:
        session = self._loaded()
        facts = session.resize(request.gpu_expert_bytes)
        for text in session.model.recorder.take_notices():
            self.send(Notice(text=text))
        return Loaded(id=request.id, facts=facts, memory=memory_in_use())

    def _plan(self, request: Plan) -> AnyEvent:
        from engine.session.plan_model import plan_model

        session = self._session
        network = self._the_network() if request.load.partitioning == "ring" else None
        return plan_model(request, session.facts if session is not None else None, network)

    def _bench(self, task: Task, request: Bench) -> AnyEvent:
        from engine.bench.running import check_bench, load_for, run_bench
        from engine.session.loading import find_folder

        check_bench(request)
        if request.kind == "residency":
            from engine.bench.residency import bench_residency

            # What is loaded would take its memory and its time.
            self._release()
            return bench_residency(request, task.report, task.cancelled)
        if request.kind == "exchange":
            from engine.bench.exchange import bench_exchange

            return bench_exchange(request, task.report, task.cancelled)
        if request.kind == "ring":
            from engine.bench.ring import bench_ring

            self._release()
            return bench_ring(request, task.report, task.cancelled)
        self._load(task, load_for(request))
        request = msgspec.structs.replace(request, load=within_this_machine(request.load)[0])
        _, folder = find_folder(request.load.model, task.report, task.cancelled)
        try:
            with self._undisturbed():
                buffer_bytes = self._parts.effort.buffer_bytes
                return run_bench(request, self._loaded(), folder, task.report, task.cancelled, buffer_bytes)
        finally:
            if self._popularity_writer is not None:
                self._popularity_writer.leave_out()

    def _release(self) -> None:
        """Free the loaded model, so that two never have to fit at once."""
        self.keep_popularity()
        self._popularity_writer = None
        if self._residency is not None:
            self._residency.release()
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def keep_popularity(self) -> None:
        """Store the loaded model's popularity counts. From any thread."""
        writer = self._popularity_writer
        if writer is not None:
            writer.save()

    def _generate(self, task: Task, request: Generate) -> AnyEvent:
        from engine.session.session import cancelled_answer

        session = self._loaded()
        if task.cancelled():
            return cancelled_answer(request.id)
        try:
            with self._undisturbed():
                finished = session.generate(request, self.send, task)
                return finished if self._residency is None else self._residency.probed(finished, session.first_pass_s)
        finally:
            if self._popularity_writer is not None:
                self._popularity_writer.save_if_due()

    def _undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Ensure that only the model touches the weights until the end of the context."""
        return contextlib.nullcontext() if self._residency is None else self._residency.answering()

    def _loaded(self) -> Session:
        if self._session is None:
            raise ModelError("No model is loaded; choose one first.", kind="bad-input")
        return self._session


def popularity_writer_for(session: Session, model: str, notice: Callable[[str], None]) -> PopularityWriter | None:
    """What keeps the use of ``session``'s experts; None for a dense model, or a runtime that does not count it."""
    from engine.models.locations import profile_paths
    from engine.models.store import profile_key, resolve
    from engine.moe.popularity_file import PopularityWriter

    popularity, profile = session.model.popularity, session.profile
    if popularity is None or profile is None:
        return None
    resolved = resolve(model)
    path, _ = profile_paths(profile_key(resolved.folder or resolved.plain_folder))
    return PopularityWriter(path, profile, popularity, session.facts.experts_per_token, notice)


def _measured(request: MeasureMachine) -> AnyEvent:
    from engine.calibration.memory_rate import memory_rate
    from engine.system.free_memory import memory

    return MachineMeasured(id=request.id, memory_bytes=memory().total, memory_read=memory_rate(physical_cores()))


def _prepare(task: Task, request: Prepare) -> AnyEvent:
    from engine.models import store
    from engine.models.gguf_folder import open_gguf
    from engine.models.prepare import needs_preparing, prepare

    resolved = store.resolve(request.model)
    if resolved.kind == "gguf":
        open_gguf(resolved.source, task.report, task.cancelled, resolved.plain_folder)
    folder = resolved.require_folder()
    worth_it, why = needs_preparing(folder)
    if not worth_it:
        return Done(id=request.id, path=str(folder), detail=why)
    prepare(folder, resolved.prepared_folder, task.report, task.cancelled)
    return Done(id=request.id, path=str(resolved.prepared_folder), detail=why)


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename} cannot be used: {error.strerror}; free it, mend it, or choose another place."
    what = str(error).strip().splitlines()[0][:300] if str(error).strip() else "no further word"
    return f"The engine failed with {type(error).__name__}: {what} (more in {locate('logs') / 'engine.log'})."


def _kind(error: BaseException) -> ErrorKind:
    from engine.system.free_memory import ran_out_of_memory

    if isinstance(error, OSError) and error.filename is not None:
        return "disk"
    return "memory" if ran_out_of_memory(error) else "internal"


def environment(threads: int) -> dict[str, str]:
    """Settings of libraries before they are imported: no network access by themselves, little spinning, small caches.

    OpenMP threads that spin between two operations become very slow when another process, such as the screen, needs the
    cores. Threads that sleep at once take half as long again on a quiet machine. They therefore spin for some tens of
    microseconds. oneDNN, and torch in front of it, keep a thousand kernels, one for every number of rows, of half a
    megabyte each.
    """
    kernels = str(KERNELS_KEPT)
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "USE_HUB_KERNELS": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        # Handshakes that strangers fail at are no news.
        "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "NONE"),
        **ONLY_TLS_1_3,
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "LRU_CACHE_CAPACITY": os.environ.get("LRU_CACHE_CAPACITY", kernels),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", kernels),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", str(SPINS)),
    }


def end_process(status: int) -> NoReturn:
    """End at once, whatever the threads do, and the children with it, but for those that tidy up behind it."""
    with contextlib.suppress(Exception):
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if is_remover(child.cmdline()):
                    continue
            with contextlib.suppress(psutil.Error):
                child.kill()
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(status)


def end_with_thread(failure: threading.ExceptHookArgs, notice: Callable[[str], None]) -> None:
    """End the process if ``failure`` ended a thread that ran our code, as others may wait for that thread.

    An ended process is started again, but a hanging one is not. Threads of other libraries are ignored.
    """
    name = "a thread" if failure.thread is None else failure.thread.name
    traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
    frames = traceback.walk_tb(failure.exc_traceback)
    if not any(frame.f_globals.get("__name__", "").startswith(("engine.", "discovery.")) for frame, _ in frames):
        return
    notice(f"The engine's {name} failed with {failure.exc_type.__name__}: the engine ends, to be started again.")
    end_process(EXIT_THREAD_FAILED)


def serve(pipes: Pipes, parts: EngineParts) -> NoReturn:
    """Answer requests until the stream of them ends."""
    writer = EventWriter(pipes.events, on_closed=lambda: end_process(0))
    threading.excepthook = lambda failure: end_with_thread(failure, lambda text: writer.send(Notice(text=text)))
    host = Host(writer.send, pipes.log.roll_if_large, parts)
    reader = request_reader()
    writer.send(Hello(protocol=PROTOCOL_VERSION, pid=os.getpid()))
    if pipes.log.problem is not None:
        writer.send(Notice(text=pipes.log.problem))
    host.start()
    parts.observe("serving")
    while data := os.read(pipes.requests, READ_BYTES):
        try:
            requests = reader.feed(data)
        except ProtocolError as error:
            # What follows a bad frame cannot be trusted to begin where a frame begins.
            writer.send(Notice(text=f"The engine got something that is no request and ends: {error}."))
            end_process(EXIT_BAD_FRAME)
        for request in requests:
            if not host.take(request):
                leave(host)
    leave(host)


def leave(host: Host) -> NoReturn:
    """End the process. Popularity counts are stored if the disk is quick, and the other machines are notified."""
    leaving = [threading.Thread(target=last, daemon=True) for last in (host.keep_popularity, host.close_network)]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(LAST_SAVE_S)
    end_process(0)


def main(parts: EngineParts = THE_PRODUCT) -> NoReturn:
    """``parts``: those of the product, unless a test composes the engine of others."""
    # Ctrl-c belongs to the screen, which decides what to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_to_owner()
    pipes = claim_standard_streams(locate("logs") / "engine.log")
    faulthandler.enable(file=2)
    os.environ.update(environment(physical_cores()))
    renew_defaults()
    serve(pipes, parts)


if __name__ == "__main__":
    main()
