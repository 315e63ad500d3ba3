"""Guides for answers of a loaded model that must have a form."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from engine.errors import Cancelled, ModelError
from engine.generation.call_grammars import call_grammar
from engine.generation.constraints import AnswerGuide, ConstraintVocabulary, FormState, GuideVocabulary
from engine.generation.reasoning import ReasoningParser
from engine.ipc.messages import Constraint, Generate
from engine.session.token_history import ChatTokenizer

LOOK_S = 0.02
"""Seconds between two checks whether an answer was cancelled while its form is prepared."""


class Constraining:
    """Makes guides. The data that they need about the vocabulary is made with the first guide and kept.

    ``vocabulary`` is the model's number of logits, ``ends`` are the tokens that end an answer.
    """

    def __init__(self, tokenizer: ChatTokenizer | None, vocabulary: int, ends: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = ends
        self._forms: ConstraintVocabulary | None = None
        self._known: GuideVocabulary | None = None
        self._left: threading.Thread | None = None
        """Thread that prepares a form for an answer that was cancelled."""

    def guide(
        self,
        request: Generate,
        constraint: Constraint,
        parser: Callable[[], ReasoningParser] | None,
        cancelled: Callable[[], bool],
    ) -> AnswerGuide:
        """The guide of ``request``'s answer, which must satisfy ``constraint``, at its beginning.

        Raises ModelError (bad-input) if the constraint cannot be used, with this model or at all, and Cancelled soon
        after ``cancelled()`` returns True.
        """
        if request.continue_last:
            raise ModelError(
                "An answer that is continued cannot be given a form; leave the constraint out.", "bad-input"
            )
        if self._tokenizer is None or not self._tokenizer.token_bytes.exact:
            raise ModelError(
                "This model's answers cannot be given a form, as the bytes of its tokens are not known.", "bad-input"
            )
        known, forms = self._vocabularies(self._tokenizer)
        return AnswerGuide(self._begun(forms, constraint, cancelled), known, parser and parser())

    def _begun(self, forms: ConstraintVocabulary, constraint: Constraint, cancelled: Callable[[], bool]) -> FormState:
        """The form at its beginning.

        A hostile form takes seconds, and the library cannot be interrupted. So it works in a thread, which continues
        alone if the answer is cancelled. The next form waits for it, so that there is never more than one.
        """
        outcome: list[FormState | BaseException] = []

        def work() -> None:
            try:
                outcome.append(forms.begin(constraint))
            except BaseException as error:
                outcome.append(error)

        _wait(self._left, cancelled)
        self._left = threading.Thread(target=work, name="form", daemon=True)
        self._left.start()
        _wait(self._left, cancelled)
        self._left = None
        (state,) = outcome
        if isinstance(state, BaseException):
            raise state
        return state

    def call_guide(
        self, request: Generate, parser: Callable[[], ReasoningParser] | None, cancelled: Callable[[], bool]
    ) -> AnswerGuide:
        """The guide of an answer that must call one of ``request``'s tools. Raises ModelError as :meth:`guide`."""
        assert self._tokenizer is not None and self._tokenizer.tool_format is not None
        tools = [tool for tool in request.tools if request.forced_tool in ("", tool.name)]
        tokenizer = self._tokenizer
        parts = tokenizer.reasoning if self._tokenizer.tool_format.shape == "parts" else None
        grammar = call_grammar(
            self._tokenizer.tool_format,
            tools,
            lambda mark: tokenizer.encode_rendered(mark, beginning=False),
            tokenizer.token_bytes.special,
            parts,
        )
        # Where a call is a part of the answer, its grammar is that of the thoughts, too.
        return self.guide(request, grammar, parser if parts is None else None, cancelled)

    def _vocabularies(self, tokenizer: ChatTokenizer) -> tuple[GuideVocabulary, ConstraintVocabulary]:
        if self._known is None or self._forms is None:
            spellings = tokenizer.token_bytes.all(self._vocabulary)
            self._forms = ConstraintVocabulary(spellings, tokenizer.token_bytes.special | frozenset(self._ends))
            self._known = GuideVocabulary(
                self._vocabulary,
                spellings.__getitem__,
                self._ends,
                lambda mark: tokenizer.encode_rendered(mark, beginning=False),
                self._forms.spelled,
                [token for token, text in enumerate(spellings) if text and not text.strip(b"\n")],
            )
        return self._known, self._forms


def _wait(thread: threading.Thread | None, cancelled: Callable[[], bool]) -> None:
    """Wait for the end of ``thread``. Raises Cancelled soon after ``cancelled()`` returns True."""
    while thread is not None and thread.is_alive():
        if cancelled():
            raise Cancelled("The answer was cancelled before it began.")
        thread.join(LOOK_S)
