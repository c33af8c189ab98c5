"""Await a call in a coroutine."""

import asyncio

from taskyard import AsyncClient


async def main():
    async with AsyncClient() as client:
        return await client.submit(lambda x: x + 1, 10)


print(asyncio.run(main()))
