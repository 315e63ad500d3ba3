"""macOS' permission for the local network, which belongs to the terminal app that privatellm runs in."""

from __future__ import annotations

import errno
from collections.abc import Mapping

_NAMES = {"iTerm.app": "iTerm", "vscode": "Visual Studio Code", "ghostty": "Ghostty", "WarpTerminal": "Warp"}
"""The names of apps in System Settings, where they differ from what ``TERM_PROGRAM`` says."""


def may_use_local_network(environment: Mapping[str, str]) -> bool:
    """Whether macOS asks for no permission: Terminal.app and remote logins have it."""
    return environment.get("TERM_PROGRAM") == "Apple_Terminal" or "SSH_CONNECTION" in environment


def local_network_permission(terminal: str) -> str:
    """How to give the permission to ``terminal``, which is what ``TERM_PROGRAM`` says, or empty."""
    known = terminal and terminal.isprintable() and terminal not in ("tmux", "screen")
    name = _NAMES.get(terminal, terminal) if known else "your terminal app"
    return (
        f"allow {name} under System Settings > Privacy & Security > Local Network (if it is not in the list: "
        "start the app anew and try again)"
    )


def permission_lacked(error: OSError, environment: Mapping[str, str], system: str) -> str:
    """How to give the permission, if ``error`` of a connection on ``system`` may come from its lack; else empty.

    macOS then says that there is no route to the host.
    """
    if system != "darwin" or error.errno != errno.EHOSTUNREACH or may_use_local_network(environment):
        return ""
    return local_network_permission(environment.get("TERM_PROGRAM", ""))
