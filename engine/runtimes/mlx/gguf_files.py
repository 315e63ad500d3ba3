"""What a GGUF file's weights become in mlx: their bytes, what is unpacked, and whether that is worth it.

Importable without mlx.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError, shown
from engine.models.architectures.families import FAMILIES
from engine.models.folders.checkpoint import Checkpoint
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import is_plain_in_mlx
from engine.models.formats.model_files import Experts
from engine.models.formats.number_formats import in_mlx, is_packed
from engine.models.store.catalogue import for_gpu_instead
from engine.planning.units import byte_size

MOST_GROWTH = 1.5
"""How many times as large as in the file the weights may be in mlx."""


@dataclass(frozen=True)
class LaidOut:
    """The weights of a GGUF file in mlx: ``stored`` bytes in the file, ``nbytes`` in memory. ``unpacked`` are the bytes
    in the file of what no kernel of mlx takes, by format, and ``added`` what unpacking adds to them. ``is_packed``:
    whether any of them is in a packed format."""

    stored: int
    nbytes: int
    unpacked: Counter[str]
    added: int
    is_packed: bool

    @property
    def growth(self) -> float:
        return self.nbytes / max(1, self.stored)

    def notice(self, dtype: str) -> str:
        """What the weights take, in words; ``dtype`` is what mlx computes with."""
        sentence = (
            f"the GGUF file's weights were laid out for mlx: {byte_size(self.nbytes, fine=True)} in memory, "
            f"{byte_size(self.stored, fine=True)} in the file"
        )
        if self.unpacked:
            sentence += (
                f"; {_listed(self.unpacked)} of them unpacked to {dtype}, which takes "
                f"{byte_size(self.added, fine=True)} more"
            )
        if dtype == "bfloat16":
            sentence += "; scales were rounded to bfloat16 (`--dtype float32` keeps them)"
        return sentence


def in_gguf(folder: Path) -> bool:
    """Whether the weights in ``folder`` are in GGUF files."""
    return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))


def dtype_of(files: Checkpoint, asked: str) -> str:
    """What mlx computes with on a GPU where ``asked`` was asked for: what the file has most of, and bfloat16 for packed
    formats, to which their scales are rounded."""
    if asked != "auto":
        return asked
    nbytes: Counter[str] = Counter()
    for number_format, _, size, _ in _tensors(files, with_trunk=True):
        nbytes[number_format] += size
    return {"F32": "float32", "F16": "float16"}.get(max(nbytes, key=lambda each: nbytes[each]), "bfloat16")


def laid_out_in_mlx(files: Checkpoint, width: int, with_trunk: bool = True) -> LaidOut:
    """What the weights of ``files`` become where mlx computes with numbers of ``width`` bytes."""
    stored = nbytes = added = 0
    any_packed = False
    unpacked: Counter[str] = Counter()
    for number_format, numbers, size, apart in _tensors(files, with_trunk):
        codes, plain = (0, numbers) if apart else in_mlx(number_format, numbers)
        stored += size
        nbytes += codes + plain * width
        any_packed |= is_packed(number_format)
        if is_packed(number_format) and plain == numbers:
            unpacked[number_format] += size
            added += plain * width - size
    return LaidOut(stored, nbytes, unpacked, added, any_packed)


def _tensors(files: Checkpoint, with_trunk: bool) -> Iterator[tuple[str, int, int, bool]]:
    """Format, numbers and bytes of all tensors, and whether it is plain in mlx in any format. A matrix of a layer's
    experts is counted as one tensor, as those of the first expert are."""
    for name, (_, entry) in files.trunk_entries.items() if with_trunk else ():
        yield entry.dtype, math.prod(entry.shape), entry.nbytes, is_plain_in_mlx(name, entry.dtype)
    experts: Experts | None = files.experts
    if experts is None:
        return
    for layer in experts.layers:
        for matrix in experts.place(layer, 0).own:
            yield matrix.format, math.prod(matrix.shape) * experts.count, matrix.nbytes * experts.count, False


def unsupported_reason(folder: Path, ring: bool) -> str | None:
    """Why mlx does not run the GGUF file in ``folder``, in a few words; None if it does. ``ring``: with other machines.

    Raises ModelError if the file cannot be opened.
    """
    if ring:
        return "a ring reads a GGUF file with the native runtime, where it lies"
    files = open_model(folder, as_whole=True)
    family = FAMILIES[files.config["model_type"]]
    if family.mlx is None:
        return None  # the family is refused by name
    weights = laid_out_in_mlx(files, width=2)
    if weights.growth <= MOST_GROWTH:
        return None
    growth = f"from {byte_size(weights.stored, fine=True)} to {byte_size(weights.nbytes, fine=True)}"
    why = f"none of whose kernels takes {_listed(weights.unpacked)}"
    if not weights.unpacked:
        why = "whose kernels take wider codes"
    return f"the GGUF file's weights would grow {growth} in mlx, {why}"


def refuse_unsupported(folder: Path, ring: bool) -> None:
    """Raises ModelError (bad-input) if mlx does not run the GGUF file in ``folder``, naming what to take instead."""
    problem = unsupported_reason(folder, ring)
    if problem is None:
        return
    instead = for_gpu_instead(folder.name)
    model = "a model of mlx-community" if instead is None else f"{instead.name} of the catalogue"
    raise ModelError(f"{problem[0].upper()}{problem[1:]}: choose the native runtime, or {model}.", kind="bad-input")


def _listed(unpacked: Counter[str]) -> str:
    return " and ".join(f"{byte_size(size, fine=True)} of {shown(name)}" for name, size in unpacked.most_common())
