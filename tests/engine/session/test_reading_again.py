"""Why a prompt is read again, for conversations that are made of pieces, and in a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ipc.messages import Generate, Load, Message, ReadAgain
from engine.session.kept_rows import shared_length
from engine.session.loading import load_session
from engine.session.reading_again import FEW_TOKENS, Closest, cause_of, difference, message_at, message_ends
from engine.session.session import Session
from engine.session.token_history import TokenHistory
from tests.engine.session.asking import LetterTokenizer
from tests.support.controls import Nobody
from tests.support.progress import quiet
from tests.support.tiny_models import write_tiny_model

LETTERS = st.text("abc", min_size=1, max_size=5)


@given(messages=st.lists(LETTERS, min_size=2, max_size=6), data=st.data())
def test_the_changed_message_is_found_and_its_text(messages: list[str], data: st.DataObject) -> None:
    """Tokens are letters here, and a message ends with a mark."""
    place = data.draw(st.integers(0, len(messages) - 1))
    other = data.draw(LETTERS.filter(lambda text: text != messages[place]))
    more = data.draw(LETTERS)
    kept = "".join(f"<{text}>" for text in [*messages[:place], other, *messages[place + 1 :]]) + f"<{more}"
    asked = "".join(f"<{text}>" for text in messages)
    shared = shared_length(list(map(ord, kept)), list(map(ord, asked)))
    assert message_at(shared, message_ends(asked, messages)) == place
    told = difference(kept, asked)
    assert told is not None and told[0] != told[1]
    assert told[0] in kept and told[1] in asked
    last = place == len(messages) - 1
    closest = Closest.of(list(map(ord, kept)), shared, None)
    assert closest.cuts and closest.length == len(kept)
    cause = cause_of(closest, len(asked), shared, own=True, last_message=last, first=False, answers=True)
    assert cause == (None if last else "changed")


@given(
    shared=st.integers(0, 99), more=st.integers(0, 20), asked=st.integers(1, 99), lost=st.integers(0, 99),
    own=st.booleans(), gone=st.booleans(), cuts=st.booleans(), last=st.booleans(),
    first=st.booleans(), answers=st.booleans(),
)  # fmt: skip
def test_each_cause_has_its_condition(
    shared: int,
    more: int,
    asked: int,
    lost: int,
    own: bool,
    gone: bool,
    cuts: bool,
    last: bool,
    first: bool,
    answers: bool,
) -> None:
    shared = min(shared, asked)
    reused = max(0, min(shared, asked - 1) - lost)
    closest = Closest(shared, shared + more, given_up=gone, cuts=cuts)
    cause = cause_of(closest, asked, reused, own=own, last_message=last, first=first, answers=answers)
    everything = shared - reused <= FEW_TOKENS
    if cause == "restarted":
        assert first and answers and shared <= (0 if own else FEW_TOKENS)
    if cause == "memory":
        assert gone and not everything
    if cause == "state":
        assert not cuts and not everything and not gone
    if cause == "changed":
        assert own and more and shared < asked and not last
    if cause == "written":
        assert not everything and cuts and not gone and (not more or shared == asked)
    if cause is None and shared > (0 if own else FEW_TOKENS):
        assert everything or ((last or not own) and more)
    assert cause_of(None, asked, 0, own=own, last_message=False, first=first, answers=answers) == (
        "restarted" if first and answers else None
    )


@given(old=st.text(max_size=60), new=st.text(max_size=60))
def test_a_difference_is_none_only_where_one_text_begins_with_the_other(old: str, new: str) -> None:
    found = difference(old, new)
    assert (found is None) == (old.startswith(new) or new.startswith(old))
    if found is not None:
        assert found[0] != found[1] and max(map(len, found)) <= 36


def test_a_message_that_the_template_changes_ends_where_the_one_before_it_does() -> None:
    assert message_ends("[hello][bye]", ["hello", "<think>x</think>bye", " bye "]) == [6, 6, 11]


# --- in a session ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["mixtral", "qwen3_next"])
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / request.param, request.param)
    found = load_session(Load(id=1, model=str(folder), runtime="torch"), quiet)
    yield found
    found.close()


class Client(Nobody):
    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name

    @property
    def owner(self) -> object:
        return self._name

    def __call__(self, *messages: Message, **options: Any) -> ReadAgain | None:
        request = Generate(id=1, messages=list(messages), max_tokens=2, quotes=True, **options)
        return self._session.generate(request, lambda event: None, self).read_again


def with_letters(session: Session, **options: Any) -> Session:
    fresh = Session(session.model, LetterTokenizer(), ends=(), defaults={}, prefill_chunk=8, **options)
    fresh._history = TokenHistory(LetterTokenizer())
    return fresh


def test_a_changed_date_is_named_to_its_own_client_only(session: Session) -> None:
    asked = with_letters(session, prefix_bytes=10**9)
    mine, theirs = Client(asked, "mine"), Client(asked, "theirs")
    question = Message("user", "Why?" * 10)
    assert mine(Message("system", "Today-is-Monday-and-all-is-well"), question) is None, "nothing was kept"
    found = mine(Message("system", "Today-is-Sunday-and-all-is-well"), question)
    assert found is not None and (found.cause, found.message, found.role) in [
        ("changed", 0, "system"), ("state", 0, "system"),
    ]  # fmt: skip
    assert "Monday" in found.before and "Sunday" in found.now
    assert found.shared_tokens == 1 + len("Today-is-")
    found = mine(Message("system", "Today-is-Sunday-and-all-was-well"), question)
    assert found is not None and "was" in found.now
    assert theirs(Message("system", "Today-is-Sunday-and-all-is-lost"), question) is None


def test_another_conversation_of_the_same_client_is_no_earlier_version(session: Session) -> None:
    ask = Client(with_letters(session, prefix_bytes=10**9), "me")
    chats = [[Message("system", "S" * 40), Message("user", f"{who}?" * 5), Message("user", "Q")] for who in ("A", "B")]
    for name, messages in zip(("chat1", "chat2"), chats, strict=True):
        assert ask(*messages, conversation=name) is None
    again = ask(chats[1][0], Message("user", "B!" * 5), chats[1][2], conversation="chat2")
    assert again is not None and again.before and again.now


def test_who_does_not_ask_for_quotes_gets_none(session: Session) -> None:
    asked = with_letters(session)
    for day in ("Monday", "Sunday"):
        request = Generate(
            id=1, messages=[Message("system", f"It-is-{day}"), Message("user", "Why?")], max_tokens=1
        )  # fmt: skip
        found = asked.generate(request, lambda event: None, Nobody()).read_again
    assert found is not None and found.message == 0 and not found.before and not found.now


def test_a_conversation_that_goes_on_is_not_read_again(session: Session) -> None:
    ask = Client(with_letters(session, prefix_bytes=10**9), "me")
    before = [Message("system", "S" * 20), Message("user", "Q" * 40)]
    request = Generate(id=1, messages=before, max_tokens=4)
    answer = ask._session.generate(request, lambda event: None, ask)
    later = ask(*before, Message("assistant", answer.text), Message("user", "More?"))
    assert later is None or later.cause == "state"


def test_a_conversation_is_read_again_after_a_restart_or_if_it_was_given_up(session: Session) -> None:
    asked = with_letters(session, prefix_bytes=0)
    ask = Client(asked, "me")
    first = [Message("user", "A" * 50), Message("assistant", "Yes"), Message("user", "And?")]
    found = ask(*first)
    assert found == ReadAgain(cause="restarted")
    assert ask(Message("user", "B" * 50)) is None
    again = ask(*first)
    assert again is not None and again.cause == "memory" and again.shared_tokens > 50
