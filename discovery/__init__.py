"""Peers on the network: identity, announcing, browsing, pairing. Knows nothing of models."""
