"""`thinpipe join`: asks the hub what to do, does it, and asks again, until the run has ended or the person leaves."""

import secrets
import shutil
import time
import tomllib
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist
from rich.console import Console

from thinpipe.checkpoint import Manifest
from thinpipe.checkpoint.folder import MANIFEST, step_folder
from thinpipe.checkpoint.state import versions
from thinpipe.core.code import code_version
from thinpipe.core.config import from_table
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.swarm.identity import Identity, accept_invite, load_identity
from thinpipe.swarm.invite import Invite
from thinpipe.swarm.line_test import measure_latency, measure_rates
from thinpipe.swarm.messages import MOST_WORDS, Accusation, Answer, Done, Measure, NextRequest, Refused, Wait, Work
from thinpipe.swarm.reports import MachineReport
from thinpipe.swarm.settings import JoinConfig
from thinpipe.train.config import DataSection, JobSection, RunConfig
from thinpipe.train.faults import PoisonedError
from thinpipe.train.hub_supplies import HubSupplies
from thinpipe.train.loop import Trainer
from thinpipe.train.machine import measure_machine
from thinpipe.transport.nats.dial import UnreachableError
from thinpipe.transport.nats.frame import Origin
from thinpipe.transport.nats.opening import open_nats_group
from thinpipe.transport.nats.post import Post

_ASK_SECONDS = 30.0
_AGAIN_SECONDS = 2.0
_JOINED_SECONDS = 5.0


def run(config: JoinConfig) -> int:
    """Exit code 1 when the hub stayed away, 2 when it refused us."""
    identity, folder = _who_we_are(config)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"you are {identity.name} in run {identity.run}; Ctrl+C leaves it")
    program = PeerProgram(identity, folder, config, console)
    while True:
        try:
            return program.run()
        except (ConnectionError, TimeoutError) as error:
            alone = time.monotonic() - program.last_answer
            if alone > config.patience_seconds:
                console.print(f"nothing was heard of the hub for {alone:.0f} s, so this is the end: {error}")
                return 1
            console.print(f"{error}; trying again")
            time.sleep(_AGAIN_SECONDS)


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
    return accept_invite(invite, folder, name=config.name, code=code_version()), folder


class PeerProgram:
    """One life of a peer. `run` may be called again after a ConnectionError or a TimeoutError."""

    def __init__(self, identity: Identity, folder: Path, config: JoinConfig, console: Console) -> None:
        self.identity, self.folder, self.config, self.console = identity, folder, config, console
        self.life, self.epoch, self.why = secrets.token_hex(8), 0, ""
        self.accuses: Accusation | None = None
        self.report: MachineReport | None = None
        self.together: tuple[float, float] | None = None
        self.last_answer = time.monotonic()
        self._said = ""

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
        finally:
            post.close()

    def _connect(self) -> Post:
        """The server turns away those who are signing in while it reads its settings again."""
        began = time.monotonic()
        while True:
            try:
                return Post(self.identity.address)
            except UserError as error:
                if time.monotonic() - began > _JOINED_SECONDS:
                    raise (ConnectionError(str(error)) if isinstance(error, UnreachableError) else error) from None
            time.sleep(0.2)

    def _serve(self, post: Post) -> int:
        while True:
            match self._ask(post):
                case Wait(text=text):
                    self._say(text)
                case Measure() as measure:
                    self._measure(post, measure)
                case Work() as work:
                    if self._work(post, work):
                        self._leave(post)
                        return 0
                case Done(text=text):
                    self._say(f"the run has ended; at the hub: {text}")
                    self._tell_that_we_leave(post)
                    return 0
                case Refused(text=text):
                    raise UserError(f"the hub refused: {text}")

    def _ask(self, post: Post) -> Answer:
        request = NextRequest(
            life=self.life,
            code=code_version(),
            report=self.report,
            took_part_in=self.epoch,
            why=self.why[:MOST_WORDS],
            accuses=self.accuses,
            together_bps=self.together,
        )
        data = post.request("next", msgspec.msgpack.encode(request), seconds=_ASK_SECONDS)
        self.why, self.accuses, self.together = "", None, None
        self.last_answer = time.monotonic()
        answer: Answer = msgspec.msgpack.decode(data, type=Answer)
        return answer

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

    def _work(self, post: Post, work: Work) -> bool:
        """One epoch. True when the person who sits here wants to leave."""
        self.epoch = work.epoch
        mine = work.names.index(self.identity.name)
        self._say(
            f"epoch {work.epoch}: {work.shares[mine]} of {sum(work.shares)} segments, place {mine + 1} of "
            f"{len(work.names)}; {work.text}"
        )
        config = self._settings(work.settings)
        self._prepare_folder(work)
        supplies = HubSupplies(post, work, config, self._say)
        origin = Origin(
            run=bytes.fromhex(self.identity.fingerprint[:16]),
            epoch=work.epoch,
            incarnation=work.lives[self.identity.name],
        )
        trainer: Trainer | None = None
        try:
            timeout = timedelta(seconds=config.parallelism.timeout_seconds)
            group = None
            if len(work.names) > 1:
                group = open_nats_group(post, work.names, origin, timeout=timeout, incarnations=work.lives)
            trainer = Trainer(config, group, supplies)
            trainer.train()
        except PoisonedError as error:
            name = work.names[error.sender]
            self.accuses = Accusation(name=name, step=error.step, what=error.what)
            self.why = f"{name} was wrong twice in step {error.step}: {error.what}"
            self._say(f"epoch {work.epoch} is over: {self.why}")
        except (ConnectionError, TimeoutError, dist.DistError) as error:  # also a hub that is frozen
            self.why = str(error)
            self._say(f"epoch {work.epoch} is over: {error}")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            supplies.close()
        return trainer is not None and trainer.asked_here

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
            post.request("leave", b"", seconds=5)

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self.console.print(text)
