"""Families without a record: transformers defines them, and whether this runtime runs them right is found by trying.

A small model of the same configuration, with random weights, runs through rows of tokens as a conversation does. Its
logits are compared with those of transformers' own pass over the whole text. The result is kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from engine.errors import Cancelled, ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.architectures.families import COUNT_KEYS, FAMILIES
from engine.models.formats.json_files import SMALL_FILE, read_object
from engine.models.formats.model_files import ModelFiles
from engine.runtimes.protocol import Interrupted, Logits
from engine.runtimes.torch.loading import BUILDING, attention_of, build_skeleton, in_one_line, may_be_ignored
from engine.runtimes.torch.model import TorchModel
from engine.system.durable_files import new_file
from engine.system.free_memory import ran_out_of_memory
from engine.system.locations import ensure

TOLERANCE = 2e-4
"""Maximum difference of two logits that count as equal, relative to the largest one."""
VOCABULARY = 96
"""Tokens that the small model knows."""
WINDOW = 8
"""Sliding window of the small model, in tokens; the text is longer."""
LEAST_LAYERS = 4
MOST_NUMBERS = 200_000_000
"""Maximum parameters of the small model."""
VERSION = 1
"""Version of the trial. Results of another one do not count."""
_INNER = ("intermediate_size", "moe_intermediate_size", "ffn_hidden_size")

SmallModel = Callable[[nn.Module], TorchModel]
"""Makes a model of this runtime from a module of transformers."""
UNRECORDED = (
    "The definition of transformers runs this model, experts and all, as privatellm has none of its family; that is "
    "slower."
)


def is_unrecorded(config: Mapping[str, Any]) -> bool:
    """Whether the family of ``config.json`` has no record."""
    return config.get("model_type") not in FAMILIES


# --- the trial --------------------------------------------------------------------------------------------------------


def check(config: Any, run: SmallModel) -> None:
    """Raises ModelError if a small model like ``config`` is not run as transformers runs it."""
    ours = importlib.metadata.version("privatellm")
    tried = [VERSION, ours, transformers.__version__, torch.__version__, config.to_dict()]
    digest = hashlib.sha256(json.dumps(tried, sort_keys=True, default=str).encode()).hexdigest()
    path = ensure("data") / "trials" / f"{digest[:24]}.json"
    problem = _kept(path)
    if problem is None:
        try:
            problem = _tried(config, run)
        except (OSError, ImportError) as error:
            raise _unlike(config, in_one_line(error)) from error
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            with new_file(path) as file:
                file.write(json.dumps({"family": config.model_type, "problem": problem}).encode())
    if problem:
        raise _unlike(config, problem)


def _kept(path: Path) -> str | None:
    """The result in ``path``, empty for none wrong; None if there is none to be used."""
    try:
        problem = read_object(path, SMALL_FILE).get("problem")
    except ModelError:
        return None
    return problem if isinstance(problem, str) else None


def _unlike(config: Any, problem: str) -> ModelError:
    return ModelError(
        f"Models of the family {config.model_type} are known to transformers alone, and a small one of the same "
        f"configuration does not run here as it does there: {problem}; choose another model."
    )


def _tried(config: Any, run: SmallModel) -> str:
    """What went wrong: the first place at which this runtime gives other logits for ``config``, or what the trial
    raised; empty if nothing did. Raises what another time need not happen."""
    try:
        module = small_module(config)
        return difference(module, run(module))
    except Exception as error:  # whatever a definition raises for a cache that it does not expect
        if _passing(error):
            raise
        return str(error) if isinstance(error, ModelError) else in_one_line(error)


def _passing(error: Exception) -> bool:
    """Whether ``error`` came from this machine or this moment: memory, files, missing packages, a stop."""
    at_once = isinstance(error, OSError | ImportError | Interrupted | Cancelled) or ran_out_of_memory(error)
    return at_once or (isinstance(error, ModelError) and error.kind != "model")


def difference(module: Any, model: TorchModel) -> str:
    """The first place at which ``model`` has other logits than ``module`` in one pass; empty if there is none."""
    text = [3 + 37 * index % (VOCABULARY - 3) for index in range(22)]
    other = text[:18] + [token ^ 1 for token in text[18:]]
    wanted, branched = _whole(module, text), _whole(module, other)
    worst = TOLERANCE * float(max(wanted.abs().max(), branched.abs().max(), 1.0))

    def differ(found: Logits | None, *rows: torch.Tensor) -> bool:
        assert found is not None
        logits = torch.from_numpy(found).reshape(len(rows), -1)
        return not bool((logits - torch.stack(rows)).abs().max() <= worst)

    rows = model.start()
    if differ(rows.extend(text[:9]), wanted[8]):
        return "a prompt has other logits"
    if differ(rows.extend(text[9:17]), wanted[16]):
        return "a prompt in two parts has other logits"
    if differ(rows.step([text[17]]), wanted[17]):
        return "a step has other logits"
    arrays = rows.contents()
    assert arrays is not None
    beams = rows.fan_out(2)
    if differ(beams.step([text[18], other[18]]), wanted[18], branched[18]):
        return "two answers at once have other logits"
    beams.reorder([1, 1])
    if differ(beams.step([other[19], other[19]]), branched[19], branched[19]):
        return "an answer that was copied has other logits"

    unread = iter(arrays)

    def fill(buffer: Any) -> None:
        buffer[:] = next(unread).read()

    restored, _ = model.restored(18, 0, [array.part for array in arrays], fill)
    if differ(restored.step([text[18]]), wanted[18]):
        return "a conversation that was kept has other logits"
    if rows.can_truncate:
        rows.truncate(7)
        if differ(rows.extend(text[7:12]), wanted[11]):
            return "a conversation that was cut back has other logits"
    return ""


def small_module(config: Any) -> Any:
    """A model like ``config`` that transformers runs, with random weights in float32. Raises ModelError."""
    generator = torch.Generator().manual_seed(1)
    problem = ""
    for settings in small_settings(config):
        try:
            small = type(config).from_dict(settings)
            numbers = sum(parameter.numel() for parameter in build_skeleton(small, torch.float32).parameters())
            if numbers > MOST_NUMBERS:
                problem = problem or f"it would have {numbers} parameters"
                continue
            with BUILDING:
                module = transformers.AutoModelForCausalLM.from_config(
                    small, dtype=torch.float32, attn_implementation=attention_of(small)
                )
            module.eval().requires_grad_(False)
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
            if bool(_whole(module, [3, 4, 5]).isfinite().all()):
                return module
            problem = "its numbers overflow"
        except Exception as error:  # whatever a definition raises for numbers that it was not written for
            if _passing(error):
                raise
            problem = in_one_line(error)
    raise ModelError(f"no small one can be built ({problem})")


def small_settings(config: Any) -> Iterator[dict[str, Any]]:
    """Settings like those of ``config`` with few layers and a small vocabulary. The first ones have small matrices too,
    which not every family can be built with."""
    whole, names = config.to_dict(), config.attribute_map

    def stated(*keys: str) -> dict[str, int]:
        return {names.get(key, key): value for key in keys if isinstance(value := getattr(config, key, None), int)}

    layers, kinds = config.num_hidden_layers, getattr(config, "layer_types", None) or [""]
    fewest = next((count for count in range(1, layers) if set(kinds[:count]) == set(kinds)), layers)
    fewest = min(layers, max(fewest, LEAST_LAYERS))
    per_layer = {key: value for key, value in whole.items() if isinstance(value, list) and len(value) == layers}
    few = whole | {key: value[:fewest] for key, value in per_layer.items()}
    few |= dict.fromkeys(stated("num_hidden_layers"), fewest) | dict.fromkeys(stated("vocab_size"), VOCABULARY)
    few |= {key: 0 for key, value in whole.items() if key.endswith("_token_id") and isinstance(value, int)}
    few |= {key: min(WINDOW, value) for key, value in stated("sliding_window").items()}
    inner = dict.fromkeys(stated(*_INNER), 64) | {key: min(8, value) for key, value in stated(*COUNT_KEYS).items()}
    heads, grouped = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", 0)
    narrow = dict.fromkeys(stated("num_attention_heads"), 4) | dict.fromkeys(stated("hidden_size"), 64)
    narrow |= dict.fromkeys(stated("num_key_value_heads"), 4 if grouped == heads else min(grouped or 1, 2))
    narrow |= {key: 16 for key in ("head_dim", "mamba_d_head") if isinstance(whole.get(key), int)}
    narrow |= dict.fromkeys(stated("mamba_n_heads"), 4 * getattr(config, "mamba_expand", 1))
    yield few | inner | narrow
    yield few | inner
    yield few


def _whole(module: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one pass without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = module(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
        return logits


# --- the whole model --------------------------------------------------------------------------------------------------


def load_whole(
    files: ModelFiles, config: Any, dtype: torch.dtype, device: torch.device, progress: ProgressCallback
) -> nn.Module:
    """The model of ``files`` with all its weights, experts too, as transformers loads it. Raises ModelError."""
    progress("reading the trunk", 0, files.trunk_bytes, "bytes")
    transformers.logging.disable_progress_bar()
    try:
        with BUILDING:
            module, report = transformers.AutoModelForCausalLM.from_pretrained(
                files.folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention_of(config),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever transformers raises for files that do not fit
        raise ModelError(f"{files.folder} cannot be loaded by transformers: {in_one_line(error)}") from error
    wrong = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
    wrong += [name for name in report["unexpected_keys"] if not may_be_ignored(name, [], config.num_hidden_layers)]
    if wrong:
        raise ModelError(
            f"Tensor {min(wrong)} of the model's files does not fit a {config.model_type} model as config.json "
            "describes it; the files do not belong together: fetch the model again."
        )
    whole: nn.Module = module.eval().requires_grad_(False).to(device)
    return whole


def state_bytes(model: TorchModel) -> int:
    """Bytes of the states that ``model`` keeps for a row besides keys and values, found by running one token."""
    rows = model.start()
    rows.extend([0])
    states = [array.part for array in rows.contents() or () if not array.part.name.endswith((" keys", " values"))]
    return sum(math.prod(part.shape) * getattr(torch, part.numbers).itemsize for part in states)
