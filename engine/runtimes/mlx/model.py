"""A loaded model and its rows of tokens: the runtime protocol on an mlx-lm model."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import psutil

from engine.errors import ModelError
from engine.generation.sampling import Sampler, SamplingRule
from engine.ipc.messages import ModelFacts
from engine.moe.popularity import Popularity
from engine.moe.timing import Phase
from engine.pictures.places import Positions
from engine.pictures.shown import PicturePass
from engine.runtimes.common.model import LocalModel, LocalRows
from engine.runtimes.mlx import eligible, wired
from engine.runtimes.mlx import spans as timed
from engine.runtimes.mlx.cache import LayerCache, RowCache, contents_of, evaluate, move_rows, restored_caches
from engine.runtimes.mlx.experts import RingPass
from engine.runtimes.mlx.picture_inputs import Turning, embedded, seeing_ahead, spread_ropes
from engine.runtimes.mlx.spans import Spans
from engine.runtimes.protocol import Fill, Logits, RowArray, RowPart, TokenRows

_COLDEST = 1e-30
"""Lowest temperature in use, as on the host. Below it only the likeliest tokens have a weight in float32."""


def draw_token(logits: Array, rule: SamplingRule, key: Array | None) -> Array:
    """The next token [1] for ``logits`` [1, vocabulary] in float32; ``key`` is mlx's random key, which greedy decoding
    does not use."""
    if rule.greedy:
        return mx.argmax(logits, axis=-1)
    return mx.random.categorical(surviving(logits, rule), key=key)


def surviving(logits: Array, rule: SamplingRule) -> Array:
    """Logarithms [1, vocabulary] of the tokens' weights: 0 for the likeliest, -inf for tokens that must not be
    drawn."""
    weights = (logits - mx.max(logits, axis=-1, keepdims=True)) / max(rule.temperature, _COLDEST)
    nothing = mx.array(-mx.inf, mx.float32)
    likeliest = weights
    if 0 < rule.top_k < logits.shape[-1]:
        likeliest = mx.topk(weights, rule.top_k, axis=-1)
        weights = mx.where(weights >= mx.min(likeliest, axis=-1, keepdims=True), weights, nothing)
    if rule.top_p < 1.0:
        # Of the vocabulary only what top-k left is sorted; who weighs as much as the last one that stays, stays too.
        held = -mx.sort(-likeliest, axis=-1)
        masses = mx.exp(held)
        inside = mx.cumsum(masses, axis=-1) - masses < rule.top_p * mx.sum(mx.exp(weights), axis=-1, keepdims=True)
        # The likeliest token, which weighs 0, always stays.
        last = mx.min(mx.where(inside, held, mx.array(0.0)), axis=-1, keepdims=True)
        weights = mx.where(weights >= last, weights, nothing)
    if rule.min_p > 0.0:
        weights = mx.where(mx.exp(weights) >= rule.min_p, weights, nothing)
    return weights


def are_scores(logits: Array) -> Array:
    """Whether ``logits`` [1, vocabulary] are numbers with a finite maximum, as an array [1]."""
    return ~mx.any(mx.isnan(logits), axis=-1) & mx.isfinite(mx.max(logits, axis=-1))


Array = Any

_CLEARED_EVERY = 256
"""Steps after which mlx returns its cached buffers. Keys and values grow by as many positions at once, and their former
buffers fit nothing later."""


@contextmanager
def memory_named() -> Iterator[None]:
    """Turns mlx's errors for exhausted memory into a ModelError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, MemoryError) or "allocat" in text.lower() or "insufficient memory" in text.lower():
            raise ModelError(
                f"there is not enough memory for this step ({text or 'out of memory'}): "
                "use fewer beams, a shorter conversation or a smaller model",
                kind="memory",
            ) from error
        raise


