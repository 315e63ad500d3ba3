"""A loaded model and its conversation: loading, turns, the prefix cache, the token history."""
