"""The command line: which commands and flags there are, and what they may be."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.commands.output import ReaderGoneError, WorkFailed, answer, complain, forget_stdout
from app.settings import SettingError, setting_named
from engine.messages import BenchKind, DtypeName, ExpertPolicy, Partitioning, RuntimeName

if TYPE_CHECKING:
    from app.commands.loading import LoadFlags

_RAW = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="privatellm",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_RAW,
    help="Talk to a Mixture-of-Experts language model that nobody else hears, on the machines you own. "
    "Without a command: the chat.",
)
models_app = typer.Typer(
    rich_markup_mode=None,
    context_settings=_RAW,
    invoke_without_command=True,
    help="The models on this machine. M is a catalogue name, a Hugging Face repo id, a folder, or a GGUF file.",
)
app.add_typer(models_app, name="models")

LocationKind = Literal["config", "data", "models", "logs"]
_ModelArgument = Annotated[
    str, typer.Argument(metavar="M", help="Catalogue name, Hugging Face repo id, local folder, or GGUF file.")
]


_FLAGS = {"gpu_expert_memory": "gpu-memory", "cpu_threads": "threads", "context_limit": "context"}
"""Flags with another name than their setting."""


def run(arguments: list[str]) -> int:
    """Run one command; the exit status (0, 1, 2 or 130)."""
    try:
        app(args=arguments, prog_name="privatellm")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except WorkFailed as error:
        complain(str(error))
        return error.status
    except ReaderGoneError:
        return 0
    except OSError as error:
        complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        forget_stdout()
        return 1
    return 0


def _show_version(wanted: bool) -> None:
    if wanted:
        answer(f"privatellm {importlib.metadata.version('privatellm')}\n")
        raise typer.Exit


@app.callback()
def privatellm(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options that stand before any command."""


