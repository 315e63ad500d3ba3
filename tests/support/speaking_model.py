"""A tiny model that can be talked to: with a tokenizer, and with the chat template of a test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.support.tiny_models import write_tiny_model


def write_speaking_model(folder: Path, template: str) -> Path:
    """A model whose vocabulary is the bytes and the marks ``<|im_start|>`` and ``<|im_end|>``, which ends an answer."""
    return write_tokenizer(write_tiny_model(folder, "mixtral", vocab_size=300), template)


def write_tokenizer(folder: Path, template: str, further: Sequence[str] = ()) -> Path:
    """The same tokenizer in ``folder``, with ``further`` special tokens after those two."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|im_start|>", "<|im_end|>", *further]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
