"""Leave a stream early; the server stops at once: python cancel.py ADDRESS."""

import sys
import time

from runnerd_client import Client

if len(sys.argv) != 2:
    sys.exit("usage: python cancel.py ADDRESS")
with Client(sys.argv[1], timeout=60) as client:
    with client.stream("Count to a million.", max_tokens=1000, ignore_eos=True) as stream:
        for text in stream.texts():
            print(f"first piece: {text!r}")
            break  # leaving the block cancels the call
    while client.load().num_running:
        time.sleep(0.01)
    print("the server has nothing to do")
