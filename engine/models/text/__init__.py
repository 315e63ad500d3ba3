"""Between text and tokens: tokenizers, chat templates, marks of thoughts and calls."""
