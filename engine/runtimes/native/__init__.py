"""The trunk of the commonest decoder shape in our own CPU kernels; imports neither torch nor transformers."""
