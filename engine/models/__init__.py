"""Models on disk: catalogue, fetching, the starter, the bank, tokenizer and chat template. No torch, no mlx."""
