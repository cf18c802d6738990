"""Start a daemon on the embedded model, ask it a question over gRPC, print the streamed answer and the rates."""

from __future__ import annotations

import re
import subprocess
import sys

QUESTION = "What is the capital of France?"
READY = re.compile(r"serving .* on (\S+:\d+)")


def main() -> int:
    print("$ runnerd serve --port 0", flush=True)
    server = subprocess.Popen(
        [sys.executable, "-m", "runnerd_service", "serve", "--port", "0", "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = wait_until_ready(server)
        if address is None:
            return server.wait() or 1
        print(f'$ runnerd generate --stats "{QUESTION}"', flush=True)
        client = [sys.executable, "-m", "runnerd_service", "generate", "--address", address]
        options = ["--stats", "--temperature", "0", "--max-tokens", "64"]
        return subprocess.run([*client, *options, QUESTION], check=False, timeout=300).returncode
    finally:
        server.terminate()
        server.wait(timeout=60)


def wait_until_ready(server: subprocess.Popen[str]) -> str | None:
    """Echo the daemon's output until it says where it serves; None if it ends instead."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if found := READY.search(line):
            return found[1]
    return None


if __name__ == "__main__":
    sys.exit(main())
