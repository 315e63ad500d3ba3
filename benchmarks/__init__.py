"""Scripts that reproduce every number the documentation quotes. Not part of the installed program."""
