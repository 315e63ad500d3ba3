"""The chat in lines over a script: what is written, and which commands work without a screen."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from app import clipboard
from app.attachments.attachment import Attachment
from app.chat.commands.table import COMMANDS
from app.chat.state import Entry, Phase, Status
from app.conversations.records import Thoughts
from app.conversations.store import ConversationStore
from app.plain.chat import PlainChat
from app.plain.console import Console, ReaderGone, gather, wrapped
from app.plain.speaking import LONGEST_WAIT, Speaker, spoken_length
from app.settings.file import open_settings
from engine.ipc.messages import Beam, Generate, Progress
from tests.app.attachments.pictures import SEEING, png
from tests.app.fake_engine import FakeEngine

Run = Callable[..., list[str]]


@pytest.fixture
def run(engine: FakeEngine, store: ConversationStore, home: Path) -> Run:
    """Runs the chat over lines of input; the lines of output without the greeting."""

    def run_lines(*lines: str) -> list[str]:
        written = io.StringIO()
        console = Console(io.StringIO("".join(f"{line}\n" for line in lines)), written)
        assert PlainChat(console, engine, store, open_settings()).run() == 0
        output = written.getvalue()
        assert output.endswith("\n") and "\x1b" not in output
        return [line for line in output.splitlines()[1:] if not line.endswith((" is loaded.", "engine.", "Loading."))]

    return run_lines


def test_a_conversation_is_lines_with_the_speakers_in_words(run: Run, store: ConversationStore) -> None:
    assert run("Which city?", "", "Again?") == [
        "You: Which city?", "Model: Paris is the capital.", "You: ", "You: Again?", "Model: Paris is the capital.",
    ]  # fmt: skip
    (conversation,) = store.conversations()
    assert [message.state for message in store.shown(conversation.id)] == ["complete"] * 4


def test_the_model_that_is_loaded_is_named_before_its_first_answer(
    engine: FakeEngine, store: ConversationStore, home: Path
) -> None:
    written = io.StringIO()
    console = Console(io.StringIO("Which city?\n"), written)
    assert PlainChat(console, engine, store, open_settings()).run() == 0
    lines = written.getvalue().splitlines()
    named = lines.index("Notice: The model starter is loaded.")
    assert named < lines.index("Model: Paris is the capital.")
    assert lines.count("Notice: The model starter is loaded.") == 1


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_what_the_model_writes_is_not_taken_for_a_line_of_the_chat(run: Run, engine: FakeEngine, pieces: int) -> None:
    lines = [
        "You: and now?",
        " notice : all is well",
        "Err\u200bor\uff1a no",
        "Thoughts (2 s): x",
        "Model:y",
        "Your: z",
        "a You: b",
    ]
    text = "You: fine.\n\n" + "\n".join(lines)
    engine.answer = lambda request: [text[at : at + pieces] for at in range(0, len(text), pieces)]
    shown = [
        "> You: and now?",
        ">  notice : all is well",
        "> Error\uff1a no",
        "> Thoughts (2 s): x",
        "> Model:y",
        *lines[-2:],
    ]
    assert run("Hi") == ["You: Hi", "Model: You: fine.", "", *shown]
    # Nor what an import brought, or was thought.
    console = Console(io.StringIO(), written := io.StringIO())
    Speaker(console).message(Entry("user", "Hi\nModel: yes"))
    Speaker(console).say("so\nNotice: no", "Thoughts")
    assert written.getvalue() == "You: Hi\n> Model: yes\nThoughts: so\n> Notice: no\n"


def test_what_the_model_writes_cannot_act(run: Run, engine: FakeEngine) -> None:
    engine.answer = lambda request: ["\x1b[31mred\x1b]0;title", "\x07 and \x9b2J", "done\r\n"]
    assert run("Hi") == ["You: Hi", "Model: red and done"]


def test_a_question_of_several_lines_ends_with_its_marks(
    run: Run, engine: FakeEngine, store: ConversationStore
) -> None:
    run('"""first', "second", 'third"""', "one\\", "two")
    (conversation,) = store.conversations()
    questions = [message.content for message in store.shown(conversation.id) if message.role == "user"]
    assert questions == ["first\nsecond\nthird", "one\ntwo"]


def test_a_question_that_begins_with_slashes_loses_nothing(run: Run, store: ConversationStore) -> None:
    run("// why does this fail", "//help")
    (conversation,) = store.conversations()
    questions = [message.content for message in store.shown(conversation.id) if message.role == "user"]
    assert questions == ["// why does this fail", "/help"]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["plain"], "plain"),
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (["ends here\\"], "ends here"),
        (['"""', "a", "", "b", '"""'], "a\n\nb"),
        (['"""one line"""'], "one line"),
        (['"""no end', "a"], "no end\na"),
    ],
)
def test_lines_are_gathered(lines: list[str], text: str) -> None:
    rest = iter(lines)

    def read(first: bool) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    assert gather(read) == text


