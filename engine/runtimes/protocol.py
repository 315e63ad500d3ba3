"""What a runtime is: it runs the trunk, owns the key/value cache, and asks the executor for the experts' weighted sum.

Everything above (session, sampling, beam search) is written against these base classes only, so all runtimes share it.
Token ids are Python ints; logits are float32 numpy arrays on the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError, PeerLost
from engine.ipc.messages import Load, ModelFacts
from engine.ipc.progress import ProgressCallback
from engine.models.files import FileMapping
from engine.moe.expert_parallel import LayerExchange
from engine.moe.popularity import Popularity
from engine.moe.rank_context import RankContext
from engine.moe.timing import Recorder

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Draw:
    """How the next token is chosen: the rule of :class:`engine.generation.sampling.SamplingRule` without a seed.

    ``on_host(logits)`` [vocabulary] is asked where the logits are no numbers; it raises ModelError then.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    on_host: Callable[[Logits], int]


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

    @abstractmethod
    def extend(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        """Prefill one chunk (``rows`` must be 1). Returns the logits after the last token, [vocabulary], or None."""

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> Logits:
        """Decode one token per row. Returns logits [rows, vocabulary]."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens of the (only) row."""

    @abstractmethod
    def fan_out(self, rows: int) -> TokenRows:
        """A new object with ``rows`` copies of this single row's cache. This one is unchanged and stays usable."""

    @abstractmethod
    def reorder(self, parents: Sequence[int]) -> int:
        """Row i becomes a copy of row ``parents[i]``. Moves key/values only for rows whose parent changed, and only
        positions after the shared prompt. Returns the bytes moved."""

    def step_choosing(self, token: int, draw: Draw) -> int | None:
        """Decode ``token`` in the only row; returns the token that follows, chosen where the logits are.

        None, and nothing was decoded: tokens are chosen on the host. The step after it may be begun before anybody has
        seen its token; it is used by a call with the same ``draw`` and that token. Whatever else is asked of these
        rows forgets a step that was begun so.
        """
        return None

    def settle(self) -> None:
        """Forget a step that was begun ahead: nobody will ask for it."""
        return


class Interrupted(Exception):
    """Raised by :attr:`LoadedModel.between_layers` to abandon a forward pass; the rows stay as they were."""


class Weights(Protocol):
    """Weights in pieces, in the order in which a pass uses them. Asked from the page warmer's thread only."""

    @property
    def own_memory(self) -> bool:
        """They are in a GPU driver's memory, not in pages of files."""
        ...

    @property
    def sizes(self) -> list[int]:
        """Bytes of each piece."""
        ...

    def touch(self, index: int) -> None:
        """Use the memory of a piece."""
        ...

    def resident(self, index: int) -> bool:
        """Whether a piece need not be touched."""
        ...

    def close(self) -> None: ...


class LoadedWeights(ABC):
    """Weights that were loaded, and where they are in memory: in pages of files, unless a runtime says otherwise."""

    weights_are_wired: bool = False
    """The system keeps all of them in a GPU's memory by itself."""

    @property
    def mapped_files(self) -> Sequence[FileMapping]:
        """The mappings that a pass reads, so that bringing them into memory leaves no page to its first pass."""
        return ()

    def kept_weights(self) -> Weights | None:
        """Weights in a GPU driver's memory (mlx), to be touched while the model does not answer; None: in files."""
        return None

    def hold_weights(self, wanted: bool) -> None:
        """False: the system need not keep them any more; True: it is to keep them as before. From any thread."""
        return

    @abstractmethod
    def close(self) -> None:
        """Free the memory."""


class LoadedModel(LoadedWeights):
    """A model ready to run. What a runtime cannot do has a default here."""

    between_layers: Callable[[], None] | None = None
    """If set, called before each decoder layer of an :meth:`TokenRows.extend`; may raise :class:`Interrupted`. Runtimes
    that cannot stop within a chunk do not call it."""

    @property
    @abstractmethod
    def facts(self) -> ModelFacts: ...

    @property
    @abstractmethod
    def recorder(self) -> Recorder:
        """Filled by the runtime while ``recorder.enabled``; hooks that cost time are off otherwise."""

    @abstractmethod
    def start(self) -> TokenRows:
        """An empty cache of one row."""

    @property
    def popularity(self) -> Popularity | None:
        """Routes to each expert since the model was loaded, whether or not somebody watches; None where they are not
        counted, as for a dense model."""
        return None

    def resize_experts(self, nbytes: int | None) -> ModelFacts:
        """Give experts ``nbytes`` of the GPU's memory from now on (None: what is left free); the facts then.

        Raises ModelError if no GPU shares the experts (bad-input), or it has too little (memory).
        """
        raise ModelError(
            f"{self.facts.name} runs on {self.facts.runtime}, which shares no experts with a GPU; load it with "
            "partitioning hybrid.",
            kind="bad-input",
        )

    def memory_for_rows(self) -> int | None:
        """Bytes of the GPU that keys and values may take, what experts would give up for them included; None where they
        are elsewhere."""
        return None

    @property
    def context(self) -> RankContext | None:
        """This node's place in the ring, which is another one after the ring was formed anew; None: on one machine."""
        return None

    def turn(self, cancelled: Callable[[], bool]) -> None:
        """A turn begins, or is over. ``cancelled``, which is asked from another thread, says whether it was stopped: a
        pass ends then though other machines are waited for, with Interrupted or, where they do not answer, PeerLost."""
        return

    def recover(self, lost: PeerLost, progress: ProgressCallback, say: Callable[[str], None]) -> None:
        """After ``lost`` came out of a pass: form again with those who are left. All rows that were made before are
        void. ``say`` is told each thing that the person should know as soon as it is known, a line each.

        Raises ModelError if that cannot be done, naming the missing gigabytes (memory), and Cancelled from
        ``progress``: then the next question forms.
        """
        raise ModelError(f"A machine of the ring is gone: {lost}.", kind="network") from lost

    def between_turns(self, progress: ProgressCallback, say: Callable[[str], None]) -> bool:
        """Called before a question: forms again if somebody is gone, or came back. Returns whether all rows that were
        made before are void; they are, too, if it raises (as :meth:`recover`)."""
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


class Runtime(Protocol):
    """A way to run models: ``torch`` or ``mlx``."""

    @property
    def name(self) -> str: ...

    def load(
        self,
        folder: Path,
        request: Load,
        progress: ProgressCallback,
        ring: RingPlace | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> LoadedModel:
        """Load the model in ``folder`` (prepared, or plain Hugging Face safetensors; in a ring also a share of one).

        With ``ring`` only the experts of its rank context are used, and every MoE layer goes through its exchange.
        ``release`` frees the model that was loaded before: it is called once, after all that can be refused without
        its memory was refused, and before memory is taken.
        Raises :class:`engine.errors.ModelError` if the family is not supported, files are damaged, or it does not fit.
        """
        ...


Config = dict[str, Any]
"""A model's ``config.json`` as parsed."""
