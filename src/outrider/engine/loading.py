"""A model's name -> a model that runs and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.config import EngineConfig
from outrider.errors import InvalidOptionError, UnsupportedModelError
from outrider.models.base import LanguageModel
from outrider.models.checkpoint import Checkpoint
from outrider.models.decoder import Decoder
from outrider.models.load import ModelLocation, open_checkpoint, resolve
from outrider.models.toy import ToyModel
from outrider.models.weights import WeightFormat, WeightPlan
from outrider.text.tokenizer import Tokenizer
from outrider.text.toy_tokenizer import toy_tokenizer
from outrider.text.vocabulary import vocabulary_hash

Progress = Callable[[str, int, int], None]

TOYS = {"toy": 0.0, "toy-draft": 0.4}
"""Table models that need no file (``models/toy.py``), and how far each is from the table of ``toy``."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its tokenizer, and what the user called it."""

    model: LanguageModel
    tokenizer: Tokenizer
    name: str
    dtype: torch.dtype
    weights: str


def choose_device(name: str) -> torch.device:
    """``auto`` is CUDA when there is a GPU.

    Raises:
        InvalidOptionError: CUDA was asked for and is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidOptionError(f"device '{name}' asked for, but torch sees no CUDA GPU; use --device cpu")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 where the hardware computes in it, else float32.

    Raises:
        InvalidOptionError: float16 on a CPU.
    """
    if name == "auto":
        has_bf16 = device.type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return torch.bfloat16 if has_bf16 else torch.float32
    if name == "float16" and device.type == "cpu":
        raise InvalidOptionError("--dtype float16 is for GPUs; on a CPU use bfloat16 or float32")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def load_model(
    spec: str, config: EngineConfig, progress: Progress | None = None, sharing: LoadedModel | None = None
) -> LoadedModel:
    """Resolve, check and load a model (target or draft).

    Args:
        progress: told how far a fetch is.
        sharing: a loaded target; a model of the package that speaks its vocabulary takes its tokenizer.

    Raises:
        UsageError, RunError: as ``models/load.py`` and ``models/weights.py`` say.
    """
    if spec in TOYS:
        _check_toy(spec, config)
        toy = ToyModel(vocab_size=toy_tokenizer().vocab_size, noise=TOYS[spec])
        return LoadedModel(toy, toy_tokenizer(), spec, torch.float64, "table")
    if config.trust_remote_code and not config.fallback:
        raise InvalidOptionError("--trust-remote-code only applies to models run through transformers: add --fallback")
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    plan = WeightPlan(dtype, WeightFormat(config.weights), device)
    location = resolve(spec, progress)
    if config.fallback:
        return _load_fallback(location, config, dtype, device, progress, sharing)
    try:
        checkpoint = open_checkpoint(location)
    except UnsupportedModelError:
        if location.kind != "pretrained":
            raise
        return _load_fallback(location, config, dtype, device, progress, sharing)
    tokenizer = _tokenizer(location, checkpoint, progress, sharing)
    decoder = Decoder(checkpoint, plan)
    return LoadedModel(decoder, tokenizer, location.name, dtype, weights_label(decoder))


def _check_toy(spec: str, config: EngineConfig) -> None:
    asked = {"dtype": config.dtype, "weights": config.weights}
    if changed := [f"--{name} {value}" for name, value in asked.items() if value != "auto"]:
        raise InvalidOptionError(f"model '{spec}' is a float64 table; it takes no {' or '.join(changed)}")


def weights_label(decoder: Decoder) -> str:
    """How the matrices ended up being held, for ``describe``."""
    plan, name = decoder.plan, decoder.weight_format
    if name == WeightFormat.INT4:
        return "int4 groups of 32, bfloat16 for many rows"
    if name == WeightFormat.INT8:
        return "int8 rows, bfloat16 for many rows"
    return str(plan.dtype).removeprefix("torch.") + (" (prepacked)" if plan.packed else "")


def _tokenizer(
    location: ModelLocation, checkpoint: Checkpoint | None, progress: Progress | None, sharing: LoadedModel | None
) -> Tokenizer:
    """The model's own, or for one of the package that of the model whose vocabulary it speaks."""
    shipped = location.shipped
    if shipped is not None:
        if sharing is not None and vocabulary_hash(sharing.tokenizer) == shipped.vocabulary:
            return sharing.tokenizer
        location, checkpoint = resolve(shipped.tokenizer_of, progress), None
    if location.kind == "gguf":
        return Tokenizer.from_gguf(getattr(checkpoint or open_checkpoint(location), "metadata", {}))
    return Tokenizer.from_directory(location.path)


def _load_fallback(
    location: ModelLocation,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
    sharing: LoadedModel | None,
) -> LoadedModel:
    from outrider.models.hf import TransformersModel

    if location.kind != "pretrained":
        raise InvalidOptionError(f"--fallback needs a transformers directory or hub id, not the file '{location.name}'")
    if config.weights != "auto":
        raise InvalidOptionError(f"--weights {config.weights} is not available through transformers; use auto")
    model = TransformersModel.from_directory(
        location.path, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code
    )
    label = f"{str(dtype).removeprefix('torch.')} (transformers)"
    return LoadedModel(model, _tokenizer(location, None, progress, sharing), location.name, dtype, label)
