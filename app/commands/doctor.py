"""``privatellm doctor``: what was found, which path runs and why, and the way out of what does not."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import msgspec

from app.commands.doctor_network import Finding, Mark, network
from app.commands.output import answer, as_json
from app.engine_client import EngineClient, EngineDied
from app.engine_process import child_environment
from app.machine import Machine, default_runtime, this_machine
from app.settings.file import open_settings
from app.text_safety import one_line
from engine.errors import ModelError
from engine.ipc.messages import DoctorFacts, Load
from engine.models.store import local_models
from engine.planning.runtime_choice import WSL_LIBRARIES
from engine.planning.units import byte_size
from engine.system.locations import KINDS, Kind, locate

_SIGNS: dict[Mark, str] = {"ok": "✓", "note": "·", "problem": "✗"}
_LIBRARIES = ("torch", "transformers", "mlx", "mlx-lm", "textual", "safetensors", "gguf", "huggingface-hub", "msgspec")
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "i8mm")
_WIDTH = 14
"""Minimum columns of what a finding is about."""
_TOOL_WAIT_S = 5.0
_ENGINE_WAIT_S = 60.0


def doctor(*, in_json: bool, probe: bool = False, peer: str = "") -> int:
    """Print the findings; the exit status is 1 if one of them is a problem.

    ``probe``: examine the network although no ring was set up. ``peer``: the address of a machine to be reached.
    """
    findings = examine(probe=probe, peer=peer)
    if in_json:
        answer(as_json([asdict(finding) for finding in findings]))
    else:
        width = max(_WIDTH, *(len(finding.about) for finding in findings))
        answer("".join(_lines(finding, width) for finding in findings))
    return 1 if any(finding.mark == "problem" for finding in findings) else 0


def examine(*, probe: bool = False, peer: str = "") -> list[Finding]:
    machine = this_machine()
    settings = open_settings(look_only=True).settings
    facts = engine_facts(settings.load)
    examinations: list[Callable[[], list[Finding]]] = [
        _program,
        _processor,
        lambda: _memory(facts),
        lambda: _graphics(machine),
        _libraries,
        lambda: _runtime(machine),
        lambda: _kernels_and_model(facts, settings.model),
        _engine,
        lambda: network(probe=probe, peer=peer),
        _settings,
        _conversations,
        _models,
        _places,
    ]
    return [finding for examination in examinations for finding in examination()]


def _lines(finding: Finding, width: int) -> str:
    """The finding and its way out. ``width``: columns of the subject."""
    line = f"{_SIGNS[finding.mark]} {finding.about:{width}} {one_line(finding.text)}\n"
    return line + (f"{'':{width + 3}}fix: {one_line(finding.way_out)}\n" if finding.way_out else "")


def _program() -> list[Finding]:
    version = importlib.metadata.version("privatellm")
    return [Finding("privatellm", f"{version}, Python {platform.python_version()} on {platform.platform(terse=True)}")]


def _processor() -> list[Finding]:
    import psutil

    features = [feature for feature in _CPU_FEATURES if feature in cpu_features()]
    cores = f"{psutil.cpu_count(logical=False) or '?'} cores, {os.cpu_count()} threads"
    return [Finding("processor", f"{platform.machine()}, {cores}; {', '.join(features) or 'no known vector features'}")]


def cpu_features() -> frozenset[str]:
    """The processor's features by Linux's names; empty if the system does not report them."""
    if sys.platform == "darwin":
        return _darwin_features()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _darwin_features() -> frozenset[str]:
    """The features that sysctl reports: ``hw.optional.arm.FEAT_BF16: 1`` is Linux's ``bf16``."""
    query = ["/usr/sbin/sysctl", "hw.optional"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=_TOOL_WAIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    pairs = (line.partition(":") for line in result.stdout.splitlines())
    return frozenset(
        name.rsplit(".", 1)[-1].removeprefix("FEAT_").lower() for name, _, value in pairs if value.strip() == "1"
    )


def _memory(facts: DoctorFacts | str) -> list[Finding]:
    """The memory that this program may use, as loading and planning see it."""
    if isinstance(facts, str):
        return []
    available = f"{byte_size(facts.memory_free)} available of {byte_size(facts.memory_total)}"
    if facts.memory_total < facts.memory_of_machine:
        available += (
            f", the limit of this container or control group; the machine has {byte_size(facts.memory_of_machine)}"
        )
    return [Finding("memory", available)]


def _graphics(machine: Machine) -> list[Finding]:
    if machine.apple_silicon:
        return [Finding("GPU", "Apple GPU, sharing the machine's memory")]
    if not machine.gpu:
        return [Finding("GPU", "none found; the model runs on the CPU", "note")]
    names = nvidia_gpus()
    if names is None:
        return [Finding("GPU", "there is one; without nvidia-smi its name and memory are not known", "note")]
    if names:
        return [Finding("GPU", "; ".join(names))]
    return [Finding("GPU", "the NVIDIA driver lists no GPU", "problem", "run nvidia-smi")]


def nvidia_gpus() -> list[str] | None:
    """Name and memory of each GPU, as nvidia-smi reports them; empty if it fails, None if it is not there."""
    tool = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=WSL_LIBRARIES)
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        result = subprocess.run(
            query, capture_output=True, text=True, timeout=_TOOL_WAIT_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    return [line.strip() for line in result.stdout.splitlines() if line.strip()]


def _libraries() -> list[Finding]:
    """Versions from the packages' metadata: importing torch would take seconds."""
    versions = []
    for library in _LIBRARIES:
        try:
            versions.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return [Finding("libraries", ", ".join(versions))]


def _runtime(machine: Machine) -> list[Finding]:
    name, reason = default_runtime(machine)
    findings = [Finding("runtime", f"auto is {name} ({reason})")]
    if not machine.torch and not (machine.apple_silicon and name == "mlx"):
        findings[0] = Finding("runtime", "torch is not installed", "problem", "install privatellm again")
    elif machine.apple_silicon and name != "mlx":
        findings[0] = Finding("runtime", f"auto is {name} ({reason})", "note", "pip install mlx mlx-lm")
    return findings


def _kernels_and_model(facts: DoctorFacts | str, model: str) -> list[Finding]:
    """The engine's kernels, and what runs ``model``, the one of the settings."""
    if isinstance(facts, str):
        return [Finding("kernels", facts, "problem", f"the end of {locate('logs') / 'engine.log'} may show why")]
    return [_kernels(facts), *([] if facts.kernels_problem else _model(facts, model))]


def engine_facts(load: Load) -> DoctorFacts | str:
    """The engine's facts, from a separate process because this one does not import the engine; or an error message."""
    command = [sys.executable, "-P", "-m", "engine.doctor_facts"]
    try:
        done = subprocess.run(
            command,
            check=False,
            input=msgspec.json.encode(load),
            capture_output=True,
            timeout=_ENGINE_WAIT_S,
            env=child_environment(),
        )
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout, type=DoctorFacts)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        return f"the engine could not be examined ({error})"
    if done.returncode < 0:
        return f"the process that examined the kernels was ended by signal {-done.returncode}"
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    return f"the engine could not be examined ({''.join(last) or f'exit status {done.returncode}'})"


