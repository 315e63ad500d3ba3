"""From a model's name to a session: resolve, convert if needed, choose the runtime, load, find the end tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.errors import ModelError, shown
from engine.generation.sampling import own_sampling, stated_penalty, usual_limit
from engine.ipc.messages import Load, ModelFacts
from engine.ipc.progress import ProgressCallback
from engine.models.architectures.config_values import check_config
from engine.models.formats.json_files import SMALL_FILE, read_object
from engine.runtimes.common.loading import load_model
from engine.session.refusals import check_request

if TYPE_CHECKING:
    from engine.cluster.head.lacked_model import LackedModel
    from engine.cluster.network import ClusterNetwork
    from engine.runtimes.protocol import LoadedModel
    from engine.session.looking import Looking
    from engine.session.session import Session


def load_session(
    request: Load,
    progress: ProgressCallback,
    should_stop: Callable[[], bool] | None = None,
    release: Callable[[], None] = lambda: None,
    network: ClusterNetwork | None = None,
    loaded: ModelFacts | None = None,
) -> Session:
    """Load ``request.model`` and make a session of it. Opens no socket; a GGUF file is converted once.

    With partitioning ``ring``, ``network`` must be open, and its machines share the model's experts. If a hub model is
    not on this machine, this machine's shard of it is fetched from the machines that have it.

    ``loaded`` are the facts of the model that was loaded before. ``release`` frees it, and is called just before memory
    is needed, so that the old model is kept if the new one is refused. Raises ModelError: unknown model (bad-input),
    not on this machine, damaged, unsupported, or too large (memory).
    """
    from engine.models.folders.model_folder import refuse_shard
    from engine.models.store.catalogue import for_gpu_instead
    from engine.models.store.prefix_files import remove_prefixes
    from engine.models.text.tokenizer import load_tokenizer
    from engine.runtimes import runtime_named
    from engine.runtimes.choosing import choose_runtime, mlx_by_default
    from engine.runtimes.mlx import eligible, gguf_files
    from engine.runtimes.model_headers import read_headers
    from engine.session.disk_prefixes import prefix_identity
    from engine.session.gpu_choice import settle_gpu
    from engine.session.session import Session

    started = time.perf_counter()
    check_request(request)
    lacked = find_in_ring(request.model, network, progress) if network is not None else None
    if lacked is not None:
        name, folder = lacked.name, lacked.folder
    else:
        name, folder = find_folder(request.model, progress, should_stop)
        refuse_shard(folder)
    notices: list[str] = []
    if network is None:
        request, notices = settle_gpu(request, folder, loaded, progress)
    choice = choose_runtime(request, folder, progress=progress)
    runtime = runtime_named(choice.name)
    progress("reading the tokenizer", 0, 0, "")
    words = load_tokenizer(folder)
    defaults = read_settings(folder / "generation_config.json")
    ends = stop_ids(defaults) or stop_ids(read_settings(folder / "config.json"))
    if network is None:
        model = load_model(runtime, name, folder, request, progress, release=release)
    else:
        from engine.cluster.head.head_model import RingModel

        former = network.former(name, folder, runtime, request, lacked, choice)
        # Forming asks what memory is free.
        release()
        model = RingModel(name, former, progress)
    if words is not None:
        # The template's process has started meanwhile.
        ends |= words.end_of_turn_ids
    if choice.is_fallback:
        notices.append(f"Running on {runtime.name}: {choice.reason}.")
        instead = for_gpu_instead(name) if mlx_by_default() and gguf_files.in_gguf(folder) else None
        if instead is not None:
            notices.append(f"The catalogue has {instead.name}, which this Mac's GPU runs.")
    if request.key_values != "auto" and runtime.name != "native":
        notices.append(
            f"Keys and values are not kept in {request.key_values}: the runtime {runtime.name} cannot do that, native "
            "can."
        )
    if request.prefix_disk_bytes and not model.keeps_contents:
        notices.append(
            "What the model reads is not kept on disk between runs, as the machines of a ring hold parts of it."
        )
    if request.prefix_disk_bytes == 0:
        remove_prefixes()
    looking, way_out, said = pictures_for(model, folder, in_ring=network is not None)
    notices += said
    facts = msgspec.structs.replace(
        model.facts,
        name=name,
        sight=looking.sight if looking is not None else None,
        way_to_see=way_out,
        has_chat_template=words is not None and words.has_chat_template,
        has_tokenizer=words is not None,
        reasoning=words.reasoning_facts if words is not None else None,
        sampling=own_sampling(defaults),
        answer_limit=usual_limit(defaults),
        load_s=time.perf_counter() - started,
        notices=[*notices, *model.facts.notices, *(words.notices if words else ()), *settings_not_applied(defaults)],
        context_limit=min(model.facts.context_limit, request.context_limit or model.facts.context_limit),
    )
    # From the files: in a ring the loaded model is this machine's shard, and forming may replace that by a whole copy.
    here = (network.loaded_from if network is not None else None) or folder
    popularity = model.popularity
    profile = None if popularity is None else popularity.model or read_headers(here, request).profile
    chunk = request.prefill_chunk
    if runtime.name == "mlx" and network is None:  # the machines of a ring agree on theirs
        chunk = eligible.prefill_chunk(chunk, eligible.architecture())
    return Session(
        model,
        words,
        ends=ends,
        defaults=defaults,
        facts=facts,
        profile=profile,
        prefill_chunk=chunk,
        prefix_bytes=request.prefix_bytes,
        prefix_disk_bytes=request.prefix_disk_bytes or 0,
        drafts=request.drafts,
        looking=looking,
        way_to_see=way_out,
        identity=prefix_identity(folder, request, model.facts) if request.prefix_disk_bytes else "",
    )


def pictures_for(model: LoadedModel, folder: Path, *, in_ring: bool) -> tuple[Looking | None, str, list[str]]:
    """What shows pictures to ``model``, loaded from ``folder``; None if it is shown none, and then what to do about
    that. Sentences for the person."""
    from engine.pictures.folders import read_sight
    from engine.pictures.shown import ShownPictures
    from engine.session.looking import Looking
    from engine.session.refusals import way_to_see

    notices, sight = list[str](), None
    try:
        sight = read_sight(folder)
    except ModelError as error:
        notices.append(f"No picture can be shown to this model: {error}")
    if sight is not None and model.takes_pictures and not in_ring:
        model.pictures = ShownPictures(sight, model.facts.hidden)
        return Looking(model.pictures, folder, model.facts.device), "", notices
    return None, way_to_see(model.facts, in_ring=in_ring), notices


def find_folder(name: str, progress: ProgressCallback, should_stop: Callable[[], bool] | None) -> tuple[str, Path]:
    """The model's name for the screen, and the folder to open. A GGUF file gets its folder if it has none.

    Raises ModelError: unknown (bad-input), or known but not on this machine (saying how to get it).
    """
    from engine.models.store import local_models

    resolved = local_models.resolve(name)
    if resolved.kind == "gguf":
        from engine.models.store.gguf_folder import open_gguf

        open_gguf(resolved.source, progress, should_stop, resolved.plain_folder)
    # A person's own folder without a config is opened, too, because opening gives the best error message.
    own = resolved.kind == "folder" and resolved.source.is_dir()
    return resolved.name, resolved.folder or (resolved.source if own else resolved.require_folder())


def find_in_ring(name: str, network: ClusterNetwork, progress: ProgressCallback) -> LackedModel | None:
    """A hub model that machines of the ring have and this machine lacks; None otherwise."""
    from engine.models.store import local_models

    resolved = local_models.resolve(name)
    return network.lacked(resolved, progress) if resolved.kind == "hub" and resolved.folder is None else None


def settings_not_applied(defaults: dict[str, Any]) -> list[str]:
    """A line about each generation setting of the model that sampling does not support here."""
    penalty = defaults.get("repetition_penalty")
    if penalty is None or stated_penalty(defaults) is not None:
        return []
    return [f"The model's own repetition_penalty of {shown(penalty)} is not applied: it is no usable number."]


def read_settings(path: Path) -> dict[str, Any]:
    """A JSON object in the model's folder; empty without such a file. Raises ModelError if it is damaged."""
    settings = read_object(path, SMALL_FILE)
    check_config(settings, str(path))
    return settings


def stop_ids(settings: dict[str, Any]) -> frozenset[int]:
    """``eos_token_id`` of a configuration, which is a number, a list of them, or absent."""
    value = settings.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return frozenset(int(token) for token in ids if isinstance(token, int))
