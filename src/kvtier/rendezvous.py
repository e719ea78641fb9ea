"""How the processes of an engine find memory that has no name.

The memory is a file that only descriptors lead to, so it is freed with the last process that has one, in
whatever way that process ends. The first process writes its process id and its descriptor of the memory into
a small named file:

    kvtier-<engine id>.pool     "<process> <descriptor> <device> <inode>"

The others open /proc/PROCESS/fd/DESCRIPTOR and check the device and inode. The first process holds a lock on
the named file as long as it lives. A file without a lock was left by a killed process, and is removed.

`locked` waits for other processes, briefly. All other calls are made while that lock is held, by any thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from kvtier.errors import PoolError

_PATIENCE_SECONDS = 30.0
_PREFIX, _SUFFIX = "kvtier-", ".pool"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a planted pipe must not block us
_MOST_BYTES = 200  # the four numbers take less


def default_directory() -> Path:
    """Return the directory where the processes of a machine meet."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def path_of(engine_id: str, directory: Path) -> Path:
    """Return the named file of an engine."""
    return directory / f"{_PREFIX}{quote(engine_id, safe='')}{_SUFFIX}"


def named_files(directory: Path) -> list[Path]:
    """Return the named files of all engines."""
    return sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}"))


@contextmanager
def locked(directory: Path, patience: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Hold the lock under which named files are made and removed.

    The lock is on the directory itself, so no lock file is left behind.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + patience
        while not _try_lock(fd):
            if time.monotonic() >= deadline:
                raise PoolError(f"pool: {directory} has been locked by another process for {patience:.0f} s")
            time.sleep(0.001)
        yield
    finally:
        os.close(fd)


@contextmanager
def lock_and_sweep(directory: Path, patience: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Hold the lock; before and after, remove the named files that no process holds."""
    with locked(directory, patience):
        _sweep(directory)
        try:
            yield
        finally:
            _sweep(directory)


def announce(path: Path, memory: int) -> int:
    """Announce the descriptor `memory` in a named file.

    Return the descriptor of the named file, which holds its lock: closing it ends the announcement.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        identity = os.fstat(memory)
        os.write(fd, f"{os.getpid()} {memory} {identity.st_dev} {identity.st_ino}\n".encode())
    except BaseException:
        os.close(fd)
        raise
    return fd


def find(path: Path) -> int | None:
    """Return a new descriptor of the announced memory; `None` if there is none, or it has just gone."""
    try:
        owner = os.stat(path, follow_symlinks=False).st_uid
    except FileNotFoundError:
        return None
    if owner != os.geteuid():
        raise PoolError(f"pool: {path} belongs to another user; choose another engine_id")
    try:
        return _follow(path)
    except PoolError:
        if is_held(path):
            raise
        path.unlink()
        return None


def _follow(path: Path) -> int:
    owner = "another program"
    try:
        process, descriptor, device, inode = map(int, _read(path).split())
        owner, link = f"process {process}", f"/proc/{process}/fd/{descriptor}"
        found = os.stat(link)  # before opening, because opening a wrong file may have side effects
        _expect_regular(found)
        if (found.st_dev, found.st_ino) != (device, inode):
            raise PoolError(_out_of_reach(path, owner, f"{link} is something else"))
        return os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise PoolError(_out_of_reach(path, owner, str(error))) from error


def _read(path: Path) -> str:
    fd = os.open(path, _READ)
    try:
        _expect_regular(os.fstat(fd))
        return os.read(fd, _MOST_BYTES).decode("ascii")
    finally:
        os.close(fd)


def _expect_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")


def _out_of_reach(path: Path, owner: str, reason: str) -> str:
    remedy = "run an engine's processes as one user in one PID namespace, or choose another engine_id"
    return f"pool: cannot open the memory of {owner}, to which {path} leads: {reason}; {remedy}"


def is_held(path: Path) -> bool:
    """Return whether a process holds a named file. The file of another user counts as held."""
    try:
        fd = os.open(path, _READ)
    except OSError:
        return True
    try:
        return not _try_lock(fd)
    finally:
        os.close(fd)


def _sweep(directory: Path) -> None:
    for path in named_files(directory):
        with suppress(OSError):
            if not is_held(path):
                path.unlink()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
