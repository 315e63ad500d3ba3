"""``@file`` in a question: what is a reference, which files it names, and how files are listed and found."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.attachments import listing
from app.attachments.attachment import Attachment
from app.attachments.listing import best, entries_of, files_below, fitting, folders_of
from app.attachments.references import MOST_FILES, pasted_pictures, pattern, reference_to, references, resolve
from app.tui.chat.completion import FileReferences
from tests.app.attachments.pictures import png
from tests.support.eventually import PATIENCE_S


@pytest.fixture(autouse=True)
def _listing_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_PATIENCE_S", PATIENCE_S)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("a.py", "src/b.py", "src/deep/c.py", "src/notes.md", "two words.txt", "build/made.o", ".hidden/x"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")
    (tmp_path / "src/data.bin").write_bytes(b"\0\1")
    return tmp_path


def names(text: str, folder: Path) -> list[str]:
    return [attachment.name for attachment in resolve(text, folder).attachments]


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("@a.py", ["a.py"]),
        ("see (@a.py) and @src/b.py.", ["a.py)", "src/b.py."]),
        ('@"two words.txt" and @~/x', ["two words.txt", "~/x"]),
        ("me@example.com a@b @ x @@y", []),
        ("first\n@second", ["second"]),
    ],
)
def test_a_reference_stands_at_the_beginning_of_a_word(text: str, paths: list[str]) -> None:
    assert [reference.path for reference in references(text)] == paths


@given(st.text(st.characters(exclude_characters='"@\n'), min_size=1, max_size=30))
def test_what_is_inserted_for_a_path_refers_to_it(path: str) -> None:
    text = f"see {reference_to(path)} there"
    assert [reference.path for reference in references(text)] == [path]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Explain @a.py.", ["a.py"]),
        ("@a.py again @a.py", ["a.py"]),
        ("(@src/b.py, @a.py)?", ["src/b.py", "a.py"]),
        ('@"two words.txt"', ["two words.txt"]),
        ("@src/*.py", ["src/b.py"]),
        ("@src/**/*.py", ["src/b.py", "src/deep/c.py"]),
        ("@src/deep/", ["src/deep/c.py"]),
        ("@src", []),
        ("@property and @types/node and @nothing/*.py", []),
        ("@[ab].py", ["a.py"]),
    ],
)
def test_what_references_name(project: Path, text: str, expected: list[str]) -> None:
    resolved = resolve(text, project)
    assert [attachment.name for attachment in resolved.attachments] == expected
    assert all(attachment.text == f"text of {attachment.name}\n" for attachment in resolved.attachments)
    assert not resolved.problems


def test_absolute_paths_and_the_home_folder(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(project / "src"))
    other = tmp_path.parent
    assert names(f"@{project}/a.py @~/b.py @~/deep/ @{project}/src/*.md", other) == [
        f"{project}/a.py", "~/b.py", "~/deep/c.py", f"{project}/src/notes.md",
    ]  # fmt: skip


def test_what_cannot_be_attached_is_a_problem_only_if_it_was_named_itself(project: Path) -> None:
    resolved = resolve("@src/data.bin", project)
    assert resolved.problems == ("src/data.bin is a binary file, so it cannot be attached.",)
    resolved = resolve("@src/", project)
    assert [attachment.name for attachment in resolved.attachments] == ["src/b.py", "src/deep/c.py", "src/notes.md"]
    assert resolved.left_out == ("src/data.bin is a binary file, so it cannot be attached.",) and not resolved.problems


def test_too_many_files_are_a_problem(tmp_path: Path) -> None:
    for number in range(MOST_FILES + 1):
        (tmp_path / f"{number}.txt").write_text("x")
    assert resolve("@*.txt", tmp_path).problems == (
        f"@*.txt names {MOST_FILES + 1} files; at most {MOST_FILES} can be attached to a question.",
    )


def test_too_much_text_is_a_problem(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("x" * 1_900_000)
    assert resolve("@*.txt", tmp_path).problems == ("The files are 10 MB together; at most 8 MB can be attached.",)


def test_an_edited_question_keeps_what_was_attached(project: Path) -> None:
    kept = [Attachment("a.py", "old text"), Attachment("src/gone.py", "gone"), Attachment("other", "no longer named")]
    resolved = resolve("Look at @a.py, @src/ and @src/deep/c.py", project, kept)
    assert [(attachment.name, attachment.text) for attachment in resolved.attachments] == [
        ("a.py", "old text"), ("src/gone.py", "gone"), ("src/deep/c.py", "text of src/deep/c.py\n"),
    ]  # fmt: skip


@given(st.text("abc*?[]!^-/.\\&~", max_size=12))
def test_any_pattern_can_be_used(glob: str) -> None:
    in_one_folder = "/" not in glob and "**" not in glob
    assert not (in_one_folder and pattern(glob).fullmatch("a/b"))


def test_sets_of_letters() -> None:
    assert pattern("[!ab]x").fullmatch("cx") and not pattern("[!ab]x").fullmatch("ax")
    assert pattern("[]a-c]x").fullmatch("]x") and pattern("[]a-c]x").fullmatch("bx")
    assert pattern("[^^]").fullmatch("a") and not pattern("[^^]").fullmatch("^")
    assert pattern("[z-a]").fullmatch("[z-a]")


def test_a_text_with_many_asterisks_is_compared_at_once() -> None:
    assert pattern("*a" * 20 + "b").fullmatch("a" * 60) is None
    assert pattern("**/x*_*.p*").fullmatch("a/b/xy_z.py")


# --- listing ---


def test_outside_a_repository_hidden_folders_and_made_files_are_left_out(project: Path) -> None:
    assert files_below(project) == [
        "a.py",
        "src/b.py",
        "src/data.bin",
        "src/deep/c.py",
        "src/notes.md",
        "two words.txt",
    ]


def test_in_a_repository_its_ignore_file_is_respected(project: Path) -> None:
    subprocess.run(["git", "init", "-q", "."], cwd=project, check=True)
    (project / ".gitignore").write_text("*.md\n*.bin\n")
    assert files_below(project) == [
        ".gitignore", ".hidden/x", "a.py", "build/made.o", "src/b.py", "src/deep/c.py", "two words.txt",
    ]  # fmt: skip
    assert files_below(project / "src") == ["b.py", "deep/c.py"]


def test_folders_and_entries(project: Path) -> None:
    assert folders_of(["a", "src/b", "src/deep/c"]) == ["src/", "src/deep/"]
    assert entries_of(project / "src") == ["b.py", "data.bin", "deep/", "notes.md"]
    assert entries_of(project / "nothing") == []


def test_the_best_names_come_first() -> None:
    files = ["tests/test_prompt.py", "app/prompt.py", "app/tui/chat/prompt.py", "docs/apt.md", "pr/o/m/p/t", "other"]
    assert best(fitting("prompt", files), 4) == [
        "app/prompt.py", "app/tui/chat/prompt.py", "tests/test_prompt.py", "pr/o/m/p/t",
    ]  # fmt: skip
    assert best(fitting("chatprompt", files), 4) == ["app/tui/chat/prompt.py"]
    assert best(fitting("", ["b", "a"]), 5) == ["a", "b"]


# --- folders of other people -----------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def lacking(folder: Path, marker: Path, kind: str) -> Path:
    """A repository in ``folder`` in which git must fetch an object before it can list the files, from a remote that
    names a program to run: one that makes the file ``marker``. ``kind``: the lacking object, and the remote's kind."""
    lacked, _, remote = kind.partition(" ")
    folder.mkdir()
    for name in ("keep/.gitignore", "keep/a.py", "other/.gitignore", "other/b.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("*.md\n")
    git(folder, "init", "-q", ".")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "all")
    # In a sparse index a folder is one entry, its tree. A .gitignore that is not checked out is read from its blob.
    git(folder, "sparse-checkout", "init", "--cone", *(["--sparse-index"] if lacked == "tree" else []))
    git(folder, "sparse-checkout", "set", "keep")
    number = git(folder, "rev-parse", "HEAD:other" if lacked == "tree" else "HEAD:other/.gitignore")
    (folder / ".git/objects" / number[:2] / number[2:]).unlink()
    if lacked == "blob":
        (folder / "other").mkdir()
        (folder / "other/new.py").write_text("")
    program = f"touch {marker}; git-upload-pack"
    values = {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::sh -c touch% {marker}" if remote == "ext" else str(folder),
        "remote.origin.uploadpack": program,
        "core.fsmonitor": program,
        "core.sshCommand": program,
        "core.hooksPath": str(folder / "hooks"),
        # What the repository allows must not matter.
        **{f"protocol.{name}.allow": "always" for name in ("file", "ext", "ssh")},
    }
    if remote == "ssh":
        values["remote.origin.url"] = "ssh://host.invalid/x"
    for name, value in values.items():
        git(folder, "config", name, value)
    return folder


