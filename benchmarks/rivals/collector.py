"""A local collector: `python -m benchmarks.rivals.collector`, which prints its address.

It receives OTLP over HTTP, and scrapes each second the Prometheus endpoints whose ports it reads
from standard input, one a line. At the end of its input it prints what it got, as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

_SCRAPE_SECONDS = 1.0


class _Receiver(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    counts: Counter[str]

    def do_POST(self) -> None:
        """Receive spans, and accept them."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.counts[f"{self.path} requests"] += 1
        self.counts[f"{self.path} bytes"] += len(body)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _scrape(port: str, counts: Counter[str], stopping: threading.Event) -> None:
    while not stopping.wait(_SCRAPE_SECONDS):
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics") as response:
                counts["scraped bytes"] += len(response.read())
        except OSError:
            continue  # the replica has stopped
        counts["scrapes"] += 1


def main() -> None:
    """Collect until standard input closes."""
    counts: Counter[str] = Counter()
    handler = type("Receiver", (_Receiver,), {"counts": counts})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    stopping = threading.Event()
    for line in sys.stdin:
        arguments = (line.strip(), counts, stopping)
        threading.Thread(target=_scrape, args=arguments, daemon=True).start()
    stopping.set()
    print(json.dumps(counts), file=sys.stderr)


if __name__ == "__main__":
    main()
