"""The command palette: what can be done on the screen below it, with the keys that do it too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from textual.app import App, SystemCommand
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.dom import DOMNode
from textual.screen import Screen

from app.tui.actions import title_of
from app.tui.keymap import readable
from app.tui.ranking import recent_first, remember, score
from app.tui.terminal.application import TerminalApp

_UNINTERESTING = ("command_palette", "focus_next", "focus_previous", "interrupt")
"""Actions that nobody looks for in the palette. Those of commands are in it anyway."""


class RankedCommands(Provider):
    """The commands of the screen: those run last, then the others in the screen's own order.

    What is typed is looked for in titles and descriptions, letter by letter.
    """

    async def discover(self) -> Hits:
        for command in self._ranked():
            yield DiscoveryHit(command.title, self._running(command), help=command.help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command in self._ranked():
            fits = score(matcher, command)
            if fits > 0:
                title = matcher.highlight(command.title)
                yield Hit(fits, title, self._running(command), text=command.title, help=command.help)

    @property
    def _recent(self) -> list[str]:
        return cast(TerminalApp, self.app).recent_commands

    def _ranked(self) -> list[SystemCommand]:
        return recent_first(self.app.get_system_commands(self.screen), self._recent)

    def _running(self, command: SystemCommand) -> Callable[[], object]:
        return partial(self._run, command)

    def _run(self, command: SystemCommand) -> object:
        remember(self._recent, command.title)
        return command.callback()


def screen_commands(screen: Screen[Any], besides: Iterable[str] = ()) -> list[SystemCommand]:
    """The actions that have a key on ``screen`` now: those of the focused widget, of what is around it, of the screen.

    ``besides``: actions, as bindings name them, that are left out.
    """
    commands: dict[tuple[DOMNode, str], tuple[str, list[str]]] = {}
    for name, (node, binding, enabled, _) in screen.active_bindings.items():
        action = binding.action.rpartition(".")[2]
        if binding.id is None or not enabled or not binding.description:
            continue
        if action.startswith("command(") or action in (*_UNINTERESTING, *besides):
            continue
        commands.setdefault((node, binding.action), (title_of(binding), []))[1].append(readable(name))
    return [
        SystemCommand(title, f"Here: {', '.join(keys[:2])}", _running(screen.app, action, node))
        for (node, action), (title, keys) in commands.items()
    ]


def _running(app: App[Any], action: str, node: DOMNode) -> Callable[[], object]:
    """Runs ``action`` of ``node``, which must be given back its focus by the palette before."""
    return lambda: app.call_later(app.run_action, action, node)
