"""The tower that turns a picture into rows for a model: transformers' own modules and image processors.

It is built for some pictures, which takes a second, and discarded after them, so that its gigabyte of weights is in
memory only then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.errors import ModelError, damaged
from engine.ipc.progress import ProgressCallback
from engine.models.architectures.config_values import without_implementations
from engine.models.formats.json_files import SMALL_FILE, read_object
from engine.models.formats.mapped_file import MappedFile
from engine.moe.kernels.file_guard import unchanged
from engine.pictures.folders import tower_folder, tower_tensors
from engine.pictures.picture import Picture
from engine.pictures.sight import Sight, longest_side
from engine.runtimes.torch.loading import BUILDING, fill_buffers, in_one_line, put
from engine.runtimes.torch.offload.torch_tensors import numbers_on

STAGE = "looking at a picture"
"""Stage of the progress reports of a tower."""


class VisionTower:
    """The tower of a model, in float32 on ``device``; on the CPU from when the device's memory does not hold it."""

    def __init__(self, folder: Path, sight: Sight, device: str = "cpu") -> None:
        """Raises ModelError if the configuration or the weights in ``folder`` are damaged."""
        self._device = torch.device(device)
        config = _config(tower_folder(folder))
        build, self._look = _KINDS[sight.family]
        self._sight = sight
        self._vision = config.vision_config
        try:
            with BUILDING, torch.device("meta"):
                self._module: Any = build(config).eval().requires_grad_(False)
        except Exception as error:  # the numbers of a damaged config.json fail anywhere
            raise damaged(f"config.json describes no tower that can be built: {in_one_line(error)}") from error
        _fill(self._module, folder, sight)
        self._layers = _layers(self._module)

    def rows(self, picture: Picture, progress: ProgressCallback) -> NDArray[np.float32]:
        """The rows of :class:`engine.pictures.shown.PicturePass`, in the order of :attr:`Grid.seen`.

        ``progress`` is called before each layer, and may raise Cancelled. Raises ModelError if the picture is too long
        and narrow, or the rows are no numbers.
        """
        grid = self._sight.grid(picture.height, picture.width)
        array = np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)
        hooks = [
            layer.register_forward_pre_hook(lambda *_, done=done: progress(STAGE, done, len(self._layers), "layers"))
            for done, layer in enumerate(self._layers)
        ]
        try:
            with torch.inference_mode():
                rows = self._rows(array)
        finally:
            for hook in hooks:
                hook.remove()
        if len(rows) != grid.seen:
            raise ModelError(f"The tower made {len(rows)} rows of a picture of {grid.seen} tokens.", "internal")
        if not np.isfinite(rows).all():
            raise damaged("What the tower made of a picture is no number, so its weights are damaged")
        return rows

    def _rows(self, array: NDArray[np.uint8]) -> NDArray[np.float32]:
        try:
            # The weights were read on the CPU, and are moved for the first picture.
            rows = self._look(self._module.to(self._device), self._sight, self._vision, array)
        except torch.OutOfMemoryError:
            if self._device.type == "cpu":
                raise
            self._device = torch.device("cpu")
            return self._rows(array)
        except (RuntimeError, ValueError) as error:  # transformers checks less of a tower's settings than it needs
            raise ModelError(
                f"The tower cannot look at a picture: {in_one_line(error)}; fetch the model again."
            ) from error
        array_of_rows: NDArray[np.float32] = rows.cpu().numpy()
        return array_of_rows


def _config(folder: Path) -> Any:
    """transformers' configuration of the whole model. Raises ModelError if it cannot be used."""
    from transformers import CONFIG_MAPPING

    stored = read_object(folder / "config.json", SMALL_FILE)
    try:
        return CONFIG_MAPPING[stored["model_type"]].from_dict(without_implementations(stored))
    except Exception as error:  # whatever transformers raises for settings it did not expect
        raise ModelError(f"{folder / 'config.json'} cannot be used: {in_one_line(error)}") from error


