"""How files are written so that neither a kill nor a full disk nor a second process spoils them.

python -c "from nanocram import safety; help(safety)"
"""

import contextlib
import os
import signal
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
        self.fd = os.open(
            path, os.O_RDWR | os.O_CREAT, 0o666
        )  # NFS locks nothing that is open for reading only
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            self.close()
            sys.exit(
                f"{path} is held by another process that writes there: wait for it, or choose another folder"
            )
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


class Unbreakable:
    """A text stream that goes on where its file cannot be written: a full disk or a closed pipe must not end a day."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        with contextlib.suppress(OSError):
            self.stream.write(text)

    def flush(self):
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name):
        return getattr(self.stream, name)


def run(main, where, then, memory=lambda: "a smaller model"):
    """Call a script's main(). What the user or the machine does to it ends it with one line instead of a trace.

    where: what an error of the system is about if it names no file; then: how to go on; memory(): what to type if it
    does not suffice."""
    sys.stdout.reconfigure(
        line_buffering=True, errors="replace"
    )  # a log file is written line by line
    sys.stdout = Unbreakable(sys.stdout)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(f"\nstopped: {then}")
    except OSError as e:
        sys.exit(f"{e.filename or where}: {e.strerror or e}; {then}")
    except (MemoryError, RuntimeError) as e:
        # torch.OutOfMemoryError is a RuntimeError, and the CPU's allocator raises a plain one
        words = "out of memory", "allocate memory", "alloc_failed"  # the last is cuBLAS's
        if not isinstance(e, MemoryError) and not any(w in str(e).lower() for w in words):
            raise
        sys.exit(f"out of memory: type {memory()}")


def stop_at_signals(stop):
    """Call stop() at the first SIGINT or SIGTERM; the second one ends the process at once."""

    def handler(number, frame):
        stop()
        signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # nobody may be reading any more
            os.write(2, b"\nstopping and saving; once more ends the run at once\n")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
