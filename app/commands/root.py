"""The command line: which commands and flags there are, and what they may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args

import click
from click.shell_completion import CompletionItem

from app.commands.output import ReaderGoneError, WorkFailed, answer, fail, forget_stdout
from app.settings.fields import SettingError, Value
from app.settings.schema import setting_named
from engine.ipc.messages import BenchKind, DtypeName, ExpertPolicy, KeyValuesName, Partitioning, RuntimeName

_HELP = {"help_option_names": ["-h", "--help"]}
_BENCHES = "decode, prefill, beams, experts, exchange, ring or residency."
_MOST_NODES = 16

LocationKind = Literal["config", "data", "db", "models", "logs", "keymap"]

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


def _model_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    from app.commands.shell import model_names

    return model_names(context, parameter, begun)


def _persona_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    from app.commands.shell import persona_names

    return persona_names(context, parameter, begun)


_model_argument = click.argument(
    "model",
    metavar="M",
    shell_complete=_model_names,
    help="Catalogue name, Hugging Face repository id (OWNER/NAME:Q4_K_M for a GGUF file of it), folder, GGUF file, or "
    "a model of another program (ollama:qwen3:30b).",
)
_json_option = click.option("--json", "in_json", is_flag=True, help="Print JSON.")
_yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
_peer_option = click.option(
    "--peer",
    "peers",
    metavar="HOST:PORT",
    multiple=True,
    help="Address of a machine that is not found automatically; may be repeated.",
)
# An option for a setting has the setting's key as its parameter's name: it reaches the engine with that setting.
_load_options = _several(
    click.option("--runtime", type=_one_of(RuntimeName), help="What runs the model."),
    click.option("--dtype", type=_one_of(DtypeName), help="Number format of the computation."),
    click.option("--key-values", type=_one_of(KeyValuesName), help="How keys and values are kept in memory."),
    click.option("--partitioning", type=_one_of(Partitioning), help="Which devices and machines run the experts."),
    _peer_option,
    click.option("--policy", type=_one_of(ExpertPolicy), help="How GPU and CPU share the experts."),
    click.option(
        "--gpu-memory", "gpu_expert_memory", metavar="GIB", type=float, help="GPU memory for experts, in GiB."
    ),
    click.option("--threads", "cpu_threads", metavar="N", type=int, help="Number of CPU threads."),
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
    """A group whose help lists its commands in the order of their definition, not alphabetically."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder, invoke_without_command=True, context_settings=_HELP)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
@click.option("--continue", "latest", is_flag=True, help="Go on with the latest chat.")
@click.option(
    "--model", shell_complete=_model_names, help="Model to chat with. The one of your settings stays the default."
)
@click.option("--persona", metavar="P", shell_complete=_persona_names, help="Persona to chat with.")
@click.option("--plain", is_flag=True, help="Chat in plain lines: for screen readers, dumb terminals and scripts.")
@click.pass_context
def privatellm(context: click.Context, *, latest: bool, model: str | None, persona: str | None, plain: bool) -> int:
    """Chat privately with a Mixture-of-Experts language model on your own machines. Without a command the chat
    opens."""
    if context.invoked_subcommand is None:
        from app.commands.chat import chat, start_from

        _given({"model": model})
        return chat(start_from(latest=latest, model=model, persona=persona), plain=plain)
    given = {"--continue": latest, "--model": model is not None, "--persona": persona is not None, "--plain": plain}
    for flag in (name for name, is_given in given.items() if is_given):
        raise click.BadParameter("before a command it is for the chat, which takes no command", param_hint=flag)
    return 0


