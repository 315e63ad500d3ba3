"""The engine process: ``python -m engine.host`` reads requests from its stdin and writes events to its stdout.

Other programs may attach through a Unix socket (:mod:`engine.connections`). The main thread only reads, so that
cancellation and the end of a program are noticed whatever the model does. A second thread loads models and answers
questions, those of several clients at the same time. A third one fetches and prepares models, so that a chat can go on
meanwhile. The process ends with the last program that uses it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

import msgspec

from engine.cluster.parts import THE_PRODUCT, EngineParts
from engine.connections import Connections, EventWriter
from engine.errors import ErrorKind, ModelError
from engine.ipc.engine_sockets import engine_key
from engine.ipc.messages import (
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
    ForgetPrefixes,
    Generate,
    ListPeers,
    Load,
    Loaded,
    MachineMeasured,
    MeasureMachine,
    ModelFacts,
    NetworkState,
    Notice,
    OpenNetwork,
    Pair,
    Plan,
    Prepare,
    Progress,
    ProtocolError,
    Pull,
    Resize,
    RingChanged,
    Sharing,
    ShowCode,
    Shutdown,
    Watch,
)
from engine.ipc.progress import Reports
from engine.model_in_use import ModelInUse
from engine.models.store.starter_defaults import renew_defaults
from engine.moe.kernels.pool import physical_cores, within_this_machine
from engine.process_life import EXIT_BAD_FRAME, Pipes, claim_standard_streams, end_process, end_with_thread, environment
from engine.system.awake import AWAKE
from engine.system.free_memory import memory_in_use
from engine.system.locations import locate
from engine.system.processes import keep_to_owner

if TYPE_CHECKING:
    from engine.cluster.network import ClusterNetwork
    from engine.generation.programs import Program
    from engine.session.scheduler import Scheduler

WAITING = "waiting for other answers"
"""Stage of a question that has to wait."""

LAST_SAVE_S = 1.0
"""Maximum seconds for which the end of the process waits for a disk."""


class Client:
    """A program that uses the engine. ``send`` writes to it and is thread-safe."""

    def __init__(self, send: Callable[[AnyEvent], None]) -> None:
        self.send = send
        self.watching = False
        """Whether the client's timing panel is open."""
        self.uses_model = False
        """Whether the client was told that the model is loaded."""
        self.knows_network = False
        """Whether the client asked about the network, so that it is told of changes."""


class Task:
    """A request in progress, and whether it was cancelled."""

    def __init__(self, request: AnyRequest, client: Client) -> None:
        self.request = request
        self.client = client
        self.only_shared = False
        """Whether a Load is answered only with the model that others have loaded, or refused."""
        self._stop = threading.Event()
        self.report = Reports(request.id, client.send, self.cancelled)

    @property
    def owner(self) -> tuple[Client, str]:
        """The owner on whose turn the request is served."""
        return self.client, self.request.client if isinstance(self.request, Generate) else ""

    def cancel(self) -> None:
        self._stop.set()

    def cancelled(self) -> bool:
        return self._stop.is_set()

    def watching(self) -> bool:
        return self.client.watching


