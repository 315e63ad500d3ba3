"""Colours of code: what a model writes may neither stop the screen nor keep it from being coloured afterwards."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from app.tui.render import highlighting
from app.tui.render.highlighting import (
    BLOCK_LIMIT,
    LANGUAGES,
    LINE_LIMIT,
    SHORTER_BLOCKS,
    SPACE_LIMIT,
    Highlighter,
    worth_colouring,
)
from app.tui.render.markdown import MARKDOWN_LIMIT, render_markdown
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, ready, shown, wait_until

BACKSLASHES = '```scala\n"' + "\\" * 60 + "\n```"
"""An answer of 74 characters. The lexer of Scala takes a time for it that doubles with every second backslash."""


class Block:
    """A widget as the highlighter sees it."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    def remake(self) -> None:
        self.done.set()


@pytest.fixture
async def highlighter() -> AsyncIterator[Highlighter]:
    made = Highlighter()
    yield made
    await made.close()


async def coloured(highlighter: Highlighter, code: str, language: str) -> list[object]:
    """All the colours of ``code``; nothing else is being coloured."""
    block = Block()
    spans = highlighter.spans(code, language, block)
    if highlighter.busy:
        await block.done.wait()
        spans = highlighter.spans(code, language, block)
    return list(spans)


# --- the fuzz -----------------------------------------------------------------------------------------------------

_CHARACTERS = "\"'`\\/*#-<>(){}[]=:;,.!?$%&@^~|+_ \t\n0aA"
_WORDS = (
    "a=", "<a ", "/*", '"""', "${", "{{", "$(", "a<b>", '\\"', "a(", "#{", "<<E\n", "<!--", "//", "\n\n", "\n ", "a:\n",
    "- a\n", "\\\n", "#define a\n", "<script>", "<?php ", "a ", "::a", '"\\u', "1e", "a<", 'r#"', "q{", "=begin\n",
)  # fmt: skip


EVERY = 18
"""Number of hostile texts of which one is tried with each lexer. The soak tests try all of them."""


def hostile_texts(lexer: str) -> Iterator[str]:
    """Each character and word over and over, with and without something that it could be thought to be inside of."""
    for unit in (*_CHARACTERS, *_WORDS):
        for opening in ("", '"'):
            yield (opening + unit * 64)[:64]
    draw = random.Random(lexer)
    units = (*_CHARACTERS, *_WORDS)
    for _ in range(20):
        yield ("".join(draw.choices(units, k=draw.randint(1, 4))) * 200)[:200]
    for _ in range(2):
        yield as_long_as_may_be(draw.choice(units) * BLOCK_LIMIT, lexer)


def as_long_as_may_be(text: str, lexer: str) -> str:
    """``text`` changed so that it just keeps all limits."""
    text = re.sub(rf"\s{{{SPACE_LIMIT}}}", lambda space: space.group()[:-1] + "x", text)
    text = re.sub(rf"[^\n]{{{LINE_LIMIT}}}", lambda line: line.group() + "\n", text)
    return text[: SHORTER_BLOCKS.get(lexer, BLOCK_LIMIT)]


_LEXERS = sorted(set(LANGUAGES.values()))


@pytest.mark.parametrize("every", [EVERY, pytest.param(1, marks=pytest.mark.soak)])
async def test_no_hostile_text_keeps_a_lexer_busy(highlighter: Highlighter, every: int) -> None:
    """A process that takes too long for a block is ended by the kernel, and its lexer counts as failed."""
    for place, lexer in enumerate(_LEXERS):
        texts = list(hostile_texts(lexer))
        # Another part of the texts for each lexer, and for every third one the last, which is as long as may be.
        longest = texts[-1:] if every == 1 or place % 3 == 0 else []
        for text in [*texts[place % every : -1 : every], *longest]:
            assert worth_colouring(text, lexer), text[:20]
            await coloured(highlighter, text, lexer)
            assert not highlighter.failed, f"{lexer}: {text[:20]!r} over {len(text)} characters"


@pytest.mark.sampled
@pytest.mark.parametrize("lexer", ["c", "cpp", "java", "python"])
async def test_the_limits_keep_squares_small(highlighter: Highlighter, lexer: str) -> None:
    """These take the square of white space, or of a line."""
    for unit in (" ", "\n", "\n ", "a ", "a<b>"):
        assert not worth_colouring(unit * BLOCK_LIMIT, lexer)
        await coloured(highlighter, as_long_as_may_be(unit * BLOCK_LIMIT, lexer), lexer)
        assert not highlighter.failed, repr(unit)


# --- the process --------------------------------------------------------------------------------------------------


async def test_code_is_coloured(highlighter: Highlighter) -> None:
    code = "def pop(items):\n    return 'é' + items.pop()  # the last"
    spans = await coloured(highlighter, code, "Py")
    styled = {code[span.start : span.end]: str(span.style) for span in spans}
    assert styled["pop"] != styled["def"] != styled["'é'"]
    assert styled["# the last"] == "italic $foreground-muted"