@privatellm.command()
@click.argument("prompt", metavar="[PROMPT]", required=False, help="The question. Default: read from stdin.")
@click.option(
    "--stdin/--no-stdin",
    default=None,
    help="Append stdin to the PROMPT, or ignore it. Default: a file or a pipe is appended, but a pipe that delivers "
    "nothing within 3 seconds is ignored. Use --no-stdin in a loop that reads lines.",
)
@click.option(
    "--file",
    "files",
    metavar="F",
    type=click.Path(),
    multiple=True,
    help="Attach this text file or picture; may be repeated.",
)
@click.option("--model", shell_complete=_model_names, help="Model to ask.")
@click.option(
    "--persona", metavar="P", shell_complete=_persona_names, help="Persona to ask: its system prompt, model and values."
)
@click.option("--system", help="System prompt. Default: that of your settings or the model.")
@click.option("--beams", metavar="W", type=int, help="Width of the beam search, 1 to 16.")
@click.option("--length-penalty", metavar="P", type=float, help="Divide beam scores by length**P.")
@click.option("--temperature", metavar="T", type=float, help="0 always takes the likeliest token.")
@click.option("--top-p", metavar="P", type=float, help="Choose among the likeliest tokens up to this probability.")
@click.option("--top-k", metavar="K", type=int, help="Choose among this many of the likeliest tokens.")
@click.option("--min-p", metavar="P", type=float, help="Drop tokens below this fraction of the likeliest.")
@click.option("--repetition-penalty", metavar="P", type=float, help="Above 1, what was said becomes less likely.")
@click.option("--seed", metavar="N", type=int, help="The same seed gives the same answer.")
@click.option("--max-tokens", metavar="N", type=int, help="Maximum number of tokens in the answer.")
@click.option("--stop", metavar="S", multiple=True, help="Stop before this text; may be repeated.")
@click.option(
    "--schema", metavar="FILE", type=click.Path(), help="Answer in JSON that satisfies the JSON schema in this file."
)
@click.option("--thinking", type=click.Choice(["auto", "on", "off"]), help="Whether the model thinks first.")
@click.option("--effort", type=click.Choice(["auto", "low", "medium", "high"]), help="How long the model thinks.")
@_load_options
@click.option("--json", "in_json", is_flag=True, help="Print one JSON object with the answer and its measurements.")
@click.option("--prompt-ids", metavar="1,2,3", help="Token ids instead of text, without template and tokenizer.")
def ask(
    *,
    prompt: str | None,
    stdin: bool | None,
    files: tuple[str, ...],
    persona: str | None,
    system: str | None,
    stop: tuple[str, ...],
    schema: str | None,
    peers: tuple[str, ...],
    in_json: bool,
    prompt_ids: str | None,
    **settings: Value,
) -> int:
    """Print the answer to one question. Text on stdin is appended to the prompt: `cat notes | privatellm ask
    "summarise"`. Flags override the persona, which overrides your settings, which override the model's defaults."""
    from app.commands.question import Flags, question_from

    flags = Flags(
        prompt=prompt,
        stdin=stdin,
        files=list(files),
        prompt_ids=prompt_ids,
        persona=persona,
        system=system,
        settings=_given(settings),
        stop=list(stop),
        schema=schema,
        peers=list(peers),
        as_json=in_json,
    )
    from app.commands.ask import ask as run_ask

    return run_ask(question_from(flags))


@privatellm.group(cls=_InOrder, invoke_without_command=True)
@click.option("--json", "in_json", is_flag=True, help="Print the list as JSON.")
@click.pass_context
def models(context: click.Context, in_json: bool) -> int:
    """List, download and remove models. M is a catalogue name, a Hugging Face repository id (OWNER/NAME:Q4_K_M for one
    GGUF file of it), a folder, a GGUF file, or a model of another program as the list names it."""
    if context.invoked_subcommand is None:
        from app.commands.models import show_models

        return show_models(in_json=in_json)
    if in_json:
        raise click.BadParameter("put it after `list`", param_hint="--json")
    return 0


@models.command("list")
@_json_option
def models_list(in_json: bool) -> int:
    """List the models on this machine and those of the catalogue."""
    from app.commands.models import show_models

    return show_models(in_json=in_json)


