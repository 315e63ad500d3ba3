"""A model's tokenizer and chat template, from the model's folder.

The `tokenizers` library reads the tokenizer (:mod:`engine.models.text.tokenizer_files`), and a separate process renders
the template (:mod:`engine.models.text.template_process`). Neither runs Python code of the folder or uses the network.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.ipc.messages import Message, ReasoningFacts, Tool
from engine.models.formats.json_files import SMALL_FILE, read_object
from engine.models.text.histories import Histories
from engine.models.text.reasoning_formats import format_of, has_effort, has_switch
from engine.models.text.template_process import TemplateProcess
from engine.models.text.token_bytes import TokenBytes
from engine.models.text.tokenizer_files import TokenizerFiles, read_template, read_tokenizer
from engine.models.text.tool_formats import rendered_calls, rendered_tools, tool_format_of
from engine.system.confined import StopCheck

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
"""Files of a tokenizer. A folder without any of them can be run with token ids only."""

END_OF_TURN_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<|END_OF_TURN_TOKEN|>",
)
"""Tokens that end a turn, for a model without a chat template that tells."""
END_OF_TEXT_TOKENS = ("<|end_of_text|>", "<|endoftext|>")
"""Tokens that end a text. Models also end a turn with them, and no template writes them there."""


MOST_MESSAGES = 10_000
"""Maximum number of messages of a conversation, each call of a tool counted as another one."""
_CHUNK = 65_536
"""Characters that are tokenized at once to see whether a text can fit at all."""


class Tokenizer:
    """Converts text to token ids and back, and a conversation to the model's prompt format."""

    def __init__(
        self,
        files: TokenizerFiles,
        template: TemplateProcess | None,
        configured_ends: Collection[int],
        source: str = "",
    ) -> None:
        """``configured_ends`` are the ids that end a turn by the model's files. ``source`` is the chat template, by
        which the format of the model's thoughts is known."""
        self._library = files.backend
        self._added = files.added
        self.reasoning = format_of(source, {token.content for token in files.added.values()})
        """How the model marks its thoughts; None if it does not."""
        self.tool_format = tool_format_of(source, {token.content for token in files.added.values()})
        """How the model writes calls of tools; None if its template takes no tools, or the format is not known."""
        self._switch, self._effort = has_switch(source), has_effort(source)
        marks = self.reasoning.marks if self.reasoning is not None else ()
        calls = self.tool_format.all_marks if self.tool_format is not None else ()
        self._marks = (*marks, *calls)
        kept = (*marks, *self.reasoning.within) if self.reasoning is not None else ()
        self._left_out = _left_out(files.added, kept)
        self._left_out_beside_calls = _left_out(files.added, (*kept, *calls))
        self._named = files.named
        self._configured_ends = frozenset(configured_ends)
        self._template = template
        self._histories = Histories(takes_tools=template is not None and self.tool_format is not None)
        self._control: ControlTokens | None = None
        self.notices = files.notices
        """Lines for the person about unusual properties of this tokenizer."""

    @property
    def vocabulary_size(self) -> int:
        """Number of the tokenizer's ids, added tokens included."""
        return self._library.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def end_of_turn_ids(self) -> frozenset[int]:
        """Ids that end the model's turn: those that its files name, what its chat template writes after an answer, what
        ends a turn after a call of a tool, and what ends a text. Waits for the template's process."""
        added = {token.content: number for number, token in self._added.items()}
        special = {token.content: number for number, token in self._added.items() if token.special}
        # Files call what ends a turn after a call a text like any other, as it begins the tool's answer.
        after_calls = () if self.tool_format is None else self.tool_format.turn_ends
        named: tuple[str, ...] = END_OF_TEXT_TOKENS
        written = self._written_after_answers()
        if not written:
            # gpt-oss: <|end|> ends a message within the turn, and the answer proper comes after it.
            within = {*self._marks, *(("<|end|>",) if "<|return|>" in special else ())}
            named += tuple(each for each in END_OF_TURN_TOKENS if each not in within)
        found = {special[each] for each in named if each in special} | {
            added[each] for each in after_calls if each in added
        }
        return self._configured_ends | written | found

    def _written_after_answers(self) -> set[int]:
        """The token that the template writes behind an assistant's message; none if it writes other text there.

        A mark of thoughts or calls is passed over. If nothing follows the last message of a conversation, what comes
        between an answer and the next question counts, as with it some models end their turn.
        """
        if self._template is None:
            return set()
        try:
            texts = self._template.facts(self._named).after_answers
        except ModelError:
            # The first question says why.
            return set()
        first = next((text for text in texts if text.strip()), "")
        written = _without_marks(first, self._marks)
        found = {token.content: number for number, token in self._added.items() if written.startswith(token.content)}
        return {found[max(found, key=len)]} if written and found else set()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with the tokens that the model puts before every text, often a beginning-of-text."""
        return list(self._library.encode(text).ids)

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of single tokens."""
        return TokenBytes(self._library, self._added)

    @property
    def reasoning_facts(self) -> ReasoningFacts | None:
        """What a person may know and change about the model's thoughts."""
        if self.reasoning is None:
            return None
        return ReasoningFacts(format=self.reasoning.name, switch=self._switch, effort=self._effort)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens, but with those that mark thoughts.

        An incomplete character at the end becomes U+FFFD.
        """
        return self._decode(ids, self._left_out)

    def decode_with_calls(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` like :meth:`decode`, with the special tokens that mark tool calls, too."""
        return self._decode(ids, self._left_out_beside_calls)

    def _decode(self, ids: Sequence[int], left_out: frozenset[int] | None) -> str:
        if left_out is None:
            return self._library.decode(list(ids), skip_special_tokens=True)
        return self._library.decode([each for each in ids if each not in left_out], skip_special_tokens=False)

    def encode_chat(
        self, messages: Sequence[Message], continue_last: bool = False, should_stop: StopCheck = lambda: False
    ) -> list[int]:
        """The conversation through the model's own chat template, ready for the assistant's next words.

        See :meth:`render_chat`.
        """
        return self.encode_rendered(self.render_chat(messages, continue_last, should_stop))

    def encode_rendered(self, text: str, beginning: bool = True) -> list[int]:
        """Token ids of what :meth:`render_chat` gave, or of a later part of it (not ``beginning``)."""
        # A template writes what comes before every text itself.
        add = beginning and not self.has_chat_template
        return self._control_tokens(lambda: False).encode(text, add_special_tokens=add)

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether ``text`` is certainly more than ``limit`` tokens. No more of it is tokenized than shows it."""
        if len(text) <= max(limit, _CHUNK):
            return False
        # Where a text is cut, a few tokens more or less may come out.
        certain = limit + limit // 8 + 64
        found = 0
        for begin in range(0, len(text), _CHUNK):
            part = text[begin : begin + _CHUNK].replace(MARK, "")
            found += len(self._library.encode(part, add_special_tokens=False).ids)
            if found > certain:
                return True
        return False

    def decode_exactly(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` with special tokens spelled out."""
        return self._library.decode(list(ids), skip_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        continue_last: bool = False,
        should_stop: StopCheck = lambda: False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """The conversation as the text that is tokenized: the model's own chat template, nothing added.

        Control tokens that a message spells out have a mark in them (:mod:`engine.models.text.tokenizer`).
        ``continue_last``: the last message is the beginning of the answer and stays open. Without a template the
        messages are written as ``role: content`` blocks with ``assistant:`` at the end. ``variables``: what the
        template may name besides the messages. ``tools``: what the model may call.
        Raises ModelError if there are no messages, or the template refuses them or takes no tools; Cancelled as soon
        as ``should_stop``.
        """
        if not messages:
            raise ModelError("There is no message to answer; type one.", "bad-input")
        calls = sum(len(message.tool_calls) for message in messages)
        if len(messages) + calls > MOST_MESSAGES:
            called = f" and {calls:,} calls of tools" if calls else ""
            raise ModelError(
                f"There are {len(messages):,} messages{called}, and at most {MOST_MESSAGES:,} can be read: leave out "
                "the first ones.",
                "bad-input",
            )
        if continue_last and messages[-1].role != "assistant":
            raise ModelError(
                f"Only an assistant's message can be continued, and the last one is the {messages[-1].role}'s.",
                "bad-input",
            )
        if continue_last and not messages[-1].content.strip():
            messages, continue_last = messages[:-1], False
            if not messages:
                raise ModelError("There is no message to answer; type one.", "bad-input")
        if tools and (self._template is None or self.tool_format is None):
            raise ModelError(
                "This model's chat template takes no tools whose calls could be read; ask without tools, or load a "
                "model that was trained to call them.",
                "bad-input",
            )
        messages = self._histories.fitted(messages, lambda trial: self._rendered_trial(trial, should_stop))
        control = self._control_tokens(should_stop)
        entries = self._said(messages, control)
        if self._template is None:
            return plain_prompt(entries, continue_last)
        reasoning = control.mark(messages[-1].reasoning, own_words=False)
        if continue_last and reasoning:
            # Templates know the thoughts by one name or the other.
            entries[-1] |= {"reasoning_content": reasoning, "thinking": reasoning}
        named = {**self._named, **(variables or {})}
        if tools:
            named["tools"] = _marked(rendered_tools(tools), control)
        return self._template.render(entries, named, continue_last, should_stop)

    def takes_several_calls(self, should_stop: StopCheck = lambda: False) -> bool:
        """Whether the template takes an answer that calls several tools. Raises Cancelled."""
        return self._histories.takes_several_calls(lambda trial: self._rendered_trial(trial, should_stop))

    def _rendered_trial(self, messages: Sequence[Message], should_stop: StopCheck) -> str:
        """A conversation that holds no control token, through the template."""
        said = self._said(messages, self._control_tokens(should_stop))
        return self._template.render(said, self._named, False, should_stop) if self._template else plain_prompt(said)

    def _said(self, messages: Sequence[Message], control: ControlTokens) -> list[dict[str, Any]]:
        """``messages`` in the form that templates take, with marks in the control tokens that they spell out."""
        entries: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        for message in messages:
            content = control.mark(message.content, own_words=self._holds_thoughts(message))
            entry: dict[str, Any] = {"role": message.role, "content": content}
            if message.pictures:
                entry["content"] = _marked(content_parts(message), control)
            if message.tool_calls:
                names |= {call.id: call.name for call in message.tool_calls}
                entry["tool_calls"] = _marked(rendered_calls(message.tool_calls), control)
                if message.reasoning:
                    # What a model thought before it called is what it goes on from.
                    thoughts = control.mark(message.reasoning)
                    entry |= {"reasoning_content": thoughts, "thinking": thoughts}
            if message.role == "tool":
                name = names.get(message.tool_call_id, "")
                entry |= _marked({"tool_call_id": message.tool_call_id, "name": name}, control)
            entries.append(entry)
        return entries

    def _holds_thoughts(self, message: Message) -> bool:
        """Whether an answer begins with marked thoughts, as one does that was saved before they were kept apart. In any
        other answer the marks are spoken of."""
        begin = self.reasoning.begin if self.reasoning is not None else ""
        return message.role == "assistant" and (not begin or message.content.lstrip().startswith(begin))

    def _control_tokens(self, should_stop: StopCheck) -> ControlTokens:
        if self._control is None:
            facts = self._template.facts(self._named, should_stop) if self._template is not None else None
            texts = facts.literals if facts is not None else []
            self._control = ControlTokens(self._library, texts)
        return self._control


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a model's folder; None if the folder has none. Raises ModelError if its files are damaged."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    source = read_template(folder)
    # It starts while the vocabulary is read.
    template = TemplateProcess(source) if source else None
    files = read_tokenizer(folder)
    return Tokenizer(files, template, _configured_ends(folder, files), source or "")


def content_parts(message: Message) -> list[dict[str, str]]:
    """The text and the pictures of ``message`` in their order, as templates take them."""
    parts, begin = [], 0
    for picture in message.pictures:
        parts += [{"type": "text", "text": message.content[begin : picture.place]}, {"type": "image"}]
        begin = max(begin, picture.place)
    parts.append({"type": "text", "text": message.content[begin:]})
    return [part for part in parts if part.get("text") != ""]


def plain_prompt(messages: Sequence[Mapping[str, Any]], continue_last: bool = False) -> str:
    """How a conversation is written for a model without a chat template."""
    blocks = [f"{message['role']}: {message['content']}" for message in messages]
    return "\n\n".join(blocks if continue_last else [*blocks, "assistant:"])


def _without_marks(text: str, marks: Sequence[str]) -> str:
    """``text`` without white space and ``marks`` at its beginning."""
    while found := next((mark for mark in marks if text.lstrip().startswith(mark)), None):
        text = text.lstrip().removeprefix(found)
    return text.lstrip()


def _marked(value: Any, control: ControlTokens) -> Any:
    """``value`` with marks in all control tokens that its texts spell out."""
    if isinstance(value, str):
        return control.mark(value)
    if isinstance(value, list):
        return [_marked(each, control) for each in value]
    if isinstance(value, dict):
        return {control.mark(str(key)): _marked(each, control) for key, each in value.items()}
    return value


def _left_out(added: Mapping[int, Any], marks: Sequence[str]) -> frozenset[int] | None:
    """The special tokens that are no part of a text, if some of them are among ``marks``; None if the library knows
    best."""
    special = {number: token.content for number, token in added.items() if token.special}
    if not any(content in mark for content in special.values() for mark in marks):
        return None
    # A special token may be only the beginning of a mark.
    return frozenset(number for number, content in special.items() if not any(content in mark for mark in marks))


def _configured_ends(folder: Path, files: TokenizerFiles) -> set[int]:
    """The ids that end a turn by the files of ``folder``."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        ids.update(_ends_of(read_object(folder / name, SMALL_FILE)))
    end = files.backend.token_to_id(files.named["eos_token"]) if "eos_token" in files.named else None
    return ids if end is None else ids | {end}


def _ends_of(config: dict[str, Any]) -> list[int]:
    text_config = config.get("text_config")
    ends = config.get("eos_token_id")
    if ends is None and isinstance(text_config, dict):
        ends = text_config.get("eos_token_id")
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


# --- control tokens that a message spells out ------------------------------------------------------------------------


MARK = "\ufdd0"
"""Code point that is not a character and does not occur in normal text. In a message it is replaced by U+FFFD."""


class ControlTokens:
    """The control tokens of a tokenizer: all special ones, and those among the others that ``template_texts``, the text
    that the chat template itself writes, has in it."""

    def __init__(self, library: Library, template_texts: Iterable[str]) -> None:
        self._library = library
        added = library.get_added_tokens_decoder()
        written = "\0".join(template_texts)
        special = {token.content for token in added.values() if token.special and token.content}
        others = {token.content for token in added.values() if token.content in written and not token.content.isspace()}
        self._tokens = {token.content: (number, token) for number, token in added.items()}
        self._special = _any_of(special)
        self._all = _any_of(special | (others - {""}))
        self._as_text: _AsText | None = None

    def mark(self, content: str, *, own_words: bool = False) -> str:
        """``content`` with marks.

        ``own_words``: the model wrote it. It may then contain tokens that are not special, such as those around its
        reasoning, which templates look for.
        """
        content = content.replace(MARK, "\ufffd")
        pattern = self._special if own_words else self._all
        return pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], content)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a rendered text."""
        if MARK not in text:
            return list(self._library.encode(text, add_special_tokens=add_special_tokens).ids)
        if self._as_text is None:
            self._as_text = _AsText(self._library, self._all, self._tokens)
        return self._as_text.encode(text, add_special_tokens)


class _AsText:
    """A copy of a tokenizer in which control tokens are text, and other names stand for them."""

    def __init__(self, library: Library, pattern: re.Pattern[str], tokens: dict[str, tuple[int, Any]]) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._pattern = pattern
        self._tokens = tokens
        self._copy = Tokenizer.from_str(library.to_str())
        control = [token for text, (_, token) in tokens.items() if pattern.fullmatch(text)]
        self._copy.add_special_tokens([_like(token, token.content, special=True) for token in control])
        secret = secrets.token_hex(16)
        self._names = {token.content: f"{MARK}{secret}:{place}{MARK}" for place, token in enumerate(control)}
        self._break = f"{MARK}{secret}:{MARK}"
        names = [_like(token, self._names[token.content], special=False) for token in control]
        self._copy.add_tokens([*names, AddedToken(self._break, special=False, normalized=False)])
        self._copy.encode_special_tokens = True
        self._numbers = {self._copy.token_to_id(name): tokens[text][0] for text, name in self._names.items()}
        self._forbidden = frozenset(self._numbers.values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        named = self._pattern.sub(self._name, text)
        # A name is enclosed in its own marks, which stay.
        ids = self._encode(_replace_marks(named, ""), add_special_tokens)
        if ids is None:
            # The vocabulary may contain the characters of a control token as a word, so they must be kept apart.
            ids = self._encode(_replace_marks(named, self._break), add_special_tokens, whatever=True)
        assert ids is not None
        return ids

    def _name(self, found: re.Match[str]) -> str:
        text = found[0]
        if self._tokens[text][1].single_word and _within_a_word(found):
            return text
        return self._names[text]

    def _encode(self, text: str, add_special_tokens: bool, whatever: bool = False) -> list[int] | None:
        """None if a control token came out that the template did not write, unless ``whatever``: what is unknown to the
        vocabulary is encoded as such a token, too."""
        plain = self._copy.encode(text, add_special_tokens=False).ids
        if not whatever and not self._forbidden.isdisjoint(plain):
            return None
        end = self._copy.token_to_id(self._break)
        ids = self._copy.encode(text, add_special_tokens=add_special_tokens).ids if add_special_tokens else plain
        return [self._numbers.get(number, number) for number in ids if number != end]


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Any of ``tokens`` that is not marked, a longer one before one that it begins with; no token: nothing."""
    longest_first = sorted(tokens, key=lambda text: (-len(text), text))
    # A token of one character has its mark behind it.
    return re.compile(f"(?:{'|'.join(map(re.escape, longest_first))})(?!{MARK})" if longest_first else "(?!)")


_NAME_OR_MARK = re.compile(f"({MARK}[0-9a-f]{{32}}:[0-9]*{MARK})|{MARK}")


def _replace_marks(text: str, instead: str) -> str:
    return _NAME_OR_MARK.sub(lambda found: found[1] or instead, text)


def _within_a_word(found: re.Match[str]) -> bool:
    before, after = found.string[: found.start()][-1:], found.string[found.end() :][:1]
    return bool(re.match(r"\w", before) or re.match(r"\w", after))


def _like(token: Any, content: str, special: bool) -> Any:
    from tokenizers import AddedToken

    return AddedToken(
        content,
        single_word=False,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )
