"""`thinpipe join`: asks the hub what to do, does it, and asks again, until the run has ended or the person leaves."""

import secrets
import shutil
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist
from rich.console import Console

from thinpipe.checkpoint import Manifest
from thinpipe.checkpoint.folder import MANIFEST, is_layer_file, step_folder
from thinpipe.checkpoint.state import versions
from thinpipe.core.config import from_table
from thinpipe.core.errors import UserError
from thinpipe.core.files import file_sha256, write_atomically
from thinpipe.core.numerics import numerics
from thinpipe.swarm.file_asks import FileTransferError
from thinpipe.swarm.file_transfer import push
from thinpipe.swarm.identity import Identity, accept_invite, load_identity
from thinpipe.swarm.invite import Invite
from thinpipe.swarm.line_test import measure_latency, measure_rates
from thinpipe.swarm.messages import (
    MOST_WORDS,
    Accusation,
    Answer,
    Done,
    Give,
    LeaveRequest,
    Measure,
    NextRequest,
    Refused,
    Wait,
    Work,
)
from thinpipe.swarm.reports import MachineReport
from thinpipe.swarm.settings import JoinConfig
from thinpipe.train.alone import alone_in
from thinpipe.train.config import DataSection, JobSection, RunConfig
from thinpipe.train.faults import PoisonedError
from thinpipe.train.hub_supplies import HubSupplies
from thinpipe.train.loop import Trainer
from thinpipe.train.machine import measure_machine
from thinpipe.train.room import NoRoomError, says_no_room, wait_for_room
from thinpipe.train.spare import LINE_SHARE, Spare
from thinpipe.transport.nats.dial import UnreachableError
from thinpipe.transport.nats.frame import Origin
from thinpipe.transport.nats.opening import open_nats_group
from thinpipe.transport.nats.post import Post

COME_BACK = 75
"""By convention: try again later. A service that starts again after anything but 0 does."""
_ASK_SECONDS = 30.0
_AGAIN_SECONDS = 2.0
_JOINED_SECONDS = 5.0
_IN_USE_BY = (
    "another `thinpipe join`, and a peer takes part once: end that one first (kill it if it does not hear Ctrl+C), or "
    "join with another invite and another --folder"
)
_LONGEST_PAUSE_SECONDS = 64.0
"""Between tries of one whose disk has some room, and too little for its part."""
_NO_ROOM_SECONDS = 10.0
"""Until steps are computed again of which the last could not be saved."""


def run(config: JoinConfig) -> int:
    """Exit code 0 when the run has ended or the person leaves, 1 when the hub stayed away, 2 when it refused us, and
    COME_BACK when its owner has stopped it."""
    identity, folder = _who_we_are(config)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    with alone_in(folder, _IN_USE_BY):
        console.print(f"you are {identity.name} in run {identity.run}; Ctrl+C leaves it")
        return _take_part(PeerProgram(identity, folder, config, console))


def _take_part(program: "PeerProgram") -> int:
    config, console = program.config, program.console
    pause = _AGAIN_SECONDS
    while True:
        try:
            return program.run()
        except (ConnectionError, TimeoutError) as error:
            alone = time.monotonic() - program.last_answer
            if alone > config.patience_seconds:
                console.print(f"nothing was heard of the hub for {alone:.0f} s, so this is the end: {error}")
                return 1
            console.print(f"{error}; trying again for {config.patience_seconds - alone:.0f} s")
            time.sleep(_AGAIN_SECONDS)
        except NoRoomError as error:
            console.print(f"{error}; the others go on without this machine until there is room")
            time.sleep(pause)
            wait_for_room(program.folder, console.print, who="this machine")
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            program.last_answer = time.monotonic()


def _who_we_are(config: JoinConfig) -> tuple[Identity, Path]:
    given = Path(config.invite)
    if config.invite and not Invite.is_one(config.invite) and given.is_dir():
        identity = load_identity(given)
        if identity is None:
            raise UserError(f"{given} is not the folder of a run that you have joined: give the invite line")
        return (replace(identity, url=config.address_in(identity.url)), given)
    invite = Invite.read(config.invite)
    invite = msgspec.structs.replace(invite, url=config.address_in(invite.url))
    folder = config.folder or Path("joined") / invite.id
    return accept_invite(invite, folder, name=config.name, numerics=numerics()), folder


