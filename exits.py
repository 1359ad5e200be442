"""How scripts end: at a signal, a failing disk or too little memory with one line that says what to type next.

    python train.py config/tiny.py | head -3        # trains on when nobody reads any more
"""

import contextlib
import os
import signal
import sys


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
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # a log file is written line by line
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
