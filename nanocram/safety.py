"""Files that no kill, full disk or second process spoils; scripts that end in one line.

    python train.py config/tiny.py | head -3        # trains on when nobody reads any more

Files are written beside their goal and renamed.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path

from filelock import FileLock, Timeout

CANNOT_LOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
# What Python, PyTorch's allocators and cuBLAS say where memory runs out.
OUT_OF_MEMORY = (
    "memoryerror",
    "out of memory",
    "allocate memory",
    "alloc_failed",
    "cublas_status_not_initialized",
)


def write_beside(path, write):
    """Call write(temporary path), bring its bytes to the disk, then rename it to path.

    Whoever reads path finds the old file or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        with open(temporary, "r+b") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # what failed first is what the user has to know
            temporary.unlink()  # it must not keep the disk full
        raise


def write_text(path, text):
    """write_beside() of a text, in UTF-8 and with line feeds on every system."""
    write_beside(path, lambda temporary: temporary.write_text(text, "utf-8", newline="\n"))


def append_text(path, text):
    """Add lines to a text file, or raise OSError and leave it as it was."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a+b") as f:
            if size:
                f.seek(-1, os.SEEK_END)
                if f.read(1) != b"\n":  # a line that a kill cut short
                    text = "\n" + text
            f.write(text.encode())
    except OSError:
        with contextlib.suppress(OSError):  # it may not be there
            os.truncate(path, size)
        raise


def lock_file(folder):
    """The lock file of a folder: hidden, next to it, for the folder itself may be renamed."""
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder.with_name(f".{folder.name}.lock")


@contextlib.contextmanager
def lock(path, wait=False):
    """Hold the lock file at path: a process that is killed loses it.

    While another one holds it, this waits (wait=True) or exits with one line."""
    held = FileLock(path)
    try:
        held.acquire(timeout=-1 if wait else 0)
    except Timeout:
        sys.exit(f"{path} is held by another process: wait for it, or choose another folder")
    except NotImplementedError:  # a file system that cannot lock
        pass
    except OSError as e:
        if e.errno not in CANNOT_LOCK:
            raise
    try:
        yield
    finally:
        held.release()


def first_line(error, length=150):
    """The first line of what an exception says, or its name where it says nothing."""
    text = str(error).strip() or repr(error)
    return text.splitlines()[0][:length]


def is_out_of_memory(error):
    """Whether an exception is about memory: the CPU's allocator raises a plain RuntimeError."""
    is_system = isinstance(error, OSError)  # a process could not be started
    return not is_system and any(words in repr(error).lower() for words in OUT_OF_MEMORY)


# What torch ("CUDA error", "CUDA driver error") and Triton ("Triton Error [CUDA]") say where
# a card has fallen off the bus, or its memory or its link fails: the words are CUDA's.
DEVICE_GONE = (
    "ECC",
    "hardware",
    "NVLink",
    "unspecified launch failure",
    "launch timed out",
    "unknown error",
    "is/are busy",
    "no CUDA-capable device",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
)


def is_device_gone(error):
    """Whether an exception tells of a GPU that answers no call any more.

    Others of CUDA's, such as an illegal address, tell of a bug, and keep their traceback."""
    said = str(error)
    return "CUDA" in said and any(words in said for words in DEVICE_GONE)


class Unbreakable:
    """A text stream that a full disk or a closed pipe behind it does not stop: a day goes on."""

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


def run(main, where, then, less_memory=lambda: "a smaller model"):
    """Call a script's main(); interrupts and errors of the machine end it in one line.

    where: what to blame for an OSError that names no file; then: how to go on afterwards;
    less_memory(): what to type when memory runs out. Bugs keep their traceback."""
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # a log file is written by lines
    sys.stdout = Unbreakable(sys.stdout)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(f"\nstopped: {then}")
    except ModuleNotFoundError as e:
        if not e.name:  # transformers' own words
            raise
        package = {"sklearn": "scikit-learn"}.get(e.name, e.name)
        sys.exit(f"{e.name} is missing: pip install {package}")
    except OSError as e:
        sys.exit(f"{e.filename or where}: {e.strerror or e}; {then}")
    except (MemoryError, RuntimeError) as e:
        if is_out_of_memory(e):
            sys.exit(f"out of memory: type {less_memory()}")
        if is_device_gone(e):
            sys.exit(f"the GPU has failed ({first_line(e)}): see nvidia-smi and dmesg; {then}")
        e.add_note(then)  # what was saved before the error is there
        raise


class Signals:
    """With it, a SIGINT, a SIGTERM or, as a terminal closes, a SIGHUP sets .stop.

    A second one of its kind, two seconds later or more, ends the process at once. Of its kind:
    after a Ctrl-C torchrun sends its ranks a SIGTERM, and they are to save. Two seconds: a batch
    system's SIGTERM reaches each rank, and torchrun, which sends its own."""

    def __init__(self):
        self.stop = False
        self.before = {}  # {number: the handler to put back}

    def __enter__(self):
        numbers = [signal.SIGINT, signal.SIGTERM]
        # Windows has no SIGHUP, and under nohup it is ignored: that is to stay so.
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        if threading.current_thread() is threading.main_thread():  # no other one may
            self.before = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number, frame):
        signal.signal(number, signal.SIG_IGN)
        self.stop = True
        with contextlib.suppress(OSError):  # nobody may be reading any more
            os.write(2, b"\nstopping and saving; once more ends the run at once\n")
        time.sleep(2)
        signal.signal(number, signal.SIG_DFL)
