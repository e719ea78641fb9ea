"""A disk tier's folder: its owner, and a place in it for each namespace, row size and version.

    PATH/lock                                   held with flock while a rank takes its part of the capacity
    PATH/rank-0/lock                            held with flock by the owner
    PATH/rank-0/NAMESPACE-ROWBYTES-v1/          records, descriptions, slots

A tier never touches a place of another model, row size or version; its space counts against the capacity.
`kvtier disk gc` removes it, or a tier that the user lets take over places that nobody uses. The removal
renames the place first, so that a half-removed place is never opened. Only regular files are opened: a link
may lead out of the folder, and anything else may block without end. Everything here blocks: I/O threads and
the command line only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import msgspec

from kvtier.errors import OutsideError
from kvtier.tiers.disk.format import HEADER_BYTES, PAGE_BYTES, VERSION, DiskHeader, pack_header, read_header

RECORDS, DESCRIPTIONS, SLOTS = "records", "descriptions", "slots"
_LEARNT, _LEARNT_NEW = "learnt", "learnt.new"
_MOST_LEARNT = 6 * PAGE_BYTES
"""The most bytes that are kept of what a policy has learnt."""
_PLACE = re.compile(r"[0-9a-f]{16}-[0-9]+-v([0-9]+)")
_REMOVED = re.compile(r"removed-[0-9a-f]+-" + _PLACE.pattern)
_LOCK_TRIES, _LOCK_PAUSE = 5, 0.01
_RANK = re.compile(r"rank-([0-9]+)")


def place_name(namespace: str, row_bytes: int) -> str:
    """Return the name of the place of a namespace and row size in this version."""
    return f"{sha256(namespace.encode()).hexdigest()[:16]}-{row_bytes}-v{VERSION}"


def taken_bytes(folder: Path) -> int:
    """Return the bytes that the files of a folder take on the disk; 0 if the folder does not exist.

    What a policy has learnt counts with all of its room, or others would take what it does not need yet.
    """
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            if file == _LEARNT:
                total += 2 * _MOST_LEARNT
            elif file != _LEARNT_NEW:
                with suppress(OSError):  # the file has gone, or is a link to nothing
                    total += os.stat(os.path.join(root, file)).st_blocks * 512
    return total


def open_file(path: Path, flags: int) -> int:
    """Open a file of a folder, and return its descriptor. Anything but a regular file counts as absent."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        why = "expected a regular file, found a symbolic link"
        raise FileNotFoundError(errno.ENOENT, why, str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "expected a regular file, found something else", str(path))
    return descriptor


def learnt_bytes(capacity: int) -> int:
    """Return the room for what a policy has learnt, and for its next version; a tiny place has none."""
    return 2 * _MOST_LEARNT if capacity >= 1 << 20 else 0


def read_learnt(folder: Path) -> bytes:
    """Return what a policy has learnt at a place, in the policy's own form; nothing if it cannot be read."""
    with suppress(OSError), os.fdopen(open_file(folder / _LEARNT, os.O_RDONLY), "rb") as file:
        return file.read(_MOST_LEARNT + 1)
    return b""


