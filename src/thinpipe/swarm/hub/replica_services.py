"""What the hub keeps for the generation of one replica: its sums, its rendezvous, its progress and its conduct."""

from collections.abc import Callable, Collection

from thinpipe.swarm.hub.conduct import Conduct
from thinpipe.swarm.hub.replica import Generation, GenerationEnd
from thinpipe.swarm.hub.run_host import GenerationStart
from thinpipe.swarm.hub.services.reduction import ReductionService
from thinpipe.swarm.hub.services.store import StoreService
from thinpipe.swarm.hub.stalls import StallDetector
from thinpipe.swarm.hub.suspects import Suspects


class ReplicaServices:
    """`members`: names of all peers of the run, present or absent. `suspects` is common to all replicas."""

    def __init__(
        self, members: Callable[[], Collection[str]], suspects: Suspects, stall_detector: StallDetector
    ) -> None:
        self.conduct, self.stall_detector = Conduct(members, suspects), stall_detector
        self.reductions, self.store = ReductionService(), StoreService()
        self.last_end: GenerationEnd | None = None
        """Why the last generation ended; None while a generation runs."""

    start: GenerationStart
    """Settings and manifests of the running generation."""

    def begin(self, generation: Generation, start: GenerationStart, now: float) -> None:
        """A generation has begun in `conduct`; its reductions are begun by the caller."""
        self.start, self.last_end = start, None
        self.store.clear()
        self.stall_detector.begin(generation.number, generation.shares, now)

    async def end(self, end: GenerationEnd) -> None:
        """The generation is over: whoever waits for its peers is answered."""
        self.stall_detector.end()
        await self.reductions.end(end.reason)
        await self.store.wake_all_waiters()
