"""The command line: which commands and flags there are, and what they may be."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.commands.output import ReaderGoneError, WorkFailed, answer, fail, forget_stdout
from app.settings.schema import SettingError, setting_named
from engine.ipc.messages import BenchKind, DtypeName, ExpertPolicy, Partitioning, RuntimeName

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
peers_app = typer.Typer(
    rich_markup_mode=None,
    context_settings=_RAW,
    invoke_without_command=True,
    help="The machines this one trusts, and may form a ring with.",
)
app.add_typer(peers_app, name="peers")

_BENCHES = "decode, prefill, beams, experts, exchange, ring or residency."
_MOST_NODES = 16

LocationKind = Literal["config", "data", "models", "logs"]
_ModelArgument = Annotated[
    str, typer.Argument(metavar="M", help="Catalogue name, Hugging Face repo id, local folder, or GGUF file.")
]
_PartitioningOption = Annotated[Partitioning | None, typer.Option(help="Which machines and devices take part.")]
_PeerOption = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST:PORT", help="A machine to try besides those that are found; may be repeated."),
]


_FLAGS = {"gpu_expert_memory": "gpu-memory", "cpu_threads": "threads", "context_limit": "context"}
"""Flags with another name than their setting."""


def run(arguments: list[str]) -> int:
    """Run one command; the exit status (0, 1, 2 or 130).

    With ``--json``, a failure is one object with the key ``error`` on stdout, besides the line on stderr.
    """
    in_json = _asks_for_json(arguments)
    try:
        # Otherwise the library ends the process itself after a bad argument, and tells nobody what it was.
        return app(args=arguments, prog_name="privatellm", standalone_mode=False) or 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except WorkFailed as error:
        return fail(str(error), error.status, in_json=in_json and not error.answered)
    except ReaderGoneError:
        return 0
    except OSError as error:
        status = fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1, in_json=in_json)
        forget_stdout()
        return status
    except Exception as error:
        # Which class bad arguments have differs between versions of the library; all of them can describe themselves.
        if not (hasattr(error, "format_message") and hasattr(error, "message") and hasattr(error, "show")):
            raise
        error.message = error.message.removeprefix("Value error, ")
        if in_json:
            return fail(error.format_message(), 2, in_json=True)
        error.show()
        return 2


def _asks_for_json(arguments: list[str]) -> bool:
    return "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)


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
    stdin: Annotated[
        bool | None,
        typer.Option(
            "--stdin/--no-stdin",
            help="Whether what is piped in, or a file, follows the PROMPT. Without either flag it does, but a pipe "
            "that gives nothing for 3 seconds is left alone; --stdin waits for it. In a loop over lines: --no-stdin.",
        ),
    ] = None,
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
    partitioning: _PartitioningOption = None,
    peer: _PeerOption = None,
    policy: Annotated[ExpertPolicy | None, typer.Option(help="How GPU and CPU share the experts.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(metavar="GIB", help="GPU memory for experts, in GiB.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object with the answer and its measurements.")] = False,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="Token ids instead of text: no template, no tokenizer.")
    ] = None,
) -> None:
    """Answer one question on stdout, about what is piped in: `cat notes | privatellm ask "summarise"` asks both, the
    prompt first. Flags come before the person's settings, those before the model's own."""
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
        stdin=stdin,
        prompt_ids=prompt_ids,
        model=model,
        system=system,
        numbers={key: number for key, number in numbers.items() if number is not None},
        stop=stop or [],
        runtime=runtime,
        dtype=dtype,
        policy=policy,
        partitioning=partitioning,
        peers=peer or [],
        as_json=json,
    )
    from app.commands.ask import ask as run_ask

    raise typer.Exit(run_ask(question_from(flags)))


@models_app.callback()
def models(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="The list as JSON.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        models_list(json)
    elif json:
        raise typer.BadParameter("it stands behind `list`", param_hint="--json")


@models_app.command("list")
def models_list(json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """What is on this machine, and what is known by a short name."""
    from app.commands.models import show_models

    raise typer.Exit(show_models(in_json=json))


@models_app.command("pull")
def models_pull(
    model: _ModelArgument,
    machines: Annotated[
        bool, typer.Option("--machines", help="From a paired machine that is lent, if one has it.")
    ] = False,
) -> None:
    """Download a model (the starter is made here). An interrupted download goes on where it was."""
    from app.commands.models import pull

    raise typer.Exit(pull(model, machines=machines))


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
    partitioning: _PartitioningOption = None,
    peer: _PeerOption = None,
    policy: Annotated[ExpertPolicy | None, typer.Option(help="How GPU and CPU share the experts.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(metavar="GIB", help="GPU memory for experts, in GiB.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads.")] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Where a model would lie in memory, how fast it should be, and why. Nothing is loaded."""
    from app.commands.plan import plan as run_plan

    numbers = {"context_limit": context, "gpu_expert_memory": gpu_memory, "cpu_threads": threads}
    flags = _load_flags(model, runtime, dtype, partitioning, policy, numbers, peer)
    raise typer.Exit(run_plan(flags, in_json=json))


