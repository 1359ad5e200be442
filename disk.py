"""How files are written so that neither a kill nor a full disk nor a second process spoils them.

    python -c "import disk; help(disk)"
"""

import contextlib
import os
import sys

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


class Lock:
    """Keeps others who ask for a Lock of the same file or folder out, while it lives; a kill frees it too.

    Where another process has it, waits or exits with one line."""

    def __init__(self, path, wait=False):
        self.number = None
        if fcntl is None:
            return
        self.number = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self.number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            sys.exit(f"{path} is in use by another process: wait until it is done, or choose another folder")
        except OSError:  # a file system that cannot lock
            pass

    def close(self):
        if self.number is not None:
            with contextlib.suppress(OSError):
                os.close(self.number)
        self.number = None

    __del__ = close

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
