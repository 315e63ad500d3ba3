"""The command line: which commands and flags there are, and what they may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args

import click

from app.commands.output import ReaderGoneError, WorkFailed, answer, fail, forget_stdout
from app.settings.fields import Value
from app.settings.schema import SettingError, setting_named
from engine.ipc.messages import BenchKind, DtypeName, ExpertPolicy, Partitioning, RuntimeName

_HELP = {"help_option_names": ["-h", "--help"]}
_BENCHES = "decode, prefill, beams, experts, exchange, ring or residency."
_MOST_NODES = 16

LocationKind = Literal["config", "data", "models", "logs"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _one_of(words: object) -> click.Choice[str]:
    """The words of a Literal."""
    return click.Choice(get_args(words))


def _several(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """The decorators one below the other."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_model_argument = click.argument(
    "model", metavar="M", help="Catalogue name, Hugging Face repo id, local folder, or GGUF file."
)
_json_option = click.option("--json", "in_json", is_flag=True, help="As JSON.")
_yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
_peer_option = click.option(
    "--peer",
    "peers",
    metavar="HOST:PORT",
    multiple=True,
    help="A machine to try besides those that are found; may be repeated.",
)
# An option for a setting has the setting's key as its parameter's name: it reaches the engine with that setting.
_load_options = _several(
    click.option("--runtime", type=_one_of(RuntimeName), help="What runs the model."),
    click.option("--dtype", type=_one_of(DtypeName), help="Numbers to compute with."),
    click.option("--partitioning", type=_one_of(Partitioning), help="Which machines and devices take part."),
    _peer_option,
    click.option("--policy", type=_one_of(ExpertPolicy), help="How GPU and CPU share the experts."),
    click.option(
        "--gpu-memory", "gpu_expert_memory", metavar="GIB", type=float, help="GPU memory for experts, in GiB."
    ),
    click.option("--threads", "cpu_threads", metavar="N", type=int, help="CPU threads."),
)

_FLAGS = {"gpu_expert_memory": "gpu-memory", "cpu_threads": "threads", "context_limit": "context"}
"""Names of flags that differ from those of their settings."""


def run(arguments: list[str]) -> int:
    """Run one command; the exit status (0, 1, 2 or 130).

    With ``--json``, a failure is one object with the key ``error`` on stdout, besides the line on stderr.
    """
    in_json = _asks_for_json(arguments)
    try:
        # In standalone mode the library would end the process itself after a bad argument, without its message in JSON.
        return privatellm.main(arguments, prog_name="privatellm", standalone_mode=False) or 0
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
    except click.ClickException as error:
        if in_json:
            return fail(error.format_message(), 2, in_json=True)
        error.show()
        return 2


def _asks_for_json(arguments: list[str]) -> bool:
    return "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        answer(f"privatellm {importlib.metadata.version('privatellm')}\n")
        context.exit()


