"""All actions of the screens that have keys, for the keymap file and the screen of keys."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from textual.app import App
from textual.binding import Binding
from textual.dom import DOMNode
from textual.screen import Screen


@dataclass(frozen=True)
class Action:
    """One binding, with all its keys by Textual's names.

    ``place``: the class that has it. ``module``: the module of that class. ``priority``: its keys act before the
    focused field sees them. ``screen``: the class is a screen or an application.
    """

    id: str
    keys: tuple[str, ...]
    title: str
    place: str
    module: str
    priority: bool = False
    screen: bool = False


def title_of(binding: Binding) -> str:
    """The title of ``binding``. The line of keys shows a shorter word."""
    return binding.tooltip or binding.description


@runtime_checkable
class SaysWhyNot(Protocol):
    """A widget or screen that knows why a key of it does nothing at present."""

    def why_not(self, action: str, parameters: tuple[object, ...]) -> str:
        """A sentence; empty if there is nothing better to say than that it is not possible."""
        ...


def why_not(node: DOMNode, action: str, parameters: tuple[object, ...]) -> str:
    """Why ``action`` of ``node`` is not possible now, as a sentence; empty if nothing is known of it."""
    return node.why_not(action, parameters) if isinstance(node, SaysWhyNot) else ""


@functools.cache
def all_actions() -> tuple[Action, ...]:
    """The actions of all screens and widgets, in the order of their ids. Imports all screens."""
    import app.tui

    for module in pkgutil.walk_packages(app.tui.__path__, "app.tui."):
        importlib.import_module(module.name)
    return tuple(sorted(_declared(DOMNode), key=lambda action: (action.id, action.place)))


def _declared(base: type[DOMNode]) -> set[Action]:
    actions: set[Action] = set()
    left, seen = [base], set[type[DOMNode]]()
    while left:
        kind = left.pop()
        if kind in seen:
            continue
        seen.add(kind)
        left += kind.__subclasses__()
        if kind.__module__.startswith("app.") and "BINDINGS" in vars(kind):
            actions |= {
                Action(
                    binding.id,
                    tuple(key.key for key in Binding.make_bindings([binding])),
                    title_of(binding),
                    kind.__name__,
                    kind.__module__,
                    binding.priority,
                    issubclass(kind, (Screen, App)),
                )
                for binding in kind.BINDINGS
                if isinstance(binding, Binding) and binding.id is not None
            }
    return actions
