"""What a run has from its hub: token batches, the layers to begin with, orders to stop; and what it gives back:
events, and every checkpoint that it saves."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch.distributed as dist

from thinpipe.checkpoint import Checkpoint, Manifest
from thinpipe.checkpoint.folder import layer_file, step_folder
from thinpipe.core.digest import text_sha256
from thinpipe.core.errors import UserError
from thinpipe.core.events import AnyEvent, Saved
from thinpipe.data import Cursor
from thinpipe.swarm.accusations import is_near
from thinpipe.swarm.file_asks import FileTransferError, Pace
from thinpipe.swarm.file_requests import is_plain
from thinpipe.swarm.file_transfer import fetch, push, stat
from thinpipe.swarm.messages import EventTold, Ready, SavedRequest, TokensRequest, Verdict, Work
from thinpipe.swarm.roster import MOST_SECONDS_TO_SAVE
from thinpipe.train.config import RunConfig
from thinpipe.train.engine import Ids
from thinpipe.train.hub_exchange import HubExchange
from thinpipe.train.supplies import Supplies
from thinpipe.train.tokens import DataFacts, token_dtype, tokenizer_sha256
from thinpipe.transport.nats.post import Post
from thinpipe.transport.star import Exchange, exchange_of

_SECONDS, _AGAIN_SECONDS = 60.0, 0.25
_BATCHES_AHEAD = 2
_OVER = "the hub says that the epoch is over"

Tell = Callable[[str], None]


class HubTokens:
    """Asks for some batches ahead, so that the hub's distance costs nothing."""

    def __init__(self, post: Post, facts: DataFacts, config: RunConfig) -> None:
        self._post, self.facts = post, facts
        self._batch, self._seq_len = config.training.global_batch_size, config.training.seq_len
        self._dtype = token_dtype(facts.vocab_size)
        self._coming: dict[tuple[str, int], Future[bytes]] = {}

    def batch(self, cursor: Cursor) -> Ids:
        ahead = [cursor.samples_seen + number * self._batch for number in range(_BATCHES_AHEAD + 1)]
        return self._take("train", ahead)

    @property
    def validation(self) -> Iterator[Ids]:
        count = self.facts.validation_batches
        for index in range(count):
            yield self._take("validation", range(index, min(count, index + _BATCHES_AHEAD + 1)))

    def keep_tokenizer(self, folder: Path) -> None:
        """It has come with the layers."""

    def _take(self, split: str, indices: Collection[int]) -> Ids:
        """The first of these; the others are asked for."""
        for index in indices:
            if (split, index) not in self._coming:
                request = TokensRequest(split=split, index=index)  # type: ignore[arg-type]
                data = msgspec.msgpack.encode(request)
                self._coming[split, index] = self._post.ask("tokens", data, seconds=_SECONDS, bulk=True)
        wanted = next(iter(indices))
        data = self._post.take(self._coming.pop((split, wanted)), seconds=_SECONDS)
        for key in [key for key in self._coming if key[0] == split and key[1] not in indices]:
            self._coming.pop(key).cancel()
        if not data:
            raise ConnectionError(_OVER)
        ids = np.frombuffer(data, self._dtype)
        if ids.size != self._batch * (self._seq_len + 1):
            raise ConnectionError(f"the hub sent {ids.size} ids for a batch of {self._batch} x {self._seq_len + 1}")
        return ids.reshape(self._batch, self._seq_len + 1).astype(np.int64)


def _told(tell: Tell, words: str, _have: int, _nbytes: int) -> None:
    """Not of files that are here already."""
    tell(words)


