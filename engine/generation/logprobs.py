"""Log-probabilities of the tokens of an answer, by the model's own distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.errors import ModelError
from engine.generation.sampling import greedy_token, largest
from engine.ipc.messages import MOST_LOGPROBS, LikelyToken, TokenLogprob
from engine.runtimes.protocol import Logits


class Logprobs:
    """Reports chosen tokens with their log-probabilities and those of the ``count`` likeliest tokens.

    ``bytes_of`` gives a token's bytes. Raises ModelError (bad-input) for an impossible ``count``.
    """

    def __init__(self, count: int, bytes_of: Callable[[int], bytes]) -> None:
        if not 0 <= count <= MOST_LOGPROBS:
            raise ModelError(
                f"{count} likeliest tokens were asked for, and between 0 and {MOST_LOGPROBS} are reported.",
                kind="bad-input",
            )
        self._count = count
        self._bytes_of = bytes_of

    def of(self, logits: Logits, token: int) -> TokenLogprob:
        """The report on ``token``, chosen from ``logits`` [vocabulary] as the model computed them.

        Raises NotNumbersError if they are no numbers.
        """
        best = logits[greedy_token(logits)]
        whole = best + np.log(np.exp(logits - best, dtype=np.float32).sum(dtype=np.float64))
        top: list[LikelyToken] = []
        if self._count:
            found = largest(logits, self._count)
            found = found[np.argsort(-logits[found], kind="stable")[: self._count]]
            top = [LikelyToken(*self._spelled(int(each)), float(logits[each] - whole)) for each in found]
        return TokenLogprob(*self._spelled(token), float(logits[token] - whole), top)

    def _spelled(self, token: int) -> tuple[int, str, bytes]:
        data = self._bytes_of(token)
        return token, data.decode("utf-8", "replace"), data