@pytest.mark.parametrize("kind", ["tree file", "tree ext", "tree ssh", "blob file"])
def test_listing_a_folder_runs_nothing_that_its_repository_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    marker = tmp_path / "marker"
    folder = lacking(tmp_path / "hostile", marker, kind)
    # That the repository does what it is here for, git shows by itself.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    listing = ["git", "-c", "core.fsmonitor=false", "ls-files", "--cached", "--others", "--exclude-standard"]
    subprocess.run(listing, cwd=folder, env=environment, check=False, capture_output=True, timeout=20)
    assert marker.exists()
    marker.unlink()
    # Nor do settings of whoever started the program let it.
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "file:ext:ssh")
    monkeypatch.setenv("GIT_NO_LAZY_FETCH", "0")
    assert "keep/a.py" in files_below(folder)
    assert "keep/a.py" in names("see @keep/ and @*.py and @other/", folder)
    monkeypatch.chdir(folder)
    typed = FileReferences(asyncio.run, lambda: None)
    typed.complete("look at @", "")
    offered = typed.complete("look at @a", "")
    assert offered is not None and [file.replacement for file in offered.candidates] == ["@keep/a.py "]
    assert not marker.exists()


def with_long_names(folder: Path, count: int, length: int) -> Path:
    """A repository whose index names ``count`` files with ``length`` letters in common, each in 73 bytes."""
    folder.mkdir()
    git(folder, "init", "-q", ".")
    (folder / "a.py").write_text("")
    index = b"DIRC" + (4).to_bytes(4, "big") + count.to_bytes(4, "big")
    facts = bytes(24) + (0o100644).to_bytes(4, "big") + bytes(31) + b"\1" + b"\x0f\xff"
    for number in range(count):
        kept, new = (b"\0", b"a" * length) if number == 0 else (b"\6", b"")
        index += facts + kept + new + b"%06d\0" % number
    (folder / ".git/index").write_bytes(index + hashlib.sha1(index).digest())
    return folder


