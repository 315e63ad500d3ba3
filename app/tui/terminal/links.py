"""Addresses in a model's text that the terminal opens, as links (OSC 8) behind exactly what is shown.

A link is made from the text as it is drawn, after Markdown, never from a target that the text names. So nothing opens
but what can be read, in whatever way a model put it together.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from itertools import groupby

from rich.segment import Segment
from rich.style import Style as DrawnStyle
from textual.content import Content, Span
from textual.style import Style

LONGEST_ADDRESS = 2_000
"""Maximum characters of an address that can be opened. Terminals take little more."""

_CANDIDATE = re.compile(
    r"""(?<![A-Za-z0-9+.\-])(?:(?<=')https?://[^\s<>"`']+|https?://[^\s<>"`]+)""",
)
"""Pattern of what a reader takes for an address, to the end of the word or of the quotation."""
_CLOSING = frozenset(".,;:!?']}*_~。，、；：！？）」』】》”’»")
"""Characters that belong to the sentence when they end an address. A parenthesis does if it was not opened in it."""
_PATH = r"A-Za-z0-9._~:/!$&()*+,;=%\-"
_ADDRESS = re.compile(
    # No user info: in https://bank.com@evil.org the host is evil.org. No second scheme: where the row breaks before it,
    # the next one would begin as another address.
    r"https?://(?!.*://)[A-Za-z0-9]+(?:(?:\.|-+)[A-Za-z0-9]+)*(?::[0-9]{1,5})?"
    rf"(?:/[{_PATH}@?#]*|[?#][{_PATH}?#]*)?"
)


def opens(address: str) -> bool:
    """Whether ``address`` may be a link: http or https, ASCII, without user info and backslashes."""
    return len(address) <= LONGEST_ADDRESS and _ADDRESS.fullmatch(address) is not None


def linked(content: Content) -> Content:
    """``content`` with its addresses as links. What looks like one but is not :func:`opens` is no link in any part."""
    plain = content.plain
    if "://" not in plain:
        return content
    spans = []
    for match in _CANDIDATE.finditer(plain):
        if len(match.group()) <= LONGEST_ADDRESS:
            address = _without_closing(match.group())
            if opens(address):
                style = Style(link=address, underline=True)
                spans.append(Span(match.start(), match.start() + len(address), style))
    return Content(plain, [*content.spans, *spans]) if spans else content


def unlinked(content: Content) -> Content:
    """``content`` without links, for a text that is shortened."""
    return Content(content.plain, [span for span in content.spans if not getattr(span.style, "link", None)])


def _without_closing(address: str) -> str:
    surplus = address.count(")") - address.count("(")
    end = len(address)
    while end and (address[end - 1] in _CLOSING or (address[end - 1] == ")" and surplus > 0)):
        surplus -= address[end - 1] == ")"
        end -= 1
    return address[:end]


def checked(line: Iterable[Segment]) -> list[Segment]:
    """The segments of a drawn ``line``, in which a link stays only if it :func:`opens` what it stands behind.

    That is the whole address or, where rows break it, a part. All parts of an address get one id, by which terminals
    know that they belong together.
    """
    segments: list[Segment] = []
    for target, behind in groupby(line, key=_target):
        run = list(behind)
        if target is not None:
            known = opens(target) and "".join(segment.text for segment in run) in target
            run = [Segment(text, _relinked(style, target if known else None), control) for text, style, control in run]
        segments += run
    return segments


def _target(segment: Segment) -> str | None:
    return segment.style.link if segment.style is not None else None


def _relinked(style: DrawnStyle | None, target: str | None) -> DrawnStyle | None:
    if style is None:
        return None
    style = style.update_link(target)
    if target is not None:
        # Rich gives each piece another id.
        style._link_id = f"{zlib.crc32(target.encode()):x}"
    return style
