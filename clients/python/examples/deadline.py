"""Bound the time of a call: python deadline.py ADDRESS SECONDS."""

import sys

from runnerd_client import Client, DeadlineError

if len(sys.argv) != 3:
    sys.exit("usage: python deadline.py ADDRESS SECONDS")
address, seconds = sys.argv[1:]
with Client(address) as client:
    try:
        client.generate("Count to a million.", timeout=float(seconds), max_tokens=1000, ignore_eos=True)
    except DeadlineError as error:
        print(f"{error.code.name}: not done in {seconds} s")
    # A time limit instead ends the output in order, with what there is so far.
    answer = client.generate("Count to a million.", time_limit=float(seconds), max_tokens=1000, ignore_eos=True)
    print(f"{answer.outputs[0].finish.usage.completion_tokens} tokens in {seconds} s")
