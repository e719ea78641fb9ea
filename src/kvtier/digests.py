"""SHA-256 of whole files: each is read once, and its digest is remembered until the file changes.

Where the Hugging Face hub's cache has named a file by its digest, nothing is read. Otherwise a process of
low priority (`file_hasher`) hashes the content. One small file of the user's (docs/formats.md) keeps the
digest by path, size, inode, mtime and ctime: mtime can be set back, ctime cannot. That file is only a cache:
if it is lost, corrupt, out of date or not writable, files are hashed again. Processes that write it at the
same time may lose entries, which also only costs hashing again.

A write through a mapping updates a file's times only if the page was clean. So a file is written back before
it is hashed. File systems in memory never have clean pages, so digests of their files are not remembered.

Calls block for as long as reading takes, so no engine thread may make them. Any other thread may.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Annotated, Literal, NamedTuple, Self

import msgspec

from kvtier import file_hasher
from kvtier.errors import OutsideError
from kvtier.machine import is_in_memory

logger = logging.getLogger(__name__)

_SMALL = 1 << 20  # bytes; hashing a file up to this size takes less time than starting a process
_SETTLED_NS = 2 * 10**9
"""The age of a file's last change from which its digest is remembered. The times of a file do not show the
second of two changes in one tick.
"""
_MOST_ENTRIES = 4096
_SHA256 = re.compile("[0-9a-f]{64}")


class FileState(NamedTuple):
    """The numbers that show whether a file is still the same."""

    size: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path | int) -> Self:
        """Look at a file by its path, following links, or by its descriptor.

        Raise `OSError` if it is not a regular file.
        """
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return cls(found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


_Entry = tuple[int, int, int, int, Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]]


class _Remembered(msgspec.Struct):
    """The content of the file of digests: by path, the four numbers of a `FileState` and the digest."""

    files: dict[str, _Entry]
    version: Literal[1]


def default_file() -> Path | None:
    """Return the file of digests in the user's cache folder, or None if the user has no home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (
            (Path(folder) if os.path.isabs(folder) else Path.home() / ".cache") / "kvtier" / "digests.json"
        )
    except RuntimeError:
        return None


class Digests:
    """Computes SHA-256 digests of files and remembers them in `file`; with None it remembers none."""

    def __init__(self, file: Path | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self.file = file
        self._now_ns = now_ns

    def of(self, path: Path, state: FileState) -> str:
        """Return the digest of a file that was seen in `state`.

        Raise `OutsideError` if the file has changed or is unreadable.
        """
        try:
            _expect(state, FileState.of(path))
            return hub_digest(path) or self._recall(path, state) or self._compute(path, state)
        except OSError as error:
            expected = f"{path}: expected to read what was there when the engine was made"
            raise OutsideError(f"{expected}: {error.strerror or error}") from error

    def _compute(self, path: Path, state: FileState) -> str:
        with path.open("rb", buffering=0) as stream:
            _write_back(stream.fileno())
            _expect(state, FileState.of(stream.fileno()))
            digest = sha256(stream.read()).hexdigest() if state.size <= _SMALL else _hash_elsewhere(stream)
            _expect(state, FileState.of(stream.fileno()))
            in_memory = is_in_memory(os.fstat(stream.fileno()).st_dev)
        if self._now_ns() - state.ctime_ns > _SETTLED_NS and not in_memory:
            self._remember(path, state, digest)
        return digest

    def _recall(self, path: Path, state: FileState) -> str | None:
        entry = self._read().get(str(path.resolve()))
        return entry[4] if entry is not None and entry[:4] == state else None

    def _read(self) -> dict[str, _Entry]:
        if self.file is None:
            return {}
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=_Remembered).files
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            logger.warning(
                "%s: expected digests of files, which are now computed again: %s", self.file, error
            )
            return {}

    def _remember(self, path: Path, state: FileState, digest: str) -> None:
        """Add a digest to the current content of the file, and drop the oldest beyond the limit."""
        if self.file is None or not _is_text(name := str(path.resolve())):
            return
        entries = self._read()
        entries.pop(name, None)
        entries[name] = (*state, digest)
        kept = dict(list(entries.items())[-_MOST_ENTRIES:])
        try:
            _replace(self.file, msgspec.json.encode(_Remembered(kept, 1)))
        except OSError as error:
            logger.warning(
                "%s: expected to write digests, which are computed again next time: %s", self.file, error
            )


def _hash_elsewhere(stream: IO[bytes]) -> str:
    """Hash a file in another process. Ctrl-C does not reach that process, but it ends when this one ends."""
    command = [sys.executable, "-I", "-S", str(Path(file_hasher.__file__)), str(os.getpid())]
    done = subprocess.run(command, stdin=stream, capture_output=True, text=True, start_new_session=True)
    if not _SHA256.fullmatch(digest := done.stdout.strip()):
        why = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise OSError(f"hashing failed ({why[0]})")
    return digest


def _write_back(descriptor: int) -> None:
    """Make all pages clean, so that the next write to any of them updates the file's times."""
    with suppress(OSError):  # a read-only file system may refuse, and has no dirty pages
        os.fsync(descriptor)


def _is_text(path: str) -> bool:
    """Return whether JSON can hold a path: file names are bytes and need not be UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _expect(state: FileState, found: FileState) -> None:
    if found != state:
        raise OSError("it has changed")


def _replace(file: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
    try:
        with open(descriptor, "wb") as stream:
            stream.write(content)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def hub_digest(path: Path) -> str | None:
    """Return the digest in the name that a hub's cache gave a file; None for any other file.

    `models--ORG--NAME/snapshots/COMMIT/FILE` is a link to `models--ORG--NAME/blobs/SHA256`. Small files are
    named by git's SHA-1 instead and give None, since otherwise one content would have two digests.
    """
    path = path.parent.resolve() / path.name
    repository = next((folder.parent for folder in path.parents if _is_snapshots(folder)), None)
    if repository is None or not path.is_symlink():
        return None
    blob = Path(os.path.normpath(path.parent / os.readlink(path)))
    named = blob.parent == repository / "blobs" and _SHA256.fullmatch(blob.name) and not blob.is_symlink()
    return blob.name if named else None


def _is_snapshots(folder: Path) -> bool:
    return folder.name == "snapshots" and folder.parent.name.startswith("models--")
