"""Downloads of missing files, and errors that say what to do when reading or downloading fails."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
from filelock import FileLock

from gattn.datasets.errors import DatasetUnavailableError

__all__ = ["check_unpacked", "download", "download_archive", "most_unpacked", "read_dataset", "remove_traces"]

_TIMEOUT_SECONDS = 30.0
_HEADERS = {"User-Agent": "gattn"}  # some servers refuse Python's default

_Content = TypeVar("_Content")


def download(url: str, path: Path, sha256: str | None = None) -> None:
    """Downloads a file over TLS, with the server's certificate checked.

    Args:
        url: The address of the file.
        path: Where to save it. The file appears there complete and verified, or not at all.
        sha256: The expected SHA-256 digest, where it is known. (default: `None`)

    Raises:
        OSError: If the file cannot be downloaded.
        ValueError: If its digest is not the expected one.
    """
    part = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    try:
        request = urllib.request.Request(url, headers=_HEADERS)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response, part.open("wb") as file:
            while chunk := response.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
            if getattr(response, "length", 0):
                raise OSError(f"the connection ended before {url} was complete")
        if sha256 not in (None, digest.hexdigest()):
            raise ValueError(
                f"{path.name} from {url} has the SHA-256 digest {digest.hexdigest()}, but {sha256} was expected, so it "
                "was not kept"
            )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def most_unpacked(archive: Path) -> int:
    """How many bytes the content of an archive may have: 100 times its own, and 16 MiB."""
    return 100 * archive.stat().st_size + (16 << 20)


def check_unpacked(archive: Path) -> None:
    """Raises `ValueError` if the content of a zip file, such as an `.npz` file, is out of proportion to its size."""
    with zipfile.ZipFile(archive) as file:
        size = sum(entry.file_size for entry in file.infolist())
    if size > most_unpacked(archive):
        raise ValueError(
            f"{archive.name} has {archive.stat().st_size} bytes, but its content {size}, far more than data compress to"
        )


def download_archive(url: str, member: str, folder: Path) -> None:
    """Downloads a zip file, and extracts the files of one folder in it.

    Args:
        url: The address of the zip file.
        member: The folder in it.
        folder: Where to put the files of that folder. Existing files that are not in the archive stay.

    Raises:
        OSError: If the file cannot be downloaded, or has no such folder.
        ValueError: If its content is out of proportion to its size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # If it were unpacked in place, an archive could replace the files of other data sets.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        archive, unpacked = Path(temporary) / "archive.zip", Path(temporary) / "unpacked"
        download(url, archive)
        check_unpacked(archive)
        with zipfile.ZipFile(archive) as file:
            file.extractall(unpacked)
        for path in sorted((unpacked / member).iterdir()):
            path.replace(folder / path.name)


def read_dataset(
    name: str,
    folder: Path,
    files: list[Path],
    page: str,
    fetch: Callable[[list[Path]], None],
    read: Callable[[], _Content],
) -> _Content:
    """Reads a data set that consists of the raw `files`, after downloading those that are missing.

    Any failure becomes an error that says what to do. Nothing stays behind that would make the next attempt fail as
    well: no incomplete downloads and no empty folders. Processes and threads that load the same data set at once, as
    those of torchrun do, take turns: the first downloads and processes what the others then read.

    Args:
        name: The name of the data set in error messages.
        folder: The root folder of all data.
        files: The raw files that must be present.
        page: The web page from which a person can get the files.
        fetch: Downloads the given files, which are the missing ones.
        read: Reads the data set once all files are present.

    Raises:
        DatasetUnavailableError: If the files cannot be downloaded or read.
    """
    with _lock(folder / name):
        return _read_dataset(name, folder, files, page, fetch, read)


def _lock(folder: Path) -> AbstractContextManager[Any]:
    """A lock of a folder, which may be missing or read-only.

    Its file is in this user's cache, where nobody else can put another one in its place, or else beside the folder;
    where neither can be written, there is nothing to take turns for.
    """
    name = f"{hashlib.sha256(bytes(folder.resolve())).hexdigest()[:16]}.lock"
    for place in (platformdirs.user_cache_path("gattn"), folder.parent):
        path = place / "locks" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError:
            continue
        return FileLock(path)
    return nullcontext()


def _read_dataset(
    name: str,
    folder: Path,
    files: list[Path],
    page: str,
    fetch: Callable[[list[Path]], None],
    read: Callable[[], _Content],
) -> _Content:
    """See `read_dataset`, without its lock."""
    missing = [file for file in files if not file.exists()]
    try:
        if missing:
            fetch(missing)
        try:
            return read()
        except Exception as error:
            processed = files[0].parent.with_name("processed")
            if missing or isinstance(error, OSError) or not processed.is_dir():
                raise
            shutil.rmtree(processed)  # writing it was interrupted; the raw files are complete, so process them again
            return read()
    except BaseException as error:
        remove_traces(folder, missing)
        if not isinstance(error, Exception) or isinstance(error, DatasetUnavailableError):
            raise
        reason = f"{type(error).__name__}: {str(error) or 'no reason given'}".splitlines()[0]
        if missing:
            raise DatasetUnavailableError(
                f"{name} is not under {folder} and could not be downloaded ({reason}). Missing: "
                f"{', '.join(str(file.relative_to(folder)) for file in missing)}. Get these files from {page} and put "
                "them there, or set GATTN_DATA (or root=) to a folder that has them."
            ) from error
        if isinstance(error, PermissionError) or not os.access(folder, os.W_OK):
            raise DatasetUnavailableError(
                f"{folder} is not writable ({reason}), but loaders write a processed/ folder beside the raw files of "
                f"{name}: copy the data to a writable folder, and set GATTN_DATA (or root=) to it."
            ) from error
        raise DatasetUnavailableError(
            f"the files of {name} under {files[0].parent.parent} cannot be read ({reason}): "
            f"delete that folder, get the files again from {page}, and load again."
        ) from error


def remove_traces(folder: Path, missing: list[Path]) -> None:
    """Removes what a failed download left of the `missing` files, and the folders that it created for them."""
    for file in missing:
        if file.is_file():
            file.unlink()
        for parent in file.parents:
            if folder not in parent.parents or not parent.is_dir():
                break
            siblings = parent.with_name("processed")
            if parent.name == "raw" and siblings.is_dir() and not any(siblings.iterdir()):
                siblings.rmdir()
            if any(parent.iterdir()):
                break
            parent.rmdir()
