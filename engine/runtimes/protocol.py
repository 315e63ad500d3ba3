"""The base classes of runtimes. A runtime runs the trunk, owns the KV cache, and has the executor compute the experts.

Session, sampling and beam search use only these base classes, so all runtimes share them. Token ids are Python ints;
logits are float32 numpy arrays on the CPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError, PeerLost
from engine.ipc.messages import ModelFacts
from engine.ipc.progress import ProgressCallback
from engine.models.formats.byte_map import FileMapping
from engine.models.formats.model_files import Repacked
from engine.moe.expert_parallel import LayerExchange, RankContext
from engine.moe.popularity import Popularity
from engine.moe.timing import Recorder
from engine.pictures.shown import ShownPictures

if TYPE_CHECKING:
    from engine.generation.sampling import Sampler

Logits = NDArray[np.float32]


class TokenRows(ABC):
    """Rows of tokens of equal length in the key/value cache: one row for sampling, W rows for a beam search."""

    @property
    @abstractmethod
    def rows(self) -> int: ...

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens per row in the cache."""

    @property
    @abstractmethod
    def can_truncate(self) -> bool:
        """Whether :meth:`truncate` works: not for recurrent state such as linear attention."""

    @property
    def void(self) -> bool:
        """Whether the contents are gone with a ring that was formed again. A pass then raises PeerLost."""
        return False

    @abstractmethod
    def extend(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        """Prefill one chunk (``rows`` must be 1). Returns the logits after the last token, [vocabulary], or None."""

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> Logits:
        """Decode one token per row. Returns logits [rows, vocabulary]."""

    @property
    def steps_together(self) -> int:
        """Maximum number of tokens that :meth:`replay` runs in one pass; 0 if it runs none."""
        return 0

    def replay(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        """Run ``tokens``, at most :attr:`steps_together`, in one pass that leaves what as many :meth:`step` would, to
        the bit (``rows`` must be 1). Returns the logits after the last token, [vocabulary], or None."""
        raise ValueError("these rows are stepped through token by token")

    @property
    def verified_together(self) -> int:
        """Maximum number of tokens that :meth:`verify` runs in one pass; 0 if it runs none."""
        return 0

    def verify(self, tokens: Sequence[int]) -> Logits:
        """Run ``tokens``, at most :attr:`verified_together`, in one pass that leaves what as many :meth:`step` would,
        to the bit (``rows`` must be 1). Returns the logits after each of them, [tokens, vocabulary].

        Those that are not wanted are cut off with :meth:`truncate`.
        """
        raise ValueError("these rows are stepped through token by token")

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens of the (only) row, at least :attr:`shortest_cut`."""

    @property
    def shortest_cut(self) -> int:
        """The fewest tokens to which :meth:`truncate` can cut the row."""
        return 0 if self.can_truncate else self.length

    def forget_unseen(self, length: int) -> None:
        """Give back the memory of what is needed only if the (only) row is cut to fewer than ``length`` tokens, which
        is then impossible. A runtime may keep all of it."""
        return

    @property
    def forgotten_bytes(self) -> int:
        """Bytes of keys and values of the (only) row that were given back."""
        return 0

    @abstractmethod
    def fan_out(self, rows: int) -> TokenRows:
        """A new object with ``rows`` copies of this single row's cache. This one is unchanged and stays usable."""

    @abstractmethod
    def reorder(self, parents: Sequence[int]) -> int:
        """Row i becomes a copy of row ``parents[i]``. Moves key/values only for rows whose parent changed, and only
        positions after the shared prompt. Returns the bytes moved."""

    def checkpoint(self) -> TokenRows | None:
        """A row with what this single row holds, which goes on by itself; None if that would copy it.

        It is for rows that cannot be truncated.
        """
        return None

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of memory that a checkpoint of this row takes beside it."""
        return 0

    def contents(self, checkpoint: TokenRows | None = None) -> Sequence[RowArray] | None:
        """The arrays of the only row and its ``checkpoint`` in order; None if the runtime cannot export them.

        They are read before the next pass. :meth:`LoadedModel.restored` makes the row from them.
        """
        return None

    def step_choosing(self, token: int, sampler: Sampler) -> int | None:
        """Decode ``token`` in the only row. Returns the next token, chosen by ``sampler`` where the logits are, of
        which it is to be told (:meth:`Sampler.take`).

        Returns None, with nothing decoded, if tokens are chosen here and now. The runtime may begin the next step
        ahead; the next call uses it if it has the same ``sampler`` and the returned token. Any other call discards it.
        """
        return None

    def settle(self) -> None:
        """Discard a step that was begun ahead."""
        return


class Interrupted(Exception):
    """Raised by :attr:`LoadedModel.between_layers` to abandon a forward pass; the rows stay as they were."""


class Weights(Protocol):
    """Weights in pieces, in the order in which a pass uses them. Used by the page warmer's thread only."""

    @property
    def own_memory(self) -> bool:
        """Whether the weights are in a GPU driver's memory rather than in pages of files."""
        ...

    @property
    def sizes(self) -> list[int]:
        """Bytes of each piece."""
        ...

    def touch(self, index: int) -> None:
        """Touch the memory of a piece, which brings it into memory."""
        ...

    def resident(self, index: int) -> bool:
        """Whether a piece is in memory, so that it need not be touched."""
        ...

    def close(self) -> None: ...


class LoadedWeights(ABC):
    """Loaded weights and their place in memory: pages of files, unless a runtime overrides this."""

    weights_are_wired: bool = False
    """Whether the system keeps all weights in a GPU's memory by itself."""

    @property
    def mapped_files(self) -> Sequence[FileMapping]:
        """All mappings that a pass reads. Once they are in memory, the first pass loads no page."""
        return ()

    @property
    def repacked(self) -> Repacked:
        """What of the weights was computed when they were loaded."""
        return Repacked()

    @property
    def experts_on_gpu(self) -> Mapping[int, Collection[int]]:
        """The experts, by layer, that a GPU keeps a copy of now, so that the CPU hardly reads theirs."""
        return {}

    def kept_weights(self) -> Weights | None:
        """Weights in a GPU driver's memory (mlx), to be touched while the model is idle; None if they are in files."""
        return None

    def hold_weights(self, wanted: bool) -> None:
        """Tell the system whether to keep the weights in memory. Thread-safe."""
        return

    @abstractmethod
    def close(self) -> None:
        """Free the memory."""


class LoadedModel(LoadedWeights):
    """A model that is ready to run. Optional abilities of runtimes have defaults here."""

    between_layers: Callable[[], None] | None = None
    """If set, called before each decoder layer of an :meth:`TokenRows.extend`; may raise :class:`Interrupted`. Runtimes
    that cannot stop within a chunk do not call it."""

    beside: Callable[[], None] | None = None
    """If set, called between the layers of an :meth:`TokenRows.extend`. It may run steps of other rows. Runtimes that
    cannot run them then do not call it."""

    pictures: ShownPictures | None = None
    """The pictures that the model is shown, whose tokens :meth:`TokenRows.extend` then takes; None: it is shown none.
    """

    @property
    def takes_pictures(self) -> bool:
        """Whether passes take rows of pictures, so that :attr:`pictures` may be set."""
        return False

    @property
    @abstractmethod
    def facts(self) -> ModelFacts: ...

    @property
    @abstractmethod
    def recorder(self) -> Recorder:
        """The recorder, filled by the runtime while ``recorder.enabled``. Hooks that cost time are off otherwise."""

    @abstractmethod
    def start(self) -> TokenRows:
        """An empty cache of one row."""

    @property
    def rows_together(self) -> int:
        """Maximum number of rows in a step of :meth:`step_together`. In native each gets the bits of a step alone, in
        others the same logits but for their rounding."""
        return 1

    def step_together(self, steps: Sequence[tuple[TokenRows, Sequence[int]]]) -> Sequence[Logits]:
        """Run :meth:`TokenRows.step` of several rows, none of them void, with their tokens, in one pass if possible.
        Returns the logits [rows, vocabulary] of each."""
        return [rows.step(tokens) for rows, tokens in steps]

    @property
    def popularity(self) -> Popularity | None:
        """The number of routes to each expert since the model was loaded; None if they are not counted, as for a dense
        model."""
        return None

    @property
    def keeps_contents(self) -> bool:
        """Whether rows tell their contents, and :meth:`restored` takes them."""
        return False

    def restored(
        self, length: int, begun: int, parts: Sequence[RowPart], fill: Fill
    ) -> tuple[TokenRows, TokenRows | None]:
        """A row of ``length`` tokens with the contents ``parts``, whose bytes ``fill`` gives in order, and its
        checkpoint after ``begun`` tokens (0: none).

        Raises ValueError, before memory is taken, if a row of this model has other parts, and what ``fill`` raises.
        """
        raise ValueError(f"{self.facts.runtime} cannot restore a row")

    def resize_experts(self, nbytes: int | None) -> ModelFacts:
        """Give the experts ``nbytes`` of GPU memory (None: all that is free). Returns the new facts.

        Raises ModelError if no GPU shares the experts (bad-input), or it has too little (memory).
        """
        raise ModelError(
            f"{self.facts.name} runs on {self.facts.runtime}, which shares no experts with a GPU; load it with "
            "partitioning hybrid.",
            kind="bad-input",
        )

    def memory_for_rows(self) -> int | None:
        """Bytes of GPU memory available to keys and values, including what experts would give up for them; None if they
        are not on the GPU."""
        return None

    @property
    def context(self) -> RankContext | None:
        """This node's rank context, which changes when the ring is formed again; None on a single machine."""
        return None

    def begin_turn(self, cancelled: Callable[[], bool]) -> None:
        """Begin a turn. ``cancelled`` returns whether it was stopped; it is called from another thread.

        When all turns under way are stopped, a pass ends although other machines are waited for: with Interrupted, or
        with PeerLost if they do not answer.
        """
        return

    def end_turn(self, cancelled: Callable[[], bool]) -> None:
        """End the turn that began with ``cancelled``, if it did."""
        return

    def recover(self, lost: PeerLost, progress: ProgressCallback, notify: Callable[[str], None]) -> None:
        """Form the ring again with the remaining machines after a pass raised ``lost``. All older rows become invalid.

        ``notify`` is called with lines for the person, as soon as each is known. Raises ModelError if the ring cannot
        be formed, with the missing gigabytes (memory), and Cancelled from ``progress``. The next question then tries
        again.
        """
        raise ModelError(f"A machine of the ring is gone: {lost}.", kind="network") from lost

    def between_turns(
        self, progress: ProgressCallback, notify: Callable[[str], None], read: int = 0, passes: int = 0
    ) -> bool:
        """Form the ring again if a machine left, or if one came back and that saves more time than it takes to run
        again what the question needs of the rows. Called before each question.

        ``read``: tokens of prompts that would be run again; ``passes``: passes over decoded tokens.

        Returns whether all older rows became invalid. They do, too, if it raises, as :meth:`recover` does.
        """
        return False


@dataclass(frozen=True)
class RingPlace:
    """A node's place in a ring, for loading a model there: its rank context, and the exchange of its MoE layers.

    ``logits`` False: nobody reads this node's logits (the head samples), so a runtime may leave them out and return
    [rows, 0]; everything else of a pass, every exchange included, is as it would be with them.
    """

    context: RankContext
    exchange: LayerExchange
    logits: bool = True


Config = dict[str, Any]
"""A model's ``config.json`` as parsed."""


# --- contents of a row as bytes --------------------------------------------------------------------------------------


Bytes = NDArray[np.uint8]
_ITEM_BYTES = {"uint8": 1, "uint16": 2, "bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}
"""Bytes of a number, by the names that a part may have for its numbers."""


class RowPart(msgspec.Struct, frozen=True, array_like=True):
    """One array: its ``name``, unique in a row, the format of its ``numbers``, and its shape."""

    name: str
    numbers: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Raises ValueError for an unknown format or an impossible shape."""
        if self.numbers not in _ITEM_BYTES or not all(0 < size < 2**40 for size in self.shape):
            raise ValueError(f"{self.name} has the shape {self.shape} of {self.numbers}")
        return math.prod(self.shape) * _ITEM_BYTES[self.numbers]


@dataclass(frozen=True)
class RowArray:
    """An array of a row. ``read()`` gives its bytes, and copies no more than that."""

    part: RowPart
    read: Callable[[], Bytes]

    @classmethod
    def of(cls, name: str, array: Any, read: Callable[[Any], Bytes]) -> RowArray:
        """``array`` of a library whose types of numbers have their usual names; ``read`` gives its bytes."""
        return cls(RowPart(name, str(array.dtype).rpartition(".")[2], tuple(array.shape)), partial(read, array))


Fill = Callable[[Bytes], None]
"""Fills an array with the next bytes. It may raise."""


def as_bytes(array: NDArray[Any]) -> Bytes:
    """The bytes of ``array`` in the order of its indices."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)