@models.command("pull")
@_model_argument
@click.option("--machines", is_flag=True, help="Copy it from a paired machine that is lent, if one has it.")
def models_pull(model: str, machines: bool) -> int:
    """Download a model. The starter is built on this machine. An interrupted download is continued."""
    from app.commands.models import pull

    return pull(model, machines=machines)


@models.command("prepare")
@_model_argument
def models_prepare(model: str) -> int:
    """Write a copy of a model with its experts laid out as they are used."""
    from app.commands.models import prepare

    return prepare(model)


@models.command("remove")
@_model_argument
@_yes_option
def models_remove(model: str, yes: bool) -> int:
    """Delete a model from the models folder."""
    from app.commands.models import remove

    return remove(model, ask_first=not yes)


@privatellm.group(cls=_InOrder, invoke_without_command=True)
@click.option("--json", "in_json", is_flag=True, help="Print the list as JSON.")
@click.pass_context
def chats(context: click.Context, in_json: bool) -> int:
    """List, export and import the saved chats."""
    if context.invoked_subcommand is None:
        from app.commands.chats import show_chats

        return show_chats(in_json=in_json)
    if in_json:
        raise click.BadParameter("put it after `list`", param_hint="--json")
    return 0


@chats.command("list")
@_json_option
def chats_list(in_json: bool) -> int:
    """List the chats, the newest first, with their numbers."""
    from app.commands.chats import show_chats

    return show_chats(in_json=in_json)


@chats.command("export")
@click.argument("number", metavar="ID", type=int, help="Number of the chat in the list.")
@click.option("--format", "form", type=click.Choice(["markdown", "json"]), help="Default: as the file's name says.")
@click.option(
    "--output", "-o", "file", metavar="FILE", type=click.Path(), help="File to write. Default: standard output."
)
@click.option("--thoughts", is_flag=True, help="With what the model thought.")
def chats_export(number: int, form: Literal["markdown", "json"] | None, file: str | None, thoughts: bool) -> int:
    """Print a chat as Markdown with front matter, or as JSON with all its branches, which can be imported again."""
    from app.commands.chats import export

    return export(number, form, file, thoughts=thoughts)


@chats.command("import")
@click.argument("file", metavar="FILE", type=click.Path(), help="JSON, ZIP archive or SQLite database.")
def chats_import(file: str) -> int:
    """Import chats from an export of privatellm, ChatGPT, Claude or Open WebUI, or from llm's logs.db. What is here
    already is left out."""
    from app.commands.chats import take_in

    return take_in(file)


@privatellm.command()
@_model_argument
@click.option("--context", "context_limit", metavar="N", type=int, help="Maximum number of tokens in the conversation.")
@_load_options
@_json_option
def plan(*, peers: tuple[str, ...], in_json: bool, **settings: Value) -> int:
    """Predict a model's memory and speed, and say why. Nothing is loaded."""
    from app.commands.options import LoadFlags
    from app.commands.plan import plan as run_plan

    return run_plan(LoadFlags(_given(settings), peers), in_json=in_json)


@privatellm.command()
@click.argument("kind", metavar="WHAT", type=_one_of(BenchKind), help=_BENCHES)
@click.argument(
    "model",
    metavar="[MODEL]",
    required=False,
    shell_complete=_model_names,
    help="Default: the model of your settings.",
)
@click.option(
    "--rounds",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="Number of measurements; the figures are their medians.",
)
@click.option(
    "--nodes",
    metavar="2,3,4",
    default="2,3,4",
    show_default=True,
    help="Numbers of processes on this machine, for `ring`.",
)
@_load_options
@click.option("--even-if-busy", is_flag=True, help="Save the figures for plans even if other programs were running.")
@click.option("--json", "in_json", is_flag=True, help="Print JSON with every single figure.")
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
    """Measure a model on this machine. `experts` saves its results; plans and policies use them."""
    from app.commands.bench import bench as run_bench
    from app.commands.options import LoadFlags

    flags = LoadFlags(_given(settings), peers)
    counts = _node_counts(nodes)
    return run_bench(kind, flags, rounds=rounds, nodes=counts, even_if_busy=even_if_busy, in_json=in_json)