class MlxModel(LocalModel):
    """An mlx-lm model whose MoE blocks are ours.

    ``backbone`` is the attribute that holds the decoder without the head, ``attentions`` each layer's attention or
    what it has in its place, ``makers`` make each layer's empty cache; ``ring`` runs the experts, if the model is in a
    ring, and ``logits`` False: see :class:`engine.runtimes.protocol.RingPlace`.
    """

    def __init__(
        self,
        model: Any,
        backbone: str,
        attentions: list[str],
        makers: list[Callable[[], LayerCache]],
        spans: Spans,
        facts: ModelFacts,
        ring: RingPass | None = None,
        experts: Mapping[int, Any] | None = None,
        logits: bool = True,
    ) -> None:
        super().__init__(facts, spans.recorder)
        self._model = model
        self._backbone = backbone
        self._attentions = attentions
        self._makers = makers
        self._spans = spans
        self._timed = False
        self._ring = ring
        self._experts = experts or {}
        self._logits = logits
        self._wired = False
        self._turning: Turning | None = None
        """How the attention turns, once a picture was seen whose positions are spread."""
        self.weights_are_wired = False

    @property
    def popularity(self) -> Popularity | None:
        """Route counts, in a ring only: there the routes reach the host."""
        return self._ring.executor.popularity if self._ring is not None else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let a model in a ring run without the other nodes. Meanwhile its answers are meaningless."""
        if self._ring is None:
            yield
            return
        self._ring.alone = True
        try:
            yield
        finally:
            self._ring.alone = False

    def wire(self, key_values: int) -> str:
        """Have the system keep the weights, and ``key_values`` bytes, in the GPU's memory until the model is closed.
        Returns a line for the person if it will not keep all of it."""
        self._wired = True
        self.weights_are_wired, said = wired.wire(self.facts.trunk_bytes + self.facts.expert_bytes, key_values)
        return said

    def hold_weights(self, wanted: bool) -> None:
        if self._wired:
            wired.LIMIT.hold(wanted)

    def kept_weights(self) -> wired.MlxWeights:
        return wired.MlxWeights(wired.arrays_of(self._model, self._experts))

    def start(self) -> MlxRows:
        """An empty cache of one row. Raises ModelError if the model is closed."""
        self.check_files()
        return MlxRows(self, [make() for make in self._makers], rows=1, length=0)

    @property
    def keeps_contents(self) -> bool:
        """Whether rows can export their contents. In a ring they cannot, because other machines hold parts of them."""
        return self._ring is None

    def restored(
        self, length: int, begun: int, parts: Sequence[RowPart], fill: Fill
    ) -> tuple[MlxRows, TokenRows | None]:
        caches, saved = restored_caches(self._makers, length, begun, parts, fill)
        row = MlxRows(self, caches, rows=1, length=length)
        return row, None if saved is None else MlxRows(self, saved, rows=1, length=begun)

    def close(self) -> None:
        super().close()
        self._model = self._ring = None
        self._experts = {}
        if self._wired:
            wired.LIMIT.restore()
            self._wired = False
        mx.clear_cache()

    @property
    def takes_pictures(self) -> bool:
        return self._ring is None and self._logits

    def hidden(self, tokens: Array, caches: Sequence[LayerCache], shift: int = 0) -> Array:
        """The hidden states [rows, n, hidden] after the backbone for ``tokens`` [rows, n], appended to ``caches``.

        All tokens must be in the vocabulary, because mlx would read past the embedding. ``shift``: what is added to
        their numbers to get their positions.
        """
        self._turn(None, shift)
        return self._model[self._backbone](tokens, cache=list(caches))

    def hidden_of_pictures(self, pictures: PicturePass, caches: Sequence[LayerCache]) -> Array:
        """The hidden states [1, n, hidden] for the tokens of ``pictures``, some of which are of pictures."""
        assert self.pictures is not None
        backbone = self._model[self._backbone]
        self._turn(pictures.positions, 0)
        sight = self.pictures.sight
        ahead = seeing_ahead(caches, pictures.ends, in_full=sight.together_in_full)
        with embedded(backbone, pictures, sight) as (ids, embeddings), ahead:
            return backbone(ids, cache=list(caches), input_embeddings=embeddings)

    def _turn(self, spread: Positions | None, shift: int) -> None:
        """Have the next pass turn queries and keys by ``spread`` or ``shift``."""
        if self._turning is None:
            if spread is None and not shift:
                return
            assert self.pictures is not None
            self._turning = spread_ropes(self._model[self._backbone]["layers"], self.pictures.sight.sections)
        self._turning.spread, self._turning.shift = spread, shift

    def logits(self, hidden: Array) -> Logits:
        """The logits [rows, vocabulary] of the last position of ``hidden`` [rows, n, hidden].

        [rows, 0] at a place in a ring that does not need them; then nothing is evaluated. The head runs for that
        position only, because over a prompt it would cost more than a layer.
        """
        if not self._logits:
            return np.empty((hidden.shape[0], 0), np.float32)
        return np.array(self.scores(hidden))

    def scores(self, hidden: Array) -> Array:
        """The logits as an unevaluated float32 array on the device."""
        last = hidden[:, -1:, :]
        if "lm_head" in self._model:
            logits = self._model.lm_head(last)
        else:
            logits = self._model[self._backbone].embed_tokens.as_linear(last)
        logits = logits[:, -1, :]
        # granite's head divides, and Cohere's multiplies; their definitions do so outside the head that is called here.
        scaling = getattr(self._model, "logits_scaling", None)
        logits = logits if scaling is None else logits / scaling
        factor = getattr(getattr(self._model, "args", None), "logit_scale", None)
        logits = (logits if factor is None else logits * factor).astype(mx.float32)
        cap = getattr(self._model, "final_logit_softcapping", None)  # Gemma's, outside the head, too
        return logits if cap is None else mx.tanh(logits / cap) * cap

    @contextmanager
    def step(self, phase: Phase, tokens: list[list[int]]) -> Iterator[None]:
        """A context for one forward pass over ``tokens`` [rows][positions], measured if the recorder is enabled."""
        if self._ring is not None:
            self._ring.check = self.between_layers if phase == "prefill" else None
        self._watch(self.recorder.enabled)
        with self.one_pass(phase, tokens):
            yield

    def _watch(self, wanted: bool) -> None:
        if wanted == self._timed or self._model is None:
            return
        layers = self._model[self._backbone]["layers" if "layers" in self._model[self._backbone] else "blocks"]
        if wanted:
            timed.install(layers, self._attentions, self._spans)
        else:
            timed.remove(layers, self._attentions)
        self._timed = self._spans.active = wanted


@dataclass(frozen=True)
class _Begun:
    """A running step and the token that it will choose, [1]. Its ``outcome`` is -1 if its ``scores`` are not
    numbers."""

    token: Array
    outcome: Array
    scores: Array


class MlxRows(LocalRows):
    """Rows of tokens in the caches of one model.

    ``shared`` positions at the beginning are the same in all rows.
    """

    _model: MlxModel

    def __init__(self, model: MlxModel, caches: Sequence[LayerCache], rows: int, length: int, shared: int = 0) -> None:
        super().__init__(model)
        self._caches = caches
        self._places = [cache.place for cache in caches]
        """Place of each cache after ``length`` tokens."""
        self._rows = rows
        self._length = length
        self._shared = shared
        self._ahead: tuple[int, Sampler, _Begun] | None = None
        """The last chosen token, its sampler, and the next step, which has already begun to fill the caches."""
        self._key = mx.random.key(secrets.randbits(63))

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def length(self) -> int:
        return self._length

    @property
    def can_truncate(self) -> bool:
        return all(isinstance(cache, RowCache) for cache in self._caches)

    @property
    def shortest_cut(self) -> int:
        if not self.can_truncate:
            return self._length
        return max((cache.shortest_cut for cache in self._caches if isinstance(cache, RowCache)), default=0)

    def forget_unseen(self, length: int) -> None:
        if not self.can_truncate:
            return  # A checkpoint of the first tokens is made of these keys and values.
        self.settle()
        before = self.forgotten_bytes
        with memory_named():
            for cache in self._caches:
                if isinstance(cache, RowCache):
                    cache.forget_unseen(length)
            if self.forgotten_bytes > before:
                evaluate(self._caches)
                mx.clear_cache()

    @property
    def forgotten_bytes(self) -> int:
        return sum(cache.start * cache.bytes_per_position() for cache in self._caches if isinstance(cache, RowCache))

    @property
    def windowed_bytes_per_position(self) -> tuple[int, int]:
        """Bytes of one position in the layers that :meth:`forget_unseen` shortens, and the widest of their windows."""
        windowed = [cache for cache in self._caches if cache.window is not None] if self.can_truncate else []
        return sum(cache.bytes_per_position() for cache in windowed), max((c.window or 0 for c in windowed), default=0)

    def _pass(
        self,
        phase: Phase,
        tokens: list[list[int]],
        want_logits: bool,
        as_steps: bool = False,
        pictures: PicturePass | None = None,
    ) -> Logits | None:
        with self._model.step(phase, tokens), self._all_or_nothing():
            if pictures is not None and len(pictures.given):
                hidden = self._model.hidden_of_pictures(pictures, self._caches)
            else:
                shift = self._shift(pictures)
                hidden = self._model.hidden(mx.array(tokens, dtype=mx.int32), self._caches, shift)
            logits = self._model.logits(hidden) if want_logits else None
            evaluate(self._caches)
        self._length += len(tokens[0])
        self._places = [cache.place for cache in self._caches]
        if phase == "prefill":
            # The buffers of a long chunk fit no later step: keeping them would double the memory of a conversation.
            mx.clear_cache()
        else:
            self._clear_sometimes()
        return logits

    def _shift(self, text: PicturePass | None) -> int:
        """What earlier pictures change in the positions of the next tokens, which are ``text``."""
        return 0 if text is None or text.positions is None else int(text.positions[0, 0]) - self._length

    def step_choosing(self, token: int, sampler: Sampler) -> int | None:
        self._expect_one_row("step_choosing works")
        # A seed gives the same numbers on every runtime, so the host draws; nothing may run beside a measured step.
        if not sampler.unbound or self._model.recorder.enabled:
            return None
        ahead = self._ahead
        shift = self._shift(self._seen([0])) if self._pictures else 0
        with self._model.step("decode", [[token]]), self._all_or_nothing():
            if ahead is not None and ahead[0] == token and ahead[1] is sampler:
                begun = ahead[2]
            else:
                self.settle()
                first = mx.array([[token]], dtype=mx.int32)
                begun = self._begin(self._model.hidden(first, self._caches, shift), sampler.rule)
            places = [cache.place for cache in self._caches]
            following = self._begin(self._model.hidden(begun.token[:, None], self._caches, shift), sampler.rule)
            mx.async_eval(following.outcome)  # type: ignore[no-untyped-call]
            chosen = int(begun.outcome.item())
            if chosen < 0:
                chosen = sampler.choose(np.array(begun.scores)[0])  # which refuses them
        self._length += 1
        self._places = places
        self._ahead = (chosen, sampler, following)
        self._clear_sometimes()
        return chosen

    def settle(self) -> None:
        """Let a running step end by itself, and return mlx's buffers from an answer's steps."""
        if self._ahead is not None:
            if self._model.recorder.enabled:
                mx.eval(self._ahead[2].outcome)  # It must not run beside what is measured.
            self._go_back()
            mx.clear_cache()

    def _clear_sometimes(self) -> None:
        # One position after keys and values have usually grown, when the step that copied them has ended.
        if self._length % _CLEARED_EVERY == 1:
            mx.clear_cache()

    def _begin(self, hidden: Array, rule: SamplingRule) -> _Begun:
        scores = self._model.scores(hidden)
        key = None
        if not rule.greedy:  # A key that nothing draws with would make the graph longer with every token.
            self._key, key = mx.random.split(self._key)
        token = draw_token(scores, rule, key).astype(mx.int32)
        return _Begun(token, mx.where(are_scores(scores), token, -1), scores)

    def _cut(self, length: int) -> None:
        if length < self._length:
            self._length = length
            self._places = [length] * len(self._caches)
        self._go_back()

    def _copied(self, rows: int) -> MlxRows:
        if rows > 1:
            self._refuse_copies(rows)
        caches = [cache.copy_rows(rows) for cache in self._caches]
        evaluate(caches)
        return MlxRows(self._model, caches, rows, self._length, shared=self._length)

    def _refuse_copies(self, rows: int) -> None:
        """Raises ModelError (memory) if ``rows`` copies of the only row are more than is free."""
        needed = rows * sum(cache.row_bytes() for cache in self._caches)
        limit = eligible.working_set_bytes()
        free = int(psutil.virtual_memory().available) if limit is None else limit - mx.get_active_memory()
        if needed > free:
            raise ModelError(
                f"{rows} beams need {needed / 1e9:.1f} GB for copies of the conversation's {self._length} tokens, and "
                f"{max(0, free) / 1e9:.1f} GB are free: use fewer beams, a shorter conversation or a smaller model",
                kind="memory",
            )

    def checkpoint(self) -> TokenRows | None:
        """A copy of the row in the GPU's memory, because reading the conversation again would take far longer. None if
        the row can be truncated anyway."""
        return None if self.can_truncate else self.fan_out(1)

    @property
    def checkpoint_bytes(self) -> int:
        return self._length * self.bytes_per_position() + self.state_bytes()

    def _contents(self, checkpoint: TokenRows | None) -> Sequence[RowArray]:
        assert checkpoint is None or isinstance(checkpoint, MlxRows)
        return contents_of(self._caches, () if checkpoint is None else checkpoint._caches)

    def _move(self, parents: Sequence[int], changed: Sequence[int]) -> int:
        moved = move_rows(self._caches, parents, self._shared, self._length)
        self._places = [cache.place for cache in self._caches]
        return moved

    def bytes_per_position(self) -> int:
        """Bytes of keys and values of one token in one row; 0 while empty."""
        return sum(cache.bytes_per_position() for cache in self._caches)

    def state_bytes(self) -> int:
        """Bytes of a row's states, which do not depend on its length; 0 while empty."""
        return sum(cache.state_bytes() for cache in self._caches)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Make a failing pass leave every layer at its old length. Raises ModelError if memory ran out."""
        try:
            with memory_named():
                yield
        except BaseException:
            self._go_back()
            raise

    def _go_back(self) -> None:
        """Discard what was begun after ``length`` tokens."""
        self._ahead = None
        for cache, place in zip(self._caches, self._places, strict=True):
            cache.go_back(place)
