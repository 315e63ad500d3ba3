"""From text to what a terminal shows: Markdown, highlighted code, tables, numbers."""