class _InOrder(click.Group):
    """Its help lists the commands as they stand here, not by the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder, context_settings=_HELP)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
def privatellm() -> None:
    """Talk to a Mixture-of-Experts language model that nobody else hears, on the machines you own. Without a command:
    the chat."""


@privatellm.command()
@click.argument("prompt", metavar="[PROMPT]", required=False, help="The question; absent: from stdin.")
@click.option(
    "--stdin/--no-stdin",
    default=None,
    help="Whether what is piped in, or a file, follows the PROMPT. Without either flag it does, but a pipe that gives "
    "nothing for 3 seconds is left alone; --stdin waits for it. In a loop over lines: --no-stdin.",
)
@click.option("--model", help="Model to ask.")
@click.option("--system", help="System prompt; without one the model's template decides.")
@click.option("--beams", metavar="W", type=int, help="Beam search of this width, 1 to 16.")
@click.option("--length-penalty", metavar="P", type=float, help="Scores / length**P.")
@click.option("--temperature", metavar="T", type=float, help="0: always the likeliest token.")
@click.option("--top-p", metavar="P", type=float)
@click.option("--top-k", metavar="K", type=int)
@click.option("--min-p", metavar="P", type=float)
@click.option("--seed", metavar="N", type=int, help="The same seed gives the same answer.")
@click.option("--max-tokens", metavar="N", type=int, help="Longest answer.")
@click.option("--stop", metavar="S", multiple=True, help="End before this text; may be repeated.")
@_load_options
@click.option("--json", "in_json", is_flag=True, help="One JSON object with the answer and its measurements.")
@click.option("--prompt-ids", metavar="1,2,3", help="Token ids instead of text: no template, no tokenizer.")
def ask(
    *,
    prompt: str | None,
    stdin: bool | None,
    system: str | None,
    stop: tuple[str, ...],
    peers: tuple[str, ...],
    in_json: bool,
    prompt_ids: str | None,
    **settings: Value,
) -> int:
    """Answer one question on stdout, about what is piped in: `cat notes | privatellm ask "summarise"` asks both, the
    prompt first. Flags come before the person's settings, those before the model's own."""
    from app.commands.question import Flags, question_from

    flags = Flags(
        prompt=prompt,
        stdin=stdin,
        prompt_ids=prompt_ids,
        system=system,
        settings=_given(settings),
        stop=list(stop),
        peers=list(peers),
        as_json=in_json,
    )
    from app.commands.ask import ask as run_ask

    return run_ask(question_from(flags))


@privatellm.group(cls=_InOrder, invoke_without_command=True)
@click.option("--json", "in_json", is_flag=True, help="The list as JSON.")
@click.pass_context
def models(context: click.Context, in_json: bool) -> int:
    """The models on this machine. M is a catalogue name, a Hugging Face repo id, a folder, or a GGUF file."""
    if context.invoked_subcommand is None:
        from app.commands.models import show_models

        return show_models(in_json=in_json)
    if in_json:
        raise click.BadParameter("it stands behind `list`", param_hint="--json")
    return 0


@models.command("list")
@_json_option
def models_list(in_json: bool) -> int:
    """What is on this machine, and what is known by a short name."""
    from app.commands.models import show_models

    return show_models(in_json=in_json)


@models.command("pull")
@_model_argument
@click.option("--machines", is_flag=True, help="From a paired machine that is lent, if one has it.")
def models_pull(model: str, machines: bool) -> int:
    """Download a model (the starter is made here). An interrupted download goes on where it was."""
    from app.commands.models import pull

    return pull(model, machines=machines)


@models.command("prepare")
@_model_argument
def models_prepare(model: str) -> int:
    """Write a model's bank: its experts, laid out for this program."""
    from app.commands.models import prepare

    return prepare(model)


@models.command("remove")
@_model_argument
@_yes_option
def models_remove(model: str, yes: bool) -> int:
    """Delete a model from the models folder."""
    from app.commands.models import remove

    return remove(model, ask_first=not yes)


@privatellm.command()
@_model_argument
@click.option("--context", "context_limit", metavar="N", type=int, help="Tokens the conversation may have.")
@_load_options
@_json_option
def plan(*, peers: tuple[str, ...], in_json: bool, **settings: Value) -> int:
    """Where a model would lie in memory, how fast it should be, and why. Nothing is loaded."""
    from app.commands.options import LoadFlags
    from app.commands.plan import plan as run_plan

    return run_plan(LoadFlags(_given(settings), peers), in_json=in_json)


@privatellm.command()
@click.argument("kind", metavar="WHAT", type=_one_of(BenchKind), help=_BENCHES)
@click.argument("model", metavar="[MODEL]", required=False, help="Absent: the one of the settings.")
@click.option(
    "--rounds",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="Figures are medians over so many.",
)
@click.option(
    "--nodes", metavar="2,3,4", default="2,3,4", show_default=True, help="Processes on this machine, for `ring`."
)
@_load_options
@click.option("--even-if-busy", is_flag=True, help="Keep the figures for plans though other programs were at work.")
@click.option("--json", "in_json", is_flag=True, help="As JSON, with every single figure.")
def bench(
    *,
    kind: BenchKind,
    rounds: int,
    nodes: str,
    peers: tuple[str, ...],
    even_if_busy: bool,
    in_json: bool,
    **settings: Value,
) -> int:
    """Measure a model on this machine; `experts` keeps what it finds, and plans and policies rest on it."""
    from app.commands.bench import bench as run_bench
    from app.commands.options import LoadFlags

    flags = LoadFlags(_given(settings), peers)
    counts = _node_counts(nodes)
    return run_bench(kind, flags, rounds=rounds, nodes=counts, even_if_busy=even_if_busy, in_json=in_json)


