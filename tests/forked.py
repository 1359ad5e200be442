"""Python in processes that need no seconds to import torch: they are forks of one that has it."""

import gc
import multiprocessing
import os
import socket
import sys
import tempfile
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "matplotlib.figure", "forked"])
IN_TRANSFORMERS = """
import torch, transformers
model = transformers.AutoModelForMaskedLM.from_pretrained(".", trust_remote_code=True)
torch.save(model(*torch.load("inputs")).logits.detach(), "found")
"""
SCRIPT = "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__')"


def two_ranks():
    """Code that begins a second process: both are ranks of one run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return f"""
import os
os.environ |= {{"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}}
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if os.fork() else "1"
"""


class Forked(CONTEXT.Process):
    """Code that runs in a folder from now on, with nothing of ours imported."""

    def __init__(self, folder, code, *argv):
        super().__init__()
        self.folder, self.code, self.argv = str(folder), code, [*map(str, argv)] or ["-c"]
        self.environment = dict(os.environ)
        file, self.path = tempfile.mkstemp()  # for what it says
        os.close(file)
        self.start()

    def run(self):
        gc.freeze()  # or each process goes through all that is imported
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = [self.folder, *(x for x in sys.path if not Path(x, "train.py").exists())]
        sys.argv = self.argv
        with open(self.path, "w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        exec(self.code, {"__name__": "__main__"})

    def poll(self):
        return self.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def end(self, status=0):
        """Wait until it has ended so; what it said, to stderr too."""
        self.join()
        said = Path(self.path).read_text("utf-8")
        os.remove(self.path)
        assert self.exitcode == status, f"{self.argv}\n{said}"
        return said
