"""What loading says and imports, and that a question can be given up before anything was computed."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from pathlib import Path

import pytest

from engine.host import Host
from engine.ipc.messages import (
    AnyEvent,
    Cancel,
    Constraint,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    Message,
)
from engine.session.loading import load_session, settings_not_applied
from tests.engine.session.asking import Ask
from tests.support.speaking_model import write_speaking_model


def test_a_repetition_penalty_that_is_not_applied_is_said() -> None:
    assert settings_not_applied({}) == settings_not_applied({"repetition_penalty": 1.05}) == []
    (line,) = settings_not_applied({"repetition_penalty": 0})
    assert "repetition_penalty of 0 is not applied" in line


TEMPLATE = "{% for m in messages %}{% if m.content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
TEMPLATE += "{% endfor %}{% endfor %}{% endif %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template that loops when it is told to."""
    return write_speaking_model(tmp_path_factory.mktemp("speaking"), TEMPLATE)


@pytest.mark.soak
def test_a_native_answer_imports_neither_torch_nor_transformers(speaking: Path) -> None:
    program = """
import sys
from engine.session.loading import load_session
from engine.ipc.messages import Generate, Load, Message

class Nobody:
    owner = None
    def cancelled(self): return False
    def watching(self): return False

load = Load(id=1, model=sys.argv[1], partitioning="cpu", runtime="native")
session = load_session(load, lambda *report: None)
question = Generate(id=2, messages=[Message("user", "a<|im_end|>b")], max_tokens=3)
assert len(session.generate(question, lambda event: None, Nobody()).token_ids) > 0
assert session.facts.has_chat_template
slow = ("torch", "transformers", "huggingface_hub", "jinja2", "sentencepiece") + \\
       ("engine.models.folders.prepare", "concurrent.futures")
print([name for name in slow if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", program, str(speaking)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


def test_the_reader_that_a_part_of_an_answer_names_is_not_shown_without_tools_either(tmp_path: Path) -> None:
    template = "{# tools >>>${recipient} #}{{ messages[0].content }}<|im_end|>>>>"
    load = Load(id=1, model=str(write_speaking_model(tmp_path / "m", template)), partitioning="cpu", runtime="native")
    ask = Ask(load_session(load, lambda stage, done, total, unit: None))
    form = Constraint(kind="regex", text="all\nNoon\\.")
    assert ask(messages=[Message("user", "When?")], constraint=form).text == "Noon."


def test_a_question_is_given_up_while_its_template_runs(speaking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: queue.SimpleQueue[AnyEvent] = queue.SimpleQueue()
    host = Host(events.put)
    host.start()

    def wait_for(*kinds: type[AnyEvent]) -> AnyEvent:
        while not isinstance(event := events.get(timeout=120), kinds):
            pass
        return event

    host.take(Load(id=1, model=str(speaking), partitioning="cpu", runtime="native"))
    assert isinstance(wait_for(Loaded, Failed), Loaded)
    host.take(Generate(id=2, messages=[Message("user", "loop")]))
    host.take(Cancel(id=3, target=2))
    found = wait_for(Finished, Failed)
    assert isinstance(found, Finished) and (found.finish_reason, found.text) == ("cancelled", "")
    with monkeypatch.context() as patch:
        patch.setattr("engine.system.confined.DEADLINE_S", 1.0)
        host.take(Generate(id=4, messages=[Message("user", "loop")]))
        refused = wait_for(Finished, Failed)
    assert isinstance(refused, Failed) and "does not end within 1 seconds" in refused.error
    host.take(Generate(id=5, messages=[Message("user", "hi")], max_tokens=2))
    answered = wait_for(Finished, Failed)
    assert isinstance(answered, Finished) and answered.completion_tokens > 0
    host._release()
