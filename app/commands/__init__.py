"""What each command does; imported only when one is run."""
