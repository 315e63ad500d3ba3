"""transformers' own language models of a folder, those that it registers as parts of a whole alone, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def transformers_config(folder: Path) -> Any:
    """transformers' configuration of ``folder``, of a language model that ``AutoModelForCausalLM`` then knows."""
    from transformers import AutoConfig

    from engine.runtimes.torch.language_models import register_language_model

    config = AutoConfig.from_pretrained(folder)
    register_language_model(config)
    return config


def transformers_language_model(folder: Path, **options: Any) -> Any:
    """transformers' model of ``folder``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, config=transformers_config(folder), **options).eval()
