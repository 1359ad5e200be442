"""A small stand-in of the Hub, for tests: its listings, and whole files."""

import functools
import json
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHA = 40 * "0"


class StandIn:
    """Serves root/{datasets,models}/OWNER/NAME to processes that start while monkeypatch lasts."""

    def __init__(self, root, monkeypatch):
        answer = functools.partial(Answer, directory=root)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), answer)
        self.requests = self.server.requests = []  # paths
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{self.server.server_port}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        monkeypatch.setenv("HF_HOME", f"{root}/home")
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


class Answer(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def translate_path(self, path):
        """The file or folder of a path: there is one revision, and a model needs no /models."""
        path = re.sub("/(resolve|revision|tree)/[^/]+", "", path.removeprefix("/api"))
        kind = "" if path.startswith(("/datasets/", "/models/")) else "/models"
        return super().translate_path(kind + path)

    def end_headers(self):
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("ETag", self.path.replace("/", "-"))  # the name of a file in the cache
        self.send_header("X-Error-Code", "EntryNotFound")  # read if there is no such file
        super().end_headers()

    def do_GET(self):
        self.server.requests.append(self.path)
        if not self.path.startswith("/api/"):
            return super().do_GET()
        folder = Path(self.translate_path(self.path))
        repository = Path(self.directory, *folder.relative_to(self.directory).parts[:3])
        answer = {"id": repository.name, "sha": SHA, "siblings": []}
        if "/tree/" in self.path:
            answer = [self.entry(path, repository) for path in sorted(folder.rglob("*"))]
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def entry(self, path, repository):
        """A file or a folder, as a listing has it."""
        answer = {"path": str(path.relative_to(repository)), "size": path.stat().st_size}
        return answer | {"type": "directory" if path.is_dir() else "file", "oid": SHA}