@app.command()
def ask(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The question; absent: from stdin.")] = None,
    *,
    model: Annotated[str | None, typer.Option(help="Model to ask.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt; without one the model's template decides.")] = None,
    beams: Annotated[int | None, typer.Option(metavar="W", help="Beam search of this width, 1 to 16.")] = None,
    length_penalty: Annotated[float | None, typer.Option(metavar="P", help="Scores / length**P.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="0: always the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P")] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K")] = None,
    min_p: Annotated[float | None, typer.Option(metavar="P")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The same seed gives the same answer.")] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Longest answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="S", help="End before this text; may be repeated.")] = None,
    runtime: Annotated[RuntimeName | None, typer.Option(help="What runs the model.")] = None,
    dtype: Annotated[DtypeName | None, typer.Option(help="Numbers to compute with.")] = None,
    policy: Annotated[ExpertPolicy | None, typer.Option(help="How GPU and CPU share the experts.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(metavar="GIB", help="GPU memory for experts, in GiB.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object with the answer and its measurements.")] = False,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="Token ids instead of text: no template, no tokenizer.")
    ] = None,
) -> None:
    """Answer one question on stdout. Flags come before the person's settings, those before the model's own."""
    from app.commands.asking import Flags, question_from

    numbers = {
        "beams": beams,
        "length_penalty": length_penalty,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "max_tokens": max_tokens,
        "gpu_expert_memory": gpu_memory,
        "cpu_threads": threads,
    }
    for key, number in numbers.items():
        _check_flag(key, number)
    _check_flag("model", model)
    flags = Flags(
        prompt=prompt,
        prompt_ids=prompt_ids,
        model=model,
        system=system,
        numbers={key: number for key, number in numbers.items() if number is not None},
        stop=stop or [],
        runtime=runtime,
        dtype=dtype,
        policy=policy,
        as_json=json,
    )
    from app.commands.ask import ask as run_ask

    raise typer.Exit(run_ask(question_from(flags)))


@models_app.callback()
def models(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        models_list()


@models_app.command("list")
def models_list(json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """What is on this machine, and what is known by a short name."""
    from app.commands.models import show_models

    raise typer.Exit(show_models(in_json=json))


@models_app.command("pull")
def models_pull(model: _ModelArgument) -> None:
    """Download a model (the starter is made here). An interrupted download goes on where it was."""
    from app.commands.models import pull

    raise typer.Exit(pull(model))


@models_app.command("prepare")
def models_prepare(model: _ModelArgument) -> None:
    """Write a model's bank: its experts, laid out for this program."""
    from app.commands.models import prepare

    raise typer.Exit(prepare(model))


@models_app.command("remove")
def models_remove(
    model: _ModelArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model from the models folder."""
    from app.commands.models import remove

    raise typer.Exit(remove(model, ask_first=not yes))


@app.command()
def plan(
    model: _ModelArgument,
    *,
    context: Annotated[int | None, typer.Option(metavar="N", help="Tokens the conversation may have.")] = None,
    runtime: Annotated[RuntimeName | None, typer.Option(help="What runs the model.")] = None,
    dtype: Annotated[DtypeName | None, typer.Option(help="Numbers to compute with.")] = None,
    partitioning: Annotated[Partitioning | None, typer.Option(help="Which machines and devices take part.")] = None,
    policy: Annotated[ExpertPolicy | None, typer.Option(help="How GPU and CPU share the experts.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(metavar="GIB", help="GPU memory for experts, in GiB.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads.")] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Where a model would lie in memory, how fast it should be, and why. Nothing is loaded."""
    from app.commands.plan import plan as run_plan

    numbers = {"context_limit": context, "gpu_expert_memory": gpu_memory, "cpu_threads": threads}
    raise typer.Exit(run_plan(_load_flags(model, runtime, dtype, partitioning, policy, numbers), in_json=json))


@app.command()
def bench(
    kind: Annotated[BenchKind, typer.Argument(metavar="WHAT", help="decode, prefill, beams or experts.")],
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Absent: the one of the settings.")] = None,
    *,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Figures are medians over so many.")] = 5,
    runtime: Annotated[RuntimeName | None, typer.Option(help="What runs the model.")] = None,
    dtype: Annotated[DtypeName | None, typer.Option(help="Numbers to compute with.")] = None,
    partitioning: Annotated[Partitioning | None, typer.Option(help="Which machines and devices take part.")] = None,
    policy: Annotated[ExpertPolicy | None, typer.Option(help="How GPU and CPU share the experts.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(metavar="GIB", help="GPU memory for experts, in GiB.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads.")] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, with every single figure.")] = False,
) -> None:
    """Measure a model on this machine; `experts` keeps what it finds, and plans and policies rest on it."""
    from app.commands.bench import bench as run_bench

    numbers = {"gpu_expert_memory": gpu_memory, "cpu_threads": threads}
    flags = _load_flags(model, runtime, dtype, partitioning, policy, numbers)
    raise typer.Exit(run_bench(kind, flags, rounds=rounds, in_json=json))


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """What was found on this machine, what will run and why, and the way out of what does not."""
    from app.commands.doctor import doctor as examine

    raise typer.Exit(examine(in_json=json))


@app.command()
def locate(what: Annotated[LocationKind, typer.Argument(metavar="WHAT", help="config, data, models or logs.")]) -> None:
    """Where things are on this machine."""
    from engine.models.locations import locate as folder_for

    answer(f"{folder_for(what)}\n")


def _load_flags(
    model: str | None,
    runtime: RuntimeName | None,
    dtype: DtypeName | None,
    partitioning: Partitioning | None,
    policy: ExpertPolicy | None,
    numbers: dict[str, float | None],
) -> LoadFlags:
    from app.commands.loading import LoadFlags

    for key, number in numbers.items():
        _check_flag(key, number)
    _check_flag("model", model)
    given = {key: number for key, number in numbers.items() if number is not None}
    return LoadFlags(model, runtime, dtype, partitioning, policy, given)


def _check_flag(key: str, value: object) -> None:
    """The same limits as the setting of that name, which a flag cannot leave empty."""
    if value is None:
        return
    setting = replace(setting_named(key), optional=False)
    try:
        setting.check(value)
    except SettingError as error:
        flag = f"--{_FLAGS.get(key, key.replace('_', '-'))}"
        raise typer.BadParameter(str(error).replace(key, "it", 1), param_hint=flag) from None
