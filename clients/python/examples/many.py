"""Stream many answers at once: python many.py ADDRESS COUNT."""

import asyncio
import sys

from runnerd_client import AsyncClient


async def tokens(client: AsyncClient, index: int) -> int:
    """Give how many tokens request ``index`` got."""
    async with client.stream(f"Story number {index}:", max_tokens=32, ignore_eos=True) as stream:
        async for message in stream:
            if message.output.HasField("finish"):
                return message.output.finish.usage.completion_tokens
    return 0


async def main(address: str, count: int) -> None:
    """Stream ``count`` answers over one connection."""
    async with AsyncClient(address, timeout=120) as client:
        counts = await asyncio.gather(*(tokens(client, index) for index in range(count)))
    print(f"{sum(counts)} tokens in {count} streams")


if len(sys.argv) != 3:
    sys.exit("usage: python many.py ADDRESS COUNT")
asyncio.run(main(sys.argv[1], int(sys.argv[2])))
