"""A machine's identity: made once, its key where only its owner reads it, copies noticed."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import keyring
import keyring.errors
import pytest
from cryptography import x509

from discovery import identity as identities
from discovery import system_keyring
from discovery.certificates import CertificateError, belong_together, fingerprint, make_certificate, pem_of
from discovery.errors import IdentityError
from discovery.identity import (
    WORDS,
    copied_identities,
    fingerprint_words,
    load_identity,
    machine_instance,
    new_identity,
)
from tests.discovery.discovery_machines import MemoryKeyring


def test_without_a_keyring_the_key_is_a_file_of_its_owner_and_that_is_said_once(tmp_path: Path) -> None:
    first = load_identity(tmp_path)
    key_file = tmp_path / "private-key.pem"
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert key_file.read_bytes() == first.key_pem
    assert str(key_file) in first.notice and "no keyring" in first.notice
    again = load_identity(tmp_path)
    assert (again.node_id, again.key_pem, again.notice) == (first.node_id, first.key_pem, "")
    assert str(key_file) in again.storage


def test_with_a_keyring_no_key_is_on_disk(tmp_path: Path, memory_keyring: MemoryKeyring) -> None:
    first = load_identity(tmp_path)
    assert first.storage == "the system's keyring" and first.notice == ""
    assert load_identity(tmp_path) == first
    assert not any(b"PRIVATE KEY" in file.read_bytes() for file in tmp_path.iterdir())
    assert len(memory_keyring.secrets) == 1


def test_two_homes_share_a_keyring_without_sharing_a_key(tmp_path: Path, memory_keyring: MemoryKeyring) -> None:
    one, other = load_identity(tmp_path / "one"), load_identity(tmp_path / "other")
    assert one.node_id != other.node_id
    assert load_identity(tmp_path / "one").key_pem == one.key_pem != other.key_pem
    assert len(memory_keyring.secrets) == 2


def test_a_copied_folder_whose_key_is_in_a_keyring_gets_an_identity_of_its_own(
    tmp_path: Path, memory_keyring: MemoryKeyring
) -> None:
    original = load_identity(tmp_path / "original")
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    copy = load_identity(tmp_path / "copy")
    assert copy.node_id != original.node_id
    assert "copied" in copy.notice and "pair it again" in copy.notice


def test_a_keyring_that_does_not_answer_any_more_is_an_error_not_a_new_identity(
    tmp_path: Path, memory_keyring: MemoryKeyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_identity(tmp_path)

    def locked(service: str, username: str) -> str:
        raise keyring.errors.KeyringLocked("it is locked")

    monkeypatch.setattr(memory_keyring, "get_password", locked)
    with pytest.raises(IdentityError, match="unlock the keyring"):
        load_identity(tmp_path)
    monkeypatch.undo()
    keyring.set_keyring(memory_keyring)
    assert load_identity(tmp_path).node_id == before.node_id


def test_a_keyring_that_hangs_is_given_up(
    tmp_path: Path, memory_keyring: MemoryKeyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def hang(service: str, username: str, password: str) -> None:
        release.wait(60)

    monkeypatch.setattr(memory_keyring, "set_password", hang)
    monkeypatch.setattr(system_keyring, "SECONDS", 0.2)
    try:
        made = load_identity(tmp_path)
        assert (tmp_path / "private-key.pem").read_bytes() == made.key_pem
        assert "did not answer" in made.notice
    finally:
        release.set()


def test_a_keyring_that_forgets_is_not_used(
    tmp_path: Path, memory_keyring: MemoryKeyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_keyring, "set_password", lambda *arguments: None)
    assert "does not keep" in load_identity(tmp_path).notice
    assert (tmp_path / "private-key.pem").exists()


def test_a_key_file_that_others_can_read_is_closed_and_that_is_said(tmp_path: Path) -> None:
    load_identity(tmp_path)
    key_file = tmp_path / "private-key.pem"
    key_file.chmod(0o644)
    assert "could be read by others (mode 644)" in load_identity(tmp_path).notice
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert load_identity(tmp_path).notice == ""


BEGIN, END = b"-----BEGIN CERTIFICATE-----\n", b"-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("damage", [b"", BEGIN + b"AAAA\n" + END, b"\xff" * 99])
def test_a_damaged_certificate_is_put_aside_and_replaced(tmp_path: Path, damage: bytes) -> None:
    before = load_identity(tmp_path)
    (tmp_path / "certificate.pem").write_bytes(damage)
    after = load_identity(tmp_path)
    assert after.node_id != before.node_id and "damaged" in after.notice
    assert (tmp_path / "certificate.pem.damaged-1").read_bytes() == damage
    assert load_identity(tmp_path).node_id == after.node_id


def test_a_key_of_another_certificate_is_put_aside(tmp_path: Path) -> None:
    before = load_identity(tmp_path)
    (tmp_path / "private-key.pem").write_bytes(make_certificate()[0])
    after = load_identity(tmp_path)
    assert after.node_id != before.node_id and "does not belong" in after.notice
    assert (tmp_path / "private-key.pem.damaged-1").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(IdentityError, match="file"):
        load_identity(tmp_path / "file")


def test_many_processes_at_once_make_one_identity(tmp_path: Path) -> None:
    program = (
        "import keyring, sys, pathlib\n"
        "from keyring.backends import fail\n"
        "keyring.set_keyring(fail.Keyring())\n"
        "from discovery.identity import load_identity\n"
        "sys.stdin.readline()\n"
        "identity = load_identity(pathlib.Path(sys.argv[1]))\n"
        "print(identity.node_id, bool(identity.notice))\n"
    )
    root = Path(identities.__file__).parents[1]
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": root}
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0].split() for process in processes]
    assert len({node_id for node_id, _ in said}) == 1
    assert sorted(notice for _, notice in said) == ["False", "False", "False", "True"]


def test_a_new_identity_replaces_key_and_certificate(tmp_path: Path, memory_keyring: MemoryKeyring) -> None:
    before = load_identity(tmp_path)
    after = new_identity(tmp_path)
    assert after.node_id != before.node_id and "pair it with the others again" in after.notice
    assert load_identity(tmp_path).node_id == after.node_id
    assert list(memory_keyring.secrets.values()) == [after.key_pem.decode()]


def test_deleting_the_certificate_gives_a_new_identity(tmp_path: Path) -> None:
    before = load_identity(tmp_path)
    (tmp_path / "certificate.pem").unlink()
    after = load_identity(tmp_path)
    assert after.node_id != before.node_id and belong_together(after.key_pem, after.certificate_pem)
    assert load_identity(tmp_path).node_id == after.node_id


def test_the_certificate_says_nothing_about_its_owner_and_outlives_the_machine(tmp_path: Path) -> None:
    made = load_identity(tmp_path)
    certificate = x509.load_pem_x509_certificate(made.certificate_pem)
    assert made.node_id == fingerprint(made.certificate_der)
    assert certificate.not_valid_before_utc.year == 2000 and certificate.not_valid_after_utc.year == 2099
    subject = certificate.subject.rfc4514_string()
    assert subject.startswith("CN=privatellm ") and len(subject) == len("CN=privatellm ") + 40
    assert belong_together(made.key_pem, made.certificate_pem)
    assert len(made.certificate_der) < 600
    assert "PRIVATE" not in repr(made)


def test_only_certificates_of_this_program_are_taken(tmp_path: Path) -> None:
    der = load_identity(tmp_path).certificate_der
    assert x509.load_pem_x509_certificate(pem_of(der)).fingerprint
    for wrong in (b"", der[:-1], der + b"\0", b"\x30" * 100, bytes(5000), der[:-1] + bytes([der[-1] ^ 1])):
        with pytest.raises(CertificateError):
            pem_of(wrong)


def test_fingerprints_in_words() -> None:
    assert len(set(WORDS)) == 256 and all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    assert fingerprint_words("00ff017f80" + "ab" * 27) == [WORDS[value] for value in (0, 255, 1, 127, 128, 0xAB)]
    with pytest.raises(ValueError, match="hex"):
        fingerprint_words("not a fingerprint")


@dataclass(frozen=True)
class Claim:
    node_id: str
    instance: str


def test_a_copied_identity_is_noticed_and_named() -> None:
    mine = Claim("aa" * 32, "1")
    twice = [Claim("bb" * 32, "2"), Claim("bb" * 32, "2"), Claim("aa" * 32, "1")]
    assert copied_identities(mine, twice) == []
    own, foreign = copied_identities(mine, [*twice, replace(mine, instance="9"), Claim("bb" * 32, "3")])
    assert "this machine's identity aaaaaaaa" in own and "new identity" in own
    assert "2 machines announce the identity bbbbbbbb" in foreign


def test_the_instance_differs_by_folder_and_stays_within_a_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine_instance(tmp_path)
    assert here == machine_instance(tmp_path) == load_identity(tmp_path).instance
    assert len(here) == 16 and here != machine_instance(tmp_path / "other")
    monkeypatch.setattr(identities, "_boot", lambda: "another boot")
    assert machine_instance(tmp_path) != here


def test_a_hanging_read_is_given_up_too(memory_keyring: MemoryKeyring, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    hang: Callable[[str, str], None] = lambda service, username: release.wait(60)  # type: ignore[assignment]  # noqa: E731
    monkeypatch.setattr(memory_keyring, "get_password", hang)
    try:
        with pytest.raises(system_keyring.KeyringUnavailable, match="did not answer"):
            system_keyring.read_secret("service", "account", seconds=0.1)
    finally:
        release.set()


def test_a_person_has_time_to_answer_the_keyrings_dialogue(
    tmp_path: Path, memory_keyring: MemoryKeyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_identity(tmp_path)
    waited: list[float | None] = []
    read = system_keyring.read_secret
    monkeypatch.setattr(
        system_keyring,
        "read_secret",
        lambda service, account, seconds=None: (waited.append(seconds), read(service, account, seconds))[1],
    )
    assert load_identity(tmp_path, 120.0).node_id == before.node_id
    load_identity(tmp_path)
    assert waited == [120.0, None]


@pytest.mark.parametrize(
    ("platform", "over_ssh", "said"), [("darwin", True, True), ("darwin", False, False), ("linux", True, False)]
)
def test_a_keychain_that_is_locked_over_ssh_says_how_it_is_opened(
    tmp_path: Path,
    memory_keyring: MemoryKeyring,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    over_ssh: bool,
    said: bool,
) -> None:
    load_identity(tmp_path)

    def locked(service: str, account: str, seconds: float | None = None) -> str:
        raise system_keyring.KeyringUnavailable("it is locked")

    monkeypatch.setattr(system_keyring, "read_secret", locked)
    monkeypatch.setattr(identities.sys, "platform", platform)
    if over_ssh:
        monkeypatch.setenv("SSH_CONNECTION", "somewhere")
    else:
        monkeypatch.delenv("SSH_CONNECTION", raising=False)
    with pytest.raises(IdentityError, match="unlock the keyring") as refused:
        load_identity(tmp_path)
    assert ("`security unlock-keychain`" in str(refused.value)) == said


def test_identities_of_many_machines_are_all_different(tmp_path: Path) -> None:
    assert len({load_identity(tmp_path / str(number)).node_id for number in range(5)}) == 5
    assert json.dumps(sorted(path.name for path in (tmp_path / "0").iterdir())) == json.dumps(
        ["certificate.pem", "identity.lock", "private-key.pem"]
    )
