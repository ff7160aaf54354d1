"""What tests of attacks share: tries that are counted, and what comes on a subject."""

import asyncio
from collections import Counter
from contextlib import contextmanager

TRIES, AT_ONCE = 200, 20


@contextmanager
def counted():
    """Yields how many tries ended how; says so to people, and accepts no end that is called "accepted"."""
    ends = Counter()
    yield ends
    print(f"\n{ends.total()} tries: {', '.join(f'{count} {end}' for end, count in sorted(ends.items()))}", end=" ")
    assert ends.total() == TRIES
    assert "accepted" not in ends


async def many(attempt, ends):
    """`attempt(number)` is an end; a few at once."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number):
        async with room:
            ends[await attempt(number)] += 1

    await asyncio.gather(*map(one, range(TRIES)))


async def heard(client, subject):
    """What comes on a subject from now on."""
    came = []

    async def arrived(message):
        came.append((message.subject, bytes(message.data)))

    await client.subscribe(subject, cb=arrived)
    await client.flush()
    return came


async def some(came):
    """Returns when something has come."""
    async with asyncio.timeout(300):
        while not came:
            await asyncio.sleep(0.01)
