"""The settings file: ``settings.toml`` in the configuration folder. Comments and unknown keys are kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.files import name_aside, read_whole, write_whole
from app.settings.fields import GROUPS, SettingError, Value
from app.settings.schema import SCHEMA, Settings, setting_named
from engine.system.locations import locate

if TYPE_CHECKING:
    from tomlkit import TOMLDocument


class SettingsFile:
    """The settings in the file, and changes to them.

    Opening never fails. A damaged file is kept aside and the defaults are used. A value that is not allowed stays in
    the file and its default is used. Unknown keys are kept. ``notices`` has a line for each of these.
    """

    def __init__(self, path: Path, *, look_only: bool = False) -> None:
        self.path = path
        self._look_only = look_only
        self.notices: list[str] = []
        self.refused: set[str] = set()
        """Keys of settings that may have a value in the file which is not used."""
        self.unsaved: dict[str, Value] = {}
        """The saved values, by their keys, of settings that have another value until the program ends."""
        self._used_over: dict[tuple[str, Value], Value] = {}
        """The value that was saved while another, by its key and itself, was used until the program ends."""
        self.settings = Settings()
        self._read()

    def change(self, key: str, value: object) -> Settings:
        """Set one setting and write the file. What another process changed in the file meanwhile is kept.

        Raises SettingError if the value is not allowed, or if the file cannot be written; then the new value is in
        effect until the program ends.
        """
        changed = self.settings.with_value(key, value)
        self.settings = changed
        self.refused.discard(key)
        self.unsaved.pop(key, None)
        self._used_over.pop((key, changed.value(key)), None)
        self.notices = []
        try:
            document = self._document()
            _put(document, key, changed.value(key))
            write_whole(self.path, document.as_string())
        except OSError as error:
            raise SettingError(
                f"the setting {key} is in effect but could not be saved to {self.path}: {error.strerror or error}"
            ) from error
        return changed

    def go_back(self, key: str, value: Value) -> None:
        """Set one setting to an earlier value. If that was not saved then, it is not saved now.

        Raises SettingError as :meth:`change` does.
        """
        if (key, value) not in self._used_over:
            self.change(key, value)
            return
        saved = self._used_over[key, value]
        try:
            if key not in self.unsaved:
                self.change(key, saved)
        finally:
            self.use(key, value)

    def use(self, key: str, value: Value) -> Settings:
        """Set one setting until the program ends; the file stays as it is. Raises SettingError."""
        changed = self.settings.with_value(key, value)
        self._used_over[key, changed.value(key)] = self.unsaved.setdefault(key, self.settings.value(key))
        self.settings = changed
        self.refused.discard(key)
        return self.settings

    def _read(self) -> None:
        try:
            content = self._content()
        except OSError as error:
            self.notices.append(
                f"The settings in {self.path} cannot be read ({error.strerror or error}); defaults are used."
            )
            self.refused = {setting.key for setting in SCHEMA}
            return
        self.settings, problems, refused = _settings_from(content)
        self.refused |= refused
        self.notices += [f"{self.path.name}: {problem}" for problem in problems]

    def _content(self) -> dict[str, Any]:
        """The file's content, for reading only. Raises OSError.

        The library that keeps comments takes longer to import than reading the settings otherwise.
        """
        import tomllib

        try:
            return tomllib.loads(read_whole(self.path))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            return self._document().unwrap()

    def _document(self) -> TOMLDocument:
        """The parsed file; an empty document if there is none or it is damaged."""
        import tomlkit
        from tomlkit.exceptions import TOMLKitError

        try:
            return tomlkit.parse(read_whole(self.path))
        except FileNotFoundError:
            return tomlkit.document()
        except (TOMLKitError, ValueError, RecursionError) as error:
            self.refused = {setting.key for setting in SCHEMA}
            reason = " ".join(str(error).split()) or type(error).__name__
            if self._look_only:
                self.notices.append(f"The settings file is damaged ({reason}); defaults are used.")
            else:
                aside = self.path.rename(name_aside(self.path))
                self.notices.append(
                    f"The settings file was damaged ({reason}); it is kept as {aside.name} and defaults are used."
                )
            return tomlkit.document()


def open_settings(path: Path | None = None, *, look_only: bool = False) -> SettingsFile:
    """The person's settings; never fails (see :class:`SettingsFile`). ``look_only``: a damaged file stays in place."""
    return SettingsFile(path or locate("config") / "settings.toml", look_only=look_only)


def _settings_from(content: dict[str, Any]) -> tuple[Settings, list[str], set[str]]:
    """The settings of a parsed file, a line for each entry that is not used, and the keys of those entries."""
    settings, problems, refused = Settings(), [], set()
    for group, table in content.items():
        if group not in GROUPS or not isinstance(table, dict):
            problems.append(f"{group!r} is unknown; it is kept and not used.")
            refused |= {setting.key for setting in SCHEMA if setting.group == group}
            continue
        settings_by_key = {setting.key: setting for setting in SCHEMA if setting.group == group}
        for key, value in table.items():
            if key not in settings_by_key:
                problems.append(f"{group}.{key} is unknown; it is kept and not used.")
                continue
            try:
                settings = settings.with_value(key, value)
            except SettingError as error:
                refused.add(key)
                default = settings_by_key[key].default
                problems.append(f"{error}; {'it is not' if default is None else f'{default!r} is'} used.")
    return settings, problems, refused


def _put(document: TOMLDocument, key: str, value: Value) -> None:
    """Set ``key`` in its table. None removes it."""
    import tomlkit

    group = setting_named(key).group
    table = document.get(group)
    if not isinstance(table, dict):
        if value is None:
            return
        # Something else stood where the table belongs (``model = 3``): there is no way to keep both under one name.
        document[group] = table = tomlkit.table()
    if value is None:
        table.pop(key, None)
    elif isinstance(value, str) and "\n" in value and "\r" not in value:
        table[key] = tomlkit.string(value, multiline=True)
    else:
        table[key] = value
