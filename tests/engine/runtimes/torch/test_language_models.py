"""Language models that transformers' AutoModelForCausalLM does not know are built all the same."""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from engine.runtimes.torch.language_models import register_language_model

TEXT = torch.arange(3, 27)[None]
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


def test_a_class_that_is_registered_as_a_part_of_a_whole_is_used() -> None:
    config = CONFIG_MAPPING["mistral4"](num_hidden_layers=1)
    register_language_model(config)
    assert MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ == "Mistral4ForCausalLM"


def test_a_model_without_a_head_gets_one() -> None:
    """The language model of Qwen3-VL gives what the whole gives."""
    text = {**_SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    whole = AutoModelForImageTextToText.from_config(CONFIG_MAPPING["qwen3_vl"](text_config=text, vision_config=vision))
    config = whole.config.text_config
    register_language_model(config)
    alone = AutoModelForCausalLM.from_config(config)
    states = {name.replace("model.language_model.", "model."): value for name, value in whole.state_dict().items()}
    alone.load_state_dict({name: value for name, value in states.items() if ".visual." not in name})
    with torch.inference_mode():
        found, wanted = (model.eval()(TEXT, logits_to_keep=3).logits for model in (alone, whole))
    assert found.shape == (1, 3, 64)
    torch.testing.assert_close(found, wanted)


def test_what_is_known_stays_as_it_is() -> None:
    config = CONFIG_MAPPING["llama"]()
    register_language_model(config)
    assert MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ == "LlamaForCausalLM"
