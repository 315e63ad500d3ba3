"""The terminal on which the screen is drawn: its input, its end, and copying."""
