"""A model's tokenizer and chat template, as the model's folder has them.

transformers reads them (remote code off, no network); it is imported when the first tokenizer is loaded, not before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.messages import Message
from engine.models.wording import shown

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
"""A folder with none of these has no tokenizer: it can be run with token ids only."""

END_OF_TURN_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|END_OF_TURN_TOKEN|>",
)
"""Tokens that end a turn in the chat templates in use, also where a model's config forgets to say so."""


class Tokenizer:
    """Text to token ids and back, and a conversation to the prompt the model was trained on."""

    def __init__(self, inner: Any, end_of_turn_ids: frozenset[int]) -> None:
        self._inner = inner
        self._end_of_turn_ids = end_of_turn_ids

    @property
    def vocabulary_size(self) -> int:
        """Number of ids the tokenizer knows, added tokens included."""
        return len(self._inner)

    @property
    def end_of_turn_ids(self) -> frozenset[int]:
        """Ids after which the model's turn is over."""
        return self._end_of_turn_ids

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with what the model puts before every text (often a beginning-of-text token)."""
        return list(self._inner.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out; an incomplete character at the end shows as U+FFFD."""
        text = self._inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def encode_chat(self, messages: Sequence[Message], continue_last: bool = False) -> list[int]:
        """The conversation through the model's own chat template, ready for the assistant's next words.

        See :meth:`render_chat`.
        """
        return self.encode_rendered(self.render_chat(messages, continue_last))

    def encode_rendered(self, text: str, beginning: bool = True) -> list[int]:
        """Token ids of what :meth:`render_chat` gave, or of a later part of it (not ``beginning``)."""
        # A template writes what comes before every text itself.
        add = beginning and not self.has_chat_template
        return list(self._inner.encode(text, add_special_tokens=add))

    def decode_exactly(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` with special tokens spelled out."""
        return str(self._inner.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def render_chat(self, messages: Sequence[Message], continue_last: bool = False) -> str:
        """The conversation as the text that is tokenized: the model's own chat template, nothing added.

        ``continue_last``: the last message is the beginning of the answer and stays open. Without a template the
        messages are written as ``role: content`` blocks with ``assistant:`` at the end.
        Raises ModelError if there are no messages, or the template refuses them.
        """
        if not messages:
            raise ModelError("There is no message to answer; type one.", "bad-input")
        if continue_last and messages[-1].role != "assistant":
            raise ModelError(
                f"Only an assistant's message can be continued, and the last one is the {messages[-1].role}'s.",
                "bad-input",
            )
        if continue_last and not messages[-1].content.strip():
            messages, continue_last = messages[:-1], False
            if not messages:
                raise ModelError("There is no message to answer; type one.", "bad-input")
        if not self.has_chat_template:
            return plain_prompt(messages, continue_last)
        return self._render(messages, continue_last)

    def _render(self, messages: Sequence[Message], continue_last: bool) -> str:
        try:
            text = self._inner.apply_chat_template(
                [{"role": message.role, "content": message.content} for message in messages],
                tokenize=False,
                add_generation_prompt=not continue_last,
                continue_final_message=continue_last,
            )
        except Exception as error:  # a template is a program of the model's: it may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(
                f"The model's chat template refuses this conversation: {shown(reason, 300)}", "bad-input"
            ) from error
        return str(text)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a model's folder; None if the folder has none. Raises ModelError if its files are damaged."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for damaged files
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            raise ModelError(
                f"The tokenizer in {folder} asks for code from its repository, which is never run."
            ) from error
        raise ModelError(
            f"The tokenizer in {folder} cannot be read ({type(error).__name__}: {shown(reason, 200)}); "
            f"download the model again."
        ) from error
    return Tokenizer(inner, _end_of_turn_ids(folder, inner))


def plain_prompt(messages: Sequence[Message], continue_last: bool = False) -> str:
    """How a conversation is written for a model without a chat template."""
    blocks = [f"{message.role}: {message.content}" for message in messages]
    return "\n\n".join(blocks if continue_last else [*blocks, "assistant:"])


def _end_of_turn_ids(folder: Path, inner: Any) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        ids.update(_configured_ends(folder / name))
    if isinstance(inner.eos_token_id, int):
        ids.add(inner.eos_token_id)
    vocabulary = {str(token): identity for identity, token in inner.added_tokens_decoder.items() if token.special}
    for token in END_OF_TURN_TOKENS:
        if token == "<|end|>" and "<|return|>" in vocabulary:
            continue  # gpt-oss: ends a message within the turn; the answer proper comes after it
        if token in vocabulary:
            ids.add(vocabulary[token])
    return frozenset(ids)


def _configured_ends(path: Path) -> list[int]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    if not isinstance(config, dict):
        return []
    text_config = config.get("text_config")
    ends = config.get("eos_token_id")
    if ends is None and isinstance(text_config, dict):
        ends = text_config.get("eos_token_id")
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
