"""A share: the part of a model that one node of a ring keeps, a sparse copy of another machine's model folder.

Every file has the name and the size that it has there; written are only the trunk and the node's own experts, the rest
are holes that take no room on the disk. So a share is read by the same code, in the same layout and with the same
results as the whole. ``share.json`` says what is here, complete and compared with its checksum; what it does not name
is not here, whatever the files hold. A share can be loaded as a node's part of a ring only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import ModelError
from engine.models.store import SHARE_MANIFEST

FORMAT = 1
_MANIFEST_LIMIT = 64 * 1024 * 1024

Form = Literal["bank", "plain", "library"]
"""Form in which a folder keeps experts: prepared slabs (``bank``), a checkpoint with the names of transformers
(``plain``), or one that mlx-lm wrote or that is quantised (``library``)."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What two machines compare before they share a model; all but ``name`` must be equal.

    ``weights`` and ``tokenizer`` are fingerprints in hexadecimal digits. The same weights have the same fingerprint in
    any form, prepared or not.
    """

    version: int
    """Of this description, and of what is sent."""
    name: str
    family: str
    quantisation: str
    """``bfloat16``, ``4-bit in groups of 64``, ..."""
    config: str
    """Fingerprint of ``config.json`` without what does not change the model."""
    tokenizer: str
    weights: str


class FileSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the model that holds tensors: its name relative to the folder, and its size in bytes."""

    name: str
    size: int


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item of which the first ``done`` bytes are on the disk; ``checksum`` is their CRC-32."""

    key: str
    done: int
    checksum: int


class ShareManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``share.json``. ``layout`` is the fingerprint of the folder's files (:mod:`engine.models.weight_layout`)."""

    format: int
    identity: ModelIdentity
    head: str
    """Node id of the machine that sent this."""
    form: Form
    layout: str
    files: tuple[FileSize, ...]
    experts: dict[int, tuple[int, ...]]
    """Layer to the experts that are here, ascending."""
    other: tuple[str, ...] = ()
    """What else is here: keys of configuration and tokenizer files, headers and pieces of the trunk."""
    trunk_pieces: int = 0
    """How many the whole trunk has; 0 for a model without one."""
    begun: Begun | None = None

    @property
    def has_trunk(self) -> bool:
        return sum(key.startswith("trunk/") for key in self.other) >= self.trunk_pieces


def is_share(folder: Path) -> bool:
    """Whether ``folder`` is a share, complete or not."""
    return (folder / SHARE_MANIFEST).is_file()


def read_share(folder: Path) -> ShareManifest:
    """``share.json`` of ``folder``. Raises ModelError if it is missing, damaged, or of another version."""
    path = folder / SHARE_MANIFEST
    try:
        if path.stat().st_size > _MANIFEST_LIMIT:
            raise ModelError(f"{path} is damaged: it is over {_MANIFEST_LIMIT} bytes; {_remedy(folder)}.")
        manifest = msgspec.json.decode(path.read_bytes(), type=ShareManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged ({error}); {_remedy(folder)}.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); {_remedy(folder)}.") from error
    if manifest.format != FORMAT:
        raise ModelError(f"{path} is of format {manifest.format}, not {FORMAT}; {_remedy(folder)}.")
    return manifest


class Part:
    """What an opened folder needs to know to hand out no more than is here."""

    def __init__(self, folder: Path, manifest: ShareManifest) -> None:
        self._folder = folder
        self._name = manifest.identity.name
        self.has_trunk = manifest.has_trunk
        self._held = {layer: tuple(sorted(experts)) for layer, experts in manifest.experts.items()}

    def held(self, layer: int) -> tuple[int, ...]:
        """The experts of ``layer`` that are here, ascending."""
        return self._held.get(layer, ())

    @property
    def count(self) -> int:
        """(layer, expert) pairs that are here."""
        return sum(map(len, self._held.values()))

    def require_trunk(self) -> None:
        """Raises ModelError if the trunk is not here."""
        if not self.has_trunk:
            raise ModelError(
                f"{self._folder} holds experts of {self._name} without its trunk: it serves in a ring whose head "
                "routes (central), and runs no model by itself."
            )


def part_of(folder: Path) -> Part | None:
    """What is here if ``folder`` is a share; None for a whole model. Raises ModelError if ``share.json`` is damaged."""
    return Part(folder, read_share(folder)) if is_share(folder) else None


def _remedy(folder: Path) -> str:
    return f"delete {folder}, and the head sends it again"
