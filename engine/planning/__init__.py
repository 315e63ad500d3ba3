"""Pure performance and memory models: no torch, no clock, no input or output."""
