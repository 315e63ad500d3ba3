"""The control plane: who is there, what they can do, forming a ring and watching over it."""
