"""The torch runtime: transformers' model definitions with our own module in place of theirs for the routed experts."""