class Host:
    """Takes requests and emits events. ``send`` belongs to a first client, for requests that name no other; None: there
    is none."""

    def __init__(
        self,
        send: Callable[[AnyEvent], None] | None = None,
        between_tasks: Callable[[], None] = lambda: None,
        parts: EngineParts = THE_PRODUCT,
    ) -> None:
        self._parts = parts
        self._clients: list[Client] = []
        self._between_tasks = between_tasks
        self._model = ModelInUse(self.send)
        self._network: ClusterNetwork | None = None
        self._networking = threading.Lock()
        self._tasks: dict[tuple[Client, int], Task] = {}
        self._lock = threading.Lock()
        self._loaded_as: Load | None = None
        """The request by which the model was loaded, without its client's own options."""
        self._full = False
        """Whether a question that is asked now has to wait."""
        self._using = threading.Lock()
        """Lock of the thread that runs the session."""
        self._answering: TurnQueue[tuple[Client, str], Task] = TurnQueue()
        self._fetching: TurnQueue[tuple[Client, str], Task] = TurnQueue()
        if send is not None:
            self.attach(send)

    def start(self) -> None:
        """Start the two working threads."""
        for name, tasks in (("answering", self._answering), ("fetching", self._fetching)):
            threading.Thread(target=self._work, args=(tasks,), name=name, daemon=True).start()

    # --- clients --------------------------------------------------------------------------------------------------

    def attach(self, send: Callable[[AnyEvent], None]) -> Client:
        """A new client, to which ``send`` writes. ``send`` must be thread-safe."""
        client = Client(send)
        with self._lock:
            self._clients.append(client)
            alone = len(self._clients) == 1
        if not alone:
            self._tell_of_sharing()
        return client

    def detach(self, client: Client) -> None:
        """Forget a client that is gone, and cancel its requests. Thread-safe."""
        with self._lock:
            if client in self._clients:
                self._clients.remove(client)
            tasks = [task for (owner, _), task in self._tasks.items() if owner is client]
        for task in tasks:
            self._cancel(task)
        self._tell_of_sharing()

    def send(self, event: AnyEvent) -> None:
        """Send ``event`` to all clients, but events of the network only to clients that asked for them. Thread-safe."""
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            if client.knows_network or not isinstance(event, NetworkState):
                client.send(event)

    def _tell_of_sharing(self) -> None:
        with self._lock:
            clients = len(self._clients)
        self.send(Sharing(clients=clients))

    def _others_use_model(self, client: Client) -> bool:
        return any(other.uses_model for other in list(self._clients) if other is not client)

    # --- requests -------------------------------------------------------------------------------------------------

    def take(self, request: AnyRequest, client: Client | None = None) -> None:
        """Accept a request, from the reading thread."""
        client = client or self._clients[0]
        match request:
            case Shutdown():
                return  # The end of a client is its connection's affair.
            case Watch(timing=timing):
                client.watching = timing
            case ForgetPrefixes(conversations=conversations):
                session = self._model.session
                if session is not None:
                    session.forget_prefixes(conversations)
            case Cancel(target=target):
                with self._lock:
                    task = self._tasks.get((client, target))
                if task is not None:
                    self._cancel(task)
            case Pull() | Prepare():
                self._queue(self._fetching, self._accept(request, client))
            case OpenNetwork() | CloseNetwork() | ShowCode() | Pair() | ForgetPeer() | ListPeers():
                client.knows_network = True
                self._finish_beside(self._accept(request, client))
            case Plan():
                # The screen asks this while an answer is running.
                self._finish_beside(self._accept(request, client))
            case EstimateBeams() | CountTokens() if self._model.session is not None:
                # The screen asks this while an answer is running.
                self._finish_beside(self._accept(request, client))
            case Load() if self._loaded_as is not None and self._others_use_model(client):
                # Answered with what is loaded, or refused, without waiting for somebody's answer.
                task = self._accept(request, client)
                task.only_shared = True
                self._finish_beside(task)
            case _:
                self._queue(self._answering, self._accept(request, client))

    def _accept(self, request: AnyRequest, client: Client) -> Task:
        task = Task(request, client)
        with self._lock:
            self._tasks[client, request.id] = task
        return task

    def _queue(self, tasks: TurnQueue[tuple[Client, str], Task], task: Task) -> None:
        if isinstance(task.request, Generate) and self._full:
            task.client.send(Progress(id=task.request.id, stage=WAITING))
        tasks.put(task.owner, task)

    def _cancel(self, task: Task) -> None:
        """Cancel ``task``. A waiting question ends at once."""
        task.cancel()
        if isinstance(task.request, Generate) and self._answering.remove(task.owner, task):
            self._finish_beside(task)

    def _work(self, tasks: TurnQueue[tuple[Client, str], Task]) -> None:
        while True:
            task = tasks.take()
            if tasks is self._answering:
                with self._using:
                    if isinstance(task.request, Generate):
                        self._answer_together(task)
                    else:
                        self._full = True
                        event = self._answer(task)
                        self._full = False
                        self._tell_last(task, event)
                    self._model.keep_prefixes(lambda: tasks.waiting() > 0)
            else:
                self._finish(task)
            del task
            self._between_tasks()

    def _answer_together(self, task: Task) -> None:
        """Answer the question ``task``, and others that are asked meanwhile. Ends when none is left."""
        from engine.session.session import MOST_TOGETHER

        session = self._model.session
        if session is None:
            return self._finish(task)
        scheduler = session.scheduler()
        with AWAKE.held(), self._model.undisturbed():
            self._begin_answer(scheduler, task)
            while scheduler.active:
                self._full = scheduler.active >= MOST_TOGETHER
                following = None if self._full else self._answering.take_now(_is_question)
                if following is not None:
                    self._begin_answer(scheduler, following)
                else:
                    scheduler.round()
        self._full = False

    def _begin_answer(self, scheduler: Scheduler, task: Task) -> None:
        request = task.request
        assert isinstance(request, Generate)
        scheduler.add(
            self._answering_program(task, request),
            lambda event: self._answered(task, event),
            lambda error: self._answered(task, _failed(task, error)),
            first=not request.client,
            owner=task,
        )

    def _answered(self, task: Task, event: AnyEvent) -> None:
        # Who asks as soon as it is told finds room for one more.
        self._full = False
        self._tell_last(task, event)

    def _answering_program(self, task: Task, request: Generate) -> Program[AnyEvent]:
        from engine.session.session import cancelled_answer

        self._parts.observe("request", request, task.report)
        if task.cancelled():
            return cancelled_answer(request.id)
        return (yield from self._model.answer(request, lambda event: self._emit(event, task.client), task))

    def keep_last_prefixes(self) -> None:
        """Write the session's prefixes to disk at the end of the process."""
        end = time.monotonic() + LAST_SAVE_S
        if self._using.acquire(timeout=LAST_SAVE_S):
            self._model.keep_prefixes(lambda: time.monotonic() > end, last=True)

    def _finish_beside(self, task: Task) -> None:
        """Run in a separate thread, or in this one if the system cannot start another."""
        try:
            threading.Thread(target=self._finish, args=(task,), daemon=True).start()
        except RuntimeError:
            self._finish(task)

    def _finish(self, task: Task) -> None:
        self._tell_last(task, self._answer(task))

    def _tell_last(self, task: Task, event: AnyEvent) -> None:
        """Send the last event of ``task``, which is over."""
        key = (task.client, task.request.id)
        with self._lock:
            if self._tasks.get(key) is task:
                del self._tasks[key]
        try:
            task.client.send(event)
        except ProtocolError as error:
            task.client.send(Failed(id=task.request.id, error=f"The answer could not be sent: {error}."))

    def _answer(self, task: Task) -> AnyEvent:
        """Run a request and return its last event. Errors become events."""
        try:
            with AWAKE.held():
                return self._run(task)
        except BaseException as error:
            return _failed(task, error)

    def _run(self, task: Task) -> AnyEvent:
        request = task.request
        self._parts.observe("request", request, task.report)
        match request:
            case Load():
                return self._load(task, request)
            case Resize():
                return self._resize(request)
            case Generate():
                return self._unanswered(task, request)
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
        session = self._model.loaded
        if isinstance(request, CountTokens):
            return session.count_tokens(request)
        return session.estimate_beams(request)

    def _load(self, task: Task, request: Load) -> AnyEvent:
        wanted, client = loaded_options(request), task.client
        if task.only_shared:
            return self._shared_model(task, wanted)
        with self._lock:
            before, used = self._loaded_as, client.uses_model
            if not self._others_use_model(client):
                # From here on nobody can be told that the former model is loaded.
                self._loaded_as, client.uses_model = None, True
        if self._loaded_as is not None:
            return self._shared_model(task, wanted)
        former = self._model.session
        try:
            facts = self._load_session(task, request)
        except BaseException:
            with self._lock:
                client.uses_model = used
                if former is not None and self._model.session is former:
                    self._loaded_as = before
            raise
        self._loaded_as, client.uses_model = wanted, True
        return Loaded(id=request.id, facts=facts, memory=memory_in_use())

    def _load_session(self, task: Task, request: Load) -> ModelFacts:
        task.report("loading", 0, 0, "")
        request, said = within_this_machine(request)
        if said:
            task.client.send(Notice(text=said))
        in_ring = request.partitioning == "ring"
        task.client.knows_network = task.client.knows_network or in_ring
        network = self._the_network() if in_ring else None
        facts = self._model.load(request, task.report, task.cancelled, self._release, network)
        for text in self._model.loaded.model.recorder.take_notices():
            task.client.send(Notice(text=text))
        return facts

    def _shared_model(self, task: Task, wanted: Load) -> Loaded:
        """The model that others use, for one more client. Raises ModelError (in-use) if another model is ``wanted``."""
        with self._lock:
            session = self._model.session
            same = session is not None and wanted == self._loaded_as
            task.client.uses_model = task.client.uses_model or same
        if session is None or not same:
            raise ModelError(
                f"Other programs use this engine and its model, so it cannot load {wanted.model} instead.",
                kind="in-use",
            )
        # It took this client no time.
        facts = msgspec.structs.replace(session.facts, load_s=0.0)
        return Loaded(id=task.request.id, facts=facts, memory=memory_in_use())

    def _pull(self, task: Task, request: Pull) -> AnyEvent:
        from engine.models.store import local_models

        resolved = local_models.resolve(request.model)
        node = self._network.open_node() if self._network is not None else None
        if node is not None and resolved.folder is None and resolved.kind in ("hub", "starter"):
            from engine.cluster.head.lacked_model import copy_model

            copied = copy_model(node, resolved, task.report)
            if copied is not None:
                return Done(id=request.id, path=str(copied[0]), detail=copied[1])
        if resolved.kind == "starter":
            from engine.models.store.starter import build_starter

            return Done(id=request.id, path=str(build_starter(task.report, task.cancelled)))
        from engine.models.store.fetching import pull
        from engine.runtimes.choosing import refuse_download

        folder = pull(request.model, task.report, task.cancelled, refuse_download)
        return Done(id=request.id, path=str(folder), detail=resolved.elsewhere)

    def _the_network(self) -> ClusterNetwork:
        """The network, made when it is first needed. It opens no socket by itself."""
        with self._networking:
            if self._network is None:
                from engine.cluster.network import ClusterNetwork

                self._network = ClusterNetwork(self.send, parts=self._parts)
            return self._network

    def close_network(self) -> None:
        """Say goodbye to the other machines, if there are any. Thread-safe."""
        network = self._network
        if network is not None:
            network.close()

    def _resize(self, request: Resize) -> AnyEvent:
        session = self._model.loaded
        facts = session.resize(request.gpu_expert_bytes)
        if self._loaded_as is not None:
            self._loaded_as = msgspec.structs.replace(self._loaded_as, gpu_expert_bytes=request.gpu_expert_bytes)
        for text in session.model.recorder.take_notices():
            self.send(Notice(text=text))
        return Loaded(id=request.id, facts=facts, memory=memory_in_use())

    def _plan(self, request: Plan) -> AnyEvent:
        from engine.session.plan_model import plan_model

        session = self._model.session
        network = self._the_network() if request.load.partitioning == "ring" else None
        return plan_model(request, session.facts if session is not None else None, network)

    def _bench(self, task: Task, request: Bench) -> AnyEvent:
        from engine.bench.running import check_bench, load_for, run_bench
        from engine.session.loading import find_folder

        check_bench(request)
        if self._others_use_model(task.client):
            raise ModelError("Other programs use this engine, which would disturb what is measured.", kind="in-use")
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
            with self._model.undisturbed():
                buffer_bytes = self._parts.effort.buffer_bytes
                return run_bench(request, self._model.loaded, folder, task.report, task.cancelled, buffer_bytes)
        finally:
            self._model.leave_out_popularity()

    def _release(self) -> None:
        """Free the loaded model."""
        self._loaded_as = None
        self._model.release()

    def keep_popularity(self) -> None:
        """Store the loaded model's popularity counts. Thread-safe."""
        self._model.keep_popularity()

    def _unanswered(self, task: Task, request: Generate) -> AnyEvent:
        """The end of a question that was cancelled before its turn. Raises ModelError if no model is loaded."""
        from engine.session.session import cancelled_answer

        assert self._model.loaded and task.cancelled()
        return cancelled_answer(request.id)

    def _emit(self, event: AnyEvent, client: Client) -> None:
        """Send an answer's event to the client that asked, or to all clients if it concerns everybody."""
        (self.send if isinstance(event, RingChanged) else client.send)(event)


