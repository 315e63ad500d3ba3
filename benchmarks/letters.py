"""A vocabulary for synthetic models: a token for each byte, so that a prompt has as many tokens as letters."""

from __future__ import annotations

import gguf
from tokenizers.pre_tokenizers import ByteLevel

END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def add_letters(writer: gguf.GGUFWriter, vocabulary: int, split: str = "gpt-2") -> None:
    """Describe a byte-level tokenizer of ``vocabulary`` tokens. A text is only made of the bytes; an answer has the
    others, too, each of which stands for a short text of its own. ``split``: the rule by which texts are split. Raises
    ValueError if there is no room for the bytes."""
    letters = [END, *sorted(ByteLevel.alphabet())]
    if vocabulary < len(letters):
        raise ValueError(f"{vocabulary} tokens do not hold the {len(letters)} of the bytes and the end")
    tokens = letters + [f"w{number}" for number in range(vocabulary - len(letters))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (vocabulary - 1)])
    # llama.cpp refuses a tokenizer without merges. This one never happens, as letters and digits are split before.
    writer.add_token_merges(["w 0"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
