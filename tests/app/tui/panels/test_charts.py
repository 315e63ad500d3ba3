"""The parts of the screen that are functions: windows, streaming, Markdown, figures, charts, commands."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.content import Content

from app.chat.state import Phase, Status
from app.chat.thread import code_blocks
from app.chat.words import engine_name, progress_text, size, slowest_layer_words, slowest_layers
from app.tui import keymap
from app.tui.chat.transcript import MOST_MESSAGES, Window
from app.tui.panels import charts
from app.tui.render.markdown import column_widths, render_markdown
from app.tui.render.status_line import status_line
from app.tui.render.streaming import LONGEST_TAIL, AnswerPart, GrowingText
from app.tui.screens.settings import prediction
from engine.ipc.messages import (
    DeviceMemory,
    ExpertMovement,
    LayerTimes,
    MemoryUse,
    PhaseTimes,
    Prefill,
    Progress,
    Timing,
)
from tests.app.fake_engine import FACTS, PLANNED

# --- windows ---


@given(st.integers(0, 400), st.lists(st.sampled_from(["older", "newer", "appended"]), max_size=40))
def test_a_window_never_leaves_the_conversation(total: int, moves: list[str]) -> None:
    window = Window.newest(total)
    for move in moves:
        step = {
            "older": Window.with_older,
            "newer": Window.with_newer,
            "appended": Window.appended,
        }[move]
        window = step(window)
        assert 0 <= window.start <= window.end <= window.total
        assert window.end - window.start <= MOST_MESSAGES


@given(st.integers(1, 400))
def test_all_messages_can_be_reached(total: int) -> None:
    window = Window.newest(total)
    seen = set(range(window.start, window.end))
    while window.older:
        window = window.with_older()
        seen |= set(range(window.start, window.end))
    while window.newer:
        window = window.with_newer()
        seen |= set(range(window.start, window.end))
    assert seen == set(range(total))


def test_a_new_message_stays_out_while_the_reader_is_elsewhere() -> None:
    window = Window(0, 30, 100)
    assert window.appended() == Window(0, 30, 101)


@given(st.integers(1, 300), st.data())
def test_a_window_around_a_message_holds_it(total: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, total - 1))
    window = Window.around(index, total)
    assert index in window
    assert window.end <= total


# --- streaming ---


@given(st.lists(st.sampled_from(["word ", "\n", "\n\n", "```\n", "```py\n", "- item\n", "1. x\n", "    code\n"])))
def test_cutting_a_growing_text_loses_nothing(pieces: list[str]) -> None:
    growing = GrowingText()
    text = ""
    for piece in pieces:
        text += piece
        growing.update(text)
        assert "".join(part.source for part in (*growing.frozen, growing.tail)) == text


def test_paragraphs_are_frozen_and_lists_are_kept_whole() -> None:
    growing = GrowingText()
    growing.update("one\n\ntwo\n\n- a\n\n- b\n")
    assert growing.frozen == [AnswerPart("one\n\n")]
    assert growing.tail.source == "two\n\n- a\n\n- b\n"
    growing.update("one\n\ntwo\n\n- a\n\n- b\n\nthree ")
    assert growing.tail.source == "three "


def test_a_closed_fence_is_frozen() -> None:
    growing = GrowingText()
    growing.update("```py\nx\n\ny\n")
    assert growing.frozen == []
    growing.update("```py\nx\n\ny\n```\nafter")
    assert growing.frozen == [AnswerPart("```py\nx\n\ny\n```\n")]


def test_a_long_fence_is_cut_and_stays_code() -> None:
    growing = GrowingText()
    growing.update("```py\n" + "line = 1\n" * 600)
    assert len(growing.tail.source) <= LONGEST_TAIL + 20
    blocks = [*(part.source for part in growing.frozen), growing.tail.source + "```\n"]
    assert all(block.startswith("```py\n") and block.endswith("```\n") for block in blocks)
    code = "".join(code_blocks(block)[0] + "\n" for block in blocks)
    assert code == "line = 1\n" * 600


def test_another_text_begins_anew() -> None:
    growing = GrowingText()
    growing.update("one\n\ntwo")
    growing.update("three")
    assert (growing.frozen, growing.tail) == ([], AnswerPart("three"))


# --- Markdown ---


def test_markdown_is_laid_out() -> None:
    text = render_markdown("# Title\n\n- one\n- two\n  1. deep\n\n> said\n\n`code` and **bold**", 40).plain
    assert text.splitlines() == [
        "Title", "", "• one", "• two", "  1. deep", "", "▎ said", "", "code and bold",
    ]  # fmt: skip


def test_long_items_are_indented() -> None:
    lines = render_markdown("- " + "word " * 12, 20).plain.splitlines()
    assert lines[0].startswith("• word")
    assert all(line.startswith("  word") and len(line) <= 20 for line in lines[1:])


def test_a_table_fits_its_width() -> None:
    source = "| a | b |\n|---|--:|\n| " + "long " * 20 + "| 7 |"
    for width in (12, 20, 40, 80):
        assert all(len(line) <= width for line in render_markdown(source, width).plain.splitlines())


@pytest.mark.parametrize("source", ["[bold]x[/]", "[@click=app.quit]x[/]", "<b>x</b>", "[/]", "\\[red]"])
def test_markup_of_a_model_is_text(source: str) -> None:
    content = render_markdown(source, 40)
    assert "x" in content.plain or content.plain in ("[/]", "[red]")
    assert not any("click" in str(span.style) for span in content.spans)


def test_escape_sequences_are_gone() -> None:
    assert render_markdown("a\x1b[31mb\x1b]0;t\x07c\x9b1md", 40).plain == "abcd"


@given(st.text(max_size=300), st.integers(1, 120))
def test_any_text_can_be_rendered(source: str, width: int) -> None:
    content = render_markdown(source, width)
    assert not any(ord(character) < 32 and character not in "\n\t" for character in content.plain)


@pytest.mark.sampled(least=1)
@pytest.mark.parametrize("mark", ["*", "_", "["])
def test_marks_within_marks_without_end_are_shown_all_the_same(mark: str) -> None:
    source = mark * 6000 + "the words" + mark * 6000
    assert "the words" in render_markdown(source, 80).plain
    assert code_blocks(source) == []


def test_code_blocks_are_found_in_order() -> None:
    assert code_blocks("```py\na\n```\ntext\n\n~~~\nb\nc\n~~~") == ["a", "b\nc"]


@given(st.lists(st.integers(0, 80), min_size=1, max_size=8), st.integers(1, 120))
def test_columns_fit_or_are_given_up(wanted: list[int], available: int) -> None:
    widths = column_widths(wanted, available)
    if widths is None:
        assert sum(min(max(1, column), 5) for column in wanted) > available
    else:
        assert sum(widths) <= available
        assert all(width >= 1 for width in widths)


# --- figures ---


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_500_000, "1.5 MB"), (250_000_000, "250 MB"), (3.4e12, "3.4 TB")],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


def test_progress_is_said_in_its_unit() -> None:
    assert progress_text(Progress(stage="weights", done=3, total=30, unit="layers")) == "weights 3 of 30 layers"
    assert progress_text(Progress(stage="x", done=10**9, total=2 * 10**9, unit="bytes")) == "x 1.0 GB of 2.0 GB"
    assert progress_text(Progress(stage="thinking")) == "thinking"


_STATUSES = [
    Status(),
    Status(phase=Phase.LOADING, model="starter", progress=Progress(stage="weights", done=63, total=100)),
    Status(phase=Phase.READING, prefill=Prefill(done=512, total=4000), facts=FACTS),
    Status(phase=Phase.ANSWERING, facts=FACTS, context_used=1900, tokens_per_s=12.3, beams=4, unsaved="full"),
    Status(phase=Phase.UNAVAILABLE, model="a-model-with-a-long-name" * 4, problem="x"),
]


@pytest.mark.parametrize("status", _STATUSES)
@given(width=st.integers(0, 200))
def test_the_status_line_fits(status: Status, width: int) -> None:
    assert status_line(status, width).cell_length <= max(width, 0)


def test_what_is_loaded_is_said_beside_how_much() -> None:
    sending = Progress(stage="sending weights to attic", done=10**8, total=10**9, unit="bytes")
    line = status_line(Status(phase=Phase.LOADING, model="starter", progress=sending), 120).plain
    assert "loading: sending weights to attic ━───────── 10% of 1.0 GB" in line


def test_the_status_line_leaves_out_what_matters_least() -> None:
    wide = status_line(_STATUSES[3], 120).plain
    assert all(text in wide for text in ("answering", "starter", "local", "context 1,900/2,048", "12.3 tok/s"))
    narrow = status_line(_STATUSES[3], 40).plain
    assert "answering" in narrow
    assert "unsaved" in narrow


_FULL = Status(
    phase=Phase.READY, model="some-moe",
    facts=msgspec.structs.replace(FACTS, name="some-moe", weights="Q4_K_M", context_limit=32_768),
    context_used=12_345, tokens_per_s=12.3, ttft_s=0.21, memory=MemoryUse(own=1_200_000_000, mapped=4_000_000_000),
)  # fmt: skip


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (40, "● ready  some-moe  12.3k/32.8k  12.3 t/s"),
        (60, "● ready  some-moe  Q4_K_M  12.3k/32.8k  12.3 tok/s"),
        (80, "● ready  some-moe  Q4_K_M  first 210 ms  context 12,345/32,768 (38%)  12.3 tok/s"),
        (
            120,
            "● ready  some-moe  Q4_K_M  memory 1.2 GB + 4.0 GB mapped  first token 210 ms  "
            "context 12,345/32,768 (38%)  12.3 tok/s",
        ),
        (
            200,
            "● ready  some-moe  Q4_K_M  torch · local (torch, cpu)  memory 1.2 GB + 4.0 GB mapped  first token 210 ms  "
            "context 12,345/32,768 (38%)  12.3 tok/s",
        ),
    ],
)
def test_what_the_status_line_shows_at_each_width(width: int, line: str) -> None:
    drawn = status_line(_FULL, width).plain
    assert len(drawn) <= width
    assert re.sub(" {2,}", "  ", drawn) == line


def test_a_name_that_tells_the_number_format_is_enough() -> None:
    facts = msgspec.structs.replace(FACTS, name="owner/some:Q4_K_M", weights="Q4_K_M")
    assert status_line(Status(phase=Phase.READY, facts=facts), 120).plain.count("Q4_K_M") == 1


# --- charts ---


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.integers(0, 200))
def test_cells_add_up(values: list[float], width: int) -> None:
    cells = charts.cells(values, width)
    assert sum(cells) == (width if sum(values) > 0 else 0)
    assert all(count >= 0 for count in cells)


def test_the_slowest_layers_are_named() -> None:
    layers = [LayerTimes(1, 0, 2), LayerTimes(5, 0, 1), LayerTimes(0, 0, 4)]
    assert slowest_layers(layers, 2) == [(1, 6.0, "attention"), (2, 4.0, "experts")]
    assert slowest_layer_words(layers).startswith("Layer 1 takes longest: attention ")
    assert slowest_layer_words(layers).endswith(" of 6.0 ms")
    assert slowest_layer_words([LayerTimes()]) == slowest_layer_words([]) == ""


def test_bars_can_be_told_apart_without_colour() -> None:
    fills = [fill for _, fill, _ in charts.PARTS]
    assert len(set(fills)) == len(fills)
    bar = charts.stacked([1, 1, 1, 1, 1, 1], 12).plain
    assert bar == "██▚▚▓▓▒▒░░··"


@given(st.integers(1, 12), st.integers(1, 300), st.integers(8, 140))
def test_a_heat_map_fits(layers: int, experts: int, width: int) -> None:
    use = [[1 + (layer * 7 + expert * 3) % 11 for expert in range(experts)] for layer in range(layers)]
    timing = Timing(prefill=PhaseTimes(), decode=PhaseTimes(), moe_layers=list(range(layers)), expert_use=use)
    lines = charts.heat_map(timing, width).split("\n")
    rows = [line for line in lines if not line.plain.startswith("Each")]
    assert all(line.cell_length <= width for line in rows)


def test_the_busiest_expert_is_one() -> None:
    timing = Timing(prefill=PhaseTimes(), decode=PhaseTimes(), moe_layers=[3, 5], expert_use=[[5, 10], [20, 0]])
    lines = charts.heat_map(timing, 60).plain.splitlines()
    assert lines[1].split() == ["3", ".25", ".50"]
    assert lines[2].split() == ["5", "1.00", ".00"]


def test_joined_columns_show_the_busiest_of_their_group() -> None:
    row = [charts.Cell(1), charts.Cell(5, True), charts.Cell(2), charts.Cell(3), charts.Cell(9)]
    assert charts.group_columns([row], 3) == ([[row[1], row[3], row[4]]], 2)
    assert charts.group_columns([[charts.Cell(4), charts.Cell(4, True)]], 1) == ([[charts.Cell(4, True)]], 2)


@pytest.mark.parametrize(("width", "expected"), [(60, ".25 1.0▪ .10"), (5, "·92")])
def test_what_is_in_gpu_memory_is_marked_without_colour(width: int, expected: str) -> None:
    timing = Timing(
        prefill=PhaseTimes(), decode=PhaseTimes(), moe_layers=[3], expert_use=[[5, 20, 4 if width == 5 else 2]],
        resident=[[1, 2] if width == 5 else [1]],
    )  # fmt: skip
    row = next(line for line in charts.heat_map(timing, width).plain.splitlines() if line.startswith("3"))
    assert " ".join(row.split()) == f"3 {expected}"


def test_the_legend_explains_the_marks_where_there_are_any() -> None:
    timing = Timing(prefill=PhaseTimes(), decode=PhaseTimes(), moe_layers=[3], expert_use=[[5, 20]], resident=[[1]])
    assert "in GPU memory: 1 of 2 experts" in charts.heat_legend(timing, 100).plain
    assert "GPU" not in charts.heat_legend(msgspec.structs.replace(timing, resident=[]), 100).plain


@given(st.integers(1, 6), st.integers(1, 300), st.integers(8, 140), st.data())
def test_a_heat_map_with_residents_fits(layers: int, experts: int, width: int, data: st.DataObject) -> None:
    resident = [data.draw(st.lists(st.integers(0, experts - 1), unique=True)) for _ in range(layers)]
    timing = Timing(
        prefill=PhaseTimes(), decode=PhaseTimes(), moe_layers=list(range(layers)),
        expert_use=[[(layer + expert) % 5 for expert in range(experts)] for layer in range(layers)], resident=resident,
    )  # fmt: skip
    rows = [line for line in charts.heat_map(timing, width).split("\n") if not line.plain.startswith("Each")]
    assert all(line.cell_length <= width for line in rows)


def test_what_was_moved_is_said_for_a_token() -> None:
    moved = ExpertMovement(
        tokens=10, weight_bytes=123_000_000, activation_bytes=820_000, hits=60, misses=40, moved=10, cpu_s=0.7,
        gpu_s=0.5, both_s=0.25, total_s=1.0,
    )  # fmt: skip
    text = charts.movement(moved, 200).plain
    assert "weights 12.3 MB" in text and "activations 82 kB" in text
    assert "hit rate 60%" in text and "25% of misses copied" in text
    assert "GPU busy 50%  CPU busy 70%  both busy 25%" in text
    assert all(len(line) <= 40 for line in charts.movement(moved, 40).plain.splitlines())
    assert "hit rate" not in charts.movement(ExpertMovement(), 80).plain


# --- what loading would need ---

FULL = DeviceMemory(
    device="Some GPU", total=24_000_000_000, free=20_000_000_000, trunk=4_000_000_000, experts=19_200_000_000
)


def test_a_shortfall_comes_first() -> None:
    short = msgspec.structs.replace(PLANNED, fits=False, shortfall=3_200_000_000, memory=[FULL])
    lines = prediction(short, 80).plain.splitlines()
    assert lines[0] == "starter does not fit in memory: 3.2 GB are missing."
    assert "Some GPU 23.2 GB of 24.0 GB" in lines[3] or "Some GPU 23.2 GB of 24.0 GB" in lines[2]


def test_a_prediction_says_what_it_rests_on() -> None:
    text = prediction(PLANNED, 100).plain
    assert "about 96.4 tok/s" in text and "prompts at 1,069 tok/s" in text and "48 GB/s, measured here" in text
    assert "CPU 824 MB of 25.0 GB" in text and "21.0 GB free" in text
    assert "runtime: native – no GPU is used" in text
    unknown = msgspec.structs.replace(PLANNED, tokens_per_s=None, basis="run `privatellm bench experts`")
    assert prediction(unknown, 100).plain.startswith("No predicted speed  run `privatellm bench experts`")
    assert prediction("There is no model\ncalled x.", 80).plain == "No prediction: There is no model called x."


# --- who runs the model ---


@pytest.mark.parametrize(
    ("trunk", "executor", "expected"),
    [
        ("", "local (torch, cpu)", "torch · local (torch, cpu)"),
        ("", "torch (cpu)", "torch (cpu)"),
        ("native (avx2, 2 threads)", "native (avx2, cpu)", "native (avx2, 2 threads)"),
        ("native (avx2, 2 threads)", "none (dense)", "native (avx2, 2 threads) · none (dense)"),
        ("transformers (torch, cpu)", "local (avx2, cpu)", "transformers (torch, cpu) · local (avx2, cpu)"),
    ],
)
def test_the_trunk_is_named(trunk: str, executor: str, expected: str) -> None:
    assert engine_name(msgspec.structs.replace(FACTS, trunk=trunk, executor=executor)) == expected


def test_phases_are_kept_apart() -> None:
    phase = PhaseTimes(layers=[LayerTimes(1, 0, 3)], per_token=5.0, steps=2, tokens=2, outside_layers=1.0)
    text = charts.phase_summary("Decode", phase, 40).plain
    assert "5.00 ms" in text
    assert "200.0 tok/s" in text
    assert "not measured" in charts.phase_summary("Prefill", PhaseTimes(), 40).plain
    assert isinstance(charts.layer_bars([], 40), Content)


# --- beams and commands ---


def test_a_legend_is_never_broken_between_a_fill_and_its_name() -> None:
    layers = [LayerTimes(attention=2, router=1, experts=7, exchange=1, wait=1, other=1)]
    for width in range(16, 90):
        phase = PhaseTimes(tokens=320, layers=layers, per_token=13)
        for line in charts.phase_summary("Prefill", phase, width).wrap(width):
            assert line.plain.strip() not in [fill for _, fill, _ in charts.PARTS]


def test_commands_are_told_from_questions() -> None:
    call = keymap.parse("/beams 4")
    assert call is not None
    assert (call.command.name, call.argument) == ("beams", "4")
    assert keymap.parse("What about /help?") is None
    assert keymap.parse("/usr/bin is a folder") is None
    assert keymap.parse("//help") is None


@pytest.mark.parametrize(
    "text",
    [
        "// @ts-check\nconst x = 1;",
        "// why does this fail",
        "//",
        "///",
        "//find the end",
        "//help\n//me",
        "//usr",
        "/ a",
    ],
)
def test_a_text_that_begins_with_slashes_loses_nothing(text: str) -> None:
    assert keymap.unescaped(text) == text


def test_two_slashes_ask_the_name_of_a_command() -> None:
    assert keymap.unescaped("//help") == "/help"
    assert keymap.parse("/help\nand more") is None
    with pytest.raises(keymap.UnknownCommand, match="did you mean /help"):
        keymap.parse("/helo")
    with pytest.raises(keymap.UnknownCommand, match="no arguments"):
        keymap.parse("/new please")


def test_footnotes_stay_as_they_are() -> None:
    shown = render_markdown("Term[^1] and \\*no\\* \\( alone.\n\n[^1]: note", 80).plain
    assert "Term[^1] and *no* ( alone." in shown
    assert "[^1]: note" in shown
    assert render_markdown("[a link][1]\n\n[1]: https://example.org", 80).plain.startswith(
        "a link (https://example.org"
    )