def loaded_options(request: Load) -> Load:
    """``request`` without its client's own options."""
    return msgspec.structs.replace(request, id=0, share=False)


def _measured(request: MeasureMachine) -> AnyEvent:
    from engine.calibration.memory_rate import memory_rate
    from engine.system.free_memory import memory

    return MachineMeasured(id=request.id, memory_bytes=memory().total, memory_read=memory_rate(physical_cores()))


def _prepare(task: Task, request: Prepare) -> AnyEvent:
    from engine.models.folders.prepare import is_old, needs_preparing, prepare
    from engine.models.store import local_models
    from engine.models.store.gguf_folder import open_gguf

    resolved = local_models.resolve(request.model)
    if resolved.kind == "gguf":
        open_gguf(resolved.source, task.report, task.cancelled, resolved.plain_folder)
    folder = resolved.require_folder()
    worth_it, why = needs_preparing(folder)
    if not worth_it:
        return Done(id=request.id, path=str(folder), detail=why)
    destination = folder if is_old(folder) else resolved.prepared_folder
    prepare(folder, destination, task.report, task.cancelled)
    return Done(id=request.id, path=str(destination), detail=why)


def _is_question(task: Task) -> bool:
    return isinstance(task.request, Generate)


def _failed(task: Task, error: BaseException) -> Failed:
    """The last event of ``task``, which ended with ``error``."""
    if isinstance(error, ModelError):
        return Failed(id=task.request.id, error=str(error), kind=error.kind)
    traceback.print_exception(error)
    return Failed(id=task.request.id, error=_sentence(error), kind=_kind(error))


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


