"""The guides of a loaded model's answers that must have a form."""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.errors import ModelError
from engine.generation.answer_guide import AnswerGuide, GuideVocabulary
from engine.generation.constraints import ConstraintVocabulary
from engine.generation.reasoning import ReasoningParser
from engine.generation.tool_grammars import call_grammar
from engine.ipc.messages import Constraint, Generate
from engine.session.token_history import ChatTokenizer


class Constraining:
    """Makes guides. What they need of the vocabulary is made with the first one, and kept.

    ``vocabulary`` is the number of the model's logits, ``ends`` are the tokens that end an answer.
    """

    def __init__(self, tokenizer: ChatTokenizer | None, vocabulary: int, ends: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = ends
        self._forms: ConstraintVocabulary | None = None
        self._known: GuideVocabulary | None = None

    def guide(
        self, request: Generate, constraint: Constraint, parser: Callable[[], ReasoningParser] | None
    ) -> AnswerGuide:
        """The guide of ``request``'s answer, which must satisfy ``constraint``, at its beginning.

        Raises ModelError (bad-input) if the constraint cannot be used with this model, or at all.
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
        return AnswerGuide(forms.begin(constraint), known, parser and parser())

    def call_guide(self, request: Generate, parser: Callable[[], ReasoningParser] | None) -> AnswerGuide:
        """The guide of an answer that must call one of ``request``'s tools. Raises ModelError as :meth:`guide`."""
        assert self._tokenizer is not None and self._tokenizer.tool_format is not None
        tools = [tool for tool in request.tools if request.forced_tool in ("", tool.name)]
        tokenizer = self._tokenizer
        grammar = call_grammar(
            self._tokenizer.tool_format,
            tools,
            lambda mark: tokenizer.encode_rendered(mark, beginning=False),
            tokenizer.token_bytes.special,
        )
        return self.guide(request, grammar, parser)

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
