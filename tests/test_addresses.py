"""The tests of a module are found by its name: their folders are those of the packages, their files are its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("app", "engine", "discovery")
MIRRORED = (*PACKAGES, "benchmarks")
ELSEWHERE = {"faults", "inventory", "packaging", "support"}
"""Folders of tests of no single package: rings whose machines fail, what is offered, the wheel, and the helpers."""

THROUGH = {
    "app/chat/commands/test_table.py": "app/chat/commands/command",
    "app/chat/test_controller.py": "app/chat/engine_link app/network",
    "app/chat/test_drafts.py": "app/tui/chat/drafting",
    "app/chat/test_finding.py": "app/tui/chat/find_line",
    "app/chat/test_first_run.py": "app/chat/downloads app/tui/screens/updates",
    "app/commands/test_root.py": "app/commands/models app/commands/options app/interrupts",
    "app/conversations/importing/test_reading.py": "app/commands/chats app/conversations/exporting "
    + " ".join(f"app/conversations/importing/{name}" for name in ("adding", "chatgpt", "claude", "llm_log", "own")),
    "app/conversations/test_drafts.py": "app/conversations/attached",
    "app/conversations/test_opening_moved.py": "app/conversations/following",
    "app/plain/test_chat.py": "app/plain/front",
    "app/plain/test_chat_process.py": "app/plain/starting",
    "app/serve/test_gate.py": "app/running_servers",
    "app/settings/test_file.py": "app/files",
    "app/settings/test_schema.py": "app/machine",
    "app/tui/chat/test_attaching.py": "app/tui/render/attachments",
    "app/tui/chat/test_completion.py": "app/tui/ranking app/tui/screens/slash_completion",
    "app/tui/chat/test_prompt.py": "app/tui/render/formatting app/tui/render/text_field",
    "app/tui/panels/test_beam_panel.py": "app/tui/panels/chat_panels",
    "app/tui/render/test_highlighting.py": "app/tui/render/highlight_process",
    "app/tui/render/test_markdown.py": "app/tui/render/markdown_parser app/tui/render/rendered",
    "app/tui/render/test_model_table.py": "app/chat/model_choices",
    "app/tui/screens/test_chat.py": "app/tui/screens/front",
    "app/tui/screens/test_log.py": "app/log_tail",
    "app/tui/test_application_failures.py": "app/tui/terminal/guarded",
    "discovery/test_identity.py": "discovery/storage",
    "engine/bench/test_residency.py": "engine/runtimes/mlx/packing",
    "engine/cluster/head/test_faster_links.py": "engine/cluster/epoch_links engine/ipc/messages/ring",
    "engine/cluster/head/test_forming.py": "engine/runtimes/model_headers",
    "engine/cluster/head/test_forming_processes.py": "engine/cluster/formation engine/cluster/head/shard_upload "
    "engine/cluster/plan_request",
    "engine/cluster/head/test_lacked_model.py": "engine/cluster/head/joined_source",
    "engine/cluster/head/test_remote_model.py": "engine/cluster/commands engine/cluster/worker/follower "
    "engine/ipc/progress",
    "engine/cluster/membership/test_heartbeat.py": "engine/cluster/parts",
    "engine/cluster/membership/test_links_trying.py": "engine/cluster/head/epoch_specs "
    "engine/cluster/head/missing_links",
    "engine/cluster/membership/test_server.py": "engine/cluster/membership/peer_table",
    "engine/cluster/test_all_gather.py": "engine/moe/expert_parallel",
    "engine/cluster/test_central.py": "engine/moe/held",
    "engine/cluster/transport/test_exchange_processes.py": "engine/bench/exchange_node",
    "engine/cluster/transport/test_mesh.py": "engine/cluster/transport/tls_socket",
    "engine/cluster/weights/test_transfer.py": "engine/models/folders/shard_files",
    "engine/cluster/worker/test_model_provider.py": "engine/cluster/head/model_sources",
    "engine/models/architectures/test_record.py": " ".join(
        path.relative_to(ROOT).with_suffix("").as_posix()
        for path in (ROOT / "engine/models/architectures/records").glob("[!_]*.py")
    ),
    "engine/models/store/test_fetching.py": "engine/models/formats/json_files",
    "engine/models/architectures/test_gguf_architectures.py": "engine/models/architectures/gguf_metadata",
    "engine/models/store/test_gguf_folder.py": "engine/models/formats/gguf_file",
    "engine/planning/test_placement_planner.py": "engine/planning/placement_search",
    "engine/residency/test_mapped.py": "engine/system/durable_files",
    "engine/runtimes/mlx/test_measuring.py": "engine/bench/throughput",
    "engine/runtimes/mlx/test_model_oracle.py": "engine/runtimes/mlx/experts engine/runtimes/mlx/routing",
    "engine/runtimes/native/test_model_oracle.py": "engine/moe/kernel_backend engine/models/architectures/parts",
    "engine/runtimes/test_choosing.py": "engine/doctor_facts",
    "engine/runtimes/test_protocol.py": "engine/moe/timing",
    "engine/runtimes/test_runtimes_gguf_packed.py": "engine/runtimes/torch/packed_modules "
    + " ".join(f"engine/models/architectures/gguf_{name}" for name in ("delta_net", "kda", "latent", "mamba")),
    "engine/runtimes/torch/offload/test_gates.py": "engine/runtimes/torch/experts_module",
    "engine/runtimes/torch/offload/test_hybrid_faults.py": "engine/runtimes/torch/gpu_memory_plan",
    "engine/runtimes/torch/offload/test_local_torch.py": "engine/moe/backend engine/moe/executor",
    "engine/session/test_disk_prefixes.py": "engine/models/store/prefix_files",
    "engine/session/test_loading.py": "engine/model_in_use engine/session/constrained",
    "engine/test_connections.py": "engine/ipc/engine_sockets",
    "engine/test_host_process.py": " ".join(
        f"engine/ipc/messages/{name}" for name in ("events", "framing", "parts", "requests")
    ),
    "faults/test_changed_files.py": "engine/moe/kernels/file_guard",
    "faults/test_killed_benchmarks.py": "engine/system/temporary_folders",
    "faults/test_memory_limits.py": "engine/system/free_memory",
}
"""File of tests -> the modules that are tested through others, as it does."""


def modules(*packages: str) -> set[str]:
    """Modules of ``packages`` as paths without an ending; packages themselves have nothing to test."""
    found = (path.relative_to(ROOT) for package in packages for path in (ROOT / package).rglob("*.py"))
    return {path.with_suffix("").as_posix() for path in found if path.name not in ("__init__.py", "__main__.py")}


def files_of_tests(*folders: str) -> list[Path]:
    """Of the tests in ``folders``, relative to the folder of all tests."""
    return [
        path.relative_to(ROOT / "tests") for folder in folders for path in (ROOT / "tests" / folder).rglob("test_*.py")
    ]


def subject(file: Path) -> str | None:
    """The module, or the package, that a file of tests is named for: of several the one with the longest name."""
    folder, stem = ROOT / file.parent, file.stem.removeprefix("test_")
    names = [path.stem for path in folder.glob("*.py")] + [path.name for path in folder.iterdir() if path.is_dir()]
    named = [name for name in (*names, folder.name) if stem == name or stem.startswith(f"{name}_")]
    return max(named, key=len, default=None)


def imported(file: Path) -> set[str]:
    """Modules that a file of tests imports or names, as paths without an ending."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name.replace(".", "/") for name in names}


