"""How a model sees: the grid of tokens that a picture of a given size becomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ModelError, damaged, shown

MOST_TOKENS = 2048
"""Maximum tokens of a picture. Larger ones are scaled down: the work of a tower grows with the square, and models allow
pictures that would take a processor hours."""
LARGEST = 2**31 - 1
"""Maximum of any whole number among the settings."""
_LONGEST = 200
"""Maximum ratio of a picture's sides."""
_IMG = 10
"""Id of the token for pictures in Mistral's vocabularies."""
_MISTRAL_AROUND = {"image_break_token_id": 12, "image_end_token_id": 13}
"""Settings of the tokens between two rows of a picture and after it, with their ids in Mistral's vocabularies."""
_GEMMA_TOKENS = (70, 140, 280, 560, 1120)
"""Numbers of tokens that Gemma's pictures may have at most."""


@dataclass(frozen=True)
class Grid:
    """The tokens of a picture: ``rows`` x ``columns``, row by row. The picture is scaled to ``height`` x ``width``
    pixels before."""

    rows: int
    columns: int
    height: int
    width: int
    breaks: int = 0
    """Tokens of text between two rows."""

    @property
    def seen(self) -> int:
        """Tokens that the tower makes."""
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        """Tokens in a prompt, with those between the rows."""
        return self.seen + self.breaks * (self.rows - 1)

    def place(self, seen: int) -> int:
        """The place among all tokens of the one that is number ``seen`` of those that the tower makes."""
        return seen + self.breaks * (seen // self.columns)


@dataclass(frozen=True)
class Sight:
    """How a model sees pictures.

    A picture is scaled, cut into patches of ``patch`` x ``patch`` pixels, and ``merge`` x ``merge`` patches become a
    token.
    """

    family: str
    """``model_type`` of the whole model, a key of :data:`TOWERS`."""
    placeholder: int
    """Id of the token that stands in a prompt where a picture is, once for each picture."""
    patch: int
    merge: int
    most: int
    """Maximum tokens of a picture that the tower makes."""
    least: int = 1
    """Minimum tokens of a picture, as far as its sides allow."""
    longest: int = LARGEST
    """Maximum pixels of a side."""
    before: tuple[int, ...] = ()
    """Ids of the tokens that come before a picture besides those that the chat template writes."""
    after: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    """Ids of the tokens between two rows of a picture."""
    beside: str = ""
    """Text that stands before and behind each picture besides that of the chat template."""
    given: int = 0
    """Id of the token whose other embeddings (:attr:`DecoderRecord.own_input`) the rows of a picture have."""
    together: bool = False
    """Whether the tokens of a picture see each other, also those after them, in layers with a window."""
    together_in_full: bool = False
    """Whether they do so in all layers."""
    spread: bool = False
    """Whether a token's position is its place in the picture (mrope), not its place in the text."""
    sections: tuple[int, int, int] = (11, 11, 10)
    """Pairs of numbers of a head that turn by each of the three positions, if they are ``spread``."""
    deep: int = 0
    """First layers of the language model behind which features of the tower's own layers are added (deepstack)."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """What is taken from red, green and blue, each from 0 to 1."""
    deviation: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """What they are divided by then."""

    @property
    def side(self) -> int:
        """Pixels of a side of the square that becomes a token."""
        return self.patch * self.merge

    def grid(self, height: int, width: int) -> Grid:
        """The grid of a picture of ``height`` x ``width`` pixels.

        Raises ModelError (bad-input) if it is too long and narrow.
        """
        longer, shorter = max(height, width), min(height, width)
        if longer > _LONGEST * shorter:
            raise ModelError(
                f"A picture of {width} x {height} pixels is more than {_LONGEST} times as long as wide; cut it.",
                "bad-input",
            )
        rows, columns = TOWERS[self.family].scaled(self, height, width)
        return Grid(rows, columns, rows * self.side, columns * self.side, len(self.between))


@dataclass(frozen=True)
class Tower:
    """A family of models that see."""

    models: str
    """What its models are called."""
    prefixes: tuple[tuple[str, str], ...]
    """Beginnings of the names of the tower's tensors in checkpoints, and what stands there in transformers' model."""
    read: Callable[[str, Mapping[str, Any], Mapping[str, Any]], Sight]
    """The sight by the name of the family, ``config.json`` and the settings of the image processor."""
    scaled: Callable[[Sight, int, int], tuple[int, int]]
    """Rows and columns of a picture of a height and a width."""


def sight_of(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Sight | None:
    """How the model of ``config.json`` sees, with the settings of its image processor (empty: as published).

    None if it sees no pictures, or in a way that is not known. Raises ModelError if a setting is damaged.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in TOWERS or not isinstance(config.get("vision_config"), Mapping):
        return None
    return TOWERS[family].read(family, config, processor)


# --- Qwen -------------------------------------------------------------------------------------------------------------


def _qwen(
    family: str,
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    placeholder: int = 248_056,
    sections: tuple[int, int, int] = Sight.sections,
) -> Sight:
    """``placeholder``, ``sections``: what settings say that are missing."""
    vision = config["vision_config"]
    patch, merge = _number(vision, "patch_size", 16), _number(vision, "spatial_merge_size", 2)
    size = processor.get("size")
    size = size if isinstance(size, Mapping) else {}
    # Older files have the limits beside the size.
    least = _number(processor, "min_pixels", _number(size, "shortest_edge", 65_536))
    most = _number(processor, "max_pixels", _number(size, "longest_edge", 16_777_216))
    for key, expected in (("patch_size", patch), ("merge_size", merge)):
        if _number(processor, key, expected) != expected:
            raise damaged(f"The image processor's {key} is {processor[key]}, and the tower's {expected}")
    area = (patch * merge) ** 2
    sight = Sight(
        family,
        _number(config, "image_token_id", placeholder, least=0),
        patch,
        merge,
        most=max(1, min(most // area, MOST_TOKENS)),
        spread=True,
        sections=_sections(config, sections),
    )
    return _with_colours(replace(sight, least=max(1, min(-(-least // area), sight.most))), processor)


def _qwen_vl(family: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Sight:
    vision = config["vision_config"]
    depth, layers = _number(vision, "depth", 27), vision.get("deepstack_visual_indexes", [8, 16, 24])
    known = isinstance(layers, list) and all(type(each) is int and 0 <= each < depth for each in layers)
    if not known or len(set(layers)) != len(layers):
        raise damaged(
            f"The setting deepstack_visual_indexes is {shown(layers)}, not different layers of a tower with {depth}"
        )
    return replace(_qwen(family, config, processor, 151_655, (24, 20, 20)), deep=len(layers))


def _sections(config: Mapping[str, Any], default: tuple[int, int, int]) -> tuple[int, int, int]:
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    # Older files call it so.
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    values = rope.get("mrope_section") if isinstance(rope, Mapping) else None
    if values is None:
        return default
    if not isinstance(values, list) or len(values) != 3 or not all(type(each) is int and each >= 0 for each in values):
        raise damaged(f"The setting mrope_section is {shown(values)}, not three whole numbers")
    time, above, left = values
    return time, above, left


def _qwen_scaled(sight: Sight, height: int, width: int) -> tuple[int, int]:
    """The nearest size, or the largest or smallest of the same proportions that is allowed."""
    side, area = sight.side, sight.side**2
    rows, columns = round(height / side), round(width / side)
    if rows * columns > sight.most:
        scale = math.sqrt((height * width) / (sight.most * area))
        return max(1, math.floor(height / scale / side)), max(1, math.floor(width / scale / side))
    if rows * columns < sight.least:
        scale = math.sqrt(sight.least * area / (height * width))
        return math.ceil(height * scale / side), math.ceil(width * scale / side)
    return rows, columns


# --- Gemma ------------------------------------------------------------------------------------------------------------


def _gemma(family: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Sight:
    vision, text = config["vision_config"], config.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    most = _number(processor, "max_soft_tokens", 280)
    if most not in _GEMMA_TOKENS:
        raise damaged(f"The image processor's max_soft_tokens is {most}, not one of {_GEMMA_TOKENS}")
    patch, merge = _number(vision, "patch_size", 16), _number(vision, "pooling_kernel_size", 3)
    for key, expected in (("patch_size", patch), ("pooling_kernel_size", merge)):
        if _number(processor, key, expected) != expected:
            raise damaged(f"The image processor's {key} is {processor[key]}, and the tower's {expected}")
    return Sight(
        family,
        _number(config, "image_token_id", 258_880, least=0),
        patch,
        merge,
        most,
        before=(_number(config, "boi_token_id", 255_999, least=0),),
        after=(_number(config, "eoi_token_id", 258_882, least=0),),
        given=_number(text, "pad_token_id", 0, least=0),
        together=text.get("use_bidirectional_attention") == "vision",
        mean=(0.0, 0.0, 0.0),
        deviation=(1.0, 1.0, 1.0),
    )


def _gemma_scaled(sight: Sight, height: int, width: int) -> tuple[int, int]:
    """The largest size of the same proportions that is allowed, also for a small picture."""
    side = sight.side
    scale = math.sqrt(sight.most * side**2 / (height * width))
    rows, columns = math.floor(scale * height / side), math.floor(scale * width / side)
    if not rows:
        return 1, min(width // height, sight.most)
    if not columns:
        return min(height // width, sight.most), 1
    return rows, columns


def _gemma_3(family: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Sight:
    """Raises ModelError if the picture is not cut into squares that become the tokens."""
    vision = config["vision_config"]
    tokens, patch = _number(config, "mm_tokens_per_image", 256), _number(vision, "patch_size", 14)
    pixels, side = _number(vision, "image_size", 896), math.isqrt(tokens)
    merge = pixels // patch // side
    if side**2 != tokens or side * merge * patch != pixels:
        raise damaged(
            f"A picture of {pixels} x {pixels} pixels in patches of {patch} makes no square of {tokens} tokens"
        )
    if tokens > MOST_TOKENS:
        raise damaged(f"A picture is {tokens:,} tokens, and at most {MOST_TOKENS:,} are read here")
    size = processor.get("size")
    for key in ("height", "width"):
        if isinstance(size, Mapping) and _number(size, key, pixels) != pixels:
            raise damaged(f"The image processor's {key} is {size[key]}, and the tower's {pixels}")
    # Templates write the token before a picture, for which its tokens, and the one after them, come.
    begin = _number(config, "boi_token_index", 255_999, least=0)
    sight = Sight(
        family,
        begin,
        patch,
        merge,
        most=tokens,
        least=tokens,
        before=(begin,),
        after=(_number(config, "eoi_token_index", 256_000, least=0),),
        beside="\n\n",
        together=True,
        together_in_full=True,
    )
    return _with_colours(sight, processor)


def _gemma_3_scaled(sight: Sight, height: int, width: int) -> tuple[int, int]:
    """The same square for any picture."""
    side = math.isqrt(sight.most)
    return side, side


# --- Mistral ----------------------------------------------------------------------------------------------------------


def _mistral(family: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Sight:
    """Raises ModelError if another layer of the tower than the last is read, or the tokens beside rows are unknown."""
    vision, layer = config["vision_config"], config.get("vision_feature_layer", -1)
    if layer != -1:
        raise ModelError(
            f"The setting vision_feature_layer is {shown(layer)}, and only the last layer (-1) is read here."
        )
    token = _number(config, "image_token_index", _IMG, least=0)
    ids = {key: config[key] for key in _MISTRAL_AROUND if config.get(key) is not None}
    if token != _IMG and len(ids) < len(_MISTRAL_AROUND):
        raise ModelError(
            f"The token of a picture is number {token}, not {_IMG} as in Mistral's vocabularies, and config.json does "
            f"not say which ones end a row and a picture ({' and '.join(_MISTRAL_AROUND)})."
        )
    between, after = (_number(ids, key, _MISTRAL_AROUND[key], least=0) for key in _MISTRAL_AROUND)
    size = processor.get("size")
    longest, key = size if isinstance(size, Mapping) else {}, "longest_edge"
    if longest.get(key) is None:
        longest, key = vision, "image_size"
    sight = Sight(
        family,
        token,
        _number(vision, "patch_size", 14),
        _number(config, "spatial_merge_size", 2),
        most=MOST_TOKENS,
        # Shorter ones would leave nothing of a narrow picture.
        longest=_number(longest, key, 1540, least=_LONGEST),
        between=(between,),
        after=(after,),
        mean=(0.48145466, 0.4578275, 0.40821073),
        deviation=(0.26862954, 0.26130258, 0.27577711),
    )
    return _with_colours(sight, processor)


def longest_side(sight: Sight, height: int, width: int) -> int:
    """Maximum pixels of the longer side with which a picture of this size for Mistral has not too many tokens."""
    longest = min(sight.longest, max(height, width))
    while math.prod(_within(sight, longest, height, width)) > sight.most:
        longest -= sight.side
    return longest


def _within(sight: Sight, longest: int, height: int, width: int) -> tuple[int, int]:
    """The size of the picture, or the largest of the same proportions with ``longest`` pixels at most, rounded up."""
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return -(-height // sight.side), -(-width // sight.side)


def _mistral_scaled(sight: Sight, height: int, width: int) -> tuple[int, int]:
    return _within(sight, longest_side(sight, height, width), height, width)


# --- settings ---------------------------------------------------------------------------------------------------------


def _number(settings: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    value = settings.get(key)
    value = default if value is None else value
    if type(value) is not int or not least <= value <= LARGEST:
        raise damaged(f"The setting {key} for pictures is {shown(value)}, not a whole number from {least} to {LARGEST}")
    return value


def _with_colours(sight: Sight, processor: Mapping[str, Any]) -> Sight:
    def three(key: str, default: tuple[float, float, float], least: float) -> tuple[float, float, float]:
        values = processor.get(key)
        if values is None:
            return default
        numbers = values if isinstance(values, list) else []
        if len(numbers) != 3 or not all(type(each) in (int, float) and least <= each <= 1 for each in numbers):
            raise damaged(f"The setting {key} for pictures is {shown(values)}, not three numbers from {least} to 1")
        red, green, blue = map(float, numbers)
        return red, green, blue

    return replace(
        sight, mean=three("image_mean", sight.mean, 0.0), deviation=three("image_std", sight.deviation, 0.001)
    )


_QWEN = Tower("Qwen 3.5 and 3.6", (("model.visual.", ""), ("visual.", "")), _qwen, _qwen_scaled)
_QWEN_VL = replace(_QWEN, models="Qwen3-VL", read=_qwen_vl)
_GEMMA = Tower(
    "Gemma 4",
    (
        ("model.vision_tower.", "vision_tower."),
        ("model.embed_vision.", "embed_vision."),
        ("vision_tower.", "vision_tower."),
        ("embed_vision.", "embed_vision."),
    ),
    _gemma,
    _gemma_scaled,
)
_UNIFIED = Tower(
    "Gemma 4",
    (
        ("model.vision_embedder.", ""),
        ("model.embed_vision.", "multimodal_embedder."),
        ("vision_embedder.", ""),
        ("embed_vision.", "multimodal_embedder."),
    ),
    _gemma,
    _gemma_scaled,
)
_WITH_PROJECTOR = (
    # Published files of Gemma 3, and mlx's of both, have the name of a module that transformers does not have.
    ("vision_tower.vision_model.", "vision_tower."),
    ("model.vision_tower.vision_model.", "vision_tower."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("vision_tower.", "vision_tower."),
    ("multi_modal_projector.", "multi_modal_projector."),
)
_GEMMA_3 = Tower("Gemma 3", _WITH_PROJECTOR, _gemma_3, _gemma_3_scaled)
_MISTRAL = Tower("Mistral 3 and 4", _WITH_PROJECTOR, _mistral, _mistral_scaled)
TOWERS: Mapping[str, Tower] = {
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_vl": _QWEN_VL,
    "qwen3_vl_moe": _QWEN_VL,
    "gemma3": _GEMMA_3,
    "gemma4": _GEMMA,
    "gemma4_unified": _UNIFIED,
    "mistral3": _MISTRAL,
}
"""The families that see, by ``model_type`` of the whole model."""
