"""Model folders: opening, sizes, layout, shards, preparing."""
