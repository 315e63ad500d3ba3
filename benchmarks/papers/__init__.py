"""What only the comparisons with the papers need: their models and simulators. Pure functions."""
