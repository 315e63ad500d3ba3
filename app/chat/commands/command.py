"""A command of the chat, and what it needs of the program that it is typed in. No Textual."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from app.chat.controller import ChatController
    from app.chat.state import Entry, Severity
    from app.chat.thread import Copying

Result = TypeVar("Result")


class Front(Protocol):
    """The screen, or the chat in lines, as commands see it.

    Methods that show something return at once on the screen. In lines they return when the person is done with it.
    """

    @property
    def controller(self) -> ChatController: ...

    @property
    def copying(self) -> Copying: ...

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function of the controller where it may be called. Returns its result and raises what it raises."""
        ...

    def run(self, work: Coroutine[None, None, None]) -> None:
        """Run ``work``, which says itself what came of it."""
        ...

    # --- words ------------------------------------------------------------------------------------------------------

    def say(self, text: str, severity: Severity = "information", *, in_lines: str | None = None) -> None:
        """Say one sentence. ``in_lines``: another wording for lines, which show less. An empty text is not said."""
        ...

    def tell(self, title: str, lines: Sequence[str]) -> None:
        """Show some lines to read."""
        ...

    def ask(self, question: str, then: Callable[[str], object], *, text: str = "", in_lines: str = "") -> None:
        """Ask for one line, which may be ``text``, and call ``then`` with it unless it is empty.

        ``in_lines``: the question in lines. If it is empty, ``text`` is taken there without asking.
        """
        ...

    def change(self, title: str, text: str, hint: str, then: Callable[[str], object], *, in_lines: str) -> None:
        """Let the person change ``text`` of many lines, and call ``then`` with it. Lines only say ``in_lines``."""
        ...

    def hide_notice(self) -> None:
        """Put away the sentence that stands above the prompt."""
        ...

    def to_prompt(self, *, end: bool = False) -> None:
        """Go back to typing. ``end``: with the end of the conversation in sight."""
        ...

    def write_answer(self) -> None:
        """Write the answer that was just asked for, until it has ended. A screen shows it anyway."""
        ...

    # --- what each shows in its own way -------------------------------------------------------------------------------

    def help(self) -> None: ...
    def keys(self) -> None: ...
    def chats(self) -> None: ...
    def models(self) -> None: ...
    def machines(self) -> None: ...
    def settings(self) -> None: ...
    def personas(self) -> None: ...
    def sampling(self, used: str = "") -> None:
        """Show the values of the chat. ``used``: name of the preset that was just given to it."""
        ...

    def beams(self) -> None: ...
    def several(self) -> None:
        """Show the answers to the question that was asked several times at once, and let the person pick one."""
        ...

    def timing(self) -> None: ...
    def thoughts(self) -> None: ...
    def log(self) -> None: ...
    def edit(self, question: Entry) -> None: ...
    def history(self, words: str) -> None: ...
    def editor(self) -> None: ...
    def find(self, text: str) -> None: ...
    def stop(self) -> None: ...
    def suspend(self) -> None: ...
    def quit(self) -> None: ...


@dataclass(frozen=True)
class Shortcut:
    """Keys that call a command.

    ``id``: the binding's name in the keymap file, whose beginning says where it is bound. ``keys``: by Textual's names.
    ``label``: a shorter title for the chat screen's line of keys. ``shown``: it stands in that line.
    """

    id: str
    keys: tuple[str, ...]
    label: str = ""
    shown: bool = False


@dataclass(frozen=True)
class Command:
    """A command of the chat.

    ``help`` is one sentence without its full stop, and ``help_in_lines`` another one where lines do something else.
    ``run`` is called with the front and what was typed after the name.

    ``argument`` is the argument's name in the help; a command without one takes no argument. ``values`` gives those
    that are offered while it is typed, each with what is said of it. ``values_are_slow``: they take long to look up.
    """

    name: str
    title: str
    help: str
    run: Callable[[Front, str], None]
    argument: str = ""
    shortcut: Shortcut | None = None
    aliases: tuple[str, ...] = ()
    help_in_lines: str = ""
    values: Callable[[], Iterable[tuple[str, str]]] | None = None
    values_are_slow: bool = False

    @property
    def usage(self) -> str:
        """The command with its argument: ``/beams [width]``."""
        return f"/{self.name} {self.argument}".rstrip()
