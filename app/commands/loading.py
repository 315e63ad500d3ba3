"""From the flags that say how a model is run, and the person's settings, to a Load."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.commands.output import WorkFailed, say
from app.commands.ringing import check_peers
from app.settings.file import open_settings
from app.settings.schema import Settings, gpu_expert_bytes
from engine.errors import ModelError
from engine.ipc.messages import DtypeName, ExpertPolicy, Load, Partitioning, RuntimeName
from engine.models.store import resolve


@dataclass(frozen=True)
class LoadFlags:
    """The command line as given; ``numbers`` holds those that were, by their setting's key."""

    model: str | None = None
    runtime: RuntimeName | None = None
    dtype: DtypeName | None = None
    partitioning: Partitioning | None = None
    policy: ExpertPolicy | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loading:
    """What is to be loaded; ``settings`` and ``peers`` say how a ring is formed for it."""

    load: Load
    settings: Settings
    peers: tuple[str, ...] = ()


def load_from(flags: LoadFlags, *, needs_model: bool = True) -> Loading:
    """Flags come before the settings. Raises WorkFailed for a model that is unknown or not on this machine
    (``needs_model``), and for flags that do not go together."""
    file = open_settings()
    for notice in file.notices:
        say(f"note: {notice}")
    settings = file.settings
    name = flags.model or settings.model
    partitioning = flags.partitioning or settings.partitioning
    peers = check_peers(list(flags.peers), ring=partitioning == "ring")
    try:
        resolved = resolve(name) if needs_model else None
        if resolved is not None and resolved.kind != "gguf":  # converted when it is loaded
            resolved.require_folder()
    except ModelError as error:
        raise WorkFailed(str(error)) from error
    load = Load(
        id=0,
        model=name,
        runtime=flags.runtime or settings.runtime,
        dtype=flags.dtype or settings.dtype,
        partitioning=partitioning,
        cpu_threads=_whole(flags.numbers.get("cpu_threads", settings.cpu_threads)),
        context_limit=_whole(flags.numbers.get("context_limit", settings.context_limit)),
        policy=flags.policy or settings.policy,
        gpu_expert_bytes=gpu_expert_bytes(flags.numbers.get("gpu_expert_memory", settings.gpu_expert_memory)),
        keep_resident=settings.keep_resident,
        lock_memory=settings.lock_memory,
    )
    return Loading(load, settings, peers)


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)
