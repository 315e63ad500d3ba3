"""The engine: everything between a prompt and its tokens. It runs in a process of its own."""
