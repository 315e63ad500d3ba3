"""The person's settings: one schema, from which the file, its validation, the screen and the help come."""
