"""Between the screen and the engine: messages, their framing, pipes, and progress."""