def serve(pipes: Pipes, parts: EngineParts, key: str) -> NoReturn:
    """Answer requests until no client is left."""
    host = Host(None, pipes.log.roll_if_large, parts)

    def left() -> None:
        connections.forget_socket()
        leave(host)

    def end_with_notice(writer: EventWriter, problem: str) -> None:
        writer.send(Notice(text=f"The engine got something that is no request and ends: {problem}."))
        writer.drain(LAST_SAVE_S)
        connections.forget_socket()
        end_process(EXIT_BAD_FRAME)

    connections = Connections(host, key, left, end_with_notice)
    writer = connections.add_pipes(pipes.requests, pipes.events)

    def notify(text: str) -> None:
        host.send(Notice(text=text))
        writer.drain(LAST_SAVE_S)

    threading.excepthook = lambda failure: end_with_thread(failure, notify)
    if pipes.log.problem is not None:
        writer.send(Notice(text=pipes.log.problem))
    host.start()
    parts.observe("serving")
    connections.run()


def leave(host: Host) -> NoReturn:
    """End the process. Popularity counts and prefixes are stored if the disk is fast enough, and other machines are
    notified."""
    last = (host.keep_popularity, host.keep_last_prefixes, host.close_network)
    leaving = [threading.Thread(target=each, daemon=True) for each in last]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(LAST_SAVE_S)
    end_process(0)