def save_learnt(folder: Path, data: bytes) -> None:
    """Save what a policy has learnt, unless it is too long, has no room or cannot be written.

    A reader finds these bytes or those before, whatever happens.
    """
    if len(data) > _MOST_LEARNT or not os.path.lexists(folder / _LEARNT):
        return
    new = folder / _LEARNT_NEW
    with suppress(OSError):  # no row is worse for it
        with os.fdopen(open_file(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(data)
        new.replace(folder / _LEARNT)


def reserve_learnt(folder: Path, capacity: int) -> None:
    """Have room for what a policy learns at a place, or none if the capacity is too small for that.

    A file stands for it, empty at first. Nothing is learnt where it cannot be made.
    """
    if not learnt_bytes(capacity):
        for name in (_LEARNT, _LEARNT_NEW):
            with suppress(OSError):
                (folder / name).unlink()
    elif not os.path.lexists(folder / _LEARNT):
        with suppress(OSError):
            os.close(open_file(folder / _LEARNT, os.O_WRONLY | os.O_CREAT))


class FolderLock:
    """The ownership of a folder. It ends with the process, however that ends.

    A child that Python forks releases its copy at once: else it would hold the lock of a killed owner. This
    does not cover a child that other code forks without an exec. A POSIX record lock would stay with its
    process, but is lost when the process closes any file of that name.
    """

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self.device = os.stat(folder).st_dev
        """The file system that the folder is on."""
        self.has_stuck_call = False
        """Its tier was closed, and the folder is held until a call returns that had not returned by then."""
        self.is_locked = True
        self._descriptor: int | None = descriptor
        _LOCKS.add(self)

    @classmethod
    def take_nowait(cls, folder: Path, device: int | None = None) -> Self:
        """Make the folder if needed, and own it. `OutsideError` in one line if that fails.

        With `device`, the folder must be on that file system.
        """
        return cls._take(folder, device, _lock_nowait)

    @classmethod
    def wait(cls, folder: Path, wait_until: Callable[[Callable[[], bool]], None]) -> Self:
        """Own the folder once it has no owner. For folders that are owned for moments only.

        `wait_until` calls its argument, which tries to lock the folder, until that returns True; it may
        raise to give up.
        """
        return cls._take(folder, None, lambda descriptor: wait_until(partial(_try_lock, descriptor)))

    @classmethod
    def _take(cls, folder: Path, device: int | None, lock: Callable[[int], None]) -> Self:
        with ExitStack() as undo:
            try:
                _expect_device(folder, device)
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _expect_device(folder, device)
                descriptor = open_file(folder / "lock", os.O_RDWR | os.O_CREAT)
                undo.callback(os.close, descriptor)
                lock(descriptor)
                taken = cls(folder, descriptor)
            except BlockingIOError:
                raise _owned(folder, descriptor) from None
            except OSError as error:
                name = "lock: " if error.filename == str(folder / "lock") else ""
                raise OutsideError(
                    f"disk tier: {folder}: expected a folder that can be written to: {name}{error.strerror};"
                    " check the path, its owner and how it is mounted"
                ) from None
            undo.pop_all()
        return taken

    def let_go(self) -> None:
        """Let other processes own the folder until `retake`, e.g. to remove something from it."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.is_locked = False

    def retake(self) -> None:
        """Own the folder again. `OutsideError` in one line if another process does."""
        if self._descriptor is not None:
            try:
                _lock_nowait(self._descriptor)
            except BlockingIOError:
                raise _owned(self.folder, self._descriptor) from None
            self.is_locked = True

    @property
    def is_held(self) -> bool:
        """Whether the folder is still there and still ours."""
        with suppress(OSError):
            return self.is_file(os.stat(self.folder / "lock"))
        return False

    def is_file(self, file: os.stat_result) -> bool:
        """Return whether this is the lock of that file."""
        with suppress(OSError):
            if self._descriptor is not None:
                ours = os.fstat(self._descriptor)
                return (file.st_dev, file.st_ino) == (ours.st_dev, ours.st_ino)
        return False

    def release(self) -> None:
        """Release the folder. Idempotent."""
        _LOCKS.discard(self)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_LOCKS: set[FolderLock] = set()
"""The locks of this process that are not released."""


def _release_all() -> None:
    for lock in list(_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_release_all)


def _owned(folder: Path, descriptor: int) -> OutsideError:
    """Return the error about a lock that is taken, with its owner as far as that is known."""
    file = os.fstat(descriptor)
    ours = [lock for lock in list(_LOCKS) if lock.is_locked and lock.is_file(file)]
    if any(lock.has_stuck_call for lock in ours):
        owner = "a tier of this process was, and was closed while a call did not return"
        remedy = "it is free when that call has returned, or the process has ended"
    elif ours:
        owner = "another tier of this process is"
        remedy = "give each tier its own path, or close the other"
    else:
        owner, remedy = "another process is", "give each engine its own path, or end the other"
    return OutsideError(f"disk tier: {folder}: expected to be its only owner, but {owner}; {remedy}")


def _expect_device(folder: Path, device: int | None) -> None:
    """Raise `OutsideError` if a folder, or the nearest parent that exists, is not on this file system.

    A mount point that was unmounted is an empty folder of the file system below it.
    """
    for existing in (folder, *folder.parents):
        with suppress(FileNotFoundError):
            if device not in (None, os.stat(existing).st_dev):
                raise OutsideError(
                    f"disk tier: {folder}: expected the file system on which it was opened, found another at"
                    f" {existing}: was it unmounted? Mount it again; a restart would use the folder as it is"
                )
            return


class DiskPlace(NamedTuple):
    """A place on the disk. `header` is `None` if the place has another version, or cannot be read."""

    folder: Path
    rank: int
    version: int
    header: DiskHeader | None
    taken: int
    """Bytes on the disk."""
    used_at: float
    """When its records were last written to, in Unix seconds."""
    owned: bool
    """Whether a process owns its rank's folder now."""

    @property
    def is_removed(self) -> bool:
        """Whether this is the rest of a place whose removal did not finish."""
        return _REMOVED.fullmatch(self.folder.name) is not None

    def remove(self) -> None:
        """Remove the place and all rows in it.

        `OutsideError` if a process owns it, or some of it cannot be removed.
        """
        lock = FolderLock.take_nowait(self.folder.parent)
        try:
            self.remove_owned()
        finally:
            lock.release()

    def remove_owned(self) -> None:
        """Remove the place and all rows in it. The caller owns its rank's folder."""
        folder = self.folder
        try:
            if folder.is_symlink():
                raise OSError(errno.ENOTDIR, "it is a link, which is for its owner to remove")
            if not self.is_removed:
                folder = folder.rename(folder.with_name(f"removed-{secrets.token_hex(4)}-{folder.name}"))
            shutil.rmtree(folder)
        except OSError as error:
            why = error.strerror or error
            left = "" if folder == self.folder else f"; what is left of it is {folder.name}"
            raise OutsideError(
                f"disk tier: {self.folder}: expected to remove all of it: {why}{left}"
            ) from None


def find_ranks(path: Path) -> Iterator[tuple[int, Path]]:
    """Yield each rank that has a folder below `path`, and that folder."""
    for folder in sorted(path.iterdir()):
        if (match := _RANK.fullmatch(folder.name)) is not None and folder.is_dir():
            yield int(match[1]), folder


def find_places(path: Path) -> Iterator[DiskPlace]:
    """Yield the places of all ranks below a folder. `OSError` if it cannot be read."""
    for number, rank in find_ranks(path):
        yield from find_rank_places(rank, number)


def find_rank_places(rank: Path, number: int = 0) -> Iterator[DiskPlace]:
    """Yield the places of a rank's folder. `OSError` if it cannot be read."""
    owned = is_owned(rank)
    for folder in sorted(rank.iterdir()):
        match = _PLACE.fullmatch(folder.name) or _REMOVED.fullmatch(folder.name)
        if match is None or not folder.is_dir():
            continue
        version = int(match[1])
        header = _peek(folder / RECORDS) if version == VERSION else None
        with suppress(FileNotFoundError):  # it is being removed
            times = [file.lstat().st_mtime for file in (*folder.iterdir(), folder)]
            used_at = max(times[:-1], default=times[-1])
            yield DiskPlace(folder, number, version, header, taken_bytes(folder), used_at, owned)


def void_places(folder: Path, namespace: str | None, row_bytes: int) -> None:
    """Make the rows of a place void by a new epoch; with `None`, the places of all namespaces.

    The epoch is on the disk on return. `folder` belongs to a rank, and the caller owns it. A place without
    a whole header starts empty anyway.
    """
    ending = f"-{row_bytes}-v{VERSION}" if namespace is None else place_name(namespace, row_bytes)
    for place in folder.iterdir():
        if _PLACE.fullmatch(place.name) is not None and place.name.endswith(ending):
            with suppress(FileNotFoundError), _open_records(place / RECORDS, os.O_RDWR) as records:
                header = read_header(records.read(HEADER_BYTES))
                if header is not None:
                    epoch, sequence = header.epoch + 1, header.sequence + 1
                    page = pack_header(msgspec.structs.replace(header, epoch=epoch, sequence=sequence))
                    records.seek(0)
                    records.write(page + page)
                    records.flush()
                    os.fdatasync(records.fileno())


def _peek(records: Path) -> DiskHeader | None:
    with suppress(OSError), _open_records(records, os.O_RDONLY) as file:
        header = read_header(file.read(HEADER_BYTES))
        return header if header is not None and header.version == VERSION else None
    return None


def _open_records(records: Path, flags: int) -> BinaryIO:
    return os.fdopen(open_file(records, flags), "rb" if flags == os.O_RDONLY else "r+b")


def _try_lock(descriptor: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _lock_nowait(descriptor: int) -> None:
    """Lock a file. Retries for a moment, because `is_owned` locks the file briefly."""
    for left in reversed(range(_LOCK_TRIES)):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise
            time.sleep(_LOCK_PAUSE)
    return None


def is_owned(folder: Path) -> bool:
    """Return whether a process owns a rank's folder now."""
    with suppress(OSError):
        descriptor = open_file(folder / "lock", os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False
