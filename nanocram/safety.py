"""Atomic writes, one run a folder, signals, errors in one line, progress in a log."""

import contextlib
import ctypes
import errno
import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

if "ipykernel" not in sys.modules:  # a notebook's, which its processes may not find
    os.environ.pop("MPLBACKEND", None)
LINE_SECONDS = 120  # between two lines of progress, where there is no terminal


def sync(file):
    """fsync an open file, where its file system can."""
    try:
        os.fsync(file)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # some mounted buckets
            raise


def write_beside(path, write):
    """Call write(temporary path), fsync, rename to path: a reader finds the old file or the new."""
    path = path.resolve()  # of a link, the file on the other disk
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        with open(temporary, "r+b") as f:
            sync(f)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # it must not keep the disk full


def write_text(path, text):
    """write_beside() for a text, in UTF-8 and with line feeds on every system."""
    write_beside(path, lambda temporary: temporary.write_text(text, "utf-8", newline="\n"))


def read_json(path, then):
    """The dict in a JSON file; exits with what to do then if it is missing or damaged."""
    try:
        return {**json.loads(path.read_bytes())}
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        sys.exit(f"{path.absolute()} is missing or damaged: {then}")


def lock(path, timeout=0):
    """Lock a file or folder until this process ends or drops the result; exits if another has it.
    Without a file system's own locks there is none: a file in place of one would outlive a kill."""
    path = Path(path).resolve()  # whatever links lead to it
    if str(path) != str(path).encode("utf-8", "ignore").decode():  # which fails in torch
        sys.exit(f"{path} is not UTF-8: type PYTHONUTF8=1 in front, or take another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    # beside a folder, which may be renamed, but inside of a disk, which containers may share
    place = (path if path.is_mount() else path.parent) / f".{path.name}.lock"
    held = FileLock(place, timeout, is_singleton=True, fallback_to_soft=False)
    try:
        held.acquire()  # in a notebook perhaps once more
    except Timeout:
        sys.exit(f"another process writes to {path}: wait for it, or choose another folder")
    except (NotImplementedError, OSError) as e:  # some network file systems cannot lock
        say_once(f"WARNING: cannot lock {path} ({e}): start no second process that writes there")
    return held


def set_aside(path, why):
    """Rename a file or folder to the first free NAME.1, NAME.2 and so on, and say so."""
    places = (path.with_name(f"{path.name}.{n}") for n in range(1, sys.maxsize))
    aside = path.rename(next(place for place in places if not place.exists()))
    say(f"{path} {why}: moved it to {aside}")


def names_in(folder):
    """Make a folder; return the names in it, but for a lock, lost+found and half-written ones."""
    if folder.is_file():
        return {folder.name}
    folder.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in folder.iterdir() if path.suffix != ".tmp"}
    return names - {f".{folder.name}.lock", "lost+found"}


def move_aside(folder):
    """Make a folder for a new run. An earlier one is moved aside, if it ever saved anything."""
    names = names_in(folder)
    if names and "run.json" not in names:
        sys.exit(f"{folder} exists and holds no run of train.py: choose another --out_dir")
    logged = "log.csv" in names and (folder / "log.csv").read_bytes().count(b"\n") > 2
    if names <= {"run.json", "tokenizer.json", "tokenizer_config.json", "log.csv"} and not logged:
        return
    try:
        set_aside(folder, "held a run, which --init=auto would have continued")
    except OSError as e:  # a disk is mounted there
        what_helps = f"type --init=auto to continue it, or --out_dir={folder}/2"
        sys.exit(f"{folder} holds a run that cannot be moved ({e.strerror}): {what_helps}")
    folder.mkdir()


def say(line):
    """Print a line above the bar; a full disk or a closed pipe ends no run."""
    with contextlib.suppress(OSError):
        tqdm.write(line)


say_once = functools.cache(say)


@contextlib.contextmanager
def extra(what):
    """Around what a run can do without: an error, of whatever kind, is a warning."""
    try:
        yield
    except (Exception, SystemExit) as e:
        say_once(f"WARNING: no {what}: {first_line(e)}")


class Bar(tqdm):
    """A progress bar; without a terminal, as in the log of a batch job, a line now and then."""

    desc = postfix = ""  # tqdm has none where it shows no bar
    said_at = time.monotonic()  # of the last line; at first, when the process began
    __init__ = functools.partialmethod(tqdm.__init__, disable=None)  # a bar in a terminal alone

    def update(self, n=1):
        super().update(n)
        if self.disable:
            self.n += n
            if self.total and time.monotonic() > self.said_at + LINE_SECONDS:
                self.said_at = time.monotonic()
                say(f"{self.n / self.total:4.0%}  {self.desc}{self.postfix}")


def first_line(error):
    """The first line of an exception's message, or its name if it has none."""
    return (str(error).strip() or repr(error)).splitlines()[0][:150]


def is_oom(error):
    """Whether an exception is about memory; the CPU's allocator raises a plain RuntimeError."""
    words = ("memoryerror", "out of memory", "allocate memory", "alloc_failed")
    return not isinstance(error, OSError) and any(word in repr(error).lower() for word in words)


def run(main, folder, then, if_oom="use a smaller model"):
    """Call a script's main(). Interrupts and errors of the machine end it in one line with what to
    do next: then, if_oom. folder: named if an OSError names no file. Bugs keep their traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(f"\nstopped: {then}")
    except OSError as e:
        place = e.filename or folder
        for name, value in os.environ.items():  # torch.compile's cache, say, that cannot be made
            if "CACHE" in name and value and Path(place).is_relative_to(value):
                then = f"unset {name}, or name another folder"
        sys.exit(f"{place}: {e.strerror or e}; {then}")
    except (MemoryError, RuntimeError) as e:
        if is_oom(e):
            sys.exit(f"out of memory: {if_oom}")
        e.add_note(then)
        raise


class Signals(contextlib.ContextDecorator):
    """Around a function: SIGINT, SIGTERM, SIGHUP, and what batch systems send before the end, set
    .stop. Once more they end the process, but not within 2 s, for torchrun repeats a SIGTERM."""

    stop = False  # bench.py and the tests ask without entering

    def __enter__(self):
        self.stop, self.before, self.timers = False, {}, []
        numbers = [signal.SIGINT, signal.SIGTERM]
        for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"):
            number = getattr(signal, name, None)  # Windows has none
            if number and signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets SIGHUP
                numbers.append(number)
        with contextlib.suppress(ValueError):  # Python allows it in the main thread alone
            self.before = {number: signal.signal(number, self.handle) for number in numbers}

    def __exit__(self, *error):
        for timer in self.timers:
            timer.cancel()
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number, frame):
        signal.signal(number, signal.SIG_IGN)
        self.stop = True
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, b"\nstopping and saving; once more ends the run at once\n")
        # the system's default again, for a handler of Python's would wait for the end of a C call
        self.timers.append(threading.Timer(2, ctypes.pythonapi.PyOS_setsig, (number, None)))
        self.timers[-1].start()


class ends_at_once(Signals):
    """Around work of a library in which Python sees no signal: each ends the process at once."""

    handle = signal.SIG_DFL
