"""The head's model of a ring: to everything above it an ordinary loaded model, whose rows live on every node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import msgspec

from engine.cluster import commands
from engine.cluster.commands import Prefixes, RowsCommand
from engine.cluster.contributions import LIMIT_S
from engine.cluster.formation import Formation, Former
from engine.cluster.head.remote_model import RANK
from engine.cluster.transport.exchange import PeerLost
from engine.errors import Cancelled, LinkLost, ModelError
from engine.generation.sampling import Sampler
from engine.ipc.messages import ModelFacts, NodeTimes, Timing
from engine.ipc.progress import ProgressCallback
from engine.models.formats.model_files import Repacked
from engine.moe.expert_parallel import HEAD, RankContext
from engine.moe.popularity import Popularity
from engine.moe.timing import Part, Phase, Recorder
from engine.planning.ring_change import Rerun
from engine.runtimes.protocol import Interrupted, LoadedModel, Logits, TokenRows

Done = TypeVar("Done")


LONG_PASS = 64
"""Minimum tokens of a pass from which the speed of reading prompts is measured."""
STOPPED_S = 1.0
"""Timeout in seconds for an exchange to end after the answer was stopped. The ring is kept if it ends in time."""
LOOK_S = 0.1
"""Seconds between two checks of the head's current wait."""


class PassWatch:
    """Ends an epoch whose live machines contribute nothing, or whose answer was stopped.

    A thread of its own checks what the head waits for in the epoch of ``formation``, until :meth:`close`.
    ``cancelled`` returns whether all answers were stopped. ``stopped`` is whether the epoch was ended because of that.
    """

    def __init__(self, formation: Formation, cancelled: Callable[[], bool]) -> None:
        self.stopped = False
        self._formation = formation
        self._cancelled = cancelled
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="waiting-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        layers = self._formation.layers
        while not self._closed.wait(LOOK_S):
            cancelled = self._cancelled()
            if cancelled:
                layers.abort()
            wait = layers.waits.now
            if wait is None:
                continue
            waited = time.monotonic() - wait.since
            if cancelled and waited > STOPPED_S:
                self.stopped = True
                self._formation.lose((), "the answer was stopped while other machines were waited for")
                return
            if waited > wait.allowed_s * self._formation.patience:
                silent = tuple(wait.missing())
                who = "" if silent else "a machine of the ring "
                self._formation.lose(silent, f"{who}contributed nothing for {waited:.0f} s")
                return


