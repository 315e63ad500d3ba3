# ruff: noqa: RUF009 (each field is made by dataclasses.field, through _setting)
"""The settings: one schema, from which the file, its validation, the settings screen and the documentation are made.

A setting is a field of :class:`Settings`; its :class:`Setting` says which values are allowed. The value None means the
model's own default. No Textual here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, cast

from app.machine import Machine, unavailable_reason
from app.settings.fields import (
    DESCRIPTIONS,
    GIB,
    GROUPS,
    Choice,
    Group,
    ItemError,
    ItemKind,
    Kind,
    SettingError,
    TakesEffect,
    Value,
    check_items,
    choices,
    split_items,
)
from app.settings.fields import setting as _setting
from app.settings.ring import RingSettings
from engine.ipc.messages import (
    DtypeName,
    ExpertPolicy,
    LendTerms,
    Load,
    LoadOptions,
    MachineOptions,
    Partitioning,
    RuntimeName,
    Sampling,
)

__all__ = [
    "GIB", "GROUPS", "POLICIES", "RELOADING", "SCHEMA", "THEMES", "Choice", "Group", "Kind", "Setting",
    "SettingError", "Settings", "TakesEffect", "Value", "documentation", "setting_named",
]  # fmt: skip

THEMES = (
    "textual-dark", "textual-light", "ansi-dark", "ansi-light", "atom-one-dark", "atom-one-light", "catppuccin-latte",
    "catppuccin-frappe", "catppuccin-macchiato", "catppuccin-mocha", "dracula", "flexoki", "gruvbox", "monokai", "nord",
    "rose-pine", "rose-pine-dawn", "rose-pine-moon", "solarized-dark",
    "solarized-light", "tokyo-night",
)  # fmt: skip


POLICIES: dict[ExpertPolicy, str] = {
    "balanced": "Balanced: whichever split ends first",
    "twiddler": "Twiddler: its Algorithm 1",
    "monde": "MoNDE: hot experts to the GPU",
    "layers": "Whole layers on the GPU (llama.cpp)",
    "lru-offload": "Recent ones kept (Mixtral-offloading)",
    "stream": "All copied when needed (ZeRO-Infinity)",
}
"""Labels of the policies by which GPU and CPU share the experts, with the paper or program each comes from."""


@dataclass(frozen=True)
class Setting:
    """The allowed values of one setting, and how it is shown. ``minimum`` and ``maximum`` are inclusive."""

    key: str
    group: Group
    kind: Kind
    label: str
    help: str
    default: Value
    choices: tuple[Choice, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    optional: bool = False
    """True if None is allowed, which means the model's own default or no limit."""
    takes_effect: TakesEffect = "now"
    """``now``: from the next answer on; ``reload``: the model is loaded again."""
    item: ItemKind | None = None
    """Kind of one item, for the kind ``items``."""
    most: int | None = None
    """Maximum number of items."""

    def check(self, value: object) -> Value:
        """``value`` in its usual form. Raises SettingError if it is not allowed."""
        return _check(self, value)

    def parse(self, text: str) -> Value:
        """The value of a typed ``text``. An empty one is None for an optional setting. Raises SettingError."""
        return _parse(self, text)

    def unavailable(self, choice: str, machine: Machine | None = None) -> str | None:
        """Why ``choice`` is unavailable on this machine; None if it is available."""
        return unavailable_reason(self.key, choice, machine)

    def without_effect(self, machine: Machine | None = None) -> str | None:
        """Why the setting has no effect on this machine, whatever its value; None if it has one."""
        return unavailable_reason(self.key, None, machine)

    @property
    def allowed(self) -> str:
        """The allowed values in words: ``1 to 16``, ``one of auto, torch, mlx``."""
        return _allowed(self)


