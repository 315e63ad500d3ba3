"""Personas: named system prompts with a model and values of an answer, in the file ``personas.toml``.

Each persona is a table of the file, whose name is the table's. Its keys are those of the settings; one that is left out
is as the settings say, and an empty text is the model's own default. No Textual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.files import name_aside, read_whole, write_whole
from app.settings.fields import Setting, SettingError, Value
from app.settings.layers import ADJUSTABLE
from app.settings.schema import Settings, setting_named
from engine.ipc.messages import Sampling
from engine.system.locations import locate

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

LONGEST_NAME = 60
"""Maximum number of characters of a persona's name."""

_SYSTEM, _MODEL = "system_prompt", "model"
_KNOWN: dict[str, Setting] = {
    setting.key: setting for setting in (setting_named(_SYSTEM), setting_named(_MODEL), *ADJUSTABLE)
}
_HEAD = """\
# Personas of privatellm. Each table is one: its keys are those of the settings (model, system_prompt, temperature).
# What is left out is as in settings.toml; "" is the model's own default.
"""


@dataclass(frozen=True)
class Persona:
    """A system prompt, a model (empty: whichever is in use) and values by the keys of settings, under a name.

    None as a value means the model's own default.
    """

    name: str
    system: str = ""
    model: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)

    @property
    def said(self) -> dict[str, Value]:
        """All that the persona says, by the keys of settings."""
        own = {key: value for key, value in ((_MODEL, self.model), (_SYSTEM, self.system)) if value}
        return {**own, **self.values}

    def values_over(self, settings: Settings) -> dict[str, Value]:
        """The values by which answers are asked for. A persona that samples is not asked with beams of ``settings``."""
        samples = any(key in self.values for key in Sampling.__struct_fields__)
        alone = samples and settings.beams > 1 and "beams" not in self.values
        return {**self.values, "beams": 1} if alone else dict(self.values)

    def checked(self) -> Persona:
        """This persona with its name and values in their usual form. Raises SettingError if they are not allowed."""
        model = str(setting_named(_MODEL).check(self.model)) if self.model.strip() else ""
        values = {key: setting_named(key).check(value) for key, value in self.values.items()}
        return Persona(check_name(self.name), str(setting_named(_SYSTEM).check(self.system)), model, values)


def check_name(name: str) -> str:
    """``name`` without spaces around it. Raises SettingError if no persona can have it."""
    word = name.strip()
    if not word or len(word) > LONGEST_NAME or not word.isprintable():
        raise SettingError(f"A persona's name is one line of 1 to {LONGEST_NAME} characters, not {name[:80]!r}.")
    return word


class PersonasFile:
    """The personas in the file at ``path``, and changes to them.

    Opening never fails, and changes nothing on disk. Entries that are not allowed stay in the file and are not used;
    ``notices`` has a line for each. A file that cannot be parsed is kept aside by the first change. Comments and
    unknown keys are kept. Each change reads the file again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notices: list[str] = []
        self.personas: tuple[Persona, ...] = ()
        """The personas that can be used, in the order of the file."""
        self.read()

    def read(self) -> tuple[Persona, ...]:
        """Read the file again."""
        self.notices = []
        try:
            content, problem = _parsed(self.path)
        except OSError as error:
            content, problem = {}, f"cannot be read: {error.strerror or error}"
        if problem:
            self.notices.append(f"{self.path.name} {problem}; there are no personas.")
        self.personas, problems = personas_from(content)
        self.notices += [f"{self.path.name}: {line}" for line in problems]
        return self.personas

    def find(self, name: str) -> Persona:
        """The persona of that name, else the only one that differs in upper and lower case.

        Raises SettingError with the names that there are.
        """
        word = name.strip()
        near = [persona for persona in self.personas if persona.name.casefold() == word.casefold()]
        exact = [persona for persona in near if persona.name == word]
        if exact or len(near) == 1:
            return (exact or near)[0]
        names = ", ".join(persona.name for persona in self.personas)
        there = f"there are {names}" if names else "there are none yet; /persona in the chat makes one"
        raise SettingError(f"There is no persona {word!r}; {there}.")

    def put(self, persona: Persona, old: str = "") -> Persona:
        """Save ``persona``, in place of the one called ``old`` if that is given. Returns it in its usual form.

        Raises SettingError if it is not allowed, if another persona has its name, or if the file cannot be written.
        """
        persona = persona.checked()
        taken = [known for known in self.read() if known.name.casefold() == persona.name.casefold()]
        if any(known.name != old for known in taken):
            raise SettingError(f"There is a persona {taken[0].name!r} already; choose another name.")

        def change(document: TOMLDocument) -> None:
            _put(document, persona, old or persona.name)

        self._change(change)
        return persona

    def delete(self, name: str) -> None:
        """Delete the persona ``name``. Raises SettingError if there is none or the file cannot be written."""
        self.read()
        self.find(name)

        def change(document: TOMLDocument) -> None:
            document.pop(name, None)

        self._change(change)

    def _change(self, change: Callable[[TOMLDocument], None]) -> None:
        try:
            document = _document(self.path)
            change(document)
            write_whole(self.path, document.as_string())
        except OSError as error:
            raise SettingError(f"The personas could not be saved to {self.path}: {error.strerror or error}.") from error
        self.read()


def open_personas(path: Path | None = None) -> PersonasFile:
    """The person's personas; never fails (see :class:`PersonasFile`)."""
    return PersonasFile(path or locate("config") / "personas.toml")


