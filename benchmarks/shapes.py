"""The shapes of the synthetic models: what their configurations say and which tensors they have. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from engine.bench.synthetic_moe import MoeShape

BF16_BYTES = 2

Tensors = Iterator[tuple[str, tuple[int, ...]]]
"""(name, dimensions), in the order in which they are stored."""


class Shape(Protocol):
    """A model that :func:`benchmarks.synthetic.write_synthetic` can write."""

    @property
    def layers(self) -> int: ...

    @property
    def embedding_scale(self) -> float:
        """Standard deviation of the embedding's entries; all other matrices have 0.02."""
        ...

    def config(self) -> dict[str, Any]:
        """The model's ``config.json``."""
        ...

    def layer_tensors(self, layer: int) -> Tensors: ...

    def tensors(self) -> Tensors:
        """All of the model's tensors. Norms have one dimension, everything else has two."""
        ...


def layer_bytes(shape: Shape) -> int:
    """Bytes of one decoder layer in bfloat16."""
    return BF16_BYTES * sum(int(np.prod(dimensions)) for _, dimensions in shape.layer_tensors(0))


def model_bytes(shape: Shape) -> int:
    """Bytes of the whole model in bfloat16."""
    return BF16_BYTES * sum(int(np.prod(dimensions)) for _, dimensions in shape.tensors())


@dataclass(frozen=True)
class MixtralShape(MoeShape):
    """The defaults are Mixtral-8x7B's, but for ``layers``."""

    layers: int = 2
    hidden: int = 4096
    ffn: int = 14336
    experts: int = 8
    experts_per_token: int = 2
    heads: int = 32
    key_value_heads: int = 8
    vocabulary: int = 32000
    positions: int = 32768

    embedding_scale: ClassVar[float] = 0.02
    name: ClassVar[str] = "mixtral-shaped"
    title: ClassVar[str] = "Synthetic Mixtral-shaped"


@dataclass(frozen=True)
class LlamaShape:
    """The defaults are Llama-3.2-1B's: a dense model whose embedding is its head, too."""

    layers: int = 16
    hidden: int = 2048
    ffn: int = 8192
    heads: int = 32
    key_value_heads: int = 8
    vocabulary: int = 128256
    positions: int = 8192

    name: ClassVar[str] = "llama-shaped"
    title: ClassVar[str] = "Synthetic Llama-3.2-1B-shaped"

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


@dataclass(frozen=True)
class Qwen35MoeShape:
    """The defaults are Qwen3.6-35B-A3B's, but for a fifth of its layers and of its vocabulary."""

    layers: int = 8
    hidden: int = 2048
    ffn: int = 512
    experts: int = 256
    experts_per_token: int = 8
    heads: int = 16
    key_value_heads: int = 2
    head_width: int = 256
    vocabulary: int = 49664

    embedding_scale: ClassVar[float] = 2.0
    name: ClassVar[str] = "qwen3.6-moe-shaped"
    title: ClassVar[str] = "Synthetic Qwen3.6-35B-A3B-shaped"

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "head_dim": self.head_width,
            "intermediate_size": self.ffn,
            "moe_intermediate_size": self.ffn,
            "shared_expert_intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "layer_types": [
                "linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(self.layers)
            ],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e7,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


QWEN3_LAYERS = 48
QWEN3_VOCABULARY = 151936


@dataclass(frozen=True)
class Qwen3MoeShape:
    """The defaults are Qwen3-30B-A3B's, but for an eighth of its layers and of its vocabulary: with both cut by the
    same factor the head keeps its share of what a token reads."""

    layers: int = QWEN3_LAYERS // 8
    hidden: int = 2048
    ffn: int = 768
    experts: int = 128
    experts_per_token: int = 8
    heads: int = 32
    key_value_heads: int = 4
    head_width: int = 128
    vocabulary: int = QWEN3_VOCABULARY // 8

    # With an embedding as small as the other matrices, the attention's average over the prompt, which is nearly the
    # same for every token, drowns what tells one token from another, and the routers choose the same few experts.
    embedding_scale: ClassVar[float] = 2.0
    name: ClassVar[str] = "qwen3-moe-shaped"
    title: ClassVar[str] = "Synthetic Qwen3-MoE-shaped"

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "head_dim": self.head_width,
            "intermediate_size": 8 * self.ffn,
            "moe_intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "use_sliding_window": False,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def layer_tensors(self, layer: int) -> Tensors:
        prefix = f"model.layers.{layer}"
        query, key_value = self.heads * self.head_width, self.key_value_heads * self.head_width
        yield f"{prefix}.input_layernorm.weight", (self.hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
        yield f"{prefix}.self_attn.q_norm.weight", (self.head_width,)
        yield f"{prefix}.self_attn.k_norm.weight", (self.head_width,)
        yield f"{prefix}.self_attn.q_proj.weight", (query, self.hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (key_value, self.hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (key_value, self.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, query)
        yield f"{prefix}.mlp.gate.weight", (self.experts, self.hidden)
        for expert in range(self.experts):
            name = f"{prefix}.mlp.experts.{expert}"
            yield f"{name}.gate_proj.weight", (self.ffn, self.hidden)
            yield f"{name}.up_proj.weight", (self.ffn, self.hidden)
            yield f"{name}.down_proj.weight", (self.hidden, self.ffn)

    def tensors(self) -> Tensors:
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            yield from self.layer_tensors(layer)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)