class RunningEpoch:
    """A formation and the commands to its followers. Not thread-safe.

    ``cancelled`` returns whether all answers under way were stopped; it is called from another thread.
    """

    def __init__(self, formation: Formation, cancelled: Callable[[], bool]) -> None:
        self.formation = formation
        self.ended = False
        self.finished_elsewhere = False
        self.watch = PassWatch(formation, cancelled) if len(formation.names) > 1 else None
        self._next_rows = 0
        self._unused: list[int] = []
        self._read = self._stepped = 0
        self._read_s = self._stepped_s = 0.0

    def new_rows(self) -> int:
        self._next_rows += 1
        return self._next_rows

    def release(self, rows: int) -> None:
        """Mark ``rows`` as unused. The next command tells the followers to drop them. Thread-safe."""
        self._unused.append(rows)

    def send(self, command: RowsCommand) -> None:
        """Send ``command`` to every follower. Raises PeerLost."""
        links = self.formation.command_links
        if self.ended:
            raise PeerLost("the ring's epoch is over")
        if not links:
            return
        frames = [commands.encode(command)]
        if self._unused:
            unused, self._unused = self._unused, []
            frames.insert(0, commands.encode(commands.Drop(unused)))
        for rank, link in links.items():
            with self.formation.layers.waits.on(lambda rank=rank: (rank,), LIMIT_S):  # type: ignore[misc]
                for frame in frames:
                    link.send(frame)

    def receive_reply(self, rank: int) -> memoryview:
        """The reply of node ``rank`` to the last command. Raises PeerLost."""
        with self.formation.layers.waits.on(lambda: (rank,), LIMIT_S):
            return self.formation.command_links[rank].receive(commands.REPLY_LIMIT)

    def took(self, tokens: int, seconds: float, decoding: bool) -> None:
        """Record that a pass over ``tokens`` took ``seconds``."""
        if decoding:
            self._stepped, self._stepped_s = self._stepped + 1, self._stepped_s + seconds
        elif tokens >= LONG_PASS:
            self._read, self._read_s = self._read + tokens, self._read_s + seconds

    def rerun(self, read: int, passes: int) -> Rerun:
        """The work of ``read`` prompt tokens and ``passes`` decoding passes, with their measured times in this
        epoch."""
        read_s = self._read_s / self._read if self._read else None
        return Rerun(read, passes, read_s, self._stepped_s / self._stepped if self._stepped else None)

    def end(self) -> None:
        """End the epoch. May be called twice."""
        self.ended = True
        if self.watch is not None:
            self.watch.close()
        self.formation.close()

    def run(self, work: Callable[[], Done]) -> Done:
        """Run a pass on this node after its command was sent.

        Raises what ``work`` raises. The followers are then notified that the pass ended here, so that they do not wait
        in it. ``finished_elsewhere`` is whether they had finished it by then.
        """
        layers = self.formation.layers
        self.finished_elsewhere = False
        layers.begin_pass()
        try:
            return work()
        except PeerLost as error:
            raise self.formation.lost() or error from error
        except BaseException:
            lost = self.formation.lost()
            if lost is not None:
                raise lost from None
            self.finished_elsewhere = not layers.give_up()
            raise


class RingRecorder(Recorder):
    """The recorder of the current epoch. Its frames contain the followers' times beside the head's."""

    def __init__(self, epoch: RunningEpoch, facts: ModelFacts) -> None:
        self._epoch = epoch
        self._waiting: list[str] = []
        self._measuring_elsewhere = False
        super().__init__(facts.layers, facts.moe_layers, facts.experts)

    @property
    def inner(self) -> Recorder:
        return self._epoch.formation.model.recorder

    def follow(self, epoch: RunningEpoch) -> None:
        """Continue with another epoch. If measuring was enabled, it continues there."""
        was = self.enabled
        self._epoch = epoch
        if was:
            self.enabled = True

    @property
    def enabled(self) -> bool:
        return self.inner.enabled

    @enabled.setter
    def enabled(self, wanted: bool) -> None:
        if self.inner.enabled != wanted:
            self.inner.enabled = wanted
            self._measure(forget=False)

    @property
    def sampled(self) -> bool:
        return self.inner.sampled

    @sampled.setter
    def sampled(self, wanted: bool) -> None:
        """Ignored: the node's own runtime decides this."""

    def reset(self) -> None:
        super().reset()
        self.inner.reset()
        if self._measuring_elsewhere:
            self._measure(forget=True)

    def notice(self, text: str) -> None:
        self._waiting.append(text)

    def take_notices(self) -> list[str]:
        taken, self._waiting = self._waiting, []
        return taken + self.inner.take_notices()

    def begin_step(self, phase: Phase, tokens: int) -> None:
        self.inner.begin_step(phase, tokens)

    def end_step(self) -> None:
        self.inner.end_step()

    def add(self, layer: int, part: Part, seconds: float) -> None:
        self.inner.add(layer, part, seconds)

    def frame(self, request_id: int) -> Timing:
        own = self.inner.frame(request_id)
        names = self._epoch.formation.names
        if len(names) < 2:
            return own
        if self._epoch.formation.facts.elsewhere:
            # This machine only waits.
            found = self._ask_times().get(RANK)
            if found is None:
                return own
            remote = NodeTimes(rank=RANK, name=names[RANK], prefill=found.prefill, decode=found.decode)
            return msgspec.structs.replace(own, prefill=found.prefill, decode=found.decode, nodes=[remote])
        nodes = [NodeTimes(rank=HEAD, name=names[HEAD], prefill=own.prefill, decode=own.decode)]
        for rank, times in sorted(self._ask_times().items()):
            nodes.append(NodeTimes(rank=rank, name=names[rank], prefill=times.prefill, decode=times.decode))
        return msgspec.structs.replace(own, nodes=nodes)

    def _measure(self, forget: bool) -> None:
        """Send the setting to the followers. A lost peer is ignored here: the next pass raises PeerLost."""
        self._measuring_elsewhere = self.inner.enabled or forget
        try:
            self._epoch.send(commands.Measure(self.inner.enabled, forget))
        except PeerLost:
            return

    def _ask_times(self) -> dict[int, commands.Times]:
        if self._epoch.ended:
            return {}
        try:
            self._epoch.send(commands.AskTimes())
            links = self._epoch.formation.command_links
            return {rank: commands.decode_times(self._epoch.receive_reply(rank)) for rank in links}
        except PeerLost:
            return {}


class RingRows(TokenRows):
    """The head's rows, and the same operations on every follower."""

    def __init__(self, epoch: RunningEpoch, rows: TokenRows, number: int, prefixes: Prefixes) -> None:
        self._epoch = epoch
        self._rows = rows
        self._number = number
        self._prefixes = prefixes
        self._sampler: Sampler | None = None
        """Sampler with which the machine that computes everything chose the last token."""

    def __del__(self) -> None:
        self._epoch.release(self._number)

    @property
    def rows(self) -> int:
        return self._rows.rows

    @property
    def length(self) -> int:
        return self._rows.length

    @property
    def can_truncate(self) -> bool:
        return self._rows.can_truncate

    @property
    def steps_together(self) -> int:
        return self._rows.steps_together

    @property
    def void(self) -> bool:
        return self._epoch.ended

    def extend(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        begun = time.monotonic()
        self._epoch.send(commands.Extend(self._number, self._prefixes.state, list(tokens), want_logits))
        logits = self._prefill(lambda: self._rows.extend(tokens, want_logits), tokens)
        self._epoch.took(len(tokens), time.monotonic() - begun, decoding=False)
        return logits

    def replay(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        self._epoch.send(commands.Replay(self._number, self._prefixes.state, list(tokens), want_logits))
        return self._prefill(lambda: self._rows.replay(tokens, want_logits), tokens)

    def _prefill(self, run: Callable[[], Logits | None], tokens: Sequence[int]) -> Logits | None:
        """Run a pass over ``tokens`` here, after its command was sent."""
        try:
            logits = self._epoch.run(run)
        except Interrupted:
            if self._epoch.finished_elsewhere:
                self._epoch.send(commands.Truncate(self._number, self.length))
            raise
        self._prefixes = self._prefixes.extended(tokens)
        return logits

    def step(self, tokens: Sequence[int]) -> Logits:
        return step_in(self._epoch, [(self, tokens)])[0]

    @property
    def here(self) -> TokenRows:
        """The head's own rows."""
        return self._rows

    def step_command(self, tokens: Sequence[int]) -> commands.Step:
        return commands.Step(self._number, self._prefixes.state, list(tokens))

    def stepped(self, tokens: Sequence[int]) -> None:
        """Record a step of ``tokens`` that was run on every node."""
        self._sampler = None
        self._prefixes = self._prefixes.stepped(tokens)

    def step_choosing(self, token: int, sampler: Sampler) -> int | None:
        """Decode ``token`` and let the machine that computes everything choose the next one; None if there is no such
        machine."""
        if not self._epoch.formation.facts.elsewhere:
            return None
        begun = time.monotonic()
        state = None if sampler is self._sampler else sampler.state
        self._epoch.send(commands.Choose(self._number, self._prefixes.state, token, state))
        chosen = self._epoch.run(lambda: self._rows.step_choosing(token, sampler))
        self._epoch.took(1, time.monotonic() - begun, decoding=True)
        self._prefixes = self._prefixes.stepped([token])
        self._sampler = sampler
        return chosen

    def truncate(self, length: int) -> None:
        self._rows.truncate(length)
        self._prefixes = self._prefixes.truncated(length)
        self._epoch.send(commands.Truncate(self._number, length))

    def fan_out(self, rows: int) -> RingRows:
        into = self._epoch.new_rows()
        wide = RingRows(self._epoch, self._rows.fan_out(rows), into, self._prefixes.fanned_out(rows))
        self._epoch.send(commands.FanOut(self._number, into, rows))
        return wide

    def reorder(self, parents: Sequence[int]) -> int:
        moved = self._rows.reorder(parents)
        self._prefixes = self._prefixes.reordered(parents)
        self._epoch.send(commands.Reorder(self._number, list(parents)))
        return moved


def step_in(epoch: RunningEpoch, steps: Sequence[tuple[RingRows, Sequence[int]]]) -> Sequence[Logits]:
    """Run ``steps`` of rows of ``epoch`` in one pass on every node. Returns the logits [rows, vocabulary] of each."""
    begun = time.monotonic()
    wanted = [rows.step_command(tokens) for rows, tokens in steps]
    epoch.send(wanted[0] if len(wanted) == 1 else commands.StepTogether(wanted))

    def run() -> Sequence[Logits]:
        if len(steps) == 1:
            return [steps[0][0].here.step(steps[0][1])]
        return epoch.formation.model.step_together([(rows.here, tokens) for rows, tokens in steps])

    logits = epoch.run(run)
    epoch.took(sum(len(tokens) for _, tokens in steps), time.monotonic() - begun, decoding=True)
    for rows, tokens in steps:
        rows.stepped(tokens)
    return logits


class RingModel(LoadedModel):
    """The head's side of a model that a ring runs.

    ``name`` is the model's name as the person wrote it. The constructor forms the first epoch. Raises ModelError if
    that fails.
    """

    def __init__(self, name: str, former: Former, progress: ProgressCallback) -> None:
        self._name = name
        self._former = former
        self._turns: tuple[Callable[[], bool], ...] = ()
        """Whether each turn under way was stopped."""
        self._epoch = RunningEpoch(former.form(progress), self._all_stopped)
        self._recorder = RingRecorder(self._epoch, self.facts)
        self._gone: list[str] = []
        """Names of machines that were reported as lost and have not been reported on since."""
        for line in self._epoch.formation.notices:
            self._recorder.notice(line)

    @property
    def facts(self) -> ModelFacts:
        formation = self._epoch.formation
        return msgspec.structs.replace(formation.model.facts, ring=formation.facts)

    @property
    def recorder(self) -> Recorder:
        return self._recorder

    @property
    def repacked(self) -> Repacked:
        return self._epoch.formation.model.repacked

    @property
    def context(self) -> RankContext:
        return self._epoch.formation.context

    @property
    def popularity(self) -> Popularity | None:
        """The head's own popularity counts: every node counts all routes."""
        return self._epoch.formation.model.popularity

    @property
    def between_layers(self) -> Callable[[], None] | None:
        return self._epoch.formation.model.between_layers

    @between_layers.setter
    def between_layers(self, check: Callable[[], None] | None) -> None:
        self._epoch.formation.model.between_layers = check

    def begin_turn(self, cancelled: Callable[[], bool]) -> None:
        self._turns = (*self._turns, cancelled)

    def end_turn(self, cancelled: Callable[[], bool]) -> None:
        self._turns = tuple(turn for turn in self._turns if turn != cancelled)

    def _all_stopped(self) -> bool:
        """Whether all turns under way were stopped. Thread-safe."""
        turns = self._turns
        return bool(turns) and all(stopped() for stopped in turns)

    @property
    def rows_together(self) -> int:
        return self._epoch.formation.model.rows_together

    def step_together(self, steps: Sequence[tuple[TokenRows, Sequence[int]]]) -> Sequence[Logits]:
        """See :class:`LoadedModel`. None of the rows are void."""
        if self.rows_together == 1:
            return super().step_together(steps)
        ours: list[tuple[RingRows, Sequence[int]]] = []
        for rows, tokens in steps:
            assert isinstance(rows, RingRows)
            ours.append((rows, tokens))
        return step_in(self._epoch, ours)

    def start(self) -> TokenRows:
        number = self._epoch.new_rows()
        self._epoch.send(commands.StartRows(number))
        return RingRows(self._epoch, self._epoch.formation.model.start(), number, Prefixes())

    def close(self) -> None:
        self._end()
        self._former.close()

    def recover(self, lost: PeerLost, progress: ProgressCallback, notify: Callable[[str], None]) -> None:
        before = self._epoch.formation.names
        why = self._epoch.formation.why_lost(lost)
        gone = [before[rank] for rank in why.noticed_at if rank in before]
        what = why.reason
        if not isinstance(why, LinkLost):
            what = f"Lost {', '.join(gone) or 'a machine of the ring'}: {what}"
        notify(f"{what}; forming the ring again.")
        self._gone = gone
        self._end()
        self._begin(progress, notify)

    def between_turns(
        self, progress: ProgressCallback, notify: Callable[[str], None], read: int = 0, passes: int = 0
    ) -> bool:
        if not self._epoch.ended:
            lost = self._epoch.formation.lost()
            stopped = self._epoch.watch is not None and self._epoch.watch.stopped
            if lost is not None and not stopped:
                self.recover(lost, progress, notify)
                return True
            # After a stop the machines are still there, but their unfinished pass is not waited for.
            if not stopped:
                try:
                    if not self._former.changed(progress, notify, self._epoch.rerun(read, passes)):
                        return False
                except Cancelled:
                    return False  # the ring is as it was, and so is what it has read
            self._end()
        self._begin(progress, notify)
        return True

    def _outcome(self, before: Collection[str]) -> str:
        """A line about machines that left, came back and joined, compared with the names ``before``."""
        formation = self._epoch.formation
        now = formation.names.values()
        gone, self._gone = self._gone, []
        others = [
            name for name in before if name not in now and name not in gone and name not in formation.without_links
        ]
        fresh = [name for name in now if name not in before or name in gone]
        joined = [name for name in fresh if name in formation.newcomers]
        back = [name for name in fresh if name not in joined]
        parts = [f"Lost {', '.join(others)}{', too' if gone else ''}"] if others else []
        parts += [f"{', '.join(back)} came back"] if back else []
        parts += [f"{', '.join(joined)} joined"] if joined else []
        going = "going" if parts else "Going"
        if formation.facts.elsewhere:
            parts.append(f"{going} on with {formation.names[RANK]} alone")
        else:
            parts.append(
                f"{going} on with {len(now)} machines" if len(now) > 1 else f"{going} on with this machine alone"
            )
        return "; ".join(parts) + "."

    def _end(self) -> None:
        self._epoch.end()

    def _begin(self, progress: ProgressCallback, notify: Callable[[str], None]) -> None:
        """Form the next epoch. If this raises, the next question forms again."""
        before = self._epoch.formation.names.values()
        try:
            formation = self._former.form(progress, notify)
        except Interrupted:
            raise ModelError("Forming the ring again was stopped; ask once more.", kind="network") from None
        self._epoch = RunningEpoch(formation, self._all_stopped)
        self._recorder.follow(self._epoch)
        notify(self._outcome(before))
        for line in formation.notices:
            self._recorder.notice(line)
