"""A small stand-in of the Hub, for tests: its listings, and whole files."""

import functools
import json
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHA = 40 * "0"


def serve(root, monkeypatch):
    """Serve root/{datasets,models}/OWNER/NAME to processes; return a list of what is asked for."""
    answer = functools.partial(Answer, directory=root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), answer)
    server.requests = []
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("HF_HOME", f"{root}/home")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.requests


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
        answer = {"id": "some/name", "sha": SHA}
        if "/tree/" in self.path:
            folder = Path(self.translate_path(self.path))
            owner = Path(self.directory, *folder.relative_to(self.directory).parts[:2])
            answer = []
            for path in sorted(folder.rglob("*")):
                place = "/".join(path.relative_to(owner).parts[1:])  # in the repository
                kind = "directory" if path.is_dir() else "file"
                answer += [{"type": kind, "path": place, "size": path.stat().st_size, "oid": SHA}]
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
