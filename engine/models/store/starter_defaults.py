"""How the starter is asked and answers by itself: what was measured best on 60 everyday questions
(``benchmarks/starter_answers.py``), in the files where every model has it.

The published template adds a system prompt with the model's name to conversations that have none, and the published
sampling draws. Both make this small model's answers worse. Folders that were made before this was measured are renewed.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.models.formats.json_files import SMALL_FILE, read_object
from engine.models.store.catalogue import STARTER
from engine.system.durable_files import new_file
from engine.system.locations import locate

SYSTEM_PROMPT = "You are a knowledgeable assistant. Give short, correct answers."
"""What the template says to a conversation without a system prompt."""
PUBLISHED_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What the published template says there."""
SAMPLING: dict[str, Any] = {
    "do_sample": False,
    "repetition_penalty": 1.1,
    "repetition_penalty_counts_prompt": False,
    "max_new_tokens": 512,
}
"""Greedy, as drawing loses right answers. The penalty keeps answers from going in circles; the limit, in tokens, ends
one that does all the same."""
_EARLIER: dict[str, Any] = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""The sampling of folders that were made before."""
_GENERATION, _TOKENIZER = "generation_config.json", "tokenizer_config.json"


def write_defaults(folder: Path, config: dict[str, Any]) -> None:
    """Write the starter's ``generation_config.json`` into ``folder``, and its system prompt into the template there.

    ``config`` is the model's. Raises ModelError, OSError.
    """
    ends = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": [config["eos_token_id"]],
        "pad_token_id": config["eos_token_id"],
    }
    _write(folder / _GENERATION, SAMPLING | ends)
    _renew_template(folder / _TOKENIZER)


def renew_defaults() -> None:
    """Give a starter that was made before the defaults of today. What a person changed in it stays as it is.

    Reads two small files if there is a starter. One that cannot be written keeps its old defaults.
    """
    folder = locate("models") / STARTER
    with contextlib.suppress(ModelError, OSError):
        if not (folder / _GENERATION).is_file():
            return
        _renew_template(folder / _TOKENIZER)
        found = read_object(folder / _GENERATION, SMALL_FILE)
        if {key: value for key, value in found.items() if not key.endswith("_token_id")} == _EARLIER:
            kept = {key: value for key, value in found.items() if key not in _EARLIER}
            _write(folder / _GENERATION, SAMPLING | kept)


def _renew_template(path: Path) -> None:
    settings = read_object(path, SMALL_FILE)
    template = settings.get("chat_template")
    renewed = _renewed(template)
    if renewed != template:
        _write(path, settings | {"chat_template": renewed})


def _write(path: Path, value: object) -> None:
    with new_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _renewed(template: Any) -> Any:
    """``template`` (a text, or a list of named ones) with the system prompt of today."""
    if isinstance(template, str):
        return template.replace(PUBLISHED_PROMPT, SYSTEM_PROMPT)
    if isinstance(template, list):
        return [{key: _renewed(value) for key, value in named.items()} if isinstance(named, dict) else named
                for named in template]  # fmt: skip
    return template