class HubSupplies(Supplies):
    """For one epoch. `close` waits until the hub has what was saved."""

    def __init__(self, post: Post, work: Work, config: RunConfig, tell: Tell) -> None:
        self._post, self._work, self._config, self._tell = post, work, config, tell
        self._folder = config.job.dump_folder
        self._manifest = msgspec.json.decode(work.manifest, type=Manifest)
        self._leads = work.names[0] == post.address.name
        self.tokens = HubTokens(post, msgspec.json.decode(work.facts, type=DataFacts), config)
        self._stop = threading.Event()
        self._cancel = post.listen("stop", lambda _data: self._stop.set())
        rate = work.keep_bytes_per_second.get(post.address.name)
        self._keeper = Keeper(post, work.epoch, tell, bytes_per_second=rate, committed=self._manifest.step)
        self._mine: list[str] = []

    def exchange(self, group: dist.ProcessGroup | None) -> Exchange:
        if group is None:
            return exchange_of(None)
        timeout = self._config.parallelism.timeout_seconds
        return HubExchange(group, self._post, self._work.epoch, timeout_seconds=timeout)

    def step(self) -> AbstractContextManager[None]:
        return self._post.progress.step()

    def fetch(self, layers: Collection[str], if_saved: Collection[str]) -> None:
        step = step_folder(self._manifest.step)
        target = self._folder / "checkpoints" / step
        files = [layer_file(layer) for layer in dict.fromkeys((*layers, *if_saved))]
        self._mine = files
        wanted = {name: self._manifest.files[name] for name in files if name in self._manifest.files}
        for number, (name, entry) in enumerate(wanted.items(), 1):
            words = f"fetching {name}, {number} of {len(wanted)}, {entry.nbytes / 1e6:.1f} MB"
            self._fetch(f"{step}/{name}", target / name, entry.nbytes, entry.sha256, words)
        for name in self._work.tokenizer:
            if not (is_plain(name) and name.startswith("tokenizer/")):
                raise UserError(f"the hub wants to write to {name[:80]!r} here: it is no hub to trust")
            found = stat(self._post, name)
            self._fetch(name, self._folder / name, found.nbytes, found.sha256)

    def _fetch(self, name: str, target: Path, nbytes: int, sha256: str, words: str = "") -> None:
        """What is wrong with a file of the hub ends this epoch, not us: the hub looks for another copy."""
        try:
            progress = partial(_told, self._tell, words) if words else None
            fetch(self._post, name, target, nbytes=nbytes, sha256=sha256, progress=progress)
        except FileTransferError as error:
            if isinstance(error.__cause__, OSError):  # our disk
                raise
            raise ConnectionError(str(error)) from error

    def ready(self, hashes: Mapping[str, str]) -> None:
        ours = {
            "settings": text_sha256(self._work.settings),
            "tokenizer": tokenizer_sha256({name: self._folder / name for name in self._work.tokenizer}),
        }
        request = msgspec.msgpack.encode(Ready(epoch=self._work.epoch, hashes=ours | dict(hashes)))
        answer = msgspec.msgpack.decode(self._post.request("ready", request, seconds=_SECONDS), type=Verdict)
        if answer.over:
            raise ConnectionError(_OVER)
        if answer.refusal:
            raise UserError(f"the hub refused: {answer.refusal}")

    def heard(self, event: AnyEvent) -> None:
        if self._leads:
            told = EventTold(epoch=self._work.epoch, event=msgspec.json.encode(event))
            self._post.tell("event", msgspec.msgpack.encode(told))
        if isinstance(event, Saved):
            self._keeper.keep(Path(event.path), self._mine)

    def asked_to_stop(self) -> bool:
        return self._stop.is_set()

    def name_of(self, process: int) -> str:
        return self._work.names[process]

    def may_accuse(self, step: int) -> bool:
        return len(self._work.names) > 1 and not is_near(step, self._work.removed_for)

    def needed(self) -> Collection[Path]:
        return self._keeper.needed(self._folder / "checkpoints")

    def close(self) -> None:
        self._cancel()
        self._keeper.close()


class Keeper:
    """Sends what was saved to the hub while training goes on; of two checkpoints that wait, the newer.

    `bytes_per_second`: no faster than this, until `close`. `committed`: the step that the hub has whole.
    """

    def __init__(
        self, post: Post, epoch: int, tell: Tell, *, bytes_per_second: float | None = None, committed: int = 0
    ) -> None:
        self._post, self._epoch, self._tell = post, epoch, tell
        self._pace = Pace(bytes_per_second)
        self._committed = committed
        self._sent: Path | None = None
        self._changed = threading.Condition()
        self._waiting: tuple[Path, list[str]] | None = None
        self._closing = False
        self._sending: Path | None = None
        self._thread = threading.Thread(target=self._run, name="thinpipe-keeper", daemon=True)
        self._thread.start()

    def keep(self, path: Path, files: list[str]) -> None:
        with self._changed:
            self._waiting = path, files
            self._changed.notify()

    def needed(self, checkpoints: Path) -> Collection[Path]:
        """The hub's newest is the one that it told us last, or the one that we have sent since: while it has no newer
        one, we have a second copy of our part. And what we send must not go away."""
        told = checkpoints / step_folder(self._committed)
        return [path for path in (told, self._sent, self._sending) if path is not None]

    def close(self) -> None:
        self._pace.lift()
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                if self._waiting is None:
                    return
                (path, files), self._waiting = self._waiting, None
                self._sending = path
            try:
                if self._send(path, files):
                    self._sent = path
            except (OSError, UserError) as error:  # a lost hub ends the epoch by itself; a newer one may have come
                self._tell(f"could not send {path.name} to the hub: {error}")
            finally:
                self._sending = None

    def _send(self, path: Path, files: list[str]) -> bool:
        manifest = Checkpoint.open(path, layers=()).manifest
        files = [name for name in files if name in manifest.files]
        request = SavedRequest(epoch=self._epoch, manifest=msgspec.json.encode(manifest), files=files)
        if not self._may_send(msgspec.msgpack.encode(request)):
            return False  # for the newer one that waits
        for name in files:
            push(self._post, path / name, f"{path.name}/{name}", pace=self._pace)
        return True

    def _may_send(self, request: bytes) -> bool:
        """Waits while the hub still gets an older one from somebody. False: a newer one of ours is there by now."""
        deadline = time.monotonic() + MOST_SECONDS_TO_SAVE
        while time.monotonic() < deadline:
            answer = msgspec.msgpack.decode(self._post.request("saved", request, seconds=_SECONDS), type=Verdict)
            if answer.refusal:
                raise UserError(answer.refusal)
            self._committed = max(self._committed, answer.committed)
            if not answer.later:
                return True
            with self._changed:
                if self._changed.wait_for(lambda: self._waiting is not None, timeout=_AGAIN_SECONDS):
                    return False
        raise UserError("somebody's older one does not get there")
