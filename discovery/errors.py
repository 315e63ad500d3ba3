"""Errors between machines. Each text is one sentence: what is wrong, with the value, and what to do."""

from __future__ import annotations


class DiscoveryError(Exception):
    """A person's request cannot be done. The text can be shown as it is."""


class IdentityError(DiscoveryError):
    """This machine's certificate or private key cannot be read or made."""


class PeersError(DiscoveryError):
    """The paired machine is unknown or named ambiguously, or its file cannot be written."""


class PairingError(DiscoveryError):
    """Two machines were not paired. Nothing was stored on this one."""


class LinkListenerError(DiscoveryError):
    """A port cannot be listened on, or nobody answers at an address."""
