"""How files are written so that neither a kill nor a full disk nor a second process spoils them.

    python -c "import disk; help(disk)"
"""

import contextlib
import os
import sys
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows nothing is locked
    fcntl = None


def write_beside(path, write):
    """Call write(temporary path), bring the bytes to the disk, then rename: readers see the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        with open(temporary, "r+b") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # a failed write must not keep the disk full


def beside(folder):
    """The lock file of a folder: hidden, next to it, for the folder itself may be renamed."""
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder.with_name(f".{folder.name}.lock")


class Lock:
    """An exclusive lock on a file that nobody renames, made where it is missing; a process that is killed loses it.

    Where another process has it, this waits or exits with one line."""

    def __init__(self, path, wait=False):
        self.fd = None
        if fcntl is None:
            return
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # NFS locks nothing that is open for reading only
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            self.close()
            sys.exit(f"{path} is held by another process that writes there: wait for it, or choose another folder")
        except OSError:  # a file system that cannot lock
            pass

    def close(self):
        if self.fd is not None:
            with contextlib.suppress(OSError):
                os.close(self.fd)
        self.fd = None

    __del__ = close

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
