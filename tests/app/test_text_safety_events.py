"""What an engine says may be read and may not act: in every field, on a real terminal, and in what commands print."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from app.commands.models import show_models
from app.text_safety import STREAMED, UNSAFE, made_safe
from engine.ipc.messages import (
    AnyEvent,
    Beam,
    Finished,
    LikelyToken,
    Notice,
    Piece,
    Sample,
    Timing,
    TokenLogprob,
    ToolCall,
    ToolCallPiece,
)
from tests.app.hostile_events import EVENTS, EVIL, filled, texts
from tests.app.scripted import make_home
from tests.app.terminals import Terminal

ACTS = [b"\x1b]0;", b"\x1b[777m", b"PWNED", b"\xc2\x9b", b"\xe2\x80\xae", b"\x1bPq"]
"""What of ``EVIL`` would act: none of it is anything that Textual writes."""
SCREENS = {
    b"\x1bOQ": "earch titles", b"\x1bOR": "nother model", b"\x1bOS": "Beam width", b"\x1b[15~": "Prefill / decode",
    b"\x1b[19~": "listening on", b"\x13": "reloads the model", b"\x10": "earch for commands",
}  # fmt: skip
"""What only the screens of f2, f3, f4, f5, f8, ctrl+s and ctrl+p show. The chat, whose footer names them all, is drawn
again late on a busy machine. The cursor may stand on the first letter of a placeholder."""
HOSTILE_CONFIG = json.dumps({"model_type": EVIL})


def streamed(value: object) -> list[str]:
    """The texts in ``value`` that a model wrote."""
    if isinstance(value, list | tuple):
        return [text for item in value for text in streamed(item)]
    if isinstance(value, dict):
        return streamed(list(value.values()))
    if not isinstance(value, msgspec.Struct):
        return []
    own = [getattr(value, name) for kind, name in STREAMED if type(value) is kind]
    return own + streamed([getattr(value, name) for name in value.__struct_fields__])


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_no_text_of_an_event_acts(kind: type[AnyEvent]) -> None:
    event = filled(kind)
    left = texts(made_safe(event))
    assert len(left) == len(texts(event))
    for text in streamed(event):
        left.remove(text)
    assert not [text for text in left if UNSAFE.search(text)]


def test_the_events_that_were_tried_hold_text() -> None:
    assert sum(texts(filled(kind)).count(EVIL) for kind in EVENTS) > 60


def test_what_is_safe_is_not_copied() -> None:
    for event in (Notice(text="one line\nand another"), filled(Timing), Piece(id=1, text=EVIL, tokens=1)):
        safe = made_safe(event)
        assert safe is event or texts(event) != texts(safe)
    assert made_safe(notice := Notice(text="plain")) is notice


def test_text_that_is_streamed_is_left_to_whoever_shows_it() -> None:
    finished = filled(Finished)
    safe = made_safe(finished)
    assert isinstance(safe, Finished) and safe.text == safe.stop_string == EVIL
    assert {kind for kind, _ in STREAMED} == {
        Piece, Finished, Beam, Sample, ToolCall, ToolCallPiece, TokenLogprob, LikelyToken,
    }  # fmt: skip


class Later(msgspec.Struct, frozen=True):
    number: int = 1
    told: dict[str, list[tuple[str, int]]] = {}


class Newer(Notice, frozen=True, kw_only=True, tag="newer"):
    inside: list[Later] = []  # noqa: RUF012 (as above)


def test_a_new_field_is_safe_by_construction() -> None:
    newer = Newer(text="", inside=[Later(told={EVIL: [(EVIL, 1)]})])
    assert texts(newer).count(EVIL) == 2
    assert not any(map(UNSAFE.search, texts(made_safe(newer))))  # type: ignore[arg-type]


# --- a real terminal ----------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    folder = tmp_path / "models" / "starter"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(HOSTILE_CONFIG)
    opened = Terminal(tmp_path, script="hostile_events.py")
    yield opened
    opened.close()


@pytest.mark.soak
def test_nothing_that_an_engine_says_reaches_a_terminal_as_it_is(terminal: Terminal) -> None:
    terminal.until_drawn("sk something")
    terminal.until_drawn("XY")
    pasted = "past\x9b31med \u202etext\r\x1b]0;PWNED\x07line \u0646\u200c\u0647"
    terminal.type(f"\x1b[200~{pasted}\x1b[201~".encode())
    terminal.until_drawn("pasted text")
    terminal.until_drawn("line \u0646\u200c\u0647")
    terminal.press(b"\r", "You")
    terminal.press(b"refuse\r", "XY")
    for key, text in SCREENS.items():
        terminal.press(key, text)
        terminal.press(b"\x1b", " Menu")
    assert [acts for acts in ACTS if acts in terminal.drawn] == []


def test_models_list_prints_what_may_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, monkeypatch)
    folder = home / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(HOSTILE_CONFIG)
    for in_json in (False, True):
        show_models(in_json=in_json)
        printed = capsys.readouterr().out
        assert "mine" in printed and not UNSAFE.search(printed)
        assert re.search(r"mine +ready", printed) or in_json
