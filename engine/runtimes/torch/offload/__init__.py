"""Experts shared between a GPU and the CPU, for the torch runtime."""
