"""A loaded model of the native runtime: passes through the trunk, and the buffers they need."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.ipc.messages import ModelFacts
from engine.models.formats.model_files import ModelFiles
from engine.moe.kernels.bindings import KernelChoice
from engine.moe.kernels.pool import Pool
from engine.moe.popularity import Popularity
from engine.moe.timing import Phase, Recorder
from engine.pictures.shown import PicturePass
from engine.runtimes.common.model import LocalModel, LocalRows
from engine.runtimes.native.bindings import MEANING, PARTS, STEPS_TOGETHER, STOPPED, CGroup, Pass, Stop, native
from engine.runtimes.native.cache import AlikeLayers, PageShape, Segments, States, joined_addresses
from engine.runtimes.native.inputs import Angles, PassInputs, pieces, query_scales
from engine.runtimes.native.lexicon import Lexicon
from engine.runtimes.native.ring import RingTrunk
from engine.runtimes.native.rotary import Rotary
from engine.runtimes.native.shape import Shape
from engine.runtimes.native.weights import TrunkWeights
from engine.runtimes.protocol import Fill, Logits, RowArray, RowPart, TokenRows
from engine.system.free_memory import memory

KEPT_BYTES = 8 * 1024 * 1024
"""Bytes of a workspace that is always kept for the next pass."""
KEPT_SHARE = 1 / 32
"""Maximum share of the free memory for a kept workspace. Keeping it saves time: the system clears freed pages before it
hands them out again, and a virtual machine may first have to ask its host for them."""

STOP_INTERVAL_S = 0.005
"""Minimum seconds between two checks whether a pass over a prompt is still wanted."""


def _stop_by(check: Callable[[], None], raised: list[BaseException]) -> Any:
    """The C callback that asks whether to stop. It stops if ``check`` raises; the exception is put into ``raised``."""

    def stop() -> int:
        try:
            check()
        except BaseException as error:
            raised.append(error)
        return len(raised)

    return Stop(stop)


@dataclass(frozen=True)
class OpenedModel:
    """A checked model, ready for the native trunk. Of its weights only norms and what must be copied have been read."""

    files: ModelFiles
    shape: Shape
    dtype: str
    choice: KernelChoice
    cache_format: str
    """Storage format of keys and values: ``BF16``, ``F32``, ``Q8_0`` or ``Q4_0``."""
    weights: TrunkWeights
    rotaries: tuple[Rotary, ...]
    """Rotary frequencies of each kind of heads."""
    popularity: Popularity | None
    """The number of routes to each expert; None for a dense model."""


class _Workspace:
    """Memory that a pass works in."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory

    def room(self, nbytes: int) -> int:
        """Address of ``nbytes``, aligned to 64 bytes."""
        if self.memory.nbytes < nbytes + 64:
            self.memory = np.empty(0, np.uint8)
            self.memory = np.empty(nbytes + nbytes // 8 + 64, np.uint8)
        return -(-int(self.memory.ctypes.data) // 64) * 64


@dataclass(frozen=True)
class PassPart:
    """Rows of a pass that share a cache: ``tokens`` [rows][tokens], and what ``pictures`` change."""

    tokens: list[list[int]]
    cache: Segments
    pictures: PicturePass | None


@dataclass(frozen=True)
class _WholePass:
    """What the pieces of one pass share. ``seconds`` [layers, parts] of it are added up."""

    weights: TrunkWeights
    phase: Phase
    workspace: _Workspace
    seconds: NDArray[np.float64]
    reads: bool
    every: bool = False
    """Whether logits are wanted after every token of the only row."""


class NativeModel(LocalModel):
    """A model whose trunk is run by our own kernels."""

    def __init__(
        self, opened: OpenedModel, facts: ModelFacts, recorder: Recorder, pool: Pool, ring: RingTrunk | None = None
    ) -> None:
        """``ring`` runs the passes if routed experts are shared with other machines."""
        super().__init__(facts, recorder, opened.files.mapped_files, opened.files.repacked)
        shape = self._shape = opened.shape
        self._weights: TrunkWeights | None = opened.weights
        self._files: ModelFiles | None = opened.files
        self._angles = [Angles(rotary) for rotary in opened.rotaries]
        self._pool = pool
        self._popularity = opened.popularity
        self._ring = ring
        # A page of no layers cannot be mapped.
        alike = [
            AlikeLayers(
                max(1, len(shape.layers_of(kind))),
                heads.key_value_heads,
                *heads.widths,
                shape.window_of(kind),
            )
            for kind, heads in enumerate(shape.kinds)
        ]
        chooses = shape.blocks
        blocks = None if chooses is None else AlikeLayers(alike[0].layers, 1, chooses.width, chooses.width, plain=True)
        self._page_shape = PageShape(tuple(alike), opened.cache_format, shape.latent is None, blocks)
        self._lexicon = None if shape.lexical is None else Lexicon(shape, opened.files)
        self._workspaces: list[NDArray[np.uint8]] = []
        """Workspaces that no pass uses."""

    @property
    def popularity(self) -> Popularity | None:
        return self._popularity

    def start(self) -> NativeTokenRows:
        """An empty cache of one row. Raises ModelError if the model's files were changed since it was loaded."""
        self.check_files()
        numbers = self._state_numbers
        states = None if numbers is None else States.of_one_row(numbers)
        return NativeTokenRows(self, Segments(self._page_shape, states=states))

    @property
    def keeps_contents(self) -> bool:
        """Whether rows can export their contents. In a ring they cannot, because other machines hold parts of them."""
        return self._ring is None

    def restored(
        self, length: int, begun: int, parts: Sequence[RowPart], fill: Fill
    ) -> tuple[NativeTokenRows, NativeTokenRows | None]:
        row, saved = Segments.restored(self._page_shape, length, begun, parts, fill, self._state_numbers)
        return NativeTokenRows(self, row), None if saved is None else NativeTokenRows(self, saved)

    @property
    def _state_numbers(self) -> int | None:
        """Number of floats in one row's states; None if no layer has one."""
        return self._shape.state_numbers or None

    def close(self) -> None:
        super().close()
        self._weights = self._ring = self._files = self._lexicon = None
        self._workspaces.clear()

    @property
    def takes_pictures(self) -> bool:
        return self._ring is None

    def run(
        self,
        phase: Phase,
        parts: Sequence[PassPart],
        want_logits: bool,
        as_steps: bool = False,
        every: bool = False,
    ) -> Logits | None:
        """Run one pass over ``parts``, several only of one token a row.

        See :meth:`engine.runtimes.common.model.LocalRows._pass`. Logits are those of all rows, [rows, vocabulary], or
        with ``every`` those after every token of the only row, [tokens, vocabulary].
        """
        try:
            with self.one_pass(phase, [row for part in parts for row in part.tokens]) as measured:
                assert self._weights is not None
                before = self._counts() if measured else {}
                seconds = np.zeros((self._shape.layers, len(PARTS)))
                with self._workspace(phase) as workspace:
                    reads = phase == "prefill" and not as_steps
                    call = _WholePass(self._weights, phase, workspace, seconds, reads, every)
                    logits = self._pieces(call, parts, want_logits)
                if measured:
                    self._record(before, seconds)
        except BaseException:
            for part in parts:
                if part.cache.states is not None:
                    part.cache.states.give_up()
            raise
        for part in parts:
            part.cache.commit(len(part.tokens[0]))
        if logits is not None and self._ring is not None and not self._ring.logits:
            return logits[:, :0]
        return logits

    @property
    def verifies(self) -> bool:
        """Whether logits can be had after every token of a pass; a node of a ring gives those after the last."""
        return self._ring is None

    @property
    def rows_together(self) -> int:
        return STEPS_TOGETHER

    def step_together(self, steps: Sequence[tuple[TokenRows, Sequence[int]]]) -> list[Logits]:
        parts = []
        for rows, tokens in steps:
            assert isinstance(rows, NativeTokenRows)
            parts.append(rows.part_of_step(tokens))
        logits = self.run("decode", parts, want_logits=True)
        assert logits is not None
        return np.split(logits, np.cumsum([len(tokens) for _, tokens in steps])[:-1])

    @contextmanager
    def _workspace(self, phase: Phase) -> Iterator[_Workspace]:
        """A workspace for a pass, within which others may run."""
        workspace = _Workspace(self._workspaces.pop() if self._workspaces else np.empty(0, np.uint8))
        try:
            yield workspace
        finally:
            kept = workspace.memory
            if phase == "decode" or kept.nbytes <= max(KEPT_BYTES, KEPT_SHARE * memory().free):
                self._workspaces.append(kept)

    def _pieces(self, call: _WholePass, parts: Sequence[PassPart], want_logits: bool) -> Logits | None:
        """Run a long prefill in pieces. Only the last piece gives logits. Nothing is committed here."""
        count, start = len(parts[0].tokens[0]), parts[0].cache.length
        # A step is one call, which nothing ends before its time but a change of the files, and then the model is lost.
        whole = call.phase == "decode" and self._ring is None
        tables = [part.cache.room_for(count) for part in parts]
        states = joined_addresses([part.cache.states.begin(whole) for part in parts if part.cache.states is not None])
        inputs = PassInputs.joined(
            [
                PassInputs.of(part.tokens, part.cache.length, self._angles, part.pictures, self.pictures)
                for part in parts
            ]
        )
        rows = count if call.every else sum(len(part.tokens) for part in parts)
        logits: Logits | None = np.empty((rows, self._shape.vocabulary), np.float32) if want_logits else None
        for first, end in pieces(start, count, inputs.ends):
            groups = (CGroup * len(parts))()
            for group, part, (table, segments) in zip(groups, parts, tables, strict=True):
                group.segments, group.segment_count = table, segments
                group.rows, group.start = len(part.tokens), part.cache.length + first
            scales = [query_scales(self._shape, group.start, end - first) for group in groups]
            growth = None if scales[0] is None else np.concatenate([each for each in scales if each is not None])
            found = logits if end == count else None
            self._one_pass(call, inputs.part(first, end), groups, growth, states, found, first == 0)
            if states is not None:
                states = (states[1], states[1])
        return logits

    def _one_pass(
        self,
        call: _WholePass,
        inputs: PassInputs,
        groups: Any,
        growth: NDArray[np.float32] | None,
        states: tuple[Any, Any] | None,
        logits: Logits | None,
        begins: bool,
    ) -> None:
        rows, count = inputs.ids.shape
        # Another pass, between layers of this one, may bring longer arrays.
        cosine, sine = self._angles[0].cosine, self._angles[0].sine
        lexicon = self._lexicon
        lexical = None if lexicon is None or states is None else lexicon.read(inputs.ids, states[0])
        the_pass = Pass(
            ids=inputs.ids.ctypes.data,
            given=None if inputs.given is None else inputs.given.ctypes.data,
            seen=None if inputs.ends is None else inputs.ends.ctypes.data,
            cosine=tuple(each.ctypes.data for each in inputs.cosine),
            sine=tuple(each.ctypes.data for each in inputs.sine),
            lexical=None if lexical is None else lexical.embeddings.ctypes.data,
            block_cosine=cosine.ctypes.data,
            block_sine=sine.ctypes.data,
            query_scale=None if growth is None else growth.ctypes.data,
            groups=groups,
            logits=None if logits is None else logits.ctypes.data,
            states_before=None if states is None else ctypes.addressof(states[0]),
            states_after=None if states is None else ctypes.addressof(states[1]),
            seconds=call.seconds.ctypes.data,
            group_count=len(groups),
            rows=rows,
            tokens=count,
            last_layer=self._shape.layers,
            reads=call.reads,
            every=call.every,
            given_id=inputs.given_id,
            given_layers=inputs.given_layers,
            seen_in_full=inputs.ends_in_full,
        )
        address = ctypes.addressof(the_pass)
        needed = native().pllm_trunk_bytes(call.weights.address, address, self._pool.threads)
        the_pass.workspace = call.workspace.room(needed)
        self._run_pass(call, the_pass, begins)
        if lexicon is not None and lexical is not None and states is not None:
            lexicon.keep(lexical, states[1])

    def _run_pass(self, call: _WholePass, the_pass: Pass, begins: bool) -> None:
        """Run a described pass, here or with the ring, which others may run between its layers."""
        library, layers, weights, address = native(), self._shape.layers, call.weights, ctypes.addressof(the_pass)
        check = self.between_layers if call.phase == "prefill" else None
        if self._ring is not None:
            self._ring.run(self._pool.handle, weights.address, the_pass, weights.shared_layers, check, begins)
            return
        beside = self.beside if call.phase == "prefill" else None
        raised: list[BaseException] = []
        if check is not None:
            the_pass.stop, the_pass.stop_interval = _stop_by(check, raised), round(STOP_INTERVAL_S * 1e9)
        by_layer = check is not None or beside is not None
        for layer in range(layers if by_layer else 1):
            if check is not None:
                check()
            if beside is not None and layer:
                beside()
            if by_layer:
                the_pass.first_layer, the_pass.last_layer = layer, layer + 1
            code = library.pllm_trunk_run(self._pool.handle, weights.address, address)
            if code == STOPPED:
                raise raised[0]
            if code:
                raise ModelError(f"The native trunk could not run: {MEANING.get(code, code)}.", kind="internal")

    def _counts(self) -> dict[int, tuple[int, ...]]:
        """Number of routes so far to every expert, by layer."""
        counted = self._popularity
        return {} if counted is None else {layer: tuple(counted.counts(layer)) for layer in counted.layers}

    def _record(self, before: dict[int, tuple[int, ...]], seconds: NDArray[np.float64]) -> None:
        for layer, row in enumerate(seconds.tolist()):
            for part, spent in zip(PARTS, row, strict=True):
                self._recorder.add(layer, part, spent)
        if self._ring is not None:
            return  # Its executor has counted the routes, and timed the experts.
        for layer, after in self._counts().items():
            self._recorder.add_routes(layer, [now - then for now, then in zip(after, before[layer], strict=True)])


class NativeTokenRows(LocalRows):
    """Rows of tokens in pages of keys and values.

    ``shared``: leading positions that all rows share by reference, which is the prompt of a beam search.
    """

    _model: NativeModel

    def __init__(self, model: NativeModel, cache: Segments, shared: int = 0) -> None:
        super().__init__(model)
        self._cache = cache
        # [row, row]: how many leading positions two rows have in common; those need not be moved.
        self._common = np.full((cache.rows, cache.rows), shared)

    @property
    def rows(self) -> int:
        return self._cache.rows

    @property
    def length(self) -> int:
        return self._cache.length

    @property
    def can_truncate(self) -> bool:
        return self._cache.states is None

    @property
    def shortest_cut(self) -> int:
        return self._cache.shortest_cut if self.can_truncate else self.length

    def forget_unseen(self, length: int) -> None:
        # The rows of a ring are cut back together with those of other runtimes. Where there are states, a checkpoint of
        # the first tokens is made of these keys and values.
        if self.can_truncate and self._model.keeps_contents:
            self._cache.forget_unseen(length)

    @property
    def forgotten_bytes(self) -> int:
        return self._cache.forgotten_bytes

    @property
    def steps_together(self) -> int:
        return STEPS_TOGETHER

    def checkpoint(self) -> TokenRows | None:
        """A row that shares this one's pages and states, without a copy; None if the row can be truncated anyway."""
        return None if self.can_truncate else self.fan_out(1)

    @property
    def checkpoint_bytes(self) -> int:
        return self._model.facts.state_bytes

    def _pass(
        self,
        phase: Phase,
        tokens: list[list[int]],
        want_logits: bool,
        as_steps: bool = False,
        pictures: PicturePass | None = None,
    ) -> Logits | None:
        return self._model.run(phase, [PassPart(tokens, self._cache, pictures)], want_logits, as_steps)

    @property
    def verified_together(self) -> int:
        return STEPS_TOGETHER if self.can_truncate and self._model.verifies else 0

    def verify(self, tokens: Sequence[int]) -> Logits:
        self._expect_one_row("tokens are verified")
        if not 1 <= len(tokens) <= self.verified_together:
            raise ValueError(f"{len(tokens)} tokens to verify; at most {self.verified_together} run in one pass")
        self.settle()
        part = PassPart([list(tokens)], self._cache, self._seen(tokens) if self._pictures else None)
        logits = self._model.run("decode", [part], want_logits=True, every=True)
        assert logits is not None
        return logits

    def part_of_step(self, tokens: Sequence[int]) -> PassPart:
        """The part of these rows in a step of several: one token a row."""
        return PassPart([[token] for token in tokens], self._cache, self._seen([0]) if self._pictures else None)

    def _cut(self, length: int) -> None:
        self._cache.truncate(length)

    def _copied(self, rows: int) -> NativeTokenRows:
        """``rows`` rows that share this single row's keys and values."""
        return NativeTokenRows(self._model, self._cache.shared(rows), self.length)

    def _contents(self, checkpoint: TokenRows | None) -> Sequence[RowArray]:
        assert checkpoint is None or isinstance(checkpoint, NativeTokenRows)
        return self._cache.contents(None if checkpoint is None else checkpoint._cache)

    def _move(self, parents: Sequence[int], changed: Sequence[int]) -> int:
        """Only positions in which a row and its parent differ are moved."""
        moved = self._cache.move([(row, parents[row], int(self._common[row, parents[row]])) for row in changed])
        if self._cache.states is not None:
            self._cache.states.reorder(parents)
        common = self._common[np.ix_(parents, parents)]
        siblings = np.equal.outer(np.asarray(parents), np.asarray(parents))
        self._common = np.where(siblings, self.length, common)
        return moved
