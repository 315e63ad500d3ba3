"""The command palette: what can be done on the screen below it, with the keys that do it too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from textual.app import App, SystemCommand
from textual.dom import DOMNode
from textual.screen import Screen

from app.tui.keymap import readable

_UNINTERESTING = ("command_palette", "focus_next", "focus_previous", "interrupt")
"""Actions that nobody looks for in the palette."""


def screen_commands(screen: Screen[Any], besides: Iterable[str] = ()) -> list[SystemCommand]:
    """The actions that have a key on ``screen`` now: those of the focused widget, of what is around it, of the screen.

    ``besides``: actions, as bindings name them, that are left out.
    """
    found: dict[tuple[DOMNode, str], tuple[str, list[str]]] = {}
    for name, (node, binding, enabled, _) in screen.active_bindings.items():
        action = binding.action.rpartition(".")[2]
        if binding.id is None or not enabled or not binding.description or action in (*_UNINTERESTING, *besides):
            continue
        found.setdefault((node, binding.action), (binding.description, []))[1].append(readable(name))
    return [
        SystemCommand(title, f"Here: {', '.join(keys[:2])}", _running(screen.app, action, node))
        for (node, action), (title, keys) in found.items()
    ]


def _running(app: App[Any], action: str, node: DOMNode) -> Callable[[], object]:
    """Runs ``action`` of ``node``, which must be given back its focus by the palette before."""
    return lambda: app.call_later(app.run_action, action, node)