def test_thoughts_are_told_and_printed_on_request(run: Run, engine: FakeEngine) -> None:
    engine.thoughts = ["I wonder", " about it."]
    lines = [line for line in run("Hi", "/thoughts") if line != "Notice: The model is thinking."]
    assert lines == [
        "You: Hi",
        "Thoughts (2.0 s, 2 tokens): /thoughts prints them.",
        "Model: Paris is the capital.",
        "You: /thoughts",
        "Thoughts (2.0 s, 2 tokens): I wonder about it.",
    ]


def test_several_answers_are_listed_and_one_is_picked(run: Run, store: ConversationStore) -> None:
    lines = run("/n 2 Which city?", "2", "/n 1 q", f"/n {'9' * 5_000} q", "/n", "")
    start = next(index for index, line in enumerate(lines) if line.startswith("1. temperature"))
    assert lines[start].endswith(": Paris is the capital.") and lines[start + 1].endswith(": PARIS IS THE CAPITAL.")
    assert lines[start + 2 : start + 4] == [
        "Number of the answer to go on with; empty: back. 2", "Model: PARIS IS THE CAPITAL.",
    ]  # fmt: skip
    assert "Warning: The number of answers must be from 2 to 8, not 1." in lines
    assert sum(line.startswith("Warning: The number of answers must be") for line in lines) == 2
    (conversation,) = store.conversations()
    assert [record.content for record in store.shown(conversation.id)][1:] == ["PARIS IS THE CAPITAL."]


def test_candidates_are_listed_and_picked_by_number(run: Run, engine: FakeEngine, store: ConversationStore) -> None:
    engine.beam_steps = [[Beam("Paris.", [1], -0.3, True), Beam("Lyon.", [2], -0.9, True)]]
    lines = run("/beams 2", "Which city?", "/beams", "2")
    assert "Notice: This chat's next question uses 2 beams." in lines
    assert lines[-5:] == [
        "Notice: The beam width is 2. /beams WIDTH changes it, from 1 to 16.", "1. score -0.300: Paris.",
        "2. score -0.900: Lyon.", "Number of the candidate to use; empty: back. 2", "Model: Lyon.",
    ]  # fmt: skip
    (conversation,) = store.conversations()
    assert store.shown(conversation.id)[-1].content == "Lyon."


def test_chats_are_opened_by_number_or_by_a_word(run: Run) -> None:
    run("About whales", "/new", "About tides")
    lines = run("/chats", "whales", "1")
    assert lines[1].startswith("1. About tides, 2") and lines[2].startswith("2. About whales, 2")
    assert lines[-3:] == ["Chat: About whales", "You: About whales", "Model: Paris is the capital."]


def test_answers_are_regenerated_and_questions_edited(run: Run, store: ConversationStore) -> None:
    lines = run("First", "/again", "/edit", "Second", "/edit", "")
    assert lines.count("Model: Paris is the capital.") == 3
    assert lines[-2:] == ["The last question: Second", "In its place; empty: back. "]
    (conversation,) = store.conversations()
    assert store.shown(conversation.id)[0].content == "Second"


