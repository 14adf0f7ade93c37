"""A small HTTP server that answers as an OpenAI-compatible chat endpoint does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any], int], tuple[int, str]]
"""From a request's body and number to the status and the content of the reply."""


@contextmanager
def server(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]], list[int]]]:
    """A chat endpoint; its address, the requests that came and how many were open at each."""
    requests: list[dict[str, Any]] = []
    opened: list[int] = []
    lock, state = threading.Lock(), {"open": 0}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state["open"] += 1
                number = len(requests)
                requests.append(body | {"key": self.headers["Authorization"], "path": self.path})
                opened.append(state["open"])
            status, content = answer(body, number)
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
            reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            data = json.dumps(reply if status == 200 else {"error": {"message": content}}).encode()
            with lock:
                state["open"] -= 1
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("retry-after-ms", "1")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                return  # a client that did not wait

        def log_message(self, *_args: object) -> None: ...

    service = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{service.server_port}/v1", requests, opened
    finally:
        service.shutdown()
        thread.join()
        service.server_close()
