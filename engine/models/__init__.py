"""Models on disk: catalogue, fetching, the starter, tokenizer and chat template. No torch, no mlx."""
