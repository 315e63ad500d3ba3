"""What a person, a program or another machine can ask of privatellm, one line each.

The lines are made from the tables, types and commands of the running program, and name no module.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterator
from importlib.resources import files
from types import FunctionType
from typing import Any, cast, get_args

import click
import msgspec
from textual.binding import Binding
from textual.dom import DOMNode

from app.chat.commands.table import COMMANDS
from app.commands.root import privatellm
from app.conversations.importing.reading import FORMATS as IMPORT_FORMATS
from app.serve.application import Application
from app.settings.fields import Setting
from app.settings.schema import SCHEMA
from app.tui.actions import all_actions
from app.tui.keymap import defaults
from engine.cluster.transport.registry import TRANSPORTS
from engine.errors import ErrorKind, ModelError
from engine.ipc.messages import AnyEvent, AnyRequest, ExpertPolicy
from engine.models.architectures.families import SUPPORTED
from engine.models.architectures.gguf_architectures import ARCHITECTURES
from engine.models.architectures.quantisation import refuse_quantized
from engine.models.formats.number_formats import BLOCKS, GROUPED, WIDTHS
from engine.models.store.catalogue import catalogue
from engine.planning.policy import policy_named
from engine.runtimes.mlx.families import unsupported_config
from engine.runtimes.native.shape import unsupported_shape
from tests.inventory.inventory_records import lines_of, records
from tests.inventory.inventory_texts import environment_variables, file_names, keys_of_dictionaries, texts

_QUANTISED: dict[str, dict[str, Any]] = {
    **{f"mlx {bits} bits in groups of {size}": {"quantization": {"bits": bits, "group_size": size}}
       for bits in (2, 3, 4, 5, 6, 8) for size in (16, 32, 64, 128)},
    **{f"mlx {mode}": {"quantization": {"bits": 4, "group_size": size, "mode": mode}}
       for mode, size in (("mxfp4", 32), ("nvfp4", 16))},
    "FP8 in blocks": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    **{f"{method} in {bits} bits and groups of {size}":
           {"quantization_config": {"quant_method": method, "bits": bits, "group_size": size}}
       for method in ("awq", "gptq") for bits in (3, 4, 8) for size in (-1, 16, 128)},
    **{f"the method {name}": {"quantization_config": {"quant_method": name}}
       for name in ("awq", "gptq", "bitsandbytes", "compressed-tensors", "fp8", "modelopt", "mxfp4", "torchao")},
}  # fmt: skip
"""Forms of safetensors, and what config.json says of them."""


def inventory() -> list[str]:
    """All lines, sorted. A text that stands in another line is not repeated by itself."""
    lines = {line for part in _PARTS for line in part()}
    said = {word for line in lines for word in line.split('"')[1::2]}
    lines |= {f'text "{text}"' for text in texts() if text not in said}
    return sorted(line.replace("\n", " ") for line in lines)


# --- what a person types --------------------------------------------------------------------------------------------


def command_line() -> Iterator[str]:
    yield from _command(privatellm, "privatellm")


def _command(command: click.Command, name: str) -> Iterator[str]:
    yield f'command {name}: "{_one_line(command.help)}"'
    for parameter in command.params:
        yield f"command {name} {_parameter(parameter)}"
    if isinstance(command, click.Group):
        for word, inner in command.commands.items():
            yield from _command(inner, f"{name} {word}")


def _parameter(parameter: click.Parameter) -> str:
    kind = parameter.type
    said = [f"[{'|'.join(map(str, kind.choices))}]" if isinstance(kind, click.Choice) else kind.name]
    said += [f"from {kind.min} to {kind.max}"] if isinstance(kind, click.IntRange) else []
    if not isinstance(parameter, click.Option) or not parameter.is_flag:
        said.append(f"shown as {parameter.make_metavar(click.Context(privatellm))}")
    default = parameter.to_info_dict().get("default")
    said += [f"default {default!r}"] if default not in (None, ()) else []
    said += ["may be repeated"] if parameter.multiple else []
    said += ["required"] if parameter.required else []
    said += ["completed"] if parameter._custom_shell_complete is not None else []
    names = [*parameter.opts, *parameter.secondary_opts] if isinstance(parameter, click.Option) else [""]
    return f'{"/".join(names)} {", ".join(said)}: "{_one_line(getattr(parameter, "help", ""))}"'.strip()


def slash_commands() -> Iterator[str]:
    for command in COMMANDS:
        keys = ",".join(defaults(command.name, "linux")) if command.shortcut is not None else "none"
        others = ",".join(command.aliases) or "none"
        in_lines = f', in plain lines "{command.help_in_lines}"' if command.help_in_lines else ""
        yield (f'slash {command.usage}: "{command.title}", "{command.help}", keys {keys}, aliases {others}{in_lines}')


def settings() -> Iterator[str]:
    for setting in SCHEMA:
        most = f", at most {setting.most}" if setting.most else ""
        yield (
            f"setting {setting.group}.{setting.key}: {setting.kind}, {setting.allowed}{most}, default "
            f'{setting.default!r}, takes effect {setting.takes_effect}: "{setting.label}", "{setting.help}"'
        )
        yield from (_choice(setting, value.value, value.label) for value in setting.choices)


def _choice(setting: Setting, value: str, label: str) -> str:
    return f'setting {setting.group}.{setting.key} choice {value}: "{label}"'


# --- the screens ----------------------------------------------------------------------------------------------------


def keys() -> Iterator[str]:
    """Every binding, by its id in the keymap file, and every action of a screen or widget."""
    all_actions()  # imports all screens
    for kind in _below(DOMNode):
        of_library = [binding for base in kind.__mro__ if not _ours(base) for binding in vars(base).get("BINDINGS", ())]
        for binding in vars(kind).get("BINDINGS", ()):
            if binding not in of_library:
                yield _key(binding)
        for name, value in vars(kind).items():
            if name.startswith("action_") and callable(value):
                yield f"action {kind.__name__}.{name.removeprefix('action_')}"


def _key(binding: Any) -> str:
    pressed = ",".join(sorted(each.key for each in Binding.make_bindings([binding])))
    if not isinstance(binding, Binding):
        return f"key without a name {pressed}: {binding[1]}"
    how = "shown" if binding.show else "hidden"
    how += ", before the focused field" if binding.priority else ""
    return (
        f'key {binding.id or "without a name"} {pressed}: {binding.action}, {how}: "{binding.description}", '
        f'"{binding.tooltip}"'
    )


def _below(base: type[DOMNode]) -> Iterator[type[DOMNode]]:
    for each in base.__subclasses__():
        if _ours(each):
            yield each
        yield from _below(each)


def _ours(kind: type) -> bool:
    return kind.__module__.startswith("app.")


# --- between processes, programs and machines -----------------------------------------------------------------------


def messages() -> Iterator[str]:
    for name, union in (("request", AnyRequest), ("event", AnyEvent)):
        yield from (f"{name} {kind.__struct_config__.tag}: {kind.__name__}" for kind in get_args(union))
    for record in set(records()):
        yield from lines_of(record)
    yield from (f"error kind {kind}" for kind in get_args(ErrorKind))


def http() -> Iterator[str]:
    """Paths with the record that a request is read as, and the names of fields in replies."""
    application = Application(cast(Any, None), cast(Any, None), lambda text: None)
    for path, (method, act) in application._paths.items():
        yield f"http {method} {path}: {', '.join(_records_of(act)) or 'no body'}"
    yield from (f"http field {key}" for key in keys_of_dictionaries("app/serve") if key.isidentifier())


def _records_of(act: Callable[..., object]) -> list[str]:
    """Names of the records that ``act`` takes from its module."""
    function = cast(FunctionType, getattr(act, "__func__", act))
    used = [(name, function.__globals__.get(name)) for name in function.__code__.co_names]
    return [name for name, value in used if isinstance(value, type) and issubclass(value, msgspec.Struct)]


def outside() -> Iterator[str]:
    """What other programs see: fields of JSON that commands print, files, variables."""
    yield from (f"json field {key}" for key in keys_of_dictionaries("app/commands") if key.isidentifier())
    yield from (f"file {name}" for name in file_names())
    yield from (f"environment variable {name}" for name in environment_variables())


# --- models ---------------------------------------------------------------------------------------------------------


def model_tables() -> Iterator[str]:
    for entry in catalogue():
        said = ", ".join(f"{key}={value!r}" for key, value in msgspec.structs.asdict(entry).items())
        yield f"catalogue {entry.name}: {said}"
    yield from (f"number format {name}: {width} bytes" for name, width in WIDTHS.items())
    for name, (numbers, nbytes) in {**BLOCKS, **GROUPED}.items():
        yield f"number format {name}: {numbers} numbers in {nbytes} bytes{', scales apart' * (name in GROUPED)}"
    for table in ("reasoning", "tool_calls"):
        read = tomllib.loads(files("assets").joinpath(f"{table}.toml").read_text("utf-8"))
        for name, entries in read.items():
            for entry in entries if isinstance(entries, list) else []:
                yield f"{table} {name} {entry['name']}: {entry!r}"
    yield from (f"import of chats from {form.program}" for form in IMPORT_FORMATS)
    yield from (f"gguf architecture {name}" for name in ARCHITECTURES)


def choices() -> Iterator[str]:
    for name, transport in TRANSPORTS.items():
        traits = [word for word in ("plain_text", "in_step_only", "spins") if getattr(transport, word)]
        needs = ", ".join([*transport.needs, *filter(None, [f"runtime {transport.runtime}" * bool(transport.runtime)])])
        yield f"exchange {name}: needs {needs or 'nothing'}; {', '.join(traits) or 'encrypted'}"
    for name in get_args(ExpertPolicy):
        rule = policy_named(name).cache
        said = ", ".join(f"{field.name}={getattr(rule, field.name)!r}" for field in dataclasses.fields(rule))
        yield f"policy {name}: {said}"


def families() -> Iterator[str]:
    """Which runtime runs a family by its configuration alone, and which quantised forms of it are read."""
    for family in SUPPORTED:
        yield f"family {family} on native: {_answer(unsupported_shape, {'model_type': family})}"
        yield f"family {family} on torch: runs"
        yield f"family {family} on mlx: {_answer(unsupported_config, {'model_type': family})}"
    for form, settings_of in _QUANTISED.items():
        answers = {family: _answer(refuse_quantized, {"model_type": family, **settings_of}) for family in SUPPORTED}
        if len(set(answers.values())) == 1:
            yield f"every family as {form}: {next(iter(answers.values()))}"
        else:
            yield from (f"family {family} as {form}: {answer}" for family, answer in answers.items())


def _answer(ask: Callable[[Any], str | None], config: dict[str, Any]) -> str:
    try:
        reason = ask(config)
    except ModelError as error:
        reason = str(error)
    return "runs" if reason is None else f"refused: {reason}"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


_PARTS: tuple[Callable[[], Iterator[str]], ...] = (
    command_line, slash_commands, settings, keys, messages, http, outside, model_tables, choices, families,
)  # fmt: skip
