"""Hold a conversation over standard input: python chat.py ADDRESS."""

import sys

from runnerd_client import ChatTurn, Client

if len(sys.argv) != 2:
    sys.exit("usage: python chat.py ADDRESS")
conversation: list[ChatTurn] = [{"role": "system", "content": "Answer in one sentence."}]
with Client(sys.argv[1]) as client:
    for line in sys.stdin:
        conversation.append({"role": "user", "content": line.strip()})
        answer = ""
        with client.stream(conversation, max_tokens=128, temperature=0) as stream:
            for text in stream.texts():
                answer += text
                print(text, end="", flush=True)
        print()
        conversation.append({"role": "assistant", "content": answer})