def test_a_small_index_does_not_make_a_long_listing(tmp_path: Path) -> None:
    found = files_below(with_long_names(tmp_path / "hostile", 300, 100_000))
    assert 1 < len(found) < 300
    assert sum(map(len, found)) <= 8_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="the system must limit a program's memory")
def test_a_small_index_does_not_take_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_long_names(tmp_path / "hostile", 300, 100_000)
    monkeypatch.setattr(listing, "_GIT_MEMORY", 20_000)
    assert files_below(folder) == ["a.py"]


# --- pictures --------------------------------------------------------------------------------------------------------


def test_pictures_are_attached_by_name_and_by_their_ending_and_not_with_a_folder(project: Path) -> None:
    for name in ("a.png", "src/b.PNG", "src/c.jpg", "odd.png"):
        (project / name).write_bytes(png(40, 20))
    (project / "odd.png").write_text("no picture")
    found = resolve("@a.png, @a.py", project)
    assert [(file.name, file.picture is not None) for file in found.attachments] == [("a.png", True), ("a.py", False)]
    shown = found.attachments[0].picture
    assert shown is not None and (shown.width, shown.height, shown.data) == (40, 20, png(40, 20))
    assert names("@src/", project) == ["src/b.py", "src/deep/c.py", "src/notes.md"]
    assert names("@src/* @src/*.jpg", project) == ["src/b.py", "src/notes.md", "src/c.jpg"]
    # What a name says does not count.
    assert [file.text for file in resolve("@odd.png", project).attachments] == ["no picture"]
    (project / "odd.png").write_bytes(png()[:50])
    assert "odd.png cannot be attached, because it is damaged" in resolve("@odd.png", project).problems[0]


def test_a_question_keeps_its_picture_when_the_file_is_gone(project: Path) -> None:
    (project / "a.png").write_bytes(png())
    kept = resolve("@a.png", project).attachments
    (project / "a.png").unlink()
    assert resolve("what is @a.png", project, kept).attachments == kept
    assert resolve("what is @a.png", project).attachments == ()


def test_pictures_have_a_limit_of_their_own(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "a.png").write_bytes(png())
    monkeypatch.setattr("app.attachments.references.MOST_PICTURE_BYTES", len(png()) - 1)
    (problem,) = resolve("@a.png @a.py", project).problems
    assert problem.startswith("The pictures are ")
    monkeypatch.setattr("app.attachments.references.MOST_PICTURE_BYTES", len(png()))
    monkeypatch.setattr("app.attachments.references.MOST_BYTES", 12)
    assert resolve("@a.png @a.py", project).problems[0].startswith("The files are 13 B together")


def test_a_pasted_path_of_a_picture_refers_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "my photo.JPG", "note.txt", 'qu"ote.png'):
        (tmp_path / name).write_bytes(b"x")
    path, spaced = str(tmp_path / "a.png"), str(tmp_path / "my photo.JPG")
    escaped = spaced.replace(" ", "\\ ")
    for pasted in (spaced, f"{spaced}\n", f"'{spaced}'", f'"{spaced}" ', escaped, (tmp_path / "my photo.JPG").as_uri()):
        assert pasted_pictures(pasted) == f'@"{spaced}" ', pasted
    assert pasted_pictures(f"{path} {escaped}") == f'@{path} @"{spaced}" '
    assert pasted_pictures("a.png") == "@a.png "
    for pasted in (
        "", "see a.png", "b.png", str(tmp_path / "note.txt"), f"{path}\n{path}", 'qu"ote.png', "it's a.png",
        f"{path} and more", f"{path} {tmp_path / 'note.txt'}", "\0.png", "x" * 30_000 + ".png",
    ):  # fmt: skip
        assert pasted_pictures(pasted) == "", pasted