def personas_from(content: Mapping[str, Any]) -> tuple[tuple[Persona, ...], list[str]]:
    """The personas of a parsed file, and a line for each entry that is not used."""
    personas: list[Persona] = []
    problems: list[str] = []
    for name, table in content.items():
        if not isinstance(table, Mapping):
            problems.append(f"{name!r} is no persona; it is kept and not used.")
            continue
        try:
            word = check_name(name)
            if word != name:
                raise SettingError(f"A persona's name has no spaces around it, unlike {name[:80]!r}.")
        except SettingError as error:
            problems.append(f"{str(error).rstrip('.')}; it is kept and not used.")
            continue
        values, wrong = _values(table)
        problems += [f"{word}: {line}" for line in wrong]
        system, model = values.pop(_SYSTEM, ""), values.pop(_MODEL, "")
        personas.append(Persona(word, str(system), str(model), values))
    return tuple(personas), problems


def _values(table: Mapping[str, Any]) -> tuple[dict[str, Value], list[str]]:
    values: dict[str, Value] = {}
    problems = []
    for key, value in table.items():
        setting = _KNOWN.get(key)
        if setting is None:
            problems.append(f"{key} is unknown; it is kept and not used.")
            continue
        try:
            values[key] = setting.check(None if value == "" and setting.optional else value)
        except SettingError as error:
            problems.append(f"{error}; it is not used.")
    return values, problems


def _parsed(path: Path) -> tuple[dict[str, Any], str]:
    """The file's content, and an error message as the end of a sentence. Raises OSError."""
    import tomllib

    try:
        return tomllib.loads(read_whole(path)), ""
    except FileNotFoundError:
        return {}, ""
    except (ValueError, RecursionError) as error:
        return {}, f"is damaged ({' '.join(str(error).split()) or type(error).__name__})"


def _document(path: Path) -> TOMLDocument:
    """The file to be changed. One that cannot be parsed is renamed and replaced by an empty one. Raises OSError."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    empty = tomlkit.parse(_HEAD)
    try:
        if _parsed(path)[1]:
            raise ValueError
        return tomlkit.parse(read_whole(path))
    except FileNotFoundError:
        return empty
    except (TOMLKitError, ValueError, RecursionError):
        path.rename(name_aside(path))
        return empty


def _put(document: TOMLDocument, persona: Persona, old: str) -> None:
    """Write ``persona`` into the table ``old``, which gets its name. Unknown keys and the table's place are kept."""
    import tomlkit

    before = document.get(old)
    table = before if isinstance(before, dict) else tomlkit.table()
    wanted = {key: "" if value is None else value for key, value in persona.said.items()}
    for key in _KNOWN:
        value = wanted.get(key)
        if value is None:
            table.pop(key, None)
        elif isinstance(value, str) and "\n" in value and "\r" not in value:
            table[key] = tomlkit.string(value, multiline=True)
        else:
            table[key] = value
    if persona.name == old:
        document[old] = table
        return
    # tomlkit cannot rename a table in place: all that follow are written again, in their order.
    order = list(document.items())
    for name, _ in order:
        document.remove(name)
    for name, item in order:
        document[persona.name if name == old else name] = table if name == old else item
