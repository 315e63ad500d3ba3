"""The program that renders a chat template, in a separate process that may be killed at any moment.

A template is a Jinja program from the model's files. The sandbox is set up as transformers does, so that the text is
the same to the byte. In addition, the results of single operations are limited. Everything else ends with this process:
the system limits its memory and time, and the parent kills it when the answer is cancelled.

Requests and answers are JSON: see :class:`engine.models.text.template_process.TemplateProcess`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.models.text.template_process import MEMORY_BYTES
from engine.system.confined import answer_requests, too_much_memory

LARGEST = 16 << 20
"""Maximum characters or items that one operation may make."""
MOST_BITS = 4096
"""Maximum bits of a number that one operation may make."""
AFTER_ANSWERS = 500
"""Number of characters after an answer that are looked at."""

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Text that transformers puts behind a message that stays open, to find its end."""


class TooLarge(jinja2.exceptions.TemplateError):
    """A template produces more than a conversation can need."""


# --- the sandbox --------------------------------------------------------------------------------------------------


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on the result of one operation, in which lists can grow and shrink.

    Templates keep queues in them (Kimi K2). What is changed is gone when the text is rendered.
    """

    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            # A width may hide in the pattern ("%9999999999d") or among what is filled in ("%*d").
            _check_percent(left, right)
        elif operator == "+":
            _check_size(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_call(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise TooLarge(f"it makes a value of {size} items at once, and {LARGEST} are allowed")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int):
            _check_size(_length(value) * max(0, int(times)))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise TooLarge(f"it makes a number of {bits} bits, and {MOST_BITS} are allowed")


def _check_percent(pattern: str, filled: Any = ()) -> None:
    for width in _PERCENT_WIDTH.findall(pattern):
        _check_size(_as_size(width))
    for value in filled if isinstance(filled, tuple) and "*" in pattern else ():
        if isinstance(value, int):
            _check_size(value)


def _check_braces(pattern: str, filled: list[Any]) -> None:
    for width in _BRACE_WIDTH.findall(pattern):
        _check_size(_as_size(width))
    for value in filled if _WIDTH_FILLED_IN.search(pattern) else ():
        if isinstance(value, int):
            _check_size(value)


def _as_size(digits: str) -> int:
    """The number that ``digits`` write; what is too long to be one counts as too large."""
    return int(digits) if len(digits) < 12 else LARGEST + 1


_PERCENT_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0-9._^]*?(\d{8,})")
_BRACE_WIDTH = re.compile(r"\{[^{}]*:[^{}]*?(\d{8,})")
_WIDTH_FILLED_IN = re.compile(r"\{[^{}]*:[^{}]*\{")


_WIDENING = frozenset(("ljust", "rjust", "center", "zfill", "expandtabs"))


def _check_call(called: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises TooLarge for a method of text that would make far too much of it."""
    text, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    given = [*args, *kwargs.values()]
    if not isinstance(text, str):
        return
    if name in _WIDENING:
        times = text.count("\t") if name == "expandtabs" else 1
        for value in given:
            if isinstance(value, int):
                _check_size(value * times)
    elif name == "replace" and len(given) > 1:
        _check_size(len(text) + (text.count(str(given[0])) if given[0] else len(text) + 1) * _length(given[1]))
    elif name == "join" and given and isinstance(given[0], list | tuple):
        _check_size(sum(map(_length, given[0])) + len(text) * len(given[0]))
    elif name in ("format", "format_map"):
        _check_braces(text, given)


def _limited(filter_: Callable[..., Any], position: int, name: str) -> Callable[..., Any]:
    """A filter whose argument ``name``, at ``position`` after the value, is a number of characters or items."""

    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        size = kwargs.get(name, args[position] if len(args) > position else 0)
        if isinstance(size, int):
            _check_size(size * (str(value).count("\n") + 1 if name == "width" else 1))
        return filter_(value, *args, **kwargs)

    return checked


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks the assistant's words for training; what is between stays as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _Namespace._check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check_name(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``value`` as JSON, as Python writes it. Jinja's own filter escapes HTML, too."""
    if isinstance(indent, int):
        _check_size(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    _check_percent(pattern)
    return datetime.now().strftime(pattern)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    filters = environment.filters
    filters["center"] = _limited(filters["center"], 0, "width")
    filters["indent"] = _limited(filters["indent"], 0, "width")
    filters["batch"] = _limited(filters["batch"], 0, "linecount")
    filters["slice"] = _limited(filters["slice"], 0, "slices")
    filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


# --- rendering ----------------------------------------------------------------------------------------------------


class ChatTemplate:
    """A compiled template. Raises whatever Jinja raises for one that is none."""

    def __init__(self, source: str) -> None:
        self._source = source
        environment = _environment()
        self._template = environment.from_string(source)
        tree = environment.parse(source)
        texts = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
        texts |= {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        self.literals = sorted(texts)
        """All text that the template itself writes or compares with."""

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], continue_last: bool) -> str:
        """The conversation as text. The last message stays open with ``continue_last``, otherwise the assistant's next
        one is begun. Raises whatever the template raises."""
        messages = [dict(message) for message in messages]
        last = str(messages[-1]["content"])
        if continue_last:
            if "content" not in self._source:
                raise ValueError("the template does not write what a message says, so none can be continued")
            messages[-1]["content"] = last + _TAG
        names = {"tools": None, "documents": None, **variables}
        text = self._template.render(messages=messages, add_generation_prompt=not continue_last, **names)
        if not continue_last:
            return text
        if last.strip() not in text or _TAG.strip() not in text:
            raise ValueError("the template does not write the last message as it is, so it cannot be continued")
        end = text.rindex(_TAG.strip())
        kept = text[end : end + len(_TAG)] == _TAG
        return text[:end] if kept else text[:end].rstrip()

    def after_answers(self, variables: Mapping[str, Any]) -> list[str]:
        """The beginning of what the template writes after an assistant's message: where that is the last one, and
        before a user's next one. What it refuses is left out."""
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _TAG.strip()}]
        texts = []
        for messages in (said, [*said, {"role": "user", "content": "a"}]):
            with contextlib.suppress(Exception):
                names = {"tools": None, "documents": None, **variables}
                text = self._template.render(messages=messages, add_generation_prompt=False, **names)
                end = text.rindex(_TAG.strip()) + len(_TAG.strip())
                texts.append(text[end : end + AFTER_ANSWERS])
        return texts


def _answer(request: Mapping[str, Any], templates: dict[str, ChatTemplate]) -> dict[str, Any]:
    source = request["template"]
    try:
        if source not in templates:
            templates.clear()
            templates[source] = ChatTemplate(source)
        template = templates[source]
        if request["messages"] is None:
            return {"literals": template.literals, "after_answers": template.after_answers(request["variables"])}
        return {"text": template.render(request["messages"], request["variables"], request["continue_last"])}
    except MemoryError:
        return {"error": too_much_memory(MEMORY_BYTES)}
    except Exception as error:  # a template is a program: it may raise anything
        return {"error": " ".join(str(error).split())[:500] or type(error).__name__}


# --- the process --------------------------------------------------------------------------------------------------


def main() -> None:
    templates: dict[str, ChatTemplate] = {}
    # Templates ask for the time, and what Jinja and the system need for that is opened late.
    answer_requests(lambda request: json.dumps(_answer(json.loads(request), templates)).encode(), opens_files=True)


if __name__ == "__main__":
    main()
