"""A follower of a decentralised ring: it runs the same passes as the head, on its own keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import assert_never

import numpy as np

from engine.cluster import commands
from engine.cluster.commands import Answers, AnyCommand, Prefixes
from engine.cluster.formation import PassControl
from engine.cluster.parts import Observer, nobody_observes
from engine.cluster.transport.exchange import Link, PeerLost
from engine.errors import ModelError
from engine.generation.sampling import NotNumbersError, Sampler, SamplerState
from engine.planning.units import byte_size
from engine.runtimes.protocol import Interrupted, LoadedModel, Logits, TokenRows

ROWS_LIMIT = 512
"""Maximum rows of tokens of a head, which uses a few for each answer under way."""
BEAMS_LIMIT = 256
"""Maximum rows into which one of them may be fanned out."""


class StaleCacheError(ModelError):
    """The head continues from something else than this node has in its cache."""


class Follower:
    """Runs the head's commands.

    ``model`` was loaded with this node's place in the ring, whose layers are ``layers``. Or the whole model runs here;
    then ``layers`` are Answers, which notify the head of each pass. ``ran`` gets the number of token positions after
    every pass. ``around`` makes what a pass runs within. Keys and values take at most ``memory`` bytes (None: no
    limit). ``move`` makes the node's links anew and returns the one to the head.
    """

    def __init__(
        self,
        model: LoadedModel,
        layers: PassControl | Answers,
        ran: Callable[[int], None] = lambda tokens: None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        memory: int | None = None,
        observe: Observer = nobody_observes,
        move: Callable[[commands.MoveLinks], Link] | None = None,
    ) -> None:
        self._model = model
        self._layers = layers
        self._ran = ran
        self._around = around
        self._memory = memory
        self._observe = observe
        self._move = move
        self._rows: dict[int, tuple[TokenRows, Prefixes]] = {}
        self._sampler: tuple[int, Sampler] | None = None
        """The rows whose tokens it chooses, and by what."""

    def follow(self, link: Link) -> None:
        """Run commands until the link ends, which raises PeerLost.

        Raises ModelError if a pass failed here, or the head wants what this node does not have. The epoch must then be
        ended with that sentence.
        """
        limit = commands.command_limit(self._model.facts.context_limit)
        while True:
            command = commands.decode_command(link.receive(limit))
            self._observe("command", self, command)
            if isinstance(command, commands.MoveLinks):
                if self._move is None:
                    raise ModelError("The head moves links that stay where they are; form the ring again.")
                link = self._move(command)
                continue
            try:
                reply = self.do(command)
            except (ValueError, IndexError) as error:
                raise StaleCacheError(f"The head asked for what cannot be done with these rows: {error}.") from error
            if reply is not None:
                link.send(commands.encode(reply))

    def do(self, command: AnyCommand) -> commands.Times | None:
        """Run one command. Returns the reply, if there is one."""
        match command:
            case commands.StartRows(rows):
                self._put(rows, self._model.start(), Prefixes())
            case commands.Extend(rows, before, tokens, want_logits) | commands.Replay(
                rows, before, tokens, want_logits
            ):
                row, prefixes = self._checked(rows, before)
                self._check_tokens(tokens)
                self._check_room(row, len(tokens))
                run = row.extend if isinstance(command, commands.Extend) else row.replay
                if self._pass(lambda: run(tokens, want_logits), len(tokens)):
                    self._rows[rows] = (row, prefixes.extended(tokens))
            case commands.Step():
                self._step([command])
            case commands.StepTogether(steps):
                self._step(steps)
            case commands.Choose(rows, before, token, state):
                self._choose(rows, before, token, state)
            case commands.Truncate(rows, length):
                row, prefixes = self._get(rows)
                row.truncate(length)
                self._rows[rows] = (row, prefixes.truncated(length))
            case commands.FanOut(rows, into, count):
                row, prefixes = self._get(rows)
                if not 0 < count <= BEAMS_LIMIT:
                    raise ValueError(f"{count} rows of one; at most {BEAMS_LIMIT} are made")
                self._check_memory(count * row.length)
                self._put(into, row.fan_out(count), prefixes.fanned_out(count))
            case commands.Reorder(rows, parents):
                row, prefixes = self._get(rows)
                row.reorder(parents)
                self._rows[rows] = (row, prefixes.reordered(parents))
            case commands.Drop(rows=numbers):
                for number in numbers:
                    self._rows.pop(number, None)
            case commands.Measure(enabled, forget):
                self._model.recorder.enabled = enabled
                if forget:
                    self._model.recorder.reset()
            case commands.AskTimes():
                frame = self._model.recorder.frame(0)
                return commands.Times(frame.prefill, frame.decode)
            case _:
                assert_never(command)
        return None

    def _step(self, steps: Sequence[commands.Step]) -> None:
        """Run ``steps`` in one pass."""
        held = [self._checked(step.rows, step.before) for step in steps]
        if not steps or len({step.rows for step in steps}) < len(steps):
            raise ValueError(f"{len(steps)} steps of rows {[step.rows for step in steps]} in one pass")
        for (row, _), step in zip(held, steps, strict=True):
            self._check_tokens(step.tokens)
            self._check_context(row, 1)
        self._check_memory(sum(row.rows for row, _ in held))

        def run() -> Logits:
            if len(steps) == 1:
                return held[0][0].step(steps[0].tokens)
            batch = [(row, step.tokens) for (row, _), step in zip(held, steps, strict=True)]
            return np.concatenate(self._model.step_together(batch))

        if self._pass(run, len(steps)):
            for (row, prefixes), step in zip(held, steps, strict=True):
                self._rows[step.rows] = (row, prefixes.stepped(step.tokens))

    def _choose(self, rows: int, before: int, token: int, state: SamplerState | None) -> None:
        row, prefixes = self._checked(rows, before)
        self._check_tokens([token])
        self._check_room(row, 1)
        if state is not None:
            self._check_tokens([*state.seen, *state.counts])
            self._sampler = rows, Sampler.going_on(state)
        if self._sampler is None or self._sampler[0] != rows:
            raise ValueError("nothing says how their tokens are chosen")
        sampler = self._sampler[1]

        def run() -> int:
            chosen = row.step_choosing(token, sampler)
            return sampler.choose(row.step([token])[0]) if chosen is None else chosen

        if self._pass(run, 1):
            self._rows[rows] = (row, prefixes.stepped([token]))

    def _pass(self, run: Callable[[], Logits | int | None], tokens: int) -> bool:
        """Run a pass. Returns whether it went through; False if the head gave it up, which leaves the rows unchanged,
        or if no token could be chosen, after which the head uses them no more."""
        answers = self._layers if isinstance(self._layers, Answers) else None
        self._layers.begin_pass()
        try:
            with self._around():
                result = run()
        except Interrupted:
            if answers is not None:
                answers.gave_up()
            return False
        except PeerLost:
            raise
        except Exception as error:
            if answers is not None and isinstance(error, NotNumbersError):
                answers.not_numbers(str(error))
                return False
            # The others wait in the next layer and must be notified of the reason.
            self._layers.give_up(str(error) or type(error).__name__)
            raise
        self._ran(tokens)
        if answers is not None:
            answers.done(result)
        return True

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises ValueError for an invalid token, as not every runtime checks before it reads the embedding."""
        vocabulary = self._model.facts.vocabulary
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
            raise ValueError(f"a token outside of the vocabulary of {vocabulary}")

    def _check_room(self, rows: TokenRows, more: int) -> None:
        """Raises ValueError for more tokens in ``rows`` than the model reads, ModelError as :meth:`_check_memory`."""
        self._check_context(rows, more)
        self._check_memory(rows.rows * more)

    def _check_context(self, rows: TokenRows, more: int) -> None:
        limit = self._model.facts.context_limit
        if rows.length + more > limit:
            raise ValueError(f"{rows.length + more} tokens in a context of {limit}")

    def _check_memory(self, more: int) -> None:
        """Raises ModelError (memory) if keys and values of ``more`` further tokens exceed the lent memory. The others
        are notified."""
        if self._memory is None:
            return
        held = sum(rows.rows * rows.length for rows, _ in self._rows.values())
        states = sum(rows.rows for rows, _ in self._rows.values()) * self._model.facts.state_bytes
        wanted = (held + more) * self._model.facts.key_value_bytes_per_token + states
        if wanted > self._memory:
            reason = (
                f"its keys and values would take {byte_size(wanted)} of the {byte_size(self._memory)} lent for them"
            )
            self._layers.begin_pass()
            self._layers.give_up(reason)
            raise ModelError(f"The head asks for too much: {reason}.", kind="memory")

    def _get(self, rows: int) -> tuple[TokenRows, Prefixes]:
        found = self._rows.get(rows)
        if found is None:
            raise StaleCacheError(f"The head goes on with rows {rows}, which this node does not have; form again.")
        return found

    def _put(self, rows: int, made: TokenRows, prefixes: Prefixes) -> None:
        if len(self._rows) >= ROWS_LIMIT:
            raise StaleCacheError(f"The head asked for more than {ROWS_LIMIT} rows of tokens; form again.")
        self._rows[rows] = (made, prefixes)

    def _checked(self, rows: int, before: int) -> tuple[TokenRows, Prefixes]:
        row, prefixes = self._get(rows)
        if prefixes.state != before:
            raise StaleCacheError(
                f"The head goes on from other tokens ({before:016x}) than this node has in its cache "
                f"({prefixes.state:016x}); form again."
            )
        return row, prefixes