class PeerProgram:
    """One life of a peer. `run` may be called again after a ConnectionError, a TimeoutError or a NoRoomError."""

    def __init__(self, identity: Identity, folder: Path, config: JoinConfig, console: Console) -> None:
        self.identity, self.folder, self.config, self.console = identity, folder, config, console
        self.life, self.epoch, self.why = secrets.token_hex(8), 0, ""
        self.accuses: Accusation | None = None
        self.report: MachineReport | None = None
        self.together: tuple[float, float] | None = None
        self.gave = ""
        self.last_answer = time.monotonic()
        self._said = ""
        self._spare = Spare(folder)

    def run(self) -> int:
        post = self._connect()
        removed: list[str] = []
        post.receive("note", lambda _sender, data: removed.append(data.decode(errors="replace")), urgent=True)
        try:
            return self._serve(post)
        except KeyboardInterrupt:
            self._leave(post)
            return 0
        except (ConnectionError, TimeoutError) as error:
            if removed:
                raise UserError(removed[0]) from error
            raise
        except NoRoomError:
            self._tell_that_we_leave(post)
            raise
        finally:
            self._spare.stop()
            post.close()

    def _connect(self) -> Post:
        """The server turns away those who are signing in while it reads its settings again."""
        began = time.monotonic()
        while True:
            try:
                return Post(self.identity.address, life=self.life)
            except UserError as error:
                if time.monotonic() - began > _JOINED_SECONDS:
                    raise (ConnectionError(str(error)) if isinstance(error, UnreachableError) else error) from None
            time.sleep(0.2)

    def _serve(self, post: Post) -> int:
        while True:
            answer = self._ask(post)
            if not isinstance(answer, Wait):
                self._spare.stop()
            match answer:
                case Wait(text=text, manifest=manifest):
                    self._say("; ".join(filter(None, (text, self._spare.problem))))
                    self._copy(post, manifest)
                case Measure() as measure:
                    self._measure(post, measure)
                case Give() as give:
                    self._give(post, give)
                case Work() as work:
                    if self._work(post, work):
                        self._leave(post)
                        return 0
                case Done(text=text, again=again):
                    back = f"`thinpipe join {self.folder}` comes back when the hub runs again"
                    self._say(f"the hub's owner has stopped it: {back}" if again else f"the run has ended; {text}")
                    self._tell_that_we_leave(post)
                    return COME_BACK if again else 0
                case Refused(text=text):
                    raise UserError(f"the hub refused: {text}")

    def _ask(self, post: Post) -> Answer:
        request = NextRequest(
            life=self.life,
            numerics=numerics(),
            report=self.report,
            took_part_in=self.epoch,
            why=self.why[:MOST_WORDS],
            accuses=self.accuses,
            together_bps=self.together,
            gave=self.gave,
        )
        data = post.request("next", msgspec.msgpack.encode(request), seconds=_ASK_SECONDS)
        self.why, self.accuses, self.together = "", None, None
        self.last_answer = time.monotonic()
        answer: Answer = msgspec.msgpack.decode(data, type=Answer)
        return answer

    def _copy(self, post: Post, manifest: bytes) -> None:
        if self.report is not None:
            self._spare.follow(post, manifest, bytes_per_second=LINE_SHARE * self.report.down_bps / 8)

    def _measure(self, post: Post, wanted: Measure) -> None:
        if wanted.together:
            self._say("measuring the line while everybody does")
            rates = measure_rates(post)
            self.together = rates.up_bps, rates.down_bps
            return
        self._say("measuring this machine and its line")
        processor = measure_machine(
            self._settings(wanted.settings), dim=wanted.dim, memory_limit_nbytes=self.config.memory_nbytes
        )
        rates, latency = measure_rates(post), measure_latency(post)
        self.report = MachineReport(
            processor=processor,
            up_bps=rates.up_bps,
            down_bps=rates.down_bps,
            latency_s=latency,
            versions=versions(),
        )
        self._say(self.report.in_words())

    def _give(self, post: Post, wanted: Give) -> None:
        """What the hub has lost, of a checkpoint of which we have a part."""
        self._say(wanted.text)
        folder = self.folder / "checkpoints" / step_folder(wanted.step)
        gave = True
        for name, sha256 in wanted.files.items():
            if not is_layer_file(name):
                raise UserError(f"the hub wants our {name[:80]!r}: it is no hub to trust")
            path = folder / name
            try:
                if path.is_file() and file_sha256(path) == sha256:
                    push(post, path, f"{folder.name}/{name}")
            except UserError as error:
                gave = False
                self._say(f"could not give {name}: {error}")
            except (ConnectionError, TimeoutError):
                raise
            except OSError as error:  # as good as none: nobody need wait for it
                self._say(f"{name} cannot be read here ({error.strerror or error}), so the hub must do without ours")
        if gave:
            self.gave = wanted.manifest
        else:
            time.sleep(_AGAIN_SECONDS)

    def _work(self, post: Post, work: Work) -> bool:
        """One epoch. True when the person who sits here wants to leave."""
        self.epoch = work.epoch
        mine = work.names.index(self.identity.name)
        self._say(
            f"epoch {work.epoch}: {work.shares[mine]} of {sum(work.shares)} segments, place {mine + 1} of "
            f"{len(work.names)}; {work.text}"
        )
        config = self._settings(work.settings)
        with self._our_disk():
            self._prepare_folder(work)
        post.progress.begin(work.epoch)
        supplies = HubSupplies(post, work, config, self._say)
        origin = Origin(
            run=bytes.fromhex(self.identity.fingerprint[:16]),
            epoch=work.epoch,
            incarnation=work.lives[self.identity.name],
        )
        trainer: Trainer | None = None
        reason = ""
        try:
            timeout = timedelta(seconds=config.parallelism.timeout_seconds)
            group = None
            if len(work.names) > 1:
                group = open_nats_group(post, work.names, origin, timeout=timeout, incarnations=work.lives)
            with self._our_disk():
                trainer = Trainer(config, group, supplies)
                reason = trainer.train()
        except PoisonedError as error:
            name = work.names[error.sender]
            what = error.what if error.receiver is None else f"{error.what}, found by {work.names[error.receiver]}"
            self.accuses = Accusation(name=name, step=error.step, what=what)
            self.why = f"{name} was wrong twice in step {error.step}: {what}"
            self._say(f"epoch {work.epoch} is over: {self.why}")
        except (ConnectionError, TimeoutError, dist.DistError) as error:  # also a hub that is frozen
            self.why = str(error)
            self._say(f"epoch {work.epoch} is over: {error}")
        finally:
            post.progress.end()  # sending what was saved may take as long as it likes
            if dist.is_initialized():
                dist.destroy_process_group()
            supplies.close()
        if trainer is None or trainer.asked_here:
            return trainer is not None
        if reason == "not_saved" and trainer.finished_steps == config.training.steps:
            self._say(f"the last step could not be saved: make room; trying again in {_NO_ROOM_SECONDS:.0f} s")
            time.sleep(_NO_ROOM_SECONDS)
        return False

    @contextmanager
    def _our_disk(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionError, TimeoutError):
            raise
        except (OSError, FileTransferError) as error:
            if says_no_room(error):
                raise NoRoomError(f"epoch {self.epoch} is over: no room on the disk of {self.folder}") from error
            if isinstance(error, FileTransferError):
                raise
            raise UserError(
                f"this machine cannot go on ({error}): put that right, then `thinpipe join {self.folder}` comes back"
            ) from error

    def _settings(self, text: str) -> RunConfig:
        """The hub's, but for all that names a place on this machine."""
        config = from_table(tomllib.loads(text), RunConfig, where="the hub's settings")
        model = config.model if config.model.initial is None else replace(config.model, initial=self.folder)
        return replace(
            config,
            job=JobSection(dump_folder=self.folder),
            data=DataSection(),
            model=model,
            boundary=replace(config.boundary, store=None),
            training=replace(config.training, device=self.config.device),
        )

    def _prepare_folder(self, work: Work) -> None:
        """The checkpoint to go on from is the newest that our folder has: what is newer was not finished by all."""
        manifest = msgspec.json.decode(work.manifest, type=Manifest)
        checkpoints = self.folder / "checkpoints"
        for path in checkpoints.glob("step-*"):
            if path.name > step_folder(manifest.step):
                shutil.rmtree(path)
        newest = checkpoints / step_folder(manifest.step)
        newest.mkdir(parents=True, exist_ok=True)
        write_atomically(newest / MANIFEST, work.manifest)

    def _leave(self, post: Post) -> None:
        self._say(f"leaving; `thinpipe join {self.folder}` comes back")
        self._tell_that_we_leave(post)

    def _tell_that_we_leave(self, post: Post) -> None:
        with suppress(ConnectionError, TimeoutError):  # then the hub will notice
            post.request("leave", msgspec.msgpack.encode(LeaveRequest(life=self.life)), seconds=5)

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self.console.print(text)