def _kernels(facts: DoctorFacts) -> Finding:
    if facts.kernels_problem:
        return Finding("kernels", facts.kernels_problem, "problem", "unset PRIVATELLM_KERNELS")
    if facts.kernels != "none":
        others = [name for name in facts.instruction_sets if name != facts.kernels]
        more = f"; also available: {', '.join(others)}" if others else ""
        threads = f"{facts.threads} thread{'' if facts.threads == 1 else 's'}"
        return Finding("kernels", f"{facts.kernels}, {threads} ({facts.kernels_reason}{more})")
    slow = "torch's own, which are slower"
    if platform.machine() == "x86_64" and "avx512_bf16" not in cpu_features():
        slow += ", above all for bfloat16, which this processor does not support"
    return Finding(
        "kernels", f"{slow}: {facts.kernels_reason}", "note", facts.kernels_way_out or "unset PRIVATELLM_KERNELS"
    )


def _model(facts: DoctorFacts, model: str) -> list[Finding]:
    if facts.model_problem:
        # A model that is not here yet is reported by _models, with the way to get one; a damaged one is a problem.
        text = f"unknown for {model}: {facts.model_problem}"
        return [Finding("trunk", text, "problem" if _is_here(model) else "note")]
    trunk = Finding("trunk", f"{facts.runtime} for {model} ({facts.runtime_reason})")
    if facts.calibrated is None:
        return [trunk]
    if facts.calibrated:
        return [trunk, Finding("calibration", facts.calibration)]
    return [trunk, Finding("calibration", facts.calibration, "note", f"privatellm bench experts {shlex.quote(model)}")]