def main(parts: EngineParts = THE_PRODUCT) -> NoReturn:
    """Run the engine with ``parts``. Tests may pass other parts than the product's."""
    # Ctrl-c belongs to the screen, which decides what to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_to_owner()
    key = engine_key()
    pipes = claim_standard_streams(locate("logs") / "engine.log")
    faulthandler.enable(file=2)
    os.environ.update(environment(physical_cores()))
    renew_defaults()
    serve(pipes, parts, key)


# --- whose turn it is ------------------------------------------------------------------------------------------------


Owner = TypeVar("Owner", bound=Hashable)
Item = TypeVar("Item")


class TurnQueue(Generic[Owner, Item]):
    """A queue in which no owner is served twice while another owner waits, the current one included. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Owner, deque[Item]] = OrderedDict()
        self._served: Owner | None = None
        """The owner that was served last."""
        self._changed = threading.Condition()

    def put(self, owner: Owner, item: Item) -> None:
        """Add ``item`` behind the other items of ``owner``. A new owner gets the last turn."""
        with self._changed:
            self._waiting.setdefault(owner, deque()).append(item)
            self._changed.notify()

    def take(self) -> Item:
        """The next item. Waits for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            return self._pop()

    def _next(self) -> deque[Item]:
        """The items of the owner whose turn it is."""
        if self._served is not None and self._served in self._waiting:
            # It asked again while it was served, perhaps before others came.
            self._waiting.move_to_end(self._served)
        return next(iter(self._waiting.values()))

    def _pop(self) -> Item:
        items = self._next()
        self._served = next(iter(self._waiting))
        item = items.popleft()
        if not items:
            del self._waiting[self._served]
        return item

    def take_now(self, wanted: Callable[[Item], bool]) -> Item | None:
        """The next item if there is one, and it is ``wanted``; otherwise None."""
        with self._changed:
            if not self._waiting or not wanted(self._next()[0]):
                return None
            return self._pop()

    def remove(self, owner: Owner, item: Item) -> bool:
        """Remove ``item`` of ``owner`` from the queue. Returns False if it is not waiting any more."""
        with self._changed:
            items = self._waiting.get(owner)
            if items is None or item not in items:
                return False
            items.remove(item)
            if not items:
                del self._waiting[owner]
            return True

    def waiting(self) -> int:
        """Number of waiting items."""
        with self._changed:
            return sum(map(len, self._waiting.values()))


if __name__ == "__main__":
    main()