def _fill(module: nn.Module, folder: Path, sight: Sight) -> None:
    """Put the tower's weights in their places, in float32. Raises ModelError for one that is missing or has another
    shape or a number format that is not plain."""
    from transformers import PreTrainedModel

    stored = tower_tensors(folder, sight)
    files = {path: MappedFile(path) for path in {tensor.path for tensor in stored.values()}}
    with unchanged(list(files.values())):
        for name, expected in module.state_dict().items():
            if name not in stored:
                raise damaged(f"Tensor {name} of the tower is missing from the model's files")
            tensor = stored[name]
            # GGUF files have no tensors without dimensions.
            shape = () if tensor.shape == (1,) and expected.dim() == 0 else tensor.shape
            # mlx's convolutions have the colours last.
            last = len(shape) == 4 and shape != tuple(expected.shape)
            shape = (shape[0], shape[3], shape[1], shape[2]) if last else shape
            if not tensor.is_readable or shape != tuple(expected.shape):
                raise damaged(
                    f"Tensor {name} of the tower is {list(tensor.shape)} of {tensor.dtype}, and config.json asks for "
                    f"{list(expected.shape)}"
                )
            file, cpu = files[tensor.path], torch.device("cpu")
            words = [file.tensor(entry.dtype, entry.shape, entry.start) for entry in tensor.entries]
            parts = [numbers_on(cpu, part, torch.float32) for part in words]
            values = parts[0] if len(parts) == 1 else torch.stack(parts, 2)
            if tensor.axes is not None:
                values = values.reshape(tensor.axes[0]).permute(tensor.axes[1])
            values = values.permute(0, 3, 1, 2).contiguous() if last else values.reshape(shape)
            put(module, name, values + tensor.added if tensor.added else values)
    for part in [module, *module.children()]:
        if isinstance(part, PreTrainedModel):
            fill_buffers(part, torch.device("cpu"))


def _layers(module: nn.Module) -> list[nn.Module]:
    """The layers that take the time: the longest list of them; none if there are no lists."""
    lists: list[list[nn.Module]] = [[*each] for each in module.modules() if isinstance(each, nn.ModuleList)]
    return max(lists, key=len, default=[])


# --- Qwen -------------------------------------------------------------------------------------------------------------


def _build_qwen(config: Any) -> nn.Module:
    from transformers import AutoModel

    tower: nn.Module = AutoModel.from_config(config.vision_config, attn_implementation="sdpa")
    return tower


def _look_qwen(module: Any, sight: Sight, vision: Any, picture: NDArray[np.uint8]) -> torch.Tensor:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    area = sight.side**2
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": sight.least * area, "longest_edge": sight.most * area},
        patch_size=sight.patch,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=sight.merge,
        image_mean=sight.mean,
        image_std=sight.deviation,
    )
    seen = processor(picture, return_tensors="pt", input_data_format="channels_last").to(module.device)
    found = module(seen["pixel_values"], grid_thw=seen["image_grid_thw"])
    # Qwen3-VL's also gives features of single layers.
    return torch.cat((found.pooler_output, *getattr(found, "deepstack_features", ())), dim=1)


# --- Gemma ------------------------------------------------------------------------------------------------------------


def _build_gemma(config: Any) -> nn.Module:
    from transformers import AutoModel
    from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder

    return nn.ModuleDict(
        {
            "vision_tower": AutoModel.from_config(config.vision_config, attn_implementation="sdpa"),
            "embed_vision": Gemma4MultimodalEmbedder(config.vision_config, config.text_config),
        }
    )


def _look_gemma(module: Any, sight: Sight, vision: Any, picture: NDArray[np.uint8]) -> torch.Tensor:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    processor = Gemma4ImageProcessorPil(
        max_soft_tokens=sight.most, patch_size=sight.patch, pooling_kernel_size=sight.merge
    )
    seen = processor(picture, return_tensors="pt", input_data_format="channels_last")
    # The processor fills up to the largest picture, which changes nothing but the time.
    count = int(seen["num_soft_tokens_per_image"][0]) * sight.merge**2
    tower = module["vision_tower"]
    patches, places = (seen[name][:, :count].to(tower.device) for name in ("pixel_values", "image_position_ids"))
    found = tower(pixel_values=patches, pixel_position_ids=places).last_hidden_state
    rows: torch.Tensor = module["embed_vision"](inputs_embeds=found)
    return rows


def _build_gemma_3(config: Any) -> nn.Module:
    from transformers import AutoModel
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

    # Nothing reads the head that summarises a picture, and files do not have it.
    config.vision_config.vision_use_head = False
    return nn.ModuleDict(
        {
            "vision_tower": AutoModel.from_config(config.vision_config, attn_implementation="sdpa"),
            "multi_modal_projector": Gemma3MultiModalProjector(config),
        }
    )


def _look_gemma_3(module: Any, sight: Sight, vision: Any, picture: NDArray[np.uint8]) -> torch.Tensor:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    size = {"height": vision.image_size, "width": vision.image_size}
    processor = Gemma3ImageProcessorPil(size=size, image_mean=sight.mean, image_std=sight.deviation)
    seen = processor(picture, return_tensors="pt", input_data_format="channels_last")
    tower = module["vision_tower"]
    found = tower(seen["pixel_values"].to(tower.device)).last_hidden_state
    rows: torch.Tensor = module["multi_modal_projector"](found)[0]
    return rows


def _build_unified(config: Any) -> nn.Module:
    from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedVisionEmbedder

    embedder: nn.Module = Gemma4UnifiedVisionEmbedder(config.vision_config, config.text_config)
    return embedder


def _look_unified(module: Any, sight: Sight, vision: Any, picture: NDArray[np.uint8]) -> torch.Tensor:
    """A square of patches is one patch here: nothing looks at the parts."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    processor = Gemma4ImageProcessorPil(max_soft_tokens=sight.most, patch_size=sight.side, pooling_kernel_size=1)
    seen = processor(picture, return_tensors="pt", input_data_format="channels_last")
    count, device = int(seen["num_soft_tokens_per_image"][0]), module.patch_dense.weight.device
    patches, places = (seen[name][:, :count].to(device) for name in ("pixel_values", "image_position_ids"))
    rows: torch.Tensor = module(patches, places).pooler_output[0]
    return rows


# --- Mistral ----------------------------------------------------------------------------------------------------------


def _build_mistral(config: Any) -> nn.Module:
    from transformers import AutoModel
    from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

    return nn.ModuleDict(
        {
            "vision_tower": AutoModel.from_config(config.vision_config, attn_implementation="sdpa"),
            "multi_modal_projector": Mistral3MultiModalProjector(config),
        }
    )


def _look_mistral(module: Any, sight: Sight, vision: Any, picture: NDArray[np.uint8]) -> torch.Tensor:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    processor = PixtralImageProcessorPil(
        size={"longest_edge": longest_side(sight, *picture.shape[:2])},
        patch_size=sight.side,
        image_mean=sight.mean,
        image_std=sight.deviation,
    )
    seen = processor(picture, return_tensors="pt", input_data_format="channels_last")
    tower, sizes = module["vision_tower"], [tuple(size) for size in seen["image_sizes"].tolist()]
    found = tower(seen["pixel_values"].to(tower.device), image_sizes=sizes).last_hidden_state
    rows: torch.Tensor = module["multi_modal_projector"](found[0], sizes)
    return rows


_Build = Callable[[Any], nn.Module]
_Look = Callable[[Any, Sight, Any, NDArray[np.uint8]], torch.Tensor]
_KINDS: dict[str, tuple[_Build, _Look]] = {
    "qwen3_5": (_build_qwen, _look_qwen),
    "qwen3_5_moe": (_build_qwen, _look_qwen),
    "qwen3_vl": (_build_qwen, _look_qwen),
    "qwen3_vl_moe": (_build_qwen, _look_qwen),
    "gemma3": (_build_gemma_3, _look_gemma_3),
    "gemma4": (_build_gemma, _look_gemma),
    "gemma4_unified": (_build_unified, _look_unified),
    "mistral3": (_build_mistral, _look_mistral),
}
"""How a tower is built and looks, by ``model_type`` of the whole model."""
