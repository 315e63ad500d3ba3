"""The chat screen, built on Textual."""