async def test_a_block_that_grows_keeps_its_colours(highlighter: Highlighter) -> None:
    spans = await coloured(highlighter, "x = 'a'", "python")
    assert highlighter.spans("x = 'a'\ny = 1", "python", Block()) == spans
    assert highlighter.spans("x = 'b'", "python", Block()) == []


async def test_what_is_not_shown_any_more_is_not_coloured(highlighter: Highlighter) -> None:
    block = Block()
    highlighter.spans("x = 1", "python", block)
    highlighter.begin(block)
    assert not highlighter.busy


async def test_other_languages_and_large_blocks_stay_plain(highlighter: Highlighter) -> None:
    block = Block()
    for code, language in (
        ("x", "scala"), ("x", ""), ("x", "no such thing"), ("x = 1\n" * BLOCK_LIMIT, "python"),
        ("x" * (LINE_LIMIT + 1), "python"), (" \n" * SPACE_LIMIT, "python"),
    ):  # fmt: skip
        assert highlighter.spans(code, language, block) == []
    assert not highlighter.busy


@pytest.mark.soak
async def test_a_lexer_that_runs_out_of_time_is_ended_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scala was let in here: its lexer is caught in one call of C, which no signal handler would interrupt."""
    highlighter = Highlighter(deadline_s=0.3)
    monkeypatch.setitem(highlighting.LANGUAGES, "scala", "scala")
    assert await coloured(highlighter, '"' + "\\" * 60, "scala") == []
    assert highlighter.failed == {"scala"}
    assert await coloured(highlighter, "x = 1", "python")
    highlighter.spans("val x = 1", "scala", Block())
    assert not highlighter.busy
    await highlighter.close()


@pytest.mark.parametrize("program", ["import sys; sys.exit()", "input(); print('[[1, 2]]', flush=True)"])
async def test_a_process_that_does_not_answer_costs_the_colours_only(program: str) -> None:
    highlighter = Highlighter((sys.executable, "-c", program))
    assert await coloured(highlighter, "x = 1", "python") == []
    assert highlighter.failed == {"python"}
    await highlighter.close()


async def test_no_process_is_started_without_code_nor_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def noted(*command: str, **options: object) -> asyncio.subprocess.Process:
        started.append(await start(*command, **options))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(highlighting.asyncio, "create_subprocess_exec", noted)
    monkeypatch.setattr(highlighting, "_IDLE_S", 0.01)
    highlighter = Highlighter()
    assert not started
    await coloured(highlighter, "x = 1", "python")
    await started[0].wait()
    await coloured(highlighter, "y = 1", "python")
    await highlighter.close()
    await started[1].wait()


# --- the screen ---------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("allowed", [False, True])
async def test_74_characters_of_an_answer_leave_the_screen_alive(
    make_app: MakeApp, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    """Also if the list of lexers let one in that it should not."""
    assert len(BACKSLASHES) == 74
    if allowed:
        monkeypatch.setitem(highlighting.LANGUAGES, "scala", "scala")
    engine.answer = lambda request: [BACKSLASHES]
    app = make_app()
    app.highlighter = Highlighter(deadline_s=0.3)
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Repeat what is on that page.")
        assert "\\" * 60 in shown(app)[-1]
        engine.answer = lambda request: ["Still here."]
        await ask(pilot, app, "Are you there?")
        assert "Still here." in shown(app)[-1]
    again = make_app()
    again.highlighter = Highlighter(deadline_s=0.3)
    async with again.run_test() as pilot:
        await ready(pilot, again)
        assert controller(again).open_conversation(again.store.conversations()[0].id)
        await wait_until(pilot, lambda: any("\\" * 60 in text for text in shown(again)))
        await ask(pilot, again, "And now?")
        assert "Still here." in shown(again)[-1]


async def test_colours_arrive_in_a_message(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.answer = lambda request: ["```python\nx = 'a'\n```"]
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Show me")
        assert app.chat is not None
        view = app.chat.transcript.views[-1]
        await wait_until(pilot, lambda: not app.highlighter.busy)
        assert "$text-success" in {str(span.style) for span in view.render().spans}


@pytest.mark.sampled
@pytest.mark.parametrize("unit", ["![", "- a\n", "| a | b\n", "# a\n", "word "])
def test_only_the_beginning_of_a_long_text_is_read_as_markdown(unit: str) -> None:
    source = "**b** " + "|a|b|\n|-|-|\n" + unit * (4 * MARKDOWN_LIMIT // len(unit))
    shown = render_markdown(source, 80)
    assert shown.plain.startswith("b")
    assert shown.plain.endswith(source[-2 * MARKDOWN_LIMIT :])
