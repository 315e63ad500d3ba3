"""The widgets of the chat: transcript, messages, prompt, notices, status line."""
