"""The implementations of the commands, each imported only when it is run."""
