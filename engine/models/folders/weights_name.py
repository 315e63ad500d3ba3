"""The number format of a model's weights in one word, as people call it: ``Q4_K_M``, ``MXFP4``, ``bf16``."""

from __future__ import annotations

from collections import Counter

from engine.models.formats.gguf_names import tag_of
from engine.models.formats.model_files import ModelFiles
from engine.models.formats.number_formats import BLOCKS

_WORDS = {
    "BF16": "bf16", "F16": "f16", "F32": "f32", "F64": "f64", "F8_E4M3": "FP8", "F8_E5M2": "FP8",
    "AFFINE4": "4-bit", "AFFINE8": "8-bit", "OCP_MXFP4": "MXFP4",
}  # fmt: skip


def weights_name(files: ModelFiles) -> str:
    """The format that most bytes of the experts have, of a dense model those of all weights.

    Of a GGUF file it is the file's own name for its mixture if its name has one.
    """
    counts = _bytes_by_format(files)
    if not counts:
        return ""
    most = counts.most_common(1)[0][0]
    if most in BLOCKS:
        return _mixture(files, most)
    return _WORDS.get(most, most)


def _bytes_by_format(files: ModelFiles) -> Counter[str]:
    counts: Counter[str] = Counter()
    experts = files.experts
    if experts is None:
        for _, tensor in files.trunk():
            counts[tensor.dtype] += tensor.words.nbytes
        return counts
    for layer in experts.layers:
        for held in experts.held(layer)[:1]:
            for matrix in experts.place(layer, held).own:
                counts[matrix.format] += matrix.nbytes
    return counts


def _mixture(files: ModelFiles, most: str) -> str:
    """The tag in the name of one of the GGUF files, if it is of the kind of ``most``; otherwise ``most``."""
    for path in sorted(files.folder.glob("*.gguf")):
        tag = tag_of(path.name)
        if tag.removeprefix("UD-").startswith(most):
            return tag
    return most
