"""Number formats, and the files that weights lie in: safetensors and GGUF, mapped and checked."""
