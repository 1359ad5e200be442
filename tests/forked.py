"""Python in processes that need no seconds to import torch: they are forks of one that has it."""

import json
import os
import subprocess
import sys
from pathlib import Path

SERVER = """
import gc, json, os, sys, torch, torch._dynamo
gc.freeze()  # or each process goes through all that is imported
for line in sys.stdin:
    folder, code, argv = json.loads(line)
    if os.fork() == 0:
        said = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.chdir(folder)
        sys.path.insert(0, folder)
        sys.argv = argv
        exec(code, {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
SCRIPT = "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__')"


class Server:
    """The process that is forked. It must have imported nothing of ours."""

    def __init__(self, folder):
        self.said = Path(folder) / "said.txt"
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # OpenMP's threads do not survive a fork
        )

    def run(self, folder, code, argv=("-c",)):
        """Run code in a folder, which must end without an error; what it said."""
        line = json.dumps([str(folder), code, [str(arg) for arg in argv]])
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        status, said = int(self.process.stdout.readline()), self.said.read_text("utf-8")
        assert status == 0, f"{argv}\n{said}"
        return said

    def close(self):
        self.process.stdin.close()
        self.process.wait()
