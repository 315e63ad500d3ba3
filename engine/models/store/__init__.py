"""Models on this machine: names, catalogue, downloads, models of other programs."""
