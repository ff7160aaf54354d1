"""A hub of models on this machine: serves the files of a folder at one commit, as the Hugging Face hub does."""

import hashlib
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def model_hub(name, folder):
    """Yields the environment in which programs ask it, and the list of (agent's method, file) that were asked for; the
    method is "part" where it is a range of bytes."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_arguments):
            pass

        def do_HEAD(self):
            self.answer(with_content=False)

        def do_GET(self):
            self.answer(with_content=True)

        def answer(self, *, with_content):
            found = re.fullmatch(rf"/{name}/resolve/(main|{COMMIT})/([\w.-]+)", self.path)
            path = None if found is None else folder / found[2]
            if path is None or not path.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound" if found else "RepoNotFound")
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content, wanted = path.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            asked.append((self.command if wanted is None else "part", path.name))
            if wanted is not None:
                content = content[int(wanted[1]) : int(wanted[2]) + 1]
            self.send_response(200 if wanted is None else 206)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_content:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        yield {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}, asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
