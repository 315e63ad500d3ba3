"""Names of the engine's cached prefixes of conversations on disk, and their removal with the conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.models.store.prefix_files import prefix_files, remove_prefixes

_CHAT = "chat"


def prefix_owner(conversation: int) -> str:
    """The name under which the engine keeps its prefix of ``conversation``."""
    return f"{_CHAT}{conversation}"


def remove_prefixes_of(conversations: Iterable[int]) -> list[str]:
    """Remove what is kept of ``conversations``, whose names are returned. Errors are ignored."""
    owners = [prefix_owner(conversation) for conversation in conversations]
    remove_prefixes(set(owners))
    return owners


def remove_orphaned_prefixes(exists: Callable[[int], bool]) -> None:
    """Remove what is kept of conversations that do not exist any more, however they ended."""
    owners = {file.owner for file in prefix_files()}
    chats = [int(owner.removeprefix(_CHAT)) for owner in owners if owner.removeprefix(_CHAT).isdecimal()]
    gone = [chat for chat in chats if not exists(chat)]
    if gone:
        remove_prefixes_of(gone)
