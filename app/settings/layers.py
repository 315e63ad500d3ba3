"""One chat's own values over the person's settings: which apply, where each comes from, presets. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from app.settings.fields import Setting, SettingError, Value
from app.settings.schema import SCHEMA, Settings, setting_named
from engine.ipc.messages import Sampling

ADJUSTABLE: tuple[Setting, ...] = tuple(
    setting for setting in SCHEMA if setting.group == "answer" and setting.key != "system_prompt"
)
"""The settings that a chat can have its own value of: the group ``answer`` but for the system prompt, which is text."""
ADJUSTABLE_KEYS = frozenset(setting.key for setting in ADJUSTABLE)

SAMPLED = tuple(name for name in Sampling.__struct_fields__ if name in ADJUSTABLE_KEYS)
"""Keys of the values that a beam search does not use."""

Source = Literal["chat", "persona", "settings", "default"]
"""The origin of a value. ``default``: the model's own default, or the program's if the model has none."""


def allowed(content: object) -> dict[str, Value]:
    """The entries of ``content`` that a chat can have. ``content`` may be any object."""
    values: dict[str, Value] = {}
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if key in ADJUSTABLE_KEYS:
            try:
                values[key] = setting_named(key).check(value)
            except SettingError:
                continue
    return values


@dataclass(frozen=True)
class ChatValues:
    """One chat's differences from the settings. None as a value means the model's own default.

    ``persona``: name of the chat's persona. ``given``: the persona's values when it was chosen, so that later changes
    of the persona do not change the chat. ``own``: values set in the chat, which override ``given``.
    """

    persona: str = ""
    given: Mapping[str, Value] = field(default_factory=dict)
    own: Mapping[str, Value] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Value]:
        """The values that come before the settings."""
        return {**self.given, **self.own}

    def source(self, key: str, settings: Settings) -> Source:
        if key in self.own:
            return "chat"
        if key in self.given:
            return "persona"
        return "default" if settings.value(key) == setting_named(key).default else "settings"

    def having(self, changes: Mapping[str, object]) -> ChatValues:
        """A copy with ``changes`` as its own values, checked. Raises SettingError."""
        for key in changes:
            adjustable(key)
        checked = {key: setting_named(key).check(value) for key, value in changes.items()}
        return dataclasses.replace(self, own={**self.own, **checked})

    def without(self, keys: Iterable[str]) -> ChatValues:
        """A copy without own values of ``keys``: the persona's or the settings' apply again."""
        gone = set(keys)
        return dataclasses.replace(self, own={key: value for key, value in self.own.items() if key not in gone})

    def with_preset(self, preset: Preset, settings: Settings) -> ChatValues:
        """A copy with the values of ``preset``. A value that applies anyway does not become the chat's own."""
        rest = self.without(preset.values)
        below = effective(settings, rest)
        return rest.having({key: value for key, value in preset.values.items() if below.value(key) != value})

    @property
    def stored(self) -> dict[str, Any]:
        """The form in which a conversation keeps it; empty if the chat sets nothing."""
        content = {"persona": self.persona, "given": dict(self.given), "own": dict(self.own)}
        return {name: value for name, value in content.items() if value}

    @staticmethod
    def restored(content: object) -> ChatValues:
        """The values in ``content``, which :attr:`stored` gave, or any object. Invalid entries are left out."""
        found = content if isinstance(content, Mapping) else {}
        persona = found.get("persona")
        name = persona if isinstance(persona, str) and persona.isprintable() else ""
        return ChatValues(name, allowed(found.get("given")), allowed(found.get("own")))


def effective(settings: Settings, chat: ChatValues) -> Settings:
    """The settings with which a chat's answers are asked for."""
    changes: dict[str, Any] = chat.values
    return dataclasses.replace(settings, **changes) if changes else settings


def value_in_effect(key: str, options: Settings, own: Sampling | None) -> Value:
    """The value of ``key`` by which an answer is asked for with ``options`` from a model that samples by ``own``.

    None if it is the model's and unknown.
    """
    value = options.value(key)
    if value is not None or own is None or key not in SAMPLED:
        return value
    if key == "temperature" and own.temperature == 0 and _filters(options):
        return 1.0
    found: Value = getattr(own, key)
    return found


def _filters(options: Settings) -> bool:
    """Whether tokens are filtered. Then the engine samples even with a model that by default takes the likeliest
    token."""
    return any(value is not None for value in (options.top_p, options.top_k, options.min_p))


def adjustable(name: str) -> Setting:
    """The setting that a person names by its key or its label, in whatever case. Raises SettingError."""
    word = _plain(name)
    for setting in ADJUSTABLE:
        if word in (_plain(setting.key), _plain(setting.label)):
            return setting
    raise SettingError(f"A chat has no value {name!r}; there are {', '.join(known.key for known in ADJUSTABLE)}.")


def _plain(name: str) -> str:
    return name.strip().casefold().replace("-", "_").replace(" ", "_")


def shown(setting: Setting, value: Value) -> str:
    """``value`` as it is typed and read; ``default`` for the model's own."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Preset:
    """Values that are set together. ``name`` is one word."""

    name: str
    about: str
    values: Mapping[str, Value]


_NO_SAMPLING: dict[str, Value] = dict.fromkeys(name for name in SAMPLED if name != "seed")

PRESETS: tuple[Preset, ...] = (
    Preset("exact", "always the likeliest token", {**_NO_SAMPLING, "temperature": 0.0, "beams": 1}),
    Preset("balanced", "what the model's authors chose", {**_NO_SAMPLING, "beams": 1}),
    # Min-p of 0.05 to 0.1 keeps text coherent at temperatures above 1: "Turning Up the Heat" (ICLR 2025).
    Preset(
        "creative",
        "more surprising words, no improbable ones",
        {**_NO_SAMPLING, "temperature": 1.2, "min_p": 0.1, "top_p": 1.0, "top_k": 0, "beams": 1},
    ),
)
"""The presets. Each sets everything that samples but the seed, and one beam, as a beam search does not sample."""


def preset_named(name: str) -> Preset:
    """The preset whose name begins with ``name``. Raises SettingError if there is none."""
    word = name.strip().casefold()
    found = [preset for preset in PRESETS if word and preset.name.startswith(word)]
    if not found:
        names = ", ".join(preset.name for preset in PRESETS)
        raise SettingError(f"There is no preset {name!r}; there are {names}.")
    return found[0]


def preset_in(options: Settings) -> Preset | None:
    """The preset whose values are those of ``options``; None if there is none."""
    return next((p for p in PRESETS if all(options.value(key) == value for key, value in p.values.items())), None)
