"""From what a user types for a model to a file on disk, and from there to a checked ``Checkpoint``.

A model is a name of the catalogue, one that ships with the package, a directory, a ``.gguf`` file, or a hub id
``organisation/name``. Builds no decoder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.errors import DownloadError, ModelFileError, UnknownNameError
from outrider.models import store
from outrider.models.checkpoint import Checkpoint
from outrider.models.shipped import ShippedModel, shipped_models

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "vocab.txt", "*.jinja"]
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """A model on this machine: ``kind`` says what ``path`` is, ``name`` is what the user called it.

    ``shipped`` is set for a model of the package, which has no tokenizer of its own beside it.
    """

    kind: Literal["gguf", "pretrained"]
    path: Path
    name: str
    shipped: ShippedModel | None = None


def resolve(spec: str, progress: store.Progress | None = None) -> ModelLocation:
    """Find the model that ``spec`` means, fetching it when it is a catalogue name or hub id that is not cached.

    A name of the catalogue or package wins over a directory of the same name (``./NAME`` means the directory); an
    existing path wins over a hub id.

    Args:
        spec: catalogue or package name, directory, ``.gguf`` file or hub id.
        progress: told how far a catalogue pull is.

    Raises:
        UnknownNameError: none of these.
        ModelFileError: a path that does not exist or holds no model.
        DownloadError: the catalogue or the hub could not deliver it.
    """
    if spec in store.catalogue():
        return ModelLocation("gguf", store.pull(spec, progress), spec)
    if (shipped := shipped_models().get(spec)) is not None:
        return ModelLocation("pretrained", shipped.directory, spec, shipped)
    path = Path(spec).expanduser()
    try:
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError):
        is_directory = is_file = False
    if spec and is_directory:
        return _in_directory(path, spec)
    if is_file:
        return _file(path, spec)
    if spec.startswith(("/", "./", "../", "~")) or path.suffix == ".gguf":
        raise ModelFileError(f"there is no model at '{spec}'; check the path")
    if _HUB_ID.fullmatch(spec):
        return ModelLocation("pretrained", _download(spec), spec)
    otherwise = ", toy, or a directory, a .gguf file, or a hub id ORGANISATION/NAME"
    raise UnknownNameError("model", spec, [*store.catalogue(), *shipped_models()], otherwise)


def open_checkpoint(location: ModelLocation) -> Checkpoint:
    """Open and check the weights.

    Raises:
        ModelFileError: damaged, truncated, unsafe or incomplete files.
        UnsupportedModelError: an architecture or feature that our decoder does not run.
    """
    if location.kind == "gguf":
        from outrider.models.gguf import GGUFCheckpoint

        return GGUFCheckpoint(location.path)
    from outrider.models.pretrained import PretrainedCheckpoint

    return PretrainedCheckpoint(location.path)


def _in_directory(path: Path, spec: str) -> ModelLocation:
    if (path / "config.json").is_file():
        return ModelLocation("pretrained", path, spec)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelLocation("gguf", files[0], spec)
    if files:
        raise ModelFileError(f"'{spec}' holds several models ({', '.join(f.name for f in files[:8])}); give one file")
    raise ModelFileError(f"'{spec}' has neither a config.json nor a .gguf file; give a model's directory")


def _file(path: Path, spec: str) -> ModelLocation:
    if path.suffix in _WEIGHT_FILES or path.name == "config.json":
        raise ModelFileError(f"'{spec}' is one file of a transformers model; give its directory '{path.parent}'")
    return ModelLocation("gguf", path, spec)


def _download(repository: str) -> Path:
    """The hub's snapshot, from its cache when complete or offline (``HF_HUB_OFFLINE``)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        # Weights of sub-directories belong to other formats ("original/"), so only the top level is fetched.
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except GatedRepoError as error:
        reason = "its owner must grant you access first (log in with 'hf auth login')"
        raise DownloadError(f"cannot download '{repository}' from the hub: {reason}") from error
    except RepositoryNotFoundError as error:
        known = ", ".join(store.catalogue())
        raise DownloadError(
            f"the hub has no model '{repository}' that you may read; check it ({known} need no hub)"
        ) from error
    except LocalEntryNotFoundError as error:
        reason = "the hub cannot be reached (or HF_HUB_OFFLINE is set) and the model is not in its cache"
        raise DownloadError(
            f"cannot download '{repository}': {reason}; connect, or give a local directory or .gguf file"
        ) from error
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DownloadError(
            f"cannot download '{repository}' from the hub: {lines[0][:200]}; try again, or give a local directory"
        ) from error
