"""Language models that transformers defines and its ``AutoModelForCausalLM`` does not know.

Some are a class that is registered as a part of a whole alone (Mistral 4). Of others there is only the model without a
head, because they are published with what sees pictures (Qwen3-VL, Step 3.7): it gets a head here.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn


def register_language_model(config: Any) -> None:
    """Lets ``AutoModelForCausalLM`` build the language model of ``config``, if transformers has a part for it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    kind = type(config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    modelling = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    stem = kind.__name__.removesuffix("Config")
    with_head = getattr(modelling, f"{stem}ForCausalLM", None)
    without_head = getattr(modelling, f"{stem}Model", None)
    if with_head is None and without_head is not None:
        with_head = _with_head(without_head, kind)
    if with_head is not None:
        AutoModelForCausalLM.register(kind, with_head, exist_ok=True)


def _with_head(decoder: Any, kind: Any) -> Any:
    """The class of ``decoder``, a model without a head whose configuration is a ``kind``, and a head."""
    from transformers import GenerationMixin
    from transformers.modeling_outputs import CausalLMOutputWithPast

    def start(self: Any, config: Any) -> None:
        # The whole's configuration says it.
        config.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
        decoder.__bases__[0].__init__(self, config)
        self.model = decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self: Any, input_ids: torch.Tensor | None = None, logits_to_keep: int = 0, **inputs: Any) -> Any:
        found = self.model(input_ids=input_ids, **inputs)
        logits = self.lm_head(found.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)

    return type(
        f"{decoder.__name__}WithHead",
        (*decoder.__bases__, GenerationMixin),
        {
            "__init__": start,
            "forward": forward,
            "config_class": kind,
            "base_model_prefix": "model",
            "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
        },
    )
