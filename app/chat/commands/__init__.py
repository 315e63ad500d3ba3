"""The slash commands of the chat, which the screen, the chat in lines and the palette share. No Textual."""
