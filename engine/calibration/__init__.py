"""What this machine was measured to do, and the files that keep it."""