def test_every_folder_of_tests_is_one_of_a_package() -> None:
    folders = {file.parent for file in files_of_tests(".") if file.parts[0] not in ELSEWHERE}
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder).is_dir()] == []
    assert {folder.parts[0] for folder in folders if folder.parts} == set(MIRRORED)


@pytest.mark.parametrize("package", MIRRORED)
def test_every_file_is_named_for_a_module_beside_which_it_lies(package: str) -> None:
    assert [str(file) for file in files_of_tests(package) if subject(file) is None] == []


def test_every_module_has_tests_under_its_name_or_in_its_folder() -> None:
    """In its folder: a file of tests there that imports it."""
    reached = {f"{file.parent.as_posix()}/{subject(file)}" for file in files_of_tests(*PACKAGES)}
    unnamed = modules(*PACKAGES) - reached
    for file in files_of_tests(*PACKAGES):
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        if any(Path(module).parent == file.parent and Path(module).name in text for module in unnamed):
            reached |= {module for module in imported(file) if Path(module).parent == file.parent}
    through = {module for named in THROUGH.values() for module in named.split()}
    assert sorted(modules(*PACKAGES) - reached - through) == []
    assert sorted(through & reached) == [], "these need no line of THROUGH any more"
    assert sorted(through - modules(*PACKAGES)) == [], "these are no modules"
    assert [file for file in THROUGH if not (ROOT / "tests" / file).exists()] == []
