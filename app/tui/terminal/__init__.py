"""The terminal that the screen is drawn on: what it sends, how it ends, what it can copy."""