def test_files_are_attached_named_and_kept(
    run: Run, store: ConversationStore, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    (home / "a.py").write_text("print(1)")
    (home / "b.bin").write_bytes(b"\0")
    lines = run("Explain @a.py", "And @b.bin", "/edit", "Explain @a.py again")
    assert "Attached: a.py, 8 B, about 2 tokens" in lines
    assert (
        "Warning: b.bin is a binary file, so it cannot be attached." in lines and "Notice: Nothing was sent." in lines
    )
    first, _ = store.shown(store.conversations()[0].id)
    assert (first.content, first.attachments) == ("Explain @a.py again", (Attachment("a.py", "print(1)"),))


def test_pictures_are_attached_unless_the_model_sees_nothing(
    run: Run, engine: FakeEngine, store: ConversationStore, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    (home / "a.png").write_bytes(png(320, 128))
    lines = run("What is @a.png")
    said = "Warning: starter sees no pictures: leave a.png out, or load a model that sees."
    assert said in lines and "Notice: Nothing was sent." in lines and not engine.sent(Generate)
    engine.facts = SEEING
    assert "Attached: a.png, 320×128, 40 tokens" in run("What is @a.png")
    assert store.shown(store.conversations()[0].id)[0].attachments[0].data == png(320, 128)


def test_settings_are_changed_by_name(run: Run) -> None:
    lines = run("/settings", "temperature 0.5", "/settings", "", "/settings", "temperature hot", "/settings", "none 1")
    assert "Notice: temperature is now 0.5." in lines and "temperature 0.5: Temperature." in lines
    assert any(line.startswith("Warning: temperature cannot be 'hot'") for line in lines)
    assert lines[-1].startswith("Warning: there is no setting 'none'")


def test_the_chat_is_exported_and_renamed(run: Run, home: Path, store: ConversationStore) -> None:
    lines = run("Hi", "/rename Greetings", f"/export {home / 'a.md'}", f"/export {home / 'a.md'}")
    assert (home / "a.md").read_text().endswith("Paris is the capital.\n")
    assert lines[-1].startswith("Error: Export failed:")
    assert [known.title for known in store.conversations()] == ["Greetings"]


def test_a_temporary_chat_is_exported_and_no_saved_one_in_its_place(run: Run, home: Path) -> None:
    run("Which city?", "/temporary", "A secret?", f"/export {home / 'a.md'}")
    exported = (home / "a.md").read_text()
    assert "A secret?" in exported and "Which city?" not in exported


def test_chats_are_imported(run: Run, home: Path, store: ConversationStore) -> None:
    chat = {"title": "Tea", "messages": [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "Yes."}]}
    (home / "chat.json").write_text(json.dumps(chat))
    lines = run(
        f"/import {home / 'chat.json'}", "/import", f"{home / 'chat.json'}", f"/import {home / 'none'}", "/import", ""
    )
    assert "Notice: Imported from privatellm: 1 new, 0 already here." in lines
    assert "Notice: Imported from privatellm: 0 new, 1 already here." in lines
    assert any(line.startswith("Error: Nothing was imported:") for line in lines)
    assert [known.title for known in store.conversations()] == ["Tea"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/nothing", "Warning: There is no command /nothing; /help lists all commands."),
        ("/copy", "Warning: There is no answer to copy yet."),
        ("/code", "Warning: There is no code block to copy."),
        ("/history", "Notice: There are no earlier questions yet."),
        ("/history tides", "Notice: No earlier question was found."),
        ("/pin", "Warning: This chat is not saved, so it is in no list."),
        ("/editor", "Warning: An editor cannot be opened: there is no terminal."),
        ("/stop", "Notice: No answer is being written. ctrl+c stops one while it is."),
        ("/suspend", "Warning: There is no shell to go back to."),
        ("/again", "Warning: There is no answer to regenerate yet."),
        ("/thoughts", "Notice: No answer here has thoughts."),
        ("/beams 99", "Warning: The beam width must be a number from 1 to 16, not 99."),
    ],
)
def test_what_cannot_be_done_is_said(run: Run, typed: str, said: str) -> None:
    assert run(typed)[-1] == said


