"""The chat: its screen, what decides, and the widgets of the transcript."""
