"""A code asked for by another process of the same account: one answer, for whoever asked, and nothing left behind."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import msgspec
import pytest

from discovery import code_requests
from discovery.code_requests import CodeRequests, ShownCode, ask_for_code
from discovery.errors import PeersError
from tests.support.eventually import PATIENCE_S, eventually


def shown(nonce: str) -> ShownCode:
    return ShownCode(nonce=nonce, code="1234 5678", seconds=120, tries=3, name="studio", listening=["10.0.0.2:47820"])


def asking(folder: Path) -> tuple[threading.Thread, list[ShownCode | None]]:
    answers: list[ShownCode | None] = []
    thread = threading.Thread(target=lambda: answers.append(ask_for_code(folder, PATIENCE_S)))
    thread.start()
    return thread, answers


def taken(requests: CodeRequests) -> str:
    asked: list[str | None] = []
    eventually(lambda: asked.append(requests.take()) or asked[-1])
    assert asked[-1] is not None
    return asked[-1]


def test_whoever_asks_is_answered_and_no_file_stays(tmp_path: Path) -> None:
    requests = CodeRequests(tmp_path)
    assert requests.take() is None
    thread, answers = asking(tmp_path)
    nonce = taken(requests)
    assert requests.take() is None and CodeRequests(tmp_path).take() is None
    requests.answer(shown("of another question"))
    requests.answer(shown(nonce))
    thread.join(PATIENCE_S)
    assert answers == [shown(nonce)]
    requests.tidy()
    assert list(tmp_path.iterdir()) == []


def test_an_answer_is_closed_to_others_and_does_not_outlive_the_code(tmp_path: Path) -> None:
    requests = CodeRequests(tmp_path)
    requests.answer(shown("n"))
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    requests.tidy()
    assert list(tmp_path.iterdir()) == []


def test_where_nobody_answers_the_question_is_taken_back(tmp_path: Path) -> None:
    assert ask_for_code(tmp_path / "network", 0.2) is None
    assert list((tmp_path / "network").iterdir()) == []


def test_a_question_that_was_left_behind_shows_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = CodeRequests(tmp_path)
    left = msgspec.json.encode({"nonce": "n", "at": code_requests.time.time() - code_requests.FRESH_S - 1})
    for content in (left, b"{", b"\xff" * 100):
        (tmp_path / "code-asked.json").write_bytes(content)
        assert requests.take() is None
        assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PeersError, match=r"No code can be asked for in .*: make the folder writable\."):
        ask_for_code(tmp_path / "file" / "network", 0.1)
