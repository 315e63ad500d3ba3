"""The families that the mlx runtime runs, and the refusal of settings that mlx-lm does not honour.

mlx-lm ignores settings that its classes do not know, and the answers are then silently wrong. The records of families
say which it honours, so that such a model is refused by name. Pure data and functions, without mlx.
"""

from __future__ import annotations

from engine.errors import ModelError
from engine.models.architectures import families
from engine.models.architectures.record import MlxRecord
from engine.runtimes.protocol import Config

FAMILIES: dict[str, MlxRecord] = {
    name: family.mlx for name, family in families.FAMILIES.items() if family.mlx is not None
}
"""The families that this runtime runs, by their name in transformers (``model_type``)."""

SUPPORTED: tuple[str, ...] = tuple(sorted(FAMILIES))


def family_of(config: Config) -> MlxRecord:
    """The family of ``config``. Raises ModelError if it is not one that mlx runs, naming it."""
    problem = _unsupported_family(config)
    if problem is not None:
        raise ModelError(f"{problem} (the torch runtime may run it: --runtime torch)")
    return FAMILIES[config["model_type"]]


def check_settings(config: Config, family: MlxRecord) -> None:
    """Refuses a configuration with a setting that mlx-lm would ignore. Raises ModelError.

    ``config`` is complete: what transformers reads from config.json, defaults filled in.
    """
    problem = _ignored_setting(config, family)
    if problem is not None:
        raise ModelError(f"{problem}: choose the torch runtime (--runtime torch)")


def unsupported_config(config: Config) -> str | None:
    """Why mlx does not run a model with this config.json, in a few words; None if it shows no reason.

    ``config`` is the file's contents. A missing setting counts as the value that mlx-lm honours.
    """
    problem = _unsupported_family(config)
    return problem or _ignored_setting(dict(families.completed(config)), FAMILIES[config["model_type"]])


def rope_of_kinds(config: Config) -> dict[str, Config]:
    """The rotary settings of each kind of layers, full attention first; those of all under "" where they are alike."""
    rule = families.FAMILIES[config["model_type"]].decoder.kind_rope
    if rule is None:
        # Files of transformers 4 have the older key, and the partial factor beside it.
        return {"": config.get("rope_parameters") or config.get("rope_scaling") or {}}
    return {kind: dict(rule(config, kind)) for kind in ("full_attention", "sliding_attention")}


def _unsupported_family(config: Config) -> str | None:
    name = config.get("model_type")
    known = isinstance(name, str) and name in FAMILIES
    return None if known else f"the mlx runtime does not run the family {name!r}"


def _ignored_setting(config: Config, family: MlxRecord) -> str | None:
    problems = [
        f"{key} {config[key]!r}" for key, values in family.honours.items() if config.get(key, values[0]) not in values
    ]
    problems += [problem for check in family.checks if (problem := check(config))]
    for kind, rope in rope_of_kinds(config).items():
        slides, of_kind = kind == "sliding_attention", f" of {kind}" if kind else ""
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in (("default",) if slides else family.rope_types):
            problems.append(f"rope_type {rope_type!r}{of_kind}")
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial != 1.0 and not (family.partial_windows if slides else family.partial_rotary):
            problems.append(f"partial_rotary_factor {partial!r}{of_kind}")
    return f"mlx-lm does not honour this {config['model_type']} model's setting {problems[0]}" if problems else None
