"""The settings: which values are allowed, and what they ask of the engine."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from app.machine import Machine, unavailable_reason
from app.settings.fields import GROUPS, Setting, SettingError
from app.settings.ring import open_network
from app.settings.schema import RELOADING, SCHEMA, THEMES, Settings, setting_named
from engine.ipc.messages import ExpertPolicy, MachineOptions

LINUX = Machine("linux", "x86_64", gpu=False, torch=True, mlx=False)


LINUX_GPU = dataclasses.replace(LINUX, gpu=True)


MAC = Machine("darwin", "arm64", gpu=False, torch=True, mlx=True)


def test_defaults_are_allowed_and_every_group_is_used() -> None:
    for setting in SCHEMA:
        assert setting.check(setting.default) == setting.default
        assert setting.help.endswith(".")
    assert {setting.group for setting in SCHEMA} == set(GROUPS)


@pytest.mark.parametrize(
    ("key", "typed", "value"),
    [
        ("seed", "", None),
        ("seed", " 12 ", 12),
        ("temperature", "0.7", 0.7),
        ("show_timing", "On", True),
        ("model", " org/name ", "org/name"),
        ("system_prompt", "Be brief.\nBe kind.", "Be brief.\nBe kind."),
        ("system_prompt", "Be\x1b[2J brief.\u202e", "Be brief."),
    ],
)
def test_what_a_person_types(key: str, typed: str, value: object) -> None:
    (setting,) = [setting for setting in SCHEMA if setting.key == key]
    assert setting.parse(typed) == value


@pytest.mark.parametrize(("key", "typed"), [("beams", ""), ("beams", "x"), ("seed", "1.5"), ("show_timing", "maybe")])
def test_what_cannot_be_typed(key: str, typed: str) -> None:
    (setting,) = [setting for setting in SCHEMA if setting.key == key]
    with pytest.raises(SettingError, match=key):
        setting.parse(typed)


def test_what_is_not_available_has_a_reason() -> None:
    assert unavailable_reason("partitioning", "ring", MAC) is None
    assert unavailable_reason("ring_exchange", "mlx", LINUX) == "mlx-lm is not installed"
    assert unavailable_reason("ring_exchange", "gloo", dataclasses.replace(LINUX, torch=False))
    assert unavailable_reason("partitioning", "hybrid", LINUX) == "no GPU found"
    assert unavailable_reason("partitioning", "hybrid", LINUX_GPU) is None
    assert unavailable_reason("runtime", "mlx", LINUX) == "mlx needs Apple Silicon"
    assert unavailable_reason("runtime", "mlx", MAC) is None
    assert unavailable_reason("runtime", "mlx", dataclasses.replace(MAC, mlx=False)) == "mlx-lm is not installed"
    assert all(unavailable_reason(setting.key, "auto", LINUX_GPU) is None for setting in SCHEMA)


@pytest.mark.parametrize("key", ["policy", "gpu_expert_memory"])
def test_sharing_experts_means_nothing_without_a_gpu(key: str) -> None:
    setting = setting_named(key)
    assert setting.without_effect(LINUX) == "no GPU found"
    assert setting.without_effect(MAC) == "CPU and GPU share their memory on Apple Silicon"
    assert setting.without_effect(LINUX_GPU) is None
    assert not [other.key for other in SCHEMA if other.without_effect(LINUX_GPU)]


def test_every_policy_has_a_label() -> None:
    assert [choice.value for choice in setting_named("policy").choices] == list(get_args(ExpertPolicy))


def test_gpu_memory_is_typed_in_gib_and_loaded_in_bytes() -> None:
    assert Settings().load.gpu_expert_bytes is None
    chosen = Settings().with_value("gpu_expert_memory", setting_named("gpu_expert_memory").parse("1.5"))
    assert chosen.load.gpu_expert_bytes == 3 * 2**29


def test_themes_are_textuals_own() -> None:
    from textual.theme import BUILTIN_THEMES

    assert set(THEMES) <= set(BUILTIN_THEMES)


def _other_value(setting: Setting) -> Any:
    """A value of ``setting`` that is not its default."""
    match setting.kind:
        case "choice":
            return next(choice.value for choice in setting.choices if choice.value != setting.default)
        case "flag":
            return not setting.default
        case "integer" | "number":
            return setting.check(setting.maximum)
    return "other"


@pytest.mark.parametrize("setting", [one for one in RELOADING if one.group == "model"], ids=lambda one: one.key)
def test_what_loads_a_model_anew_reaches_the_engine(setting: Setting) -> None:
    changed = Settings().with_value(setting.key, _other_value(setting))
    assert changed.load != Settings().load
    assert not changed.loads_like(Settings())
    assert Settings(max_tokens=7).loading_as(changed) == dataclasses.replace(changed, max_tokens=7)


@pytest.mark.parametrize("option", MachineOptions.__struct_fields__)
def test_options_of_a_machine_hold_also_when_it_is_lent(option: str) -> None:
    value = _other_value(setting_named(option))
    lent = open_network(Settings(), lend=Settings().with_value(option, value).terms)
    assert getattr(lent, option) == value and lent.lend
    assert not open_network(Settings()).lend