@dataclass(frozen=True)
class Settings(RingSettings):
    """All settings with their values."""

    model: str = _setting(
        "model", "text", "Model", "starter",
        "Catalogue name, Hugging Face repo id, local folder, or GGUF file.",
        takes_effect="reload",
    )  # fmt: skip
    runtime: RuntimeName = _setting(
        "model", "choice", "Runtime", "auto",
        "What runs the model: our kernels for the commonest families, torch for all of them, mlx on Apple Silicon.",
        choices=choices(auto="Best for this machine", native="Own CPU kernels", torch="torch", mlx="mlx"),
        takes_effect="reload",
    )  # fmt: skip
    partitioning: Partitioning = _setting(
        "model", "choice", "Partitioning", "auto",
        "Where the experts live: this machine's CPU, its GPU and CPU, or a ring of machines.",
        choices=choices(auto="Best for this machine", cpu="Alone, on the CPU", hybrid="Alone, on GPU + CPU",
                         ring="Ring of machines"),
        takes_effect="reload",
    )  # fmt: skip
    policy: ExpertPolicy = _setting(
        "model", "choice", "Sharing experts", "balanced",
        "How GPU and CPU share the experts; the first is ours, the others are for comparing.",
        choices=tuple(Choice(name, label) for name, label in POLICIES.items()), takes_effect="reload",
    )  # fmt: skip
    gpu_expert_memory: float | None = _setting(
        "model", "number", "GPU for experts", None,
        "GPU memory that holds experts, in GiB; empty: what the rest of the model leaves free.",
        minimum=0.0, maximum=65_536.0, optional=True, takes_effect="reload",
    )  # fmt: skip
    dtype: DtypeName = _setting(
        "model", "choice", "Number format", "auto",
        "Numbers to compute with; auto takes what the model is stored in.",
        choices=choices(auto="As stored", bfloat16="bfloat16", float32="float32"), takes_effect="reload",
    )  # fmt: skip
    cpu_threads: int | None = _setting(
        "model", "integer", "CPU threads", None, "Threads for computing; empty: one per physical core.",
        minimum=1, maximum=1024, optional=True, takes_effect="reload",
    )  # fmt: skip
    context_limit: int | None = _setting(
        "model", "integer", "Context limit", None,
        "Most tokens a conversation may have in memory; empty: what the model was made for.",
        minimum=64, maximum=16_777_216, optional=True, takes_effect="reload",
    )  # fmt: skip
    keep_resident: bool = _setting(
        "model", "flag", "Keep ready", True,
        "Bring the weights into memory in the background, and look after them between questions.",
        takes_effect="reload",
    )  # fmt: skip
    lock_memory: bool = _setting(
        "model", "flag", "Lock in memory", False,
        "Lock the weights in memory as well, as far as the system allows: nothing else may push them out.",
        takes_effect="reload",
    )  # fmt: skip
    system_prompt: str = _setting(
        "answer", "lines", "System prompt", "",
        "Added to every new chat. Leave empty for the model's default.",
    )  # fmt: skip
    temperature: float | None = _setting(
        "answer", "number", "Temperature", None,
        "0 always takes the likeliest token, higher varies more; empty: the model's own.",
        minimum=0.0, maximum=10.0, optional=True,
    )  # fmt: skip
    top_p: float | None = _setting(
        "answer", "number", "Top-p", None,
        "Keep the likeliest tokens that together have this probability; empty: the model's own.",
        minimum=0.01, maximum=1.0, optional=True,
    )  # fmt: skip
    top_k: int | None = _setting(
        "answer", "integer", "Top-k", None, "Keep this many of the likeliest tokens, 0 all; empty: the model's own.",
        minimum=0, maximum=10_000_000, optional=True,
    )  # fmt: skip
    min_p: float | None = _setting(
        "answer", "number", "Min-p", None,
        "Drop tokens less likely than this share of the likeliest; empty: the model's own.",
        minimum=0.0, maximum=1.0, optional=True,
    )  # fmt: skip
    seed: int | None = _setting(
        "answer", "integer", "Seed", None, "The same seed gives the same answer; empty: another one each time.",
        minimum=0, maximum=2**32 - 1, optional=True,
    )  # fmt: skip
    max_tokens: int | None = _setting(
        "answer", "integer", "Longest answer", None, "In tokens; empty: until the model stops or the context is full.",
        minimum=1, maximum=16_777_216, optional=True,
    )  # fmt: skip
    beams: int = _setting(
        "answer", "integer", "Beams", 1,
        "Candidates a beam search keeps; 1 samples one answer. More cost memory and time.",
        minimum=1, maximum=16,
    )  # fmt: skip
    length_penalty: float = _setting(
        "answer", "number", "Length penalty", 1.0,
        "Beam scores are divided by length to this power: above 0 favours long answers.",
        minimum=-10.0, maximum=10.0,
    )  # fmt: skip
    theme: str = _setting(
        "screen", "choice", "Theme", "textual-dark", "Colours of the screen.",
        choices=tuple(Choice(name, name) for name in THEMES),
    )  # fmt: skip
    show_timing: bool = _setting(
        "screen", "flag", "Timing panel", False, "Open the timing panel at start. Measuring costs a little speed.",
    )  # fmt: skip

    def value(self, key: str) -> Value:
        """The value of ``key``. Raises SettingError if there is no such setting."""
        setting_named(key)
        return cast(Value, getattr(self, key))

    def with_value(self, key: str, value: object) -> Settings:
        """A copy in which ``key`` is ``value``, checked. Raises SettingError."""
        changes: dict[str, Any] = {key: setting_named(key).check(value)}
        return dataclasses.replace(self, **changes)

    @property
    def load(self) -> Load:
        """What the engine is asked to load; its id is set when it is sent, and what is asked of a ring when that is
        known (:func:`app.settings.ring.ring_choice`). An option with a setting's name is that setting's value."""
        same = {name: getattr(self, name) for name in LoadOptions.__struct_fields__ if name in _BY_KEY}
        return Load(id=0, gpu_expert_bytes=_bytes(self.gpu_expert_memory), **same)

    @property
    def terms(self) -> LendTerms:
        """On which terms this machine is lent."""
        own = {name: getattr(self, name) for name in MachineOptions.__struct_fields__}
        return LendTerms(
            lend_memory=_bytes(self.ring_memory),
            lend_gpu_memory=_bytes(self.ring_gpu_memory),
            give_models=self.ring_give_models,
            **own,
        )

    def loads_like(self, other: Settings) -> bool:
        """Whether the same model would be loaded in the same way."""
        return all(getattr(self, key) == getattr(other, key) for key in self._loading)

    def loading_as(self, other: Settings) -> Settings:
        """These settings with the model of ``other``, loaded in its way."""
        return dataclasses.replace(self, **{key: getattr(other, key) for key in other._loading})

    @property
    def _loading(self) -> tuple[str, ...]:
        """The settings that make another model of it; those of the ring count in a ring only."""
        groups = ("model", "ring") if self.partitioning == "ring" else ("model",)
        return tuple(setting.key for setting in RELOADING if setting.group in groups)

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, seed=self.seed
        )


