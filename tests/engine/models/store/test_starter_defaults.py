"""The starter's own template and sampling, in a new folder and in one that was made before they were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.generation.sampling import sampling_rule, usual_limit
from engine.ipc.messages import Sampling
from engine.models.store.starter_defaults import PUBLISHED_PROMPT, SYSTEM_PROMPT, renew_defaults, write_defaults
from engine.models.text.template_sandbox import ChatTemplate

IDS = {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + PUBLISHED_PROMPT + "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
)
EARLIER = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, **IDS}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    folder = tmp_path / "models" / "starter"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    write(folder, "generation_config.json", EARLIER)
    write(folder, "tokenizer_config.json", {"chat_template": [{"name": "default", "template": TEMPLATE}], "x": 1})
    return folder


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_a_starter_that_was_made_before_gets_the_defaults_of_today(folder: Path) -> None:
    renew_defaults()
    defaults = read(folder, "generation_config.json")
    assert {key: defaults[key] for key in IDS} == IDS
    rule = sampling_rule(Sampling(), defaults)
    assert (rule.greedy, rule.repetition_penalty, usual_limit(defaults)) == (True, 1.1, 512)
    settings = read(folder, "tokenizer_config.json")
    assert settings["x"] == 1
    (template,) = settings["chat_template"]
    rendered = ChatTemplate(template["template"]).render([{"role": "user", "content": "Hi"}], {}, False)
    assert rendered == f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    before = [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]
    renew_defaults()
    assert [path.stat().st_mtime_ns for path in sorted(folder.iterdir())] == before
    assert not list(folder.glob("*.part"))


def test_what_a_person_changed_stays(folder: Path) -> None:
    own = EARLIER | {"temperature": 0.7}
    write(folder, "generation_config.json", own)
    write(folder, "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    renew_defaults()
    assert read(folder, "generation_config.json") == own
    assert read(folder, "tokenizer_config.json") == {"chat_template": "{{ messages }}"}


def test_a_folder_that_cannot_be_renewed_or_is_not_there_is_no_error(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    renew_defaults()
    assert read(folder, "generation_config.json") == EARLIER
    (folder / "generation_config.json").unlink()
    renew_defaults()
    assert not (folder / "generation_config.json").exists()


def test_a_new_folder_has_both(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    write_defaults(folder, {"bos_token_id": 1, "eos_token_id": 2})
    assert read(folder, "generation_config.json") == {
        "do_sample": False, "repetition_penalty": 1.1, "repetition_penalty_counts_prompt": False,
        "max_new_tokens": 512, **IDS,
    }  # fmt: skip
    assert PUBLISHED_PROMPT not in (folder / "tokenizer_config.json").read_text()


@pytest.mark.parametrize(
    ("stated", "expected"), [({}, None), ({"max_new_tokens": 7}, 7), ({"max_new_tokens": True}, None),
                             ({"max_new_tokens": 0}, None), ({"max_new_tokens": "9"}, None)],
)  # fmt: skip
def test_the_limit_that_a_model_states(stated: dict[str, Any], expected: int | None) -> None:
    assert usual_limit(stated) == expected