@privatellm.command()
@click.option("--name", metavar="N", help="What others call this machine, from now on.")
@click.option("--listen", metavar="HOST:PORT", help="Absent: all interfaces, port 47820 or the next free one.")
@_peer_option
@click.option("--memory", metavar="GIB", type=float, help="Memory that a share may take; absent: what is free.")
@click.option(
    "--gpu-memory",
    metavar="GIB",
    type=float,
    help="GPU memory that a share may take; absent: half of the GPU; 0: none.",
)
@click.option("--plain", is_flag=True, help="Lines instead of a screen: for a service.")
def join(
    name: str | None,
    listen: str | None,
    peers: tuple[str, ...],
    memory: float | None,
    gpu_memory: float | None,
    plain: bool,
) -> int:
    """Lend this machine to the rings of paired machines, until you leave."""
    from app.commands.join import JoinFlags
    from app.commands.join import join as run_join

    return run_join(JoinFlags(name, listen, peers, plain, memory, gpu_memory))


@privatellm.group("peers", cls=_InOrder, invoke_without_command=True)
@click.pass_context
def peers_group(context: click.Context) -> int:
    """The machines this one trusts, and may form a ring with."""
    if context.invoked_subcommand is None:
        from app.commands.peers import show_peers

        return show_peers(in_json=False, look=False)
    return 0


@peers_group.command("list")
@_json_option
@click.option("--look", is_flag=True, help="Open the network for a moment: which are there?")
def peers_list(in_json: bool, look: bool) -> int:
    """The machines this one trusts."""
    from app.commands.peers import show_peers

    return show_peers(in_json=in_json, look=look)


@peers_group.command("pair")
@click.argument("peer", metavar="PEER", help="HOST:PORT, or the beginning of its node id.")
@click.option("--code", metavar="CODE", help="What it shows; absent: asked for.")
def peers_pair(peer: str, code: str | None) -> int:
    """Pair with a machine that shows a code; the network is open only for that."""
    from app.commands.peers import pair

    return pair(peer, code)


@peers_group.command("code")
def peers_code() -> int:
    """Have the `privatellm join` that runs here, such as a service, show a new code for two minutes."""
    from app.commands.peers import show_code

    return show_code()


@peers_group.command("new-identity")
@_yes_option
def peers_new_identity(yes: bool) -> int:
    """Give this machine another identity, for example after its files were copied. Pair it again with every other."""
    from app.commands.peers import renew_identity

    return renew_identity(ask_first=not yes)


@peers_group.command("forget")
@click.argument("peer", metavar="N", help="Its name, or the beginning of its node id.")
def peers_forget(peer: str) -> int:
    """Stop trusting a machine."""
    from app.commands.peers import forget

    return forget(peer)


@privatellm.command()
@_json_option
@click.option("--network", is_flag=True, help="Look at the network although no ring was set up here.")
@click.option("--peer", metavar="HOST:PORT", help="A machine to be reached: which step on the way fails?")
def doctor(in_json: bool, network: bool, peer: str | None) -> int:
    """What was found on this machine, what will run and why, and the way out of what does not."""
    from app.commands.doctor import doctor as examine
    from app.settings.fields import ItemError, check_item

    try:
        address = check_item("address", peer) if peer is not None else ""
    except ItemError:
        raise click.BadParameter("it takes HOST:PORT", param_hint="--peer") from None
    return examine(in_json=in_json, probe=network, peer=address)


@privatellm.command()
@click.argument("what", metavar="WHAT", type=_one_of(LocationKind), help="config, data, models or logs.")
def locate(what: LocationKind) -> None:
    """Where things are on this machine."""
    from engine.models.locations import locate as folder_for

    answer(f"{folder_for(what)}\n")


def _given(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Those of ``settings``, by their keys, that were given on the command line. Raises click.BadParameter."""
    given: dict[str, Value] = {key: value for key, value in settings.items() if value is not None}
    for key, value in given.items():
        _check_flag(key, value)
    return given


def _node_counts(text: str) -> tuple[int, ...]:
    """``2,3,4`` as numbers of nodes."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and 1 <= int(word) <= _MOST_NODES for word in words):
        raise click.BadParameter(f"it takes numbers from 1 to {_MOST_NODES}, like 2,3,4", param_hint="--nodes")
    return tuple(map(int, words))


def _check_flag(key: str, value: object) -> None:
    """Check ``value`` by the limits of the setting ``key``, which a flag cannot leave empty."""
    setting = replace(setting_named(key), optional=False)
    try:
        setting.check(value)
    except SettingError as error:
        flag = f"--{_FLAGS.get(key, key.replace('_', '-'))}"
        raise click.BadParameter(str(error).replace(key, "it", 1), param_hint=flag) from None