SCHEMA: tuple[Setting, ...] = tuple(
    Setting(key=field.name, default=cast(Value, field.default), **field.metadata["setting"])
    for group in GROUPS
    for field in dataclasses.fields(Settings)
    if field.metadata["setting"]["group"] == group
)
"""All settings in the order of the screen."""

RELOADING = tuple(setting for setting in SCHEMA if setting.takes_effect == "reload")
"""The settings with which the model, or the ring, is another one."""

_BY_KEY = {setting.key: setting for setting in SCHEMA}


def setting_named(key: str) -> Setting:
    """Raises SettingError if there is no such setting."""
    try:
        return _BY_KEY[key]
    except KeyError:
        raise SettingError(f"there is no setting {key!r}; there are {', '.join(_BY_KEY)}") from None


def _bytes(gibibytes: float | None) -> int | None:
    return None if gibibytes is None else round(gibibytes * GIB)


def documentation() -> str:
    """The settings as a Markdown table."""
    lines = ["| table | key | default | allowed | meaning |", "| --- | --- | --- | --- | --- |"]
    for setting in SCHEMA:
        default = "" if setting.default in (None, "") else f"`{_toml_word(setting.default)}`"
        lines.append(f"| {setting.group} | `{setting.key}` | {default} | {setting.allowed} | {setting.help} |")
    return "\n".join(lines) + "\n"


def _toml_word(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _allowed(setting: Setting) -> str:
    match setting.kind:
        case "choice":
            words = "one of " + ", ".join(choice.value for choice in setting.choices)
        case "flag":
            words = "true or false"
        case "integer" | "number":
            kind = "a whole number" if setting.kind == "integer" else "a number"
            words = f"{kind} from {_figure(setting.minimum)} to {_figure(setting.maximum)}"
        case "items" if setting.item is not None:
            words = f"{DESCRIPTIONS[setting.item]}, or none"
        case _:
            words = "text"
    return f"{words}, or empty" if setting.optional else words


def _figure(value: float | None) -> str:
    if value is None:
        return "any"
    return f"{value:,.15g}" if isinstance(value, float) else f"{value:,}"


def _refuse(setting: Setting, value: object) -> SettingError:
    shown = repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return SettingError(f"{setting.key} cannot be {shown}; it must be {setting.allowed}", setting.key)


def _check(setting: Setting, value: object) -> Value:
    if value is None:
        if setting.optional:
            return None
        raise _refuse(setting, value)
    match setting.kind:
        case "flag":
            if isinstance(value, bool):
                return value
        case "integer":
            if isinstance(value, int) and not isinstance(value, bool) and _in_range(setting, value):
                return int(value)
        case "number":
            if isinstance(value, int | float) and not isinstance(value, bool) and _in_range(setting, value):
                return float(value)
        case "choice":
            if isinstance(value, str) and any(choice.value == value for choice in setting.choices):
                return str(value)
        case _ if isinstance(value, str):
            return _check_text(setting, value)
    raise _refuse(setting, value)


def _check_text(setting: Setting, value: str) -> str:
    match setting.kind:
        case "text":
            # A model's name goes into messages and file names: one line, no control characters.
            if value.strip() and value.isprintable():
                return value.strip()
        case "items" if setting.item is not None:
            try:
                if setting.most is None or len(split_items(value)) <= setting.most:
                    return check_items(setting.item, value)
            except ItemError:
                raise _refuse(setting, value) from None
        case "lines":
            if not any("\ud800" <= character <= "\udfff" for character in value):
                return value
    raise _refuse(setting, value)


def _in_range(setting: Setting, value: float) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return (setting.minimum is None or value >= setting.minimum) and (
        setting.maximum is None or value <= setting.maximum
    )


def _parse(setting: Setting, text: str) -> Value:
    if setting.kind == "lines":
        return setting.check(text)
    word = text.strip()
    if not word and setting.optional:
        return None
    try:
        match setting.kind:
            case "integer":
                return setting.check(int(word))
            case "number":
                return setting.check(float(word))
            case "flag":
                return setting.check({"true": True, "on": True, "false": False, "off": False}[word.lower()])
            case _:
                return setting.check(word)
    except (ValueError, KeyError) as error:
        raise error if isinstance(error, SettingError) else _refuse(setting, text) from None
