"""The parts that all runtimes share: how a model is loaded and described, what a pass checks, a node's experts."""
