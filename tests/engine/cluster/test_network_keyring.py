"""How long the keyring may take to hand out this machine's key when the network is opened."""

from __future__ import annotations

import pytest

from engine.cluster.network import DIALOGUE_S, keyring_patience


@pytest.mark.parametrize(
    ("lend", "system", "seconds"),
    [(False, "linux", None), (True, "linux", DIALOGUE_S), (False, "darwin", DIALOGUE_S), (True, "darwin", DIALOGUE_S)],
)
def test_who_has_a_dialogue_to_read_is_waited_for(lend: bool, system: str, seconds: float | None) -> None:
    assert keyring_patience(lend, system) == seconds