def test_every_command_works_in_lines_and_help_names_it(run: Run) -> None:
    lines = run("/help")
    for command in COMMANDS:
        assert f"{command.usage}: {command.help_in_lines or command.help}." in lines
    assert lines[-3:] == run("/keys")[1:]


def test_chats_are_pinned_and_put_away(run: Run, store: ConversationStore) -> None:
    lines = run("Hi", "/pin", "/archive", "/pin", "/temporary", "Secret", "/pin")
    assert [line for line in lines if line.endswith(" chat.")] == [
        "Notice: Pinned the chat.", "Notice: Archived the chat.", "Notice: Unpinned the chat.",
    ]  # fmt: skip
    assert lines[-1] == "Warning: This chat is not saved, so it is in no list."
    (known,) = store.conversations(archived=True)
    assert not known.pinned


def test_earlier_questions_of_all_chats_are_found_and_asked(run: Run, store: ConversationStore) -> None:
    run("About whales", "/new", "About tides", "/new", "A tide table")
    lines = run("/history tide", "2", "/history", "whales", "", "/history", "9")
    assert lines[1:6] == [
        "1. A tide table", "2. About tides", "Number of the question to ask, or words; empty: back. 2",
        "You: About tides", "Model: Paris is the capital.",
    ]  # fmt: skip
    assert "1. About whales" in lines and lines[-1] == "Notice: No earlier question was found."
    assert len(store.conversations()) == 4


def test_answers_and_code_are_copied_without_a_terminal(
    run: Run, engine: FakeEngine, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.setattr(clipboard, "clipboard_tools", lambda *_: [])
    engine.answer = lambda request: ["Thus:\n```\nx = 1\n```\n"]
    kept = home / "data" / "clipboard.txt"
    assert run("Hi", "/copy")[-1] == f"Notice: No clipboard was found. The answer was written to {kept}."
    assert kept.read_text() == "Thus:\n```\nx = 1\n```\n"
    run("Hi", "/code")
    assert kept.read_text() == "x = 1"
    kept.unlink()
    assert run("/temporary", "Hi", "/copy")[-1].startswith("Notice: The answer was not copied: no clipboard was found.")
    assert not kept.exists()


def test_an_engine_that_dies_is_an_error_and_the_text_stays(run: Run, engine: FakeEngine) -> None:
    engine.dies_at = 2
    lines = run("Hi")
    assert lines[1] == "Model: Paris"
    assert lines[2] == "Error: The engine ended before the answer was complete."
    assert lines[3].startswith("Error: The engine was killed (SIGKILL)")


def test_a_model_that_cannot_be_loaded_is_said(run: Run, engine: FakeEngine) -> None:
    engine.load_error = "There is no such model."
    assert "Error: There is no such model." in run("Hi")


def test_ctrl_c_stops_the_answer_and_keeps_it(engine: FakeEngine, store: ConversationStore, home: Path) -> None:
    """The interrupt arrives when the first words are written."""

    class Impatient(io.StringIO):
        def write(self, text: str) -> int:
            if "waiting" in text:
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    def pieces(request: object) -> list[str]:
        return ["It is waiting. ", *["more "] * 100_000]

    engine.answer = pieces
    written = Impatient()
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert PlainChat(Console(io.StringIO("Hi\nBye\n"), written), engine, store, open_settings()).run() == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Notice: Stopped.\nYou: Bye\n" in written.getvalue()
    (conversation,) = store.conversations()
    kept = store.shown(conversation.id)[1]
    assert kept.state == "stopped" and kept.content.startswith("It is waiting.")


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("Hello", 0),
        ("Hello there. And", 13),
        ("Done.\nNext", 6),
        ("1. First", 0),
        ("It costs 3. 50", 0),
        ("“Really?” she", 10),
        ("你好。我", 3),
        ("x" * 300, 0),
        ("word " * 60, 5 * 60),
    ],
)
def test_answers_are_written_by_whole_sentences(text: str, length: int) -> None:
    assert spoken_length(text, 0) == length
    assert len("word " * 60) > LONGEST_WAIT


