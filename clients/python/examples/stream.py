"""Stream an answer: python stream.py ADDRESS PROMPT."""

import sys

from runnerd_client import Client, FinishReason

if len(sys.argv) != 3:
    sys.exit("usage: python stream.py ADDRESS PROMPT")
address, prompt = sys.argv[1:]
with Client(address, timeout=60) as client, client.stream(prompt, max_tokens=64, seed=7) as stream:
    for message in stream:
        if message.HasField("started"):
            print(f"request {message.started.request_id}: {message.started.prompt_tokens} prompt tokens")
        elif message.HasField("output"):
            print(message.output.text, end="", flush=True)
            if message.output.HasField("finish"):
                finish = message.output.finish
                print(f"\n{FinishReason.Name(finish.reason)}, {finish.usage.completion_tokens} tokens")