@privatellm.command()
@click.option(
    "--listen", metavar="HOST:PORT", default="127.0.0.1:8777", show_default=True, help="Address to be asked at."
)
@click.option("--model", shell_complete=_model_names, help="Model to serve. Default: the model of your settings.")
@click.option(
    "--alias",
    "aliases",
    metavar="NAME",
    multiple=True,
    help="A further name under which clients may ask for the model; may be repeated.",
)
@click.option("--context", "context_limit", metavar="N", type=int, help="Maximum number of tokens in a conversation.")
@_load_options
@click.option(
    "--allow-host",
    "hosts",
    metavar="NAME",
    multiple=True,
    help="A further name of this machine, such as a proxy's; may be repeated.",
)
@click.option(
    "--allow-origin",
    "origins",
    metavar="ORIGIN",
    multiple=True,
    help="Origin of a web page or desktop app that may ask, such as app://obsidian.md; may be repeated.",
)
@click.option("--require-key", is_flag=True, help="Require the key from programs of this machine too.")
@click.option(
    "--tls/--no-tls",
    default=None,
    help="Encrypt by this machine's own certificate, or leave that to a proxy. Default: for other machines.",
)
@click.option("--new-key", is_flag=True, help="Make the key that other machines need, print it once, and end.")
@click.option("--status", is_flag=True, help="Show what is served here now, and end.")
def serve(
    *,
    listen: str,
    aliases: tuple[str, ...],
    peers: tuple[str, ...],
    hosts: tuple[str, ...],
    origins: tuple[str, ...],
    require_key: bool,
    tls: bool | None,
    new_key: bool,
    status: bool,
    **settings: Value,
) -> int:
    """Answer other programs over HTTP, in the protocols of OpenAI and Anthropic: editors, scripts, coding agents. Only
    programs of this machine reach it, unless --listen says otherwise."""
    from app.commands import serve as command
    from app.commands.options import LoadFlags

    if new_key:
        return command.make_key()
    if status:
        return command.show_status()
    flags = command.ServeFlags(
        LoadFlags(_given(settings), peers), listen, aliases, hosts, origins, require_key=require_key, tls=tls
    )
    return command.serve(flags)


@privatellm.command()
@click.option("--name", metavar="N", help="Name of this machine on other machines; it is saved.")
@click.option("--listen", metavar="HOST:PORT", help="Default: all interfaces, port 47820 or the next free one.")
@_peer_option
@click.option(
    "--memory", metavar="GIB", type=float, help="Memory that a model may use here. Default: all that is free."
)
@click.option(
    "--gpu-memory",
    metavar="GIB",
    type=float,
    help="GPU memory that a model may use here; 0: none. Default: half of the GPU.",
)
@click.option("--plain", is_flag=True, help="Print lines instead of showing a screen, as for a service.")
def join(
    name: str | None,
    listen: str | None,
    peers: tuple[str, ...],
    memory: float | None,
    gpu_memory: float | None,
    plain: bool,
) -> int:
    """Lend this machine to the rings of paired machines until you quit."""
    from app.commands.join import JoinFlags
    from app.commands.join import join as run_join

    return run_join(JoinFlags(name, listen, peers, plain, memory, gpu_memory))


@privatellm.group("peers", cls=_InOrder, invoke_without_command=True)
@click.pass_context
def peers_group(context: click.Context) -> int:
    """Manage the machines that this one trusts and can form a ring with."""
    if context.invoked_subcommand is None:
        from app.commands.peers import show_peers

        return show_peers(in_json=False, look=False)
    return 0


