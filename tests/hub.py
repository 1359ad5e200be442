"""A small stand-in of the Hub's HTTP API, for tests: listings, ranges, redirects, faults."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SHA = hashlib.sha1(b"stand-in").hexdigest()


class StandIn:
    """Serves root/datasets/OWNER/NAME and root/models/OWNER/NAME on a port of 127.0.0.1.

    fault(path), where set, is asked at each request: a status to answer, "cut" to break the body
    off half-way, "nothing" to close the line, or None. A file .gated in a repository closes it."""

    def __init__(self, root):
        self.root = root
        self.fault = None
        self.requests = []  # paths
        self.server = Server(("127.0.0.1", 0), type("Bound", (Answer,), {"hub": self}))
        self.port = self.server.server_port
        self.address = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


class Server(ThreadingHTTPServer):
    def handle_error(self, connection, address):
        pass  # a client that was killed


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub = None

    def log_message(self, *args):
        pass

    def send(self, code, body=b"", cut=False, **headers):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(code)
        headers = {"Content-Length": len(body), "X-Repo-Commit": SHA, **headers}
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def refuse(self, code, name, message):
        self.send(code, {"error": message}, X_Error_Code=name, X_Error_Message=message)

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        self.do_GET()

    def do_GET(self):
        posted = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(path)
        fault = self.hub.fault(path) if self.hub.fault else None
        if fault == "nothing":
            self.close_connection = True
            return None
        if isinstance(fault, int):
            return self.send(fault, {"error": "fault"})
        file = re.fullmatch(r"/(?:datasets/|)([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        api = re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(\w[\w-]*)/\w+/?(.*))?", path)
        kind = "datasets" if path.startswith(("/datasets/", "/api/datasets/")) else "models"
        if path.startswith("/cdn/"):
            return self.send_file(self.hub.root / path[5:], fault == "cut")
        if not file and not api:
            return self.refuse(404, "", "no such page")
        folder = self.hub.root / kind / (file[1] if file else api[2])
        if not folder.is_dir():
            return self.refuse(401, "RepoNotFound", "Repository not found")
        if file:
            return self.resolve(folder, file[2])
        self.describe(folder, api[2], api[3], api[4] or "", posted)

    def resolve(self, folder, name):
        path = folder / name
        if not path.is_file():
            return self.refuse(404, "EntryNotFound", "Entry not found")
        if (folder / ".gated").exists() and name != "README.md":
            message = f"Access to dataset {folder.name} is restricted. Please log in."
            return self.refuse(401, "GatedRepo", message)
        size = path.stat().st_size
        etag = f'"{hashlib.sha1(name.encode()).hexdigest()}"'
        if name.endswith((".md", ".json")):
            return self.send(200, path.read_bytes(), ETag=etag)
        to = f"http://localhost:{self.hub.port}/cdn/{path.relative_to(self.hub.root)}"
        self.send(302, Location=to, X_Linked_Size=size, X_Linked_ETag=etag, ETag=etag)

    def describe(self, folder, name, what, below, posted):
        paths = [path for path in sorted(folder.rglob("*")) if path.name != ".gated"]
        entries = []
        for path in paths:
            at = path.relative_to(folder).as_posix()
            of = hashlib.sha1(at.encode()).hexdigest()
            if path.is_dir():
                entries.append({"type": "directory", "oid": of, "size": 0, "path": at})
                continue
            size = path.stat().st_size
            large = {"oid": 64 * "0", "size": size, "pointerSize": 135}
            entries.append({"type": "file", "oid": of, "size": size, "path": at, "lfs": large})
        if what == "tree":
            inside = [e for e in entries if e["path"].startswith(below and f"{below}/")]
            if below and not inside:
                return self.refuse(404, "EntryNotFound", f"{below} does not exist")
            if "recursive=true" not in self.path.lower():
                depth = below.count("/") + bool(below)
                inside = [e for e in inside if e["path"].count("/") == depth]
            return self.send(200, inside)
        if what == "paths-info":
            return self.send(200, [e for e in entries if e["path"] in unquote(posted)])
        files = [{"rfilename": e["path"]} for e in entries if e["type"] == "file"]
        info = {"_id": 24 * "0", "id": name, "sha": SHA, "private": False, "disabled": False}
        info |= {"lastModified": "2026-01-01T00:00:00.000Z", "gated": False, "tags": []}
        self.send(200, info | {"downloads": 1, "likes": 1, "siblings": files})

    def send_file(self, path, cut):
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return self.send(200, path.read_bytes(), cut)
        size = path.stat().st_size
        start = int(wanted[1])
        end = min(int(wanted[2] or size) + 1, size)
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(end - start)
        self.send(206, data, cut, Content_Range=f"bytes {start}-{end - 1}/{size}")