def speak(*steps: str) -> str:
    written = io.StringIO()
    speaker = Speaker(Console(io.StringIO(), written))
    answer = Entry("assistant", "", state="writing")
    speaker.begin(answer)
    for step in steps:
        answer.content = step
        speaker.grow(answer, streams=True)
    answer.state = "complete"
    speaker.end(answer)
    return written.getvalue()


def test_however_an_answer_is_cut_all_of_it_is_written_once() -> None:
    text = "One sentence. Another one!\n\n- a list\n- of two\n```\ncode\n```\nThe end"
    for width in (1, 3, 7, 100):
        steps = [text[:end] for end in range(width, len(text) + width, width)]
        assert speak(*steps) == f"Model: {text}\n"


def test_text_that_turns_out_to_be_thoughts_is_called_so() -> None:
    said = speak("I think. Maybe", "The answer. It")
    assert said == (
        "Model: I think. \nNotice: The model counts the text above among its thoughts. Its answer follows.\n"
        "Model: The answer. It\n"
    )


def test_downloads_are_told_at_every_quarter() -> None:
    written = io.StringIO()
    speaker = Speaker(Console(io.StringIO(), written))
    for done in range(0, 101, 5):
        progress = Progress(stage="file", done=done * 10**6, total=100 * 10**6, unit="bytes")
        speaker.doing(Status(phase=Phase.FETCHING, progress=progress))
    assert [line.split()[4] for line in written.getvalue().splitlines()] == ["0", "25", "50", "75", "100"]


def test_thoughts_of_a_message_of_the_past_are_not_read_out() -> None:
    written = io.StringIO()
    entry = Entry("assistant", "Yes.", thoughts=Thoughts("Hm."), state="stopped")
    Speaker(Console(io.StringIO(), written)).message(entry)
    assert written.getvalue() == "Model: Yes.\nNotice: Stopped.\n"


def test_a_reader_that_went_away_ends_the_writing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(ReaderGone):
        Console(io.StringIO(), Gone()).write("x")


def test_answers_go_on_and_what_was_deleted_comes_back(run: Run, engine: FakeEngine, store: ConversationStore) -> None:
    lines = run(
        "Hi", "/continue", "/delete", "/undo", "/temporary", "Secret", "/delete", "/delete", "/delete", "/continue"
    )
    assert [line for line in lines if line.startswith("Model: Paris is the capital.")][1:]
    assert "Notice: Temporary chat: nothing of it is saved." in lines
    (conversation,) = store.conversations()
    assert [message.role for message in store.shown(conversation.id)] == ["user", "assistant"]


def test_the_whole_chat_is_deleted_and_comes_back(run: Run, store: ConversationStore) -> None:
    lines = run("Hi", "/delete chat", "/delete chat", "/undo", "/delete all")
    told = [line for line in lines if "elete" in line and not line.startswith("You:")]
    assert told == [
        "Notice: Deleted the chat “Hi”. /undo brings it back.",
        "Warning: This chat is not saved, so there is nothing to delete.",
        "Warning: There is no /delete all: /delete deletes the last message, /delete chat the whole chat.",
    ]
    (conversation,) = store.conversations()
    assert [message.role for message in store.shown(conversation.id)] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["The story of rain"], ["The story", "of rain"]),
        (["The ", "story ", "of ", "rain ", "is"], ["The story ", "of rain is"]),
        (["abcdefghijklmno p"], ["abcdefghijklmno p"]),
        (["one\ntwo three four"], ["one", "two three", "four"]),
        (["日本語 日本語"], ["日本語", "日本語"]),
    ],
)
def test_lines_are_broken_between_words(pieces: list[str], lines: list[str]) -> None:
    column, written = 0, ""
    for piece in pieces:
        text, column = wrapped(piece, column, 10)
        written += text
    assert written.split("\n") == lines


def test_lines_of_the_chat_are_found(run: Run) -> None:
    lines = run("Where is the CAPITAL?", "/find capital", "/find nothing")
    assert lines[3:] == [
        "Notice: 2 lines found.",
        "You, message 1: Where is the CAPITAL?",
        "Model, message 2: Paris is the capital.",
        "You: /find nothing",
        "Notice: 0 lines found.",
    ]