@peers_group.command("list")
@_json_option
@click.option("--look", is_flag=True, help="Open the network for a moment to see which can be reached.")
def peers_list(in_json: bool, look: bool) -> int:
    """List the machines that this one trusts."""
    from app.commands.peers import show_peers

    return show_peers(in_json=in_json, look=look)


@peers_group.command("pair")
@click.argument("peer", metavar="PEER", help="HOST:PORT, or the beginning of its node id.")
@click.option("--code", metavar="CODE", help="The code that it shows. Default: you are asked for it.")
def peers_pair(peer: str, code: str | None) -> int:
    """Pair with a machine that shows a code. The network is open only while pairing."""
    from app.commands.peers import pair

    return pair(peer, code)


@peers_group.command("code")
def peers_code() -> int:
    """Have the `privatellm join` that runs here show a new code. It is valid for two minutes."""
    from app.commands.peers import show_code

    return show_code()


@peers_group.command("new-identity")
@_yes_option
def peers_new_identity(yes: bool) -> int:
    """Give this machine a new identity. Use it after its files were copied, then pair every machine again."""
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
@click.option("--network", is_flag=True, help="Check the network even if no ring was set up here.")
@click.option("--peer", metavar="HOST:PORT", help="Check each step of reaching this machine.")
def doctor(in_json: bool, network: bool, peer: str | None) -> int:
    """Check this machine: what runs here, why, and how to fix problems."""
    from app.commands.doctor import doctor as examine
    from app.settings.fields import ItemError, check_item

    try:
        address = check_item("address", peer) if peer is not None else ""
    except ItemError:
        raise click.BadParameter("it takes HOST:PORT", param_hint="--peer") from None
    return examine(in_json=in_json, probe=network, peer=address)


@privatellm.command()
@click.argument("what", metavar="WHAT", type=_one_of(LocationKind), help="config, data, db, models, logs or keymap.")
def locate(what: LocationKind) -> None:
    """Print the folder of the configuration, data, models or logs, or the file of all chats, or that of the keys."""
    from engine.system.locations import locate as folder_for

    if what == "keymap":
        answer(f"{folder_for('config') / 'keymap.toml'}\n")
        return
    if what == "db":
        from app.conversations.opening import DATABASE

        answer(f"{folder_for('data') / DATABASE}\n")
        return
    answer(f"{folder_for(what)}\n")


@privatellm.command()
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]), help="bash, zsh or fish.")
def completion(shell: str) -> None:
    """Print a script that completes commands, options and names of models in SHELL. In the file that your shell reads
    at its start: `source <(privatellm completion bash)`; fish: `privatellm completion fish | source`."""
    from app.commands.shell import completion_script

    answer(f"{completion_script(privatellm, shell)}\n")


@privatellm.command()
def man() -> None:
    """Print the manual page: `privatellm man | man -l -`."""
    import importlib.metadata

    from app.commands.shell import manual

    answer(manual(privatellm, importlib.metadata.version("privatellm")))


def _given(settings: Mapping[str, Value]) -> dict[str, Value]:
    """The settings that were given on the command line, by their keys. Raises click.BadParameter."""
    given: dict[str, Value] = {key: value for key, value in settings.items() if value is not None}
    for key, value in given.items():
        _check_flag(key, value)
    return given


def _node_counts(text: str) -> tuple[int, ...]:
    """``2,3,4`` as numbers of nodes."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and 1 <= int(word) <= _MOST_NODES for word in words):
        raise click.BadParameter(f"it takes numbers from 1 to {_MOST_NODES}, such as 2,3,4", param_hint="--nodes")
    return tuple(map(int, words))


def _check_flag(key: str, value: object) -> None:
    """Check ``value`` by the limits of the setting ``key``, which a flag cannot leave empty."""
    setting = replace(setting_named(key), optional=False)
    try:
        setting.check(value)
    except SettingError as error:
        flag = f"--{_FLAGS.get(key, key.replace('_', '-'))}"
        raise click.BadParameter(str(error).replace(key, "it", 1), param_hint=flag) from None