def _is_here(model: str) -> bool:
    try:
        return local_models.resolve(model).folder is not None
    except ModelError:
        return False


def _engine() -> list[Finding]:
    """Whether the engine process starts and answers, as findings."""

    async def start() -> None:
        engine = EngineClient()
        try:
            await engine.start()
        finally:
            await engine.close()

    try:
        asyncio.run(start())
    except EngineDied as error:
        log = locate("logs") / "engine.log"
        return [Finding("engine", str(error), "problem", f"the end of {log} says why")]
    return [Finding("engine", "starts and answers")]


def _settings() -> list[Finding]:
    """Changes nothing: a damaged file is kept aside when the settings are next used."""
    path = locate("config") / "settings.toml"
    if not path.exists():
        return [Finding("settings", "all have their defaults")]
    file = open_settings(path, look_only=True)
    notes = [Finding("settings", notice, "note", f"edit {path}") for notice in file.notices]
    return notes or [Finding("settings", str(path))]


def _conversations() -> list[Finding]:
    from app.conversations.opening import DATABASE

    path = locate("data") / DATABASE
    findings = []
    if not path.exists():
        findings.append(Finding("conversations", "none yet"))
    else:
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=1.0)) as connection:
                (count,) = connection.execute("SELECT count(*) FROM conversation").fetchone()
            findings.append(Finding("conversations", f"{count} in {path}"))
        except sqlite3.Error as error:
            findings.append(
                Finding("conversations", f"{path}: {error}", "problem", "start the chat to recover what is readable")
            )
    with closing(sqlite3.connect(":memory:")) as connection:
        options = {name for (name,) in connection.execute("PRAGMA compile_options")}
    if "ENABLE_FTS5" not in options:
        findings.append(
            Finding(
                "search",
                "SQLite has no FTS5, so a search reads all messages",
                "note",
                "install a Python whose SQLite has FTS5",
            )
        )
    return findings


def _models() -> list[Finding]:
    folder = _existing(locate("models"))
    try:
        names = [model.name for model in local_models.installed()]
        free = shutil.disk_usage(folder).free
    except (ModelError, OSError) as error:
        return [Finding("models", str(error), "problem")]
    text = f"{', '.join(names) or 'none yet'}; {byte_size(free)} free in {folder}"
    return [Finding("models", text) if names else Finding("models", text, "note", "privatellm models pull starter")]


def _places() -> list[Finding]:
    return [_place(kind) for kind in KINDS]


def _place(kind: Kind) -> Finding:
    """The folder of ``kind``. It need not exist yet if it can be made."""
    folder = locate(kind)
    existing = _existing(folder)
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Finding(f"{kind} folder", str(folder))
    why = "may not be written to" if existing.is_dir() else "is not a folder"
    return Finding(
        f"{kind} folder",
        f"{folder}: {existing} {why}",
        "problem",
        "change its permissions, or choose another place: PRIVATELLM_HOME=/some/folder",
    )


def _existing(folder: Path) -> Path:
    """``folder``, or the nearest above it that exists."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())
