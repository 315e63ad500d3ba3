"""A ring that runs: who runs which expert, the head's model, its followers."""
