"""The file of paired machines: whole or put aside, the same for all processes, names harmless."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import peers as peers_module
from discovery.errors import PeersError
from discovery.names import MAX_NAME, clean_name
from discovery.peers import MAX_ADDRESSES, MAX_COPIES, Peer, PeersFile, PeersWatch, new_peer
from tests.discovery.discovery_machines import Machine

MakeMachine = Callable[[str], Machine]


@pytest.fixture
def file(tmp_path: Path) -> PeersFile:
    return PeersFile(tmp_path / "folder")


def test_what_is_added_is_read_by_everybody_and_closed_to_others(
    file: PeersFile, machine: MakeMachine, tmp_path: Path
) -> None:
    assert file.all() == []
    peer = machine("Attic").as_peer()
    file.add(peer)
    assert PeersFile(tmp_path / "folder").all() == [peer] == file.all()
    assert file.get(peer.node_id) == peer and file.get("00" * 32) is None
    assert stat.S_IMODE((tmp_path / "folder" / "peers.json").stat().st_mode) == 0o600


def test_copies_of_an_identity_are_remembered_until_it_is_paired_anew(file: PeersFile, machine: MakeMachine) -> None:
    peer = machine("Attic").as_peer()
    file.remember_copy(peer.node_id, "0" * 16)
    assert file.all() == []
    file.add(peer)
    found = [f"{number:016x}" for number in range(MAX_COPIES + 2)]
    for instance in [*found, found[-1]]:
        file.remember_copy(peer.node_id, instance)
    file.rename(peer.node_id, "Cellar")
    (kept,) = file.all()
    assert kept.copies == found[2:]
    file.add(peer)
    assert file.all() == [peer] and peer.copies == []


def test_another_process_is_seen(file: PeersFile, machine: MakeMachine, tmp_path: Path) -> None:
    one, other = machine("One").as_peer(), machine("Other").as_peer()
    file.add(one)
    second = PeersFile(tmp_path / "folder")
    second.add(other)
    assert {peer.name for peer in file.all()} == {"One", "Other"}
    second.forget(one.node_id)
    assert [peer.name for peer in file.all()] == ["Other"]


def test_finding_by_name_and_by_the_beginning_of_the_id(file: PeersFile, machine: MakeMachine) -> None:
    peers = [machine(name).as_peer() for name in ("Attic", "Cellar")]
    for peer in peers:
        file.add(peer)
    assert file.find("attic").name == "Attic"
    assert file.find(peers[1].node_id[:12].upper()).name == "Cellar"
    with pytest.raises(PeersError, match=r"No paired machine is called “roof”; paired are: .*Attic \([0-9a-f]{8}\)"):
        file.find("roof")
    with pytest.raises(PeersError, match="No paired machine"):
        file.find("  ")


def test_an_ambiguous_name_is_refused_with_the_ids(file: PeersFile, machine: MakeMachine) -> None:
    for number in range(2):
        file.add(msgspec.structs.replace(machine(f"m{number}").as_peer(), name="Mac mini"))
    with pytest.raises(PeersError, match=r"could be Mac mini \([0-9a-f]{8,}\), Mac mini \([0-9a-f]{8,}\)"):
        file.find("mac MINI")
    assert file.find(file.all()[0].node_id[:16]) == file.all()[0]


def test_remembering_and_forgetting(file: PeersFile, machine: MakeMachine) -> None:
    peer = msgspec.structs.replace(machine("Attic").as_peer(), name=" Attic\tMac ")
    file.add(peer)
    for number in range(MAX_ADDRESSES + 3):
        file.remember_address(peer.node_id, f"10.0.0.{number}:47820")
    file.remember_address(peer.node_id, "10.0.0.5:47820")
    remembered = file.find("Attic Mac").addresses
    assert len(remembered) == MAX_ADDRESSES
    assert remembered[0] == "10.0.0.5:47820" and len(set(remembered)) == MAX_ADDRESSES
    assert file.forget(peer.node_id).name == "Attic Mac"
    file.remember_address(peer.node_id, "10.0.0.9:1")
    assert file.all() == []
    with pytest.raises(PeersError, match="not a paired machine"):
        file.forget(peer.node_id)


def test_a_machine_that_calls_itself_otherwise_is_found_by_both_names(file: PeersFile, machine: MakeMachine) -> None:
    peer = machine("vm").as_peer()
    file.add(peer)
    assert file.rename(peer.node_id, " Studio\x1b[2J ") and not file.rename(peer.node_id, "Studio[2J")
    assert file.find("studio[2j").node_id == file.find("VM").node_id == peer.node_id
    assert (file.all()[0].name, file.all()[0].former_name) == ("Studio[2J", "vm")
    assert not file.rename(peer.node_id, "\x00") and not file.rename("00" * 32, "Attic")
    other = machine("other").as_peer()
    file.add(msgspec.structs.replace(other, name="vm"))
    assert file.find("vm").node_id == other.node_id  # who has the name now comes before who had it


def test_machines_of_one_name_are_told_apart_by_the_beginning_of_their_ids(
    file: PeersFile, machine: MakeMachine
) -> None:
    first, second, third = (machine(name).as_peer() for name in ("a", "b", "Attic"))
    for peer, name in ((first, "vm"), (second, "VM"), (third, "Attic")):
        file.add(msgspec.structs.replace(peer, name=name))
    labels = file.labels()
    assert labels[first.node_id] == f"vm ({first.node_id[:8]})" and labels[second.node_id].startswith("VM (")
    assert labels[third.node_id] == "Attic"
    assert file.labels("attic")[third.node_id] == f"Attic ({third.node_id[:8]})"  # this machine is called so, too


def test_pairing_again_replaces(file: PeersFile, machine: MakeMachine) -> None:
    peer = machine("Old").as_peer()
    file.add(peer)
    file.add(msgspec.structs.replace(peer, name="Newer"))
    assert [known.name for known in file.all()] == ["Newer"]


def test_a_certificate_that_is_not_the_nodes_is_refused(file: PeersFile, machine: MakeMachine) -> None:
    mixed = msgspec.structs.replace(machine("a").as_peer(), node_id=machine("b").identity.node_id)
    with pytest.raises(PeersError, match="certificate"):
        file.add(mixed)
    assert file.all() == []


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format":2,"peers":[]}', b"\xff\xfe", b'{"format":1,"peers":[{}]}'])
def test_a_damaged_file_is_put_aside_and_said(file: PeersFile, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "peers.json").write_bytes(damage)
    assert file.all() == []
    assert (tmp_path / "folder" / "peers.json.damaged-1").read_bytes() == damage
    (notice,) = file.take_notices()
    assert "damaged" in notice and "pair them again" in notice
    assert file.take_notices() == []


def test_a_file_with_a_swapped_certificate_is_not_trusted(
    file: PeersFile, machine: MakeMachine, tmp_path: Path
) -> None:
    mixed = msgspec.structs.replace(machine("a").as_peer(), node_id=machine("b").identity.node_id)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "peers.json").write_bytes(msgspec.json.encode({"format": 1, "peers": [mixed]}))
    assert file.all() == [] and file.take_notices()


def test_a_write_that_fails_keeps_the_old_file(
    file: PeersFile, machine: MakeMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peer = machine("Kept").as_peer()
    file.add(peer)

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(peers_module, "write_private", full)
    with pytest.raises(PeersError, match="No space left"):
        file.add(machine("New").as_peer())
    monkeypatch.undo()
    assert file.all() == PeersFile(tmp_path / "folder").all() == [peer]


def test_processes_that_write_at_once_lose_nothing(machine: MakeMachine, tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from discovery.peers import PeersFile, new_peer\n"
        "from discovery.certificates import make_certificate, der_of\n"
        "for number in range(5):\n"
        "    peer = new_peer(der_of(make_certificate()[1]), f'{sys.argv[2]}{number}')\n"
        "    PeersFile(pathlib.Path(sys.argv[1])).add(peer)\n"
    )
    root = Path(peers_module.__file__).parents[1]
    command = [sys.executable, "-c", program, str(tmp_path)]
    processes = [subprocess.Popen([*command, letter], cwd=root) for letter in "abc"]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    names = sorted(peer.name for peer in PeersFile(tmp_path).all())
    assert names == [f"{letter}{number}" for letter in "abc" for number in range(5)]


def test_forgetting_in_another_process_is_told(file: PeersFile, machine: MakeMachine, tmp_path: Path) -> None:
    kept, gone = machine("Kept").as_peer(), machine("Gone").as_peer()
    file.add(kept)
    file.add(gone)
    told: list[str] = []
    done = threading.Event()
    watch = PeersWatch(file, lambda node_id: (told.append(node_id), done.set()), seconds=0.02)  # type: ignore[func-returns-value]
    try:
        PeersFile(tmp_path / "folder").forget(gone.node_id)
        assert done.wait(60)
    finally:
        watch.close()
    assert told == [gone.node_id]
    assert not any(thread.name == "peers-watch" for thread in threading.enumerate())


def test_foreign_names_cannot_do_anything(machine: MakeMachine) -> None:
    nasty = new_peer(machine("x").identity.certificate_der, "\x1b[31mRed\x1b[0m\u202e\nnext \u0007line" + "a" * 500)
    assert nasty.name.startswith("[31mRed[0m next line") and len(nasty.name) == MAX_NAME
    assert Peer.label.fget(msgspec.structs.replace(nasty, name="")) == nasty.node_id[:8]  # type: ignore[attr-defined]


@given(st.text(max_size=300))
def test_cleaned_names_are_printable_and_stay_so(text: str) -> None:
    cleaned = clean_name(text)
    assert len(cleaned) <= MAX_NAME and clean_name(cleaned) == cleaned
    assert all(character == " " or character.isprintable() for character in cleaned)
