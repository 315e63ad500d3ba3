"""Large pastes in the prompt: folded to a label, sent whole, deleted and recalled as one."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.events import Paste
from textual.widgets import TextArea

from app.conversations.drafts import Draft
from app.conversations.store import ConversationStore
from app.tui.chat.message import MessageView
from app.tui.chat.prompt import CHARACTERS, LINES, Folds, Prompt
from app.tui.render.formatting import fold
from app.tui.render.text_field import TextField
from engine.ipc.messages import Generate
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, controller, ready, shown, wait_until

LONG = "\n".join(f"line {number}" for number in range(214))


def test_only_what_would_not_fit_is_folded() -> None:
    folds = Folds()
    short = "x\n" * LINES
    assert folds.fold(short) == short
    assert folds.fold(LONG) == "[Pasted 214 lines]"
    assert folds.fold("x" * (CHARACTERS + 1)) == "[Pasted 2,001 characters]"
    assert folds.fold(LONG + "!") == "[Pasted 214 lines, 2]"
    assert folds.fold(LONG) == "[Pasted 214 lines]"
    assert Folds().fold(LONG, "I typed [Pasted 214 lines]") == "[Pasted 214 lines, 2]"


def test_a_paste_that_contains_a_label_is_not_expanded_again() -> None:
    folds = Folds()
    inner = folds.fold(LONG)
    outer = folds.fold(f"{inner}\n" * 20)
    assert folds.expand(outer) == f"{inner}\n" * 20
    assert set(folds.used(outer)) == {outer}
    kept = Folds(folds.used(outer))
    assert kept.expand(outer) == folds.expand(outer)


class OnePrompt(App[None]):
    def compose(self) -> ComposeResult:
        yield Prompt(id="prompt")


_PASTES = ["first\n" * 11, "second\n" * 11, "third\n" * 12, "short"]
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("type"), st.sampled_from(["a", "é", "\n", "["])),
        st.tuples(st.just("paste"), st.sampled_from(_PASTES)),
        st.tuples(st.just("move"), st.integers(-30, 30)),
        st.tuples(st.sampled_from(["delete_left", "delete_right", "undo", "redo"]), st.none()),
        st.tuples(st.just("unfold"), st.none()),
    ),
    max_size=25,
)


@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.soak)])
async def test_what_is_sent_is_what_was_typed_and_pasted_whatever_is_edited(examples: int) -> None:
    """The model is a list whose items are single characters and whole pastes: an edit never splits a paste."""
    app = OnePrompt()
    async with app.run_test():
        prompt = app.query_one(Prompt)

        def items() -> list[str]:
            """The text as the characters and labels that stand in it."""
            found: list[str] = []
            position = 0
            spans = dict(prompt.folds.spans(prompt.text))
            while position < len(prompt.text):
                end = spans.get(position, position + 1)
                found.append(prompt.text[position:end])
                position = end
            return found

        def offset() -> int:
            row, column = prompt.cursor_location
            return sum(len(line) + 1 for line in prompt.text.split("\n")[:row]) + column

        def place() -> int:
            """Index of the item at which an insertion comes."""
            count = position = 0
            for item in items():
                if position >= offset():
                    break
                position += len(item)
                count += 1
            return count

        @settings(max_examples=examples)
        @given(_steps)
        @example([("paste", _PASTES[2]), ("unfold", None)] * 2 + [("undo", None)])
        def edited(steps: list[tuple[str, object]]) -> None:
            prompt.folds = Folds()
            prompt.text = ""
            prompt.history.clear()
            done: list[list[str]] = [[]]
            for what, value in steps:
                before, at = items(), place()
                inside = prompt.folds.around(prompt.document.get_line(prompt.cursor_location[0]), offset_in_line())
                match what:
                    case "type":
                        prompt.insert(str(value))
                        done.append([*before[:at], str(value), *before[at:]])
                    case "paste":
                        prompt.paste(str(value))
                        label = prompt.folds.fold(str(value))
                        new = list(label) if label == value else [label]
                        done.append([*before[:at], *new, *before[at:]])
                    case "move":
                        for _ in range(abs(int(str(value)))):
                            prompt.action_cursor_left() if int(str(value)) < 0 else prompt.action_cursor_right()
                    case "delete_left" | "delete_right":
                        getattr(prompt, f"action_{what}")()
                        gone = at if what == "delete_right" and inside is None else at - 1
                        done.append([item for index, item in enumerate(before) if index != gone or gone < 0])
                    case "unfold":
                        whole = prompt.whole_text
                        prompt.unfold()
                        assert prompt.whole_text == whole
                        done.append(items())
                    case _:
                        getattr(prompt, f"action_{what}")()
                        assert set(items()) <= {item for state in done for item in state}
                        done.append(items())
                assert items() == done[-1] if what != "move" else items() == before
                pasted = prompt.folds.used(prompt.text)
                assert prompt.whole_text == "".join(pasted.get(item, item) for item in items())

        def offset_in_line() -> int:
            return prompt.cursor_location[1]

        edited()


@pytest.mark.parametrize("lines", [1, 9, 40])
async def test_what_was_inserted_last_can_be_undone(lines: int) -> None:
    class OneField(App[None]):
        CSS = "TextField { height: 8; }"

        def compose(self) -> ComposeResult:
            yield TextField("begun")

    app = OneField()
    async with app.run_test():
        field = app.query_one(TextField)
        field.move_cursor(field.document.end)
        field.insert("a line\n" * lines)
        field.action_undo()
        assert field.text == "begun" and field.cursor_location == (0, 5)


@pytest.mark.parametrize("draft", ["", "one\ntwo words\n", LONG], ids=["empty", "short", "folded"])
async def test_no_action_on_a_draft_fails_wherever_the_cursor_is(draft: str) -> None:
    actions = {binding.action for binding in TextArea.BINDINGS if isinstance(binding, Binding)}
    app = OnePrompt()
    async with app.run_test(size=(60, 12)):
        prompt = app.query_one(Prompt)
        for place in ("cursor_line_start", "cursor_line_end", "select_all"):
            for action in sorted(actions):
                prompt.text = ""
                prompt.paste(draft)
                await prompt.run_action(place)
                await prompt.run_action(action)
                assert set(prompt.whole_text) <= set(draft), (place, action)


async def test_a_long_paste_is_folded_sent_whole_and_recalled(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        prompt = app.chat.prompt
        await pilot.press("a")
        prompt.post_message(Paste(LONG))
        await wait_until(pilot, lambda: prompt.text == "a[Pasted 214 lines]")
        await pilot.press("backspace")
        assert prompt.text == "a"
        await pilot.press("alt+z")
        assert prompt.text == "a[Pasted 214 lines]"
        await pilot.press("b", "enter")
        await wait_until(pilot, lambda: engine.sent(Generate) and not controller(app).busy)
        assert controller(app).thread.path[0].content == f"a{LONG}b"
        await pilot.press("up")
        assert prompt.text == "a[Pasted 214 lines]b"
        await pilot.press("left", "tab")
        assert prompt.text == f"a{LONG}b"
        assert app.focused is prompt


async def test_a_recalled_paste_is_not_replaced_by_that_of_another_draft_with_the_same_label() -> None:
    app = OnePrompt()
    async with app.run_test() as pilot:
        prompt = app.query_one(Prompt)
        prompt.paste(LONG)
        prompt.action_send()
        prompt.sent(LONG)
        other = LONG.upper()
        prompt.restore(Draft("[Pasted 214 lines]", {"[Pasted 214 lines]": other}))
        assert prompt.whole_text == other
        assert prompt.joined([LONG], "") == Draft(LONG)
        prompt.fill("")
        await pilot.press("up")
        assert prompt.whole_text == LONG


def test_of_a_long_question_the_ends_are_shown() -> None:
    assert fold("a\n" * 39) is None and fold("x" * 4_000) is None
    lines = fold(LONG + "\n\nWhat is it?\n")
    assert lines is not None and lines.beginning == "\n".join(LONG.split("\n")[:6])
    assert lines.end == "line 213\n\nWhat is it?" and lines.whole == "217 lines"
    assert (lines.line(False).plain, lines.line(True).plain) == ("▸ 208 more lines", "▾ 217 lines")
    characters = fold("x" * 100_000)
    assert characters is not None and characters.line(False).plain == "▸ 99,100 more characters"
    assert len(characters.beginning) + len(characters.end) == 900


@pytest.mark.soak
async def test_a_long_question_is_folded_found_and_copied_whole(make_app: MakeApp, store: ConversationStore) -> None:
    question = "\n".join(f"line {number}" for number in range(10_000)) + "\nWhat is it?"
    conversation = store.create(model="starter")
    parent: int | None = None
    for role, text in (("user", "hello"), ("assistant", "yes?"), ("user", question), ("assistant", "A list.")):
        parent = store.add(conversation.id, role, text, parent=parent).id  # type: ignore[arg-type]
    app = make_app()
    async with app.run_test(size=(80, 30)) as pilot:
        await ready(pilot, app)
        controller(app).open_conversation(conversation.id)
        await wait_until(pilot, lambda: len(shown(app)) == 4)
        assert app.chat is not None
        transcript = app.chat.transcript
        assert shown(app)[2].split("\n")[6:] == [
            "line 5",
            "▸ 9,992 more lines",
            "line 9998",
            "line 9999",
            "What is it?",
        ]
        await pilot.press("shift+tab")
        for key, index in (("left_curly_bracket", 2), ("left_curly_bracket", 0), ("left_curly_bracket", 0),
                           ("right_curly_bracket", 2), ("right_curly_bracket", 3)):  # fmt: skip
            await pilot.press(key)
            await wait_until(pilot, lambda index=index: app.focused is transcript.views[index])
        await pilot.press("up", "c")
        await wait_until(pilot, lambda: app.clipboard == question)
        await pilot.press("t")
        assert shown(app)[2].split("\n", 1)[1] == f"▾ 10,001 lines\n{question}"
        await pilot.press("t")
        assert "▸ 9,992 more lines" in shown(app)[2]
        await pilot.press("slash", *"more lines")
        await wait_until(pilot, lambda: "not found" in str(app.screen.query_one("#find-count").render()))
        app.chat.find_line.open("line 7777")
        await wait_until(pilot, lambda: "line 7777" in str(app.export_screenshot()).replace("&#160;", " "))
        assert "▾ 10,001 lines" in shown(app)[2] and isinstance(transcript.views[2], MessageView)
