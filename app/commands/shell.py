"""The man page, made from the help of the commands."""

from __future__ import annotations

from collections.abc import Iterator

import click
from click.shell_completion import CompletionItem, get_completion_class

_FILES = (
    ("settings.toml", "The settings, in the folder that `privatellm locate config` prints."),
    ("keymap.toml", "Keys of the screens, one line for each action; `privatellm locate keymap` prints its path."),
    ("personas.toml", "The personas, beside the settings."),
    ("conversations.sqlite", "All chats, in the file that `privatellm locate db` prints."),
)
_ENVIRONMENT = (
    ("PRIVATELLM_HOME", "Folder that holds configuration, data, models and logs together."),
    ("NO_COLOR", "No colours, if it is set."),
    ("ESCDELAY", "Milliseconds after which ESC is the escape key, and not the beginning of another key."),
)
_STATUS = (("0", "Success."), ("1", "Failure; the reason is on stderr."), ("2", "Bad arguments."), ("130", "Ctrl-c."))


def manual(root: click.Group, version: str) -> str:
    """The man page of ``root`` and all its commands, as roff."""
    context = click.Context(root, info_name="privatellm")
    summary, _, rest = (root.help or "").partition(". ")
    lines = [
        f'.TH PRIVATELLM 1 "" "privatellm {_text(version)}"',
        ".SH NAME",
        f"privatellm \\- {_text(summary[:1].lower() + ' '.join(summary.split())[1:])}",
        ".SH SYNOPSIS",
        ".B privatellm",
        _text(" ".join(root.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        _text(f"{summary}. {rest}"),
        ".SH OPTIONS",
        *_parameters(root, context),
        ".SH COMMANDS",
    ]
    for command, inner in _commands(root, context):
        usage = " ".join(command.collect_usage_pieces(inner))
        lines += [f'.SS "{_text(inner.command_path)} {_text(usage)}"', _text(command.help or "")]
        lines += _parameters(command, inner)
    for title, rows in (("FILES", _FILES), ("ENVIRONMENT", _ENVIRONMENT), ("EXIT STATUS", _STATUS)):
        lines.append(f".SH {title}")
        for name, about in rows:
            lines += _row(name, about)
    return "\n".join(lines) + "\n"


def _commands(group: click.Group, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """All commands below ``group`` that are not hidden, each before its own."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        inner = click.Context(command, parent=context, info_name=name)
        yield command, inner
        if isinstance(command, click.Group):
            yield from _commands(command, inner)


def _parameters(command: click.Command, context: click.Context) -> list[str]:
    lines: list[str] = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            lines += _row(*record)
    return lines


def _row(name: str, about: str) -> list[str]:
    return [".TP", f"\\fB{_text(name)}\\fR", _text(about)]


def _text(text: str) -> str:
    """``text`` as one line of roff, in which nothing is a request."""
    line = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return f"\\&{line}" if line.startswith((".", "'")) else line


# --- completion ------------------------------------------------------------------------------------------------------


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
        items = [
            CompletionItem(option.name, help=option.figures if option.here else "not downloaded")
            for option in model_options()
            if option.name.startswith(begun)
        ]
    except (ModelError, OSError):
        items = []
    # A folder or a GGUF file can be a model too. The shell completes their names.
    return items or [CompletionItem(begun, type="file")]


def persona_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The person's personas whose names begin with ``begun``."""
    from app.settings.personas import open_personas

    return [CompletionItem(persona.name) for persona in open_personas().read() if persona.name.startswith(begun)]
