"""The machine with the chat: it surveys, plans, forms the ring, uploads weights, and runs the model."""
