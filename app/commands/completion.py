"""Completion in shells: the scripts for them, and the names that only this machine knows."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

VARIABLE = "_PRIVATELLM_COMPLETE"
"""The environment variable with which a shell's script asks the program for completions."""


def completion_script(command: click.Command, shell: str) -> str:
    """The script that makes ``shell`` (bash, zsh or fish) complete ``command``."""
    kind = get_completion_class(shell)
    assert kind is not None
    return kind(command, {}, "privatellm", VARIABLE).source()


def model_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The models on this machine, those of other programs and of the catalogue that begin with ``begun``."""
    from app.chat.model_choices import model_options
    from engine.errors import ModelError

    try:
        found = [
            CompletionItem(option.name, help=option.figures if option.here else "not downloaded")
            for option in model_options()
            if option.name.startswith(begun)
        ]
    except (ModelError, OSError):
        found = []
    # A folder or a GGUF file can be a model too. The shell completes their names.
    return found or [CompletionItem(begun, type="file")]


def persona_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The person's personas whose names begin with ``begun``."""
    from app.settings.personas import open_personas

    return [CompletionItem(persona.name) for persona in open_personas().read() if persona.name.startswith(begun)]
