"""A stand-in for the engine server: the endpoints a cell uses, no model. Started as a module by the tests.

It keeps its state in memory and answers on `/server_info` what was asked of it. A model directory that holds a file
named `refuse-update` or `refuse-start` makes it fail there, one named `slow-start` slow to get ready. Like the real
one, it reads the directory of its weights when it starts, updates, or takes its memory back and was given no weights
since.
"""

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "host", "port", "max-running", "context-length", "threads", "weight-version"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--exit-with-parent", action="store_true")
    options = parser.parse_args()
    state = {"version": options.weight_version, "model": options.model, "released": False, "asked": []}
    state["loaded"] = Path(options.model).exists()
    if not state["loaded"] or Path(options.model, "refuse-start").exists():
        sys.exit("this model cannot be served")

    if Path(options.model, "slow-start").exists():
        time.sleep(2.0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/get_model_info":
                self.reply(200, {"model_path": state["model"], "weight_version": state["version"]})
            elif self.path == "/server_info":
                self.reply(200, state)
            else:
                self.reply(200, None)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state["asked"].append(self.path)
            if self.path == "/update_weights_from_disk":
                path = Path(body["model_path"])
                if not path.exists() or Path(path, "refuse-update").exists():
                    return self.reply(400, {"success": False, "message": "refused"})
                state.update(version=body["weight_version"], model=body["model_path"], loaded=True)
            elif self.path == "/release_memory_occupation":
                if Path(state["model"], "busy").exists():
                    return self.reply(400, {"error": {"message": "requests are running"}})
                state.update(released=True, loaded=False)
            elif self.path == "/resume_memory_occupation":
                if not state["loaded"] and not Path(state["model"]).exists():
                    return self.reply(400, {"error": {"message": "there are no weights to load"}})
                state.update(released=False, loaded=True)
            self.reply(200, None)

        def reply(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer((options.host, int(options.port)), Handler)
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    print("loading", flush=True)
    print(json.dumps({"url": f"http://{options.host}:{server.server_port}"}), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
