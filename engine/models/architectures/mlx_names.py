"""Names that checkpoints of mlx-lm have in place of transformers': parts of the records of families."""

LATENTS = ((".self_attn.embed_q.", ".self_attn.k_b_proj."), (".self_attn.unembed_out.", ".self_attn.v_b_proj."))
"""The two halves of the projection of latents, as GGUF files have them."""
