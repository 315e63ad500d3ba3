"""What runs the trunk and owns the key/value cache: torch and mlx behind one protocol."""