@app.command()
def bench(
    kind: Annotated[BenchKind, typer.Argument(metavar="WHAT", help=_BENCHES)],
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Absent: the one of the settings.")] = None,
    *,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Figures are medians over so many.")] = 5,
    nodes: Annotated[str, typer.Option(metavar="2,3,4", help="Processes on this machine, for `ring`.")] = "2,3,4",
    runtime: Annotated[RuntimeName | None, typer.Option(help="What runs the model.")] = None,
    dtype: Annotated[DtypeName | None, typer.Option(help="Numbers to compute with.")] = None,
    partitioning: _PartitioningOption = None,
    peer: _PeerOption = None,
    policy: Annotated[ExpertPolicy | None, typer.Option(help="How GPU and CPU share the experts.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(metavar="GIB", help="GPU memory for experts, in GiB.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads.")] = None,
    even_if_busy: Annotated[
        bool, typer.Option("--even-if-busy", help="Keep the figures for plans though other programs were at work.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON, with every single figure.")] = False,
) -> None:
    """Measure a model on this machine; `experts` keeps what it finds, and plans and policies rest on it."""
    from app.commands.bench import bench as run_bench

    numbers = {"gpu_expert_memory": gpu_memory, "cpu_threads": threads}
    flags = _load_flags(model, runtime, dtype, partitioning, policy, numbers, peer)
    counts = _node_counts(nodes)
    raise typer.Exit(run_bench(kind, flags, rounds=rounds, nodes=counts, even_if_busy=even_if_busy, in_json=json))


@app.command()
def join(
    name: Annotated[str | None, typer.Option(metavar="N", help="What others call this machine, from now on.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Absent: all interfaces, port 47820 or the next free one.")
    ] = None,
    peer: _PeerOption = None,
    memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="Memory that a share may take; absent: what is free.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a screen: for a service.")] = False,
) -> None:
    """Lend this machine to the rings of paired machines, until you leave."""
    from app.commands.join import JoinFlags
    from app.commands.join import join as run_join

    raise typer.Exit(run_join(JoinFlags(name, listen, tuple(peer or ()), plain, memory)))


@peers_app.callback()
def peers(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        peers_list()


@peers_app.command("list")
def peers_list(
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    look: Annotated[bool, typer.Option("--look", help="Open the network for a moment: which are there?")] = False,
) -> None:
    """The machines this one trusts."""
    from app.commands.peers import show_peers

    raise typer.Exit(show_peers(in_json=json, look=look))


@peers_app.command("pair")
def peers_pair(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="HOST:PORT, or the beginning of its node id.")],
    code: Annotated[str | None, typer.Option(metavar="CODE", help="What it shows; absent: asked for.")] = None,
) -> None:
    """Pair with a machine that shows a code; the network is open only for that."""
    from app.commands.peers import pair

    raise typer.Exit(pair(peer, code))


@peers_app.command("code")
def peers_code() -> None:
    """Have the `privatellm join` that runs here, such as a service, show a new code for two minutes."""
    from app.commands.peers import show_code

    raise typer.Exit(show_code())


@peers_app.command("new-identity")
def peers_new_identity(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Give this machine another identity (its files were copied, say): it must be paired anew with every other."""
    from app.commands.peers import renew_identity

    raise typer.Exit(renew_identity(ask_first=not yes))


@peers_app.command("forget")
def peers_forget(
    peer: Annotated[str, typer.Argument(metavar="N", help="Its name, or the beginning of its node id.")],
) -> None:
    """Trust a machine no longer."""
    from app.commands.peers import forget

    raise typer.Exit(forget(peer))


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    network: Annotated[
        bool, typer.Option("--network", help="Look at the network although no ring was set up here.")
    ] = False,
    peer: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A machine to be reached: which step on the way fails?")
    ] = None,
) -> None:
    """What was found on this machine, what will run and why, and the way out of what does not."""
    from app.commands.doctor import doctor as examine
    from app.settings.items import ItemError, check_item

    try:
        address = check_item("address", peer) if peer is not None else ""
    except ItemError:
        raise typer.BadParameter("it takes HOST:PORT", param_hint="--peer") from None
    raise typer.Exit(examine(in_json=json, probe=network, peer=address))


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
    peers: list[str] | None,
) -> LoadFlags:
    from app.commands.loading import LoadFlags

    for key, number in numbers.items():
        _check_flag(key, number)
    _check_flag("model", model)
    given = {key: number for key, number in numbers.items() if number is not None}
    return LoadFlags(model, runtime, dtype, partitioning, policy, given, tuple(peers or ()))


def _node_counts(text: str) -> tuple[int, ...]:
    """``2,3,4`` as numbers of nodes."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and 1 <= int(word) <= _MOST_NODES for word in words):
        raise typer.BadParameter(f"it takes numbers from 1 to {_MOST_NODES}, like 2,3,4", param_hint="--nodes")
    return tuple(map(int, words))


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
