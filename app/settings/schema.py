# ruff: noqa: RUF009 (each field is made by dataclasses.field, through setting)
"""The settings: one schema, from which the file, its validation, the settings screen and the documentation are made.

A setting is a field of :class:`Settings`; its :class:`Setting` says which values are allowed. The value None means the
model's own default. No Textual here.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal, cast

from app.settings.fields import (
    GIB,
    GROUPS,
    Choice,
    Setting,
    SettingError,
    Value,
    choices,
    setting,
)
from app.settings.ring import RingSettings
from engine.ipc.messages import (
    DtypeName,
    ExpertPolicy,
    KeyValuesName,
    LendTerms,
    Load,
    LoadOptions,
    MachineOptions,
    Partitioning,
    RuntimeName,
    Sampling,
    values_of,
)

THEMES = (
    "textual-dark", "textual-light", "ansi-dark", "ansi-light", "atom-one-dark", "atom-one-light", "catppuccin-latte",
    "catppuccin-frappe", "catppuccin-macchiato", "catppuccin-mocha", "dracula", "flexoki", "gruvbox", "monokai", "nord",
    "rose-pine", "rose-pine-dawn", "rose-pine-moon", "solarized-dark",
    "solarized-light", "tokyo-night",
)  # fmt: skip


POLICIES: dict[ExpertPolicy, str] = {
    "balanced": "Balanced: the split that ends first",
    "twiddler": "Twiddler (Algorithm 1)",
    "monde": "MoNDE: hot experts on the GPU",
    "layers": "Whole layers on the GPU (llama.cpp)",
    "lru-offload": "Recently used (Mixtral-offloading)",
    "stream": "Copy every layer (ZeRO-Infinity)",
    "on-demand": "Copy when needed (MoNDE's GPU+PM)",
}
"""Labels of the policies by which GPU and CPU share the experts, with the paper or program each comes from."""

_loading = functools.partial(setting, "model", takes_effect="reload")
_answering = functools.partial(setting, "answer")
_showing = functools.partial(setting, "screen")


@dataclass(frozen=True)
class Settings(RingSettings):
    """All settings with their values."""

    model: str = _loading(
        "text", "Model", "starter",
        "Catalogue name, Hugging Face repository id (owner/name:Q4_K_M for a GGUF file of it), folder, GGUF file, or a "
        "model of another program (ollama:qwen3:30b).",
    )  # fmt: skip
    runtime: RuntimeName = _loading(
        "choice", "Runtime", "auto",
        "What runs the model: own kernels for common families, torch for all families, mlx on Apple Silicon.",
        choices=choices(auto="Best for this machine", native="Own CPU kernels", torch="torch", mlx="mlx"),
    )  # fmt: skip
    partitioning: Partitioning = _loading(
        "choice", "Devices", "auto",
        "Where the experts run: on this machine's CPU, on its GPU and CPU, or on a ring of machines.",
        choices=choices(auto="Best for this machine", cpu="This machine: CPU", hybrid="This machine: GPU and CPU",
                        ring="Ring of machines"),
    )  # fmt: skip
    policy: ExpertPolicy = _loading(
        "choice", "Expert policy", "balanced",
        "How GPU and CPU share the experts. The first choice is privatellm's own; the others are for comparison.",
        choices=tuple(Choice(name, label) for name, label in POLICIES.items()),
    )  # fmt: skip
    gpu_expert_memory: float | None = _loading(
        "number", "GPU memory", None,
        "GPU memory for experts in GiB. Empty: all that the rest of the model leaves free.",
        minimum=0.0, maximum=65_536.0, optional=True,
    )  # fmt: skip
    dtype: DtypeName = _loading(
        "choice", "Number format", "auto", "Number format of the computation.",
        choices=choices(auto="As stored", bfloat16="bfloat16", float32="float32"),
    )  # fmt: skip
    key_values: KeyValuesName = _loading(
        "choice", "Keys and values", "auto",
        "How the conversation is kept in memory. 8 bits take half the memory, 4 bits a quarter; answers may differ.",
        choices=choices(auto="As the model computes", q8_0="8 bits (q8_0)", q4_0="4 bits (q4_0)"),
    )  # fmt: skip
    prefix_memory: float | None = _loading(
        "number", "Kept conversations", None,
        "Memory in GiB for what the model has read of other conversations than the last one, so that it need not read "
        "them again. Empty: a part of what is free. 0: none.",
        minimum=0.0, maximum=65_536.0, optional=True,
    )  # fmt: skip
    prefix_disk: float = _loading(
        "number", "Kept on disk", 0.0,
        "Disk space in GiB for what the model has read, so that it need not read a chat again after a restart. It is "
        "as private as the chats. 0: nothing is kept, and what was is deleted.",
        minimum=0.0, maximum=65_536.0,
    )  # fmt: skip
    drafts: bool = _loading(
        "flag", "Guess ahead", True,
        "Guess the next words from what was said before, and check several at once where that is faster. Answers stay "
        "the same, word for word.",
    )  # fmt: skip
    cpu_threads: int | None = _loading(
        "integer", "CPU threads", None, "Number of CPU threads. Empty: one per physical core.",
        minimum=1, maximum=1024, optional=True,
    )  # fmt: skip
    context_limit: int | None = _loading(
        "integer", "Context limit", None, "Maximum number of tokens in a conversation. Empty: the model's own limit.",
        minimum=64, maximum=16_777_216, optional=True,
    )  # fmt: skip
    keep_resident: bool = _loading(
        "flag", "Keep in memory", True,
        "Load the weights into memory in the background and keep them there between questions.",
    )  # fmt: skip
    lock_memory: bool = _loading(
        "flag", "Lock in memory", False,
        "Lock the weights in memory as far as the system allows, so that other programs cannot push them out.",
    )  # fmt: skip
    system_prompt: str = _answering(
        "lines", "System prompt", "", "Added to every new chat. Empty: the model's own default.",
    )  # fmt: skip
    temperature: float | None = _answering(
        "number", "Temperature", None,
        "0 always takes the likeliest token; higher values vary more. Empty: the model's own default.",
        minimum=0.0, maximum=10.0, optional=True,
    )  # fmt: skip
    top_p: float | None = _answering(
        "number", "Top-p", None,
        "Choose among the likeliest tokens whose probabilities add up to this. Empty: the model's own default.",
        minimum=0.01, maximum=1.0, optional=True,
    )  # fmt: skip
    top_k: int | None = _answering(
        "integer", "Top-k", None,
        "Choose among this many of the likeliest tokens; 0 means all. Empty: the model's own default.",
        minimum=0, maximum=10_000_000, optional=True,
    )  # fmt: skip
    min_p: float | None = _answering(
        "number", "Min-p", None,
        "Drop tokens less likely than this fraction of the likeliest one. Empty: the model's own default.",
        minimum=0.0, maximum=1.0, optional=True,
    )  # fmt: skip
    repetition_penalty: float | None = _answering(
        "number", "Repetition penalty", None,
        "Above 1, tokens that are in the conversation already become less likely. Empty: the model's own default.",
        minimum=0.1, maximum=10.0, optional=True,
    )  # fmt: skip
    seed: int | None = _answering(
        "integer", "Seed", None, "The same seed gives the same answer. Empty: a new seed for each answer.",
        minimum=0, maximum=2**32 - 1, optional=True,
    )  # fmt: skip
    max_tokens: int | None = _answering(
        "integer", "Answer limit", None,
        "Maximum number of tokens in an answer. Empty: the model's own limit, or until it stops or the context ends.",
        minimum=1, maximum=16_777_216, optional=True,
    )  # fmt: skip
    thinking: Literal["auto", "on", "off"] = _answering(
        "choice", "Thinking", "auto", "Whether the model thinks before it answers, if it can be told.",
        choices=choices(auto="As the model does by itself", on="On", off="Off"),
    )  # fmt: skip
    effort: Literal["auto", "low", "medium", "high"] = _answering(
        "choice", "Effort", "auto", "How long the model thinks, if it can be told.",
        choices=choices(auto="As the model does by itself", low="Low", medium="Medium", high="High"),
    )  # fmt: skip
    beams: int = _answering(
        "integer", "Beams", 1,
        "Number of candidates in a beam search; 1 samples one answer. More beams need more memory and time.",
        minimum=1, maximum=16,
    )  # fmt: skip
    length_penalty: float = _answering(
        "number", "Length penalty", 1.0,
        "Beam scores are divided by the length to this power. Values above 0 favour long answers.",
        minimum=-10.0, maximum=10.0,
    )  # fmt: skip
    theme: str = _showing(
        "choice", "Theme", "textual-dark", "Colours of the screen.",
        choices=tuple(Choice(name, name) for name in THEMES),
    )  # fmt: skip
    terminal_title: bool = _showing(
        "flag", "Window title", True, "Show the chat's title as the title of the terminal's window.",
    )  # fmt: skip
    answer_signal: Literal["off", "title", "bell", "notification"] = _showing(
        "choice", "End of an answer", "title",
        "What tells that an answer has ended while the terminal's window has no focus. Each includes the one before.",
        choices=choices(off="Nothing", title="A mark in the window's title", bell="The terminal's bell",
                        notification="A notification (OSC 9)"),
    )  # fmt: skip
    reading_width: int = _showing(
        "integer", "Reading width", 0,
        "Maximum width of the conversation in columns, which is centred then. 0: all of the window.",
        minimum=0, maximum=1000,
    )  # fmt: skip
    reduced_motion: bool = _showing(
        "flag", "Reduced motion", False,
        "Nothing blinks, slides or spins. The environment variable TEXTUAL_ANIMATIONS=none does the same.",
    )  # fmt: skip
    drawn_pictures: bool = _showing(
        "flag", "Drawn pictures", True,
        "Draw attached pictures where the terminal can: by kitty's protocol or as sixels, not inside tmux or screen.",
    )  # fmt: skip
    time_stamps: bool = _showing(
        "flag", "Time stamps", False, "Show when each message was written, with a line where a new day begins.",
    )  # fmt: skip
    chat_titles: bool = _showing(
        "flag", "Titles", True,
        "Have the model give each new chat a title after its first answer, from a billion parameters on.",
    )  # fmt: skip
    show_timing: bool = _showing(
        "flag", "Timing panel", False, "Open the timing panel at the start. Measuring costs a little speed.",
    )  # fmt: skip
    show_chats: bool = _showing(
        "flag", "List of chats", False, "Show the chats beside the conversation, from 120 columns on.",
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
        """The load request for the engine, without id and ring options (:func:`app.settings.ring.ring_choice`).

        An option with a setting's name is that setting's value.
        """
        same = {name: getattr(self, name) for name in LoadOptions.__struct_fields__ if name in _BY_KEY}
        return Load(
            id=0,
            gpu_expert_bytes=_bytes(self.gpu_expert_memory),
            prefix_bytes=_bytes(self.prefix_memory),
            prefix_disk_bytes=_bytes(self.prefix_disk),
            **same,
        )

    @property
    def terms(self) -> LendTerms:
        """On which terms this machine is lent."""
        own = values_of(MachineOptions, self)
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
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )

    @property
    def thinks(self) -> bool | None:
        """Whether the model is told to think; None: it is told nothing."""
        return None if self.thinking == "auto" else self.thinking == "on"

    @property
    def thinking_effort(self) -> str:
        """The thinking effort that the model is told; empty: it is told nothing."""
        return "" if self.effort == "auto" else self.effort


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
    """The setting ``key``. Raises SettingError if there is no such setting."""
    try:
        return _BY_KEY[key]
    except KeyError:
        raise SettingError(f"there is no setting {key!r}; there are {', '.join(_BY_KEY)}") from None


def _bytes(gibibytes: float | None) -> int | None:
    return None if gibibytes is None else round(gibibytes * GIB)
