"""From the bytes a terminal sends to what the field holds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual import events
from textual.app import App, ComposeResult
from textual.message import Message

from app.text_safety import UNSAFE
from app.tui.chat.prompt import Prompt
from app.tui.terminal.graphics import TerminalReport
from app.tui.terminal.keys import ESCAPE_S, SEQUENCE_S, KeyParser, as_text
from tests.support.random_examples import examples

START, END = "\x1b[200~", "\x1b[201~"


def heard(*pieces: str) -> list[Message]:
    parser = KeyParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def keys(*pieces: str) -> list[str]:
    return [event.key for event in heard(*pieces) if isinstance(event, events.Key)]


def pasted(*pieces: str) -> list[str]:
    return [event.text for event in heard(*pieces) if isinstance(event, events.Paste)]


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


REPORTS = ("\x1bP>|kitty(0.35.2)\x1b\\", "\x1b_Gi=31;OK\x1b\\", "\x1b[6;20;10t", "\x1b[?62;4;22c")


@pytest.mark.parametrize("report", REPORTS)
def test_answers_of_the_terminal_are_no_keys(report: str) -> None:
    found = heard(f"a{report}b{report}")
    assert [event.key if isinstance(event, events.Key) else type(event) for event in found] == [
        "a", TerminalReport, "b", TerminalReport,
    ]  # fmt: skip
    assert [event.sequence for event in found if isinstance(event, TerminalReport)] == [report] * 2
    for size in range(1, len(report)):
        parser = KeyParser(awaits_reports=lambda: True)
        pieces = [event for piece in cut(report, size) for event in parser.feed(piece)]
        assert [event.sequence for event in pieces if isinstance(event, TerminalReport)] == [report]
        assert len(pieces) == 1


@pytest.mark.parametrize("key", ["P", "_"])
def test_keys_that_answers_begin_with_are_keys(key: str) -> None:
    expected = keys(f"\x1b{key}")
    assert len(expected) == 1 and expected[0].startswith("alt+")
    now = [0.0]
    parser = KeyParser(clock=lambda: now[0], awaits_reports=lambda: True)
    assert not [*parser.feed(f"\x1b{key}")]
    now[0] = SEQUENCE_S + 0.01
    assert [event.key for event in parser.tick() if isinstance(event, events.Key)] == expected
    # Followed by another key it is none of the terminal's answers.
    assert [event.key for event in parser.feed(f"\x1b{key}x") if isinstance(event, events.Key)] == [*expected, "x"]


@pytest.mark.parametrize("sent", ["\x1b\r", "\x1b\n"])
def test_escape_and_enter_are_alt_enter(sent: str) -> None:
    assert keys("a", sent, "b") == keys("a", *sent, "b") == ["a", "alt+enter", "b"]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("\r", ["enter"]),
        ("\x1b[A", ["up"]),
        ("\x1b[1;2A", ["shift+up"]),
        ("\x1bOP", ["f1"]),
        ("\x0a", ["ctrl+j"]),
        ("\x1b[13;2u", ["shift+enter"]),
        ("\x1b[13;3u", ["alt+enter"]),
    ],
)
def test_other_keys_are_as_they_were(sent: str, expected: list[str]) -> None:
    assert keys(sent) == keys(*sent) == expected


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def heard_late(pieces: list[str], delay: float) -> list[Message]:
    """The events of ``pieces`` that arrive ``delay`` seconds after each other, and of a while afterwards."""
    clock = Clock()
    parser = KeyParser(clock=clock)
    found: list[Message] = []
    for piece in pieces:
        found += parser.feed(piece)
        end = clock.now + delay
        while parser.due is not None and parser.due <= end:
            clock.now = parser.due
            found += parser.tick()
        clock.now = end
    clock.now += 10
    return [*found, *parser.tick()]


def test_a_lone_escape_waits_for_less_than_the_rest_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ESCDELAY", raising=False)
    clock = Clock()
    parser = KeyParser(clock=clock)
    assert list(parser.feed("\x1b")) == []
    assert parser.due == clock.now + ESCAPE_S and ESCAPE_S <= 0.025
    assert list(parser.feed("[")) == []
    assert parser.due == clock.now + SEQUENCE_S
    assert [type(event) for event in parser.feed("A")] == [events.Key]
    assert parser.due is None


def test_what_the_person_says_of_the_delay_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    from textual import constants

    monkeypatch.setenv("ESCDELAY", "300")
    monkeypatch.setattr(constants, "ESCAPE_DELAY", 0.3)
    clock = Clock()
    parser = KeyParser(clock=clock)
    list(parser.feed("\x1b"))
    assert parser.due == clock.now + 0.3


SEQUENCES = (
    "\x1b[<64;10;5M", "\x1b[<0;120;40m", "\x1b[A", "\x1b[1;5C", "\x1b[3~", "\x1b[15;2~", "\x1b[[A", "\x1bOP",
    "\x1b[106;5u", "\x1b[27;5;106~", "\x1b[I", "\x1b[O", "\x1b[?2026;2$y", "\x1b[48;24;80;480;800t", "\x1b[<0;NaN;5M",
    "\x1b[M !!", "\x1b[?62;22c", "\x1b[12;40R", "\x1b[97;;97u", "\x1b[200~one\x1b[201~", "\x1b[3$",
)  # fmt: skip


def characters(found: list[Message]) -> str:
    """What a field would hold."""
    return "".join(
        event.text
        if isinstance(event, events.Paste)
        else (event.character or "") * event.is_printable
        if isinstance(event, events.Key)
        else ""
        for event in found
    )


def names(found: list[Message]) -> list[str]:
    return [event.key if isinstance(event, events.Key) else type(event).__name__ for event in found]


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("delay", [0.0, 0.03, 0.06, 0.3, 0.9])
def test_a_sequence_that_is_cut_anywhere_is_never_typed(sequence: str, delay: float) -> None:
    whole = heard_late([f"a{sequence}b"], 0.0)
    for place in range(1, len(sequence)):
        found = heard_late(["a", sequence[:place], sequence[place:], "b"], delay)
        if place == 1 and delay > ESCAPE_S:
            # The escape key has been there before the rest came; where two keys cannot be told, it is two.
            if len(sequence) > 2 and sequence[1] == "[":
                assert names(found) == [*names(whole)[:1], "escape", *names(whole)[1:]], place
            continue
        assert (names(found), characters(found)) == (names(whole), characters(whole)), place


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.sampled_from([*SEQUENCES, "x", "é", "word "]), min_size=1, max_size=5),
    st.lists(st.integers(0, 80), max_size=8),
    st.floats(0.0, 0.95),
)
def test_sequences_in_several_pieces_mean_the_same(sent: list[str], places: list[int], delay: float) -> None:
    # A cut right behind an ESC is another matter: it may be the escape key.
    data = "".join(sent)
    cuts = sorted({place for place in places if place < len(data) and data[place - 1 : place] != "\x1b"} | {0})
    pieces = [data[start:end] for start, end in zip(cuts, [*cuts[1:], len(data)], strict=True)]
    found, whole = heard_late([piece for piece in pieces if piece], delay), heard_late([data], 0.0)
    assert (names(found), characters(found)) == (names(whole), characters(whole))


@pytest.mark.parametrize("begun", ["\x1b[<64;10;", "\x1b[1;", "\x1b[", "\x1bO", "\x1b[<"])
def test_what_stays_incomplete_is_not_typed(begun: str) -> None:
    assert characters(heard_late(["a", begun, "", "b"][:2], 0.0)) == "a"
    assert characters([*heard_late(["a", begun], 5.0), *heard("b")]) == "ab"


@pytest.mark.parametrize(
    ("sent", "key"),
    [("\x1b[27;5;106~", "ctrl+j"), ("\x1bd", "alt+d"), ("\x1bD", "alt+shift+d"), ("\x1b.", "alt+full_stop")],
)
def test_a_key_with_a_modifier_types_nothing(sent: str, key: str) -> None:
    found = heard(sent)
    assert characters(found) == ""
    assert [event.key for event in found if isinstance(event, events.Key)] == [key]


def test_a_text_behind_the_escape_key_is_typed() -> None:
    assert characters(heard_late(["\x1b", "[", "x"], 0.2)) == "[x"
    assert characters(heard_late(["\x1b", "[link]"], 0.2)) == "[link]"
    assert characters(heard_late(["\x1b", "[200 words"], 3.0)) == "[200 words"


PERSIAN = "می\u200cخواهم"
CODER = "\U0001f469\u200d\U0001f4bb"
TYPED = [
    PERSIAN,
    CODER,
    "a\u00adb",
    "\u200fא",
    "prix\u00a0: 3\u202f€",
    "全角\u3000空白",
    "\U0001f3f4\U000e0067\U000e007f",
    "\u2060",
]


class FieldApp(App[None]):
    def compose(self) -> ComposeResult:
        yield Prompt("prompt")


@pytest.mark.parametrize("text", TYPED)
@pytest.mark.parametrize("kitty", [False, True])
async def test_what_is_typed_is_what_the_field_holds(text: str, kitty: bool) -> None:
    app = FieldApp()
    async with app.run_test() as pilot:
        app.query_one(Prompt).focus()
        for character in text:
            sent = f"\x1b[{ord(character)};;{ord(character)}u" if kitty else character
            for event in heard(sent):
                app.post_message(event)
        await pilot.pause()
        assert app.query_one(Prompt).text == text


@pytest.mark.parametrize("text", ["\x00", "\u2028", "\u202e", "\x85", "\x9b"])
def test_what_could_act_on_a_terminal_is_not_typed(text: str) -> None:
    assert pasted(text) == []


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    "text", ["plain\rlines\n", "\x1b[31mred\x1b[0m and \x1b\r\x1b", "\x1b[200~", "", "\x1b[A" * 20]
)
def test_a_paste_is_one_text_and_nothing_in_it_is_a_key(text: str, size: int) -> None:
    sent = cut(f"a{START}{text}{END}b", size)
    assert pasted(*sent) == [as_text(text)]
    assert not UNSAFE.search(as_text(text))
    assert keys(*sent) == ["a", "b"]


def test_what_is_pasted_keeps_its_lines_and_its_joiners() -> None:
    assert pasted(f"{START}one\rtwo\r\nthree\n\u0646\u200c\u0647 \x9b31m\u202e\U0001f469\u200d\U0001f469{END}") == [
        "one\ntwo\nthree\n\u0646\u200c\u0647 \U0001f469\u200d\U0001f469"
    ]


@settings(deadline=None, max_examples=examples(20))
@given(st.lists(st.text(max_size=20).filter(lambda text: END not in text), max_size=4), st.integers(1, 40))
def test_pastes_come_whole_however_they_are_cut(texts: list[str], size: int) -> None:
    sent = "".join(f"{START}{text}{END}" for text in texts)
    assert pasted(*cut(sent, size)) == [as_text(text) for text in texts]


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    master, slave = os.openpty()
    yield master, slave
    os.close(master)
    os.close(slave)


async def test_the_driver_hands_on_bytes_that_are_no_text_and_keys_that_come_in_pieces(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.tui.terminal.driver import TerminalDriver

    feed, fails = KeyParser.feed, [True]

    def fail_once(parser: KeyParser, data: str) -> Iterable[Message]:
        if fails:
            fails.clear()
            raise ValueError("an error of the parser")
        return feed(parser, data)

    monkeypatch.setattr(KeyParser, "feed", fail_once)
    master, slave = terminal
    app = FieldApp()
    async with app.run_test():
        driver = TerminalDriver(app)
        driver.fileno = slave
        got: list[Message] = []
        errors: list[Exception] = []
        monkeypatch.setattr(app, "_handle_exception", errors.append)
        monkeypatch.setattr(driver, "process_message", got.append)
        import tty

        tty.setraw(slave)
        reading = asyncio.create_task(asyncio.to_thread(driver.run_input_thread))
        for sent in (b"x", b"\xff", "é".encode()[:1], "é".encode()[1:], b"\x1b", b"z", b"\x1b"):
            os.write(master, sent)
            await asyncio.sleep(0.005)
            for _ in range(10_000):
                if errors:  # what is read together with "x" is lost with it
                    break
                await asyncio.sleep(0.005)
        for _ in range(1000):
            if any(isinstance(event, events.Key) and event.key == "escape" for event in got):
                break
            await asyncio.sleep(0.01)
        driver.exit_event.set()
        await reading
    # An error is told, and the terminal is read on.
    assert [str(error) for error in errors] == ["an error of the parser"]
    found = [event.character if isinstance(event, events.Key) else "" for event in got]
    assert found[:2] == ["\ufffd", "é"] and isinstance(got[-1], events.Key) and got[-1].key == "escape"
