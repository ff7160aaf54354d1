"""`thinpipe join`: the peer process. Asks the hub what to do, does it and asks again, until the run ends or the user
leaves."""

import gc
import logging
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist
from rich.console import Console

from thinpipe.checkpoint.state import versions
from thinpipe.checkpoint.storage import received_manifest
from thinpipe.config.hub import JoinConfig
from thinpipe.config.run import RunConfig
from thinpipe.core.disk_space import DiskFullError, is_disk_full, wait_for_disk_space
from thinpipe.core.errors import UserError, first_cause
from thinpipe.core.files import write_atomically
from thinpipe.core.foreign import ProtocolError, decode_foreign, sanitize
from thinpipe.core.numerics import numerics
from thinpipe.core.run_folder import MANIFEST, checkpoints_path, step_folder, step_folders
from thinpipe.device.device_class import deterministic_algorithms
from thinpipe.swarm.peer.bandwidth_probe import LinkMeter
from thinpipe.swarm.peer.base_transfer import BaseTransfer, bring_own_base
from thinpipe.swarm.peer.disclosure import Disclosure, describe_assignment
from thinpipe.swarm.peer.hub_settings import base_folder, settings_from_hub
from thinpipe.swarm.peer.identity import Identity
from thinpipe.swarm.peer.machine_probe import measure_machine
from thinpipe.swarm.peer.reach import tell_reach
from thinpipe.swarm.peer.remote_run import RemoteRun
from thinpipe.swarm.peer.renewal import Renewal, connect_as_peer
from thinpipe.swarm.peer.restore_files import restore_files
from thinpipe.swarm.peer.standby import LINK_SHARE, StandbyMirror
from thinpipe.swarm.protocol.machine_report import MachineReport
from thinpipe.swarm.protocol.messages import (
    EXIT_TEMPFAIL,
    MAX_TEXT_CHARACTERS,
    Accusation,
    Answer,
    Assignment,
    Finished,
    LeaveRequest,
    Measure,
    NextRequest,
    Note,
    Refused,
    RestoreFiles,
    Standby,
)
from thinpipe.training.data_loading import DatasetInfo
from thinpipe.training.faults import PoisonedError
from thinpipe.training.memory_check import check_assignment
from thinpipe.training.trainer import Trainer
from thinpipe.transport.nats.activity import HUB
from thinpipe.transport.nats.client import UnreachableError
from thinpipe.transport.nats.connection import HubConnection
from thinpipe.transport.nats.frame import Origin
from thinpipe.transport.nats.world import open_nats_group

_LOG = logging.getLogger(__name__)
_ASK_SECONDS = 30.0
"""Timeout of a `NextRequest` in seconds; longer than the hub's long poll."""
_RETRY_SECONDS = 2.0
"""Seconds before the hub is tried again after an error."""
_REACH_SECONDS = 5.0
"""Seconds for which a failed connection is retried."""
_MAX_PAUSE_SECONDS = 64.0
"""Maximum pause, in seconds, between attempts when the disk has free space, but too little for this peer's files."""
_DISK_FULL_RETRY_SECONDS = 10.0
"""Pause, in seconds, before the last steps are computed again because the final checkpoint could not be saved."""


def run(program: "PeerProcess") -> int:
    """Serves the hub until the run ends; starts again after lost connections, for as long as the settings allow, and
    after a full disk.

    Exit code 0 when the run has ended or the user leaves, 1 when the hub was unreachable for too long, and
    EXIT_TEMPFAIL when the hub's owner has stopped the hub. Raises UserError (exit code 2) when the hub refuses this
    peer.
    """
    config, console = program.config, program.console
    pause = _RETRY_SECONDS
    while True:
        try:
            return program.run()
        except (ConnectionError, TimeoutError) as error:
            alone = time.monotonic() - program.last_answer
            if alone > config.reconnect_timeout_seconds:
                console.print(f"giving up, because the hub has not answered for {alone:.0f} s: {error}")
                return 1
            _LOG.info("connection to the hub lost, connecting again: %s", sanitize(error))
            console.print(f"{error}; connecting again for up to {config.reconnect_timeout_seconds - alone:.0f} s")
            time.sleep(_RETRY_SECONDS)
        except DiskFullError as error:
            console.print(f"{error}; the other peers continue without this machine until disk space is free")
            time.sleep(pause)
            wait_for_disk_space(program.folder, console.print, who="this machine")
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
            program.last_answer = time.monotonic()


class PeerProcess:
    """One incarnation of a peer. `run` may be called again after a ConnectionError, a TimeoutError or a
    DiskFullError."""

    def __init__(
        self,
        identity: Identity,
        folder: Path,
        config: JoinConfig,
        console: Console,
        disclosure: Disclosure | None = None,
    ) -> None:
        self._disclosure = disclosure or Disclosure(console.print, config)
        self.identity, self.folder, self.config, self.console = identity, folder, config, console
        self.incarnation, self.generation, self.error, self.stop_reason = secrets.token_hex(8), 0, "", ""
        """`incarnation`: id of this process. `generation`: generation taken part in last. `error`, `stop_reason`: how
        it ended; see `NextRequest`."""
        self.accusation: Accusation | None = None
        self.report: MachineReport | None = None
        self.concurrent: tuple[float, float] | None = None
        """Uplink and downlink rates in bits per second from a concurrent measurement, until reported."""
        self.uploaded = ""
        """sha256 of the manifest whose missing files were restored to the hub; see `NextRequest.uploaded`."""
        self.last_answer = time.monotonic()
        """Time of the hub's last answer, in seconds of the monotonic clock."""
        self._link_meter = LinkMeter()
        self._last_printed, self._has_joined = "", False
        self._base_transfer = BaseTransfer(base_folder(folder), config.base, self._print_once)
        self._standby_mirror = StandbyMirror(folder, self._base_transfer)

    def run(self) -> int:
        """Connects and serves until the run has ended or the user leaves; returns the exit code. Raises UserError with
        the reason if the hub has removed this peer."""
        connection = self._connect()
        if not self._has_joined:
            self._has_joined = True
            self._print_once(f"joined run {self.identity.run} as {self.identity.name}; Ctrl+C leaves the run")
        removed: list[str] = []

        def on_note(_sender: str, data: bytes) -> None:
            removed.append(decode_foreign(data, Note).text)

        connection.subscribe("note", on_note, senders=[HUB], urgent=True)
        renewal = Renewal(connection, self.folder, self._on_renewed)
        renewal.start()
        try:
            self._disclosure.ask(connection, self.identity, self.folder)
            tell_reach(connection, self.identity, self.config, self._print_once)
            return self._serve(connection)
        except KeyboardInterrupt:
            self._leave(connection)
            return 0
        except (ConnectionError, TimeoutError) as error:
            if removed:
                raise UserError(removed[0]) from error
            raise
        except DiskFullError:
            self._announce_leave(connection)
            raise
        finally:
            renewal.stop()
            self._standby_mirror.stop()
            connection.close()

    def _connect(self) -> HubConnection:
        """Connects, with retries."""
        began = time.monotonic()
        while True:
            try:
                connection, self.identity = connect_as_peer(self.identity, self.folder, incarnation=self.incarnation)
                return connection
            except UnreachableError as error:
                if time.monotonic() - began > _REACH_SECONDS:
                    raise ConnectionError(str(error)) from None
            time.sleep(0.2)

    def _on_renewed(self, jwt: str) -> None:
        self.identity = replace(self.identity, jwt=jwt)

    def _serve(self, connection: HubConnection) -> int:
        """The loop: ask the hub, act on the answer. Returns the exit code."""
        while True:
            answer = self._ask(connection)
            if not isinstance(answer, Standby):
                self._standby_mirror.stop()
            match answer:
                case Standby(text=text, manifest=manifest):
                    self._print_once("; ".join(filter(None, (text, self._standby_mirror.problem))))
                    self._copy(connection, manifest)
                case Measure() as measure:
                    self._measure(connection, measure)
                case RestoreFiles() as wanted:
                    self._restore_files(connection, wanted)
                case Assignment() as assignment:
                    if self._run_generation(connection, assignment):
                        self._leave(connection)
                        return 0
                case Finished(text=text, will_resume=will_resume):
                    rejoin = f"run `thinpipe join {self.folder}` to continue when the hub runs again"
                    self._print_once(
                        f"the hub's owner stopped the hub: {rejoin}" if will_resume else f"the run has ended: {text}"
                    )
                    self._announce_leave(connection)
                    return EXIT_TEMPFAIL if will_resume else 0
                case Refused(text=text):
                    raise UserError(f"the hub refused: {text}")

    def _ask(self, connection: HubConnection) -> Answer:
        """Sends a `NextRequest` with everything to report since the last one."""
        request = NextRequest(
            incarnation=self.incarnation,
            numerics=numerics(),
            report=self.report,
            left_generation=self.generation,
            error=self.error[:MAX_TEXT_CHARACTERS],
            stop_reason=self.stop_reason,  # type: ignore[arg-type]
            accusation=self.accusation,
            concurrent_bps=self.concurrent,
            uploaded=self.uploaded,
        )
        data = connection.request("next", msgspec.msgpack.encode(request), seconds=_ASK_SECONDS)
        self.error, self.stop_reason, self.accusation, self.concurrent = "", "", None, None
        self.last_answer = time.monotonic()
        answer: Answer = decode_foreign(data, Answer)
        return answer

    def _copy(self, connection: HubConnection, manifest: bytes) -> None:
        """Mirrors the newest checkpoint in the background."""
        if self.report is not None:
            self._standby_mirror.follow(connection, manifest, bytes_per_second=LINK_SHARE * self.report.down_bps / 8)

    def _measure(self, connection: HubConnection, wanted: Measure) -> None:
        """Measures machine and link, or only the link if all peers measure at once."""
        if wanted.concurrent:
            self._print_once("measuring the bandwidth of this machine's link, at the same time as all other peers")
            rates, _ = self._link_meter.measure(connection)
            self.concurrent = rates.up_bps, rates.down_bps
            return
        self._print_once("measuring the speed of this machine and of its link to the hub")
        config = self._settings(wanted.settings)
        with deterministic_algorithms(config.debug.deterministic):
            processor = measure_machine(
                config, dim=wanted.dim, heads=wanted.heads, memory_limit_nbytes=self.config.memory_nbytes
            )
        rates, latency = self._link_meter.measure(connection)
        self.report = MachineReport(
            processor=processor,
            up_bps=rates.up_bps,
            down_bps=rates.down_bps,
            latency_s=latency,
            versions=versions(),
        )
        self._print_once(self.report.in_words())

    def _restore_files(self, connection: HubConnection, wanted: RestoreFiles) -> None:
        self._print_once(wanted.text)
        if restore_files(connection, checkpoints_path(self.folder), wanted, self._print_once):
            self.uploaded = wanted.manifest
        else:
            time.sleep(_RETRY_SECONDS)

    def _run_generation(self, connection: HubConnection, assignment: Assignment) -> bool:
        """Trains for one generation. True when the user wants to leave."""
        self.generation = assignment.generation
        if self.identity.name not in assignment.names:
            raise ProtocolError(f"the hub assigns segments to {', '.join(assignment.names)}, and not to this machine")
        mine = assignment.names.index(self.identity.name)
        self._print_once(describe_assignment(assignment, mine))
        config = self._settings(assignment.settings)
        with self._local_disk_errors():
            self._prepare_folder(assignment)
        dataset_info = decode_foreign(assignment.dataset_info, DatasetInfo, form="json")
        gc.collect()  # what is left of the last generation
        check_assignment(config, dataset_info.vocab_size, mine, rejoin=f"thinpipe join {self.folder}")
        connection.activity.begin(assignment.generation)
        remote_run = RemoteRun(connection, assignment, config, self._print_once, self.console)
        origin = Origin(
            run=bytes.fromhex(self.identity.fingerprint[:16]),
            generation=assignment.generation,
            incarnation=assignment.incarnations[self.identity.name],
        )
        trainer: Trainer | None = None
        try:
            timeout = timedelta(seconds=config.parallelism.timeout_seconds)
            group = None
            if len(assignment.names) > 1:
                group = open_nats_group(
                    connection, assignment.names, origin, timeout=timeout, incarnations=assignment.incarnations
                )
            with self._local_disk_errors(), deterministic_algorithms(config.debug.deterministic):
                if config.model.hf is not None:
                    bring_own_base(self._base_transfer, connection, assignment)
                trainer = Trainer(config, group, remote_run)
                self.stop_reason = trainer.train()
        except PoisonedError as error:
            name = assignment.names[error.sender]
            what = (
                error.what if error.receiver is None else f"{error.what}, found by {assignment.names[error.receiver]}"
            )
            self.accusation = Accusation(name=name, step=error.step, what=what)
            self.error = f"{name} sent bad values twice in step {error.step}: {what}"
            self._print_once(f"generation {assignment.generation} ended: {self.error}")
        except (ConnectionError, TimeoutError, dist.DistError) as error:  # TimeoutError: the hub is frozen
            self.error = str(error)
            _LOG.info("generation %d ended: %s", assignment.generation, sanitize(error))
            self._print_once(f"generation {assignment.generation} ended: {first_cause(error)}")
        finally:
            connection.activity.end()  # uploads in `close` are not subject to stall detection
            if dist.is_initialized():
                dist.destroy_process_group()
            remote_run.close()
        if trainer is None or trainer.stop.requested:
            return trainer is not None
        if self.stop_reason == "not_saved" and trainer.finished_steps == config.training.steps:
            self._print_once(
                f"the last step could not be saved: free disk space; trying again in {_DISK_FULL_RETRY_SECONDS:.0f} s"
            )
            time.sleep(_DISK_FULL_RETRY_SECONDS)
        return False

    @contextmanager
    def _local_disk_errors(self) -> Iterator[None]:
        """Turns errors of the local disk, also as the cause of a UserError, into DiskFullError or UserError; connection
        errors pass."""
        try:
            yield
        except (ConnectionError, TimeoutError):
            raise
        except (OSError, UserError) as error:
            if is_disk_full(error):
                raise DiskFullError(
                    f"this machine left generation {self.generation}, because the disk of {self.folder} is full"
                ) from error
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"this machine cannot continue ({error}): fix this, then run `thinpipe join {self.folder}`"
            ) from error

    def _settings(self, text: str) -> RunConfig:
        return settings_from_hub(text, self.folder, self.config.device)

    def _prepare_folder(self, assignment: Assignment) -> None:
        """Makes the checkpoint to resume from the newest in this peer's folder. Newer ones are deleted: they were not
        completed by all peers."""
        manifest = received_manifest(assignment.manifest)
        checkpoints = checkpoints_path(self.folder)
        for path in step_folders(checkpoints):
            if path.name > step_folder(manifest.step):
                shutil.rmtree(path)
        newest = checkpoints / step_folder(manifest.step)
        newest.mkdir(parents=True, exist_ok=True)
        write_atomically(newest / MANIFEST, assignment.manifest)

    def _leave(self, connection: HubConnection) -> None:
        self._print_once(f"leaving the run; `thinpipe join {self.folder}` rejoins it")
        self._announce_leave(connection)

    def _announce_leave(self, connection: HubConnection) -> None:
        """Announces to the hub that this process ends."""
        with suppress(ConnectionError, TimeoutError):  # the hub then notices by missing heartbeats
            connection.request("leave", msgspec.msgpack.encode(LeaveRequest(incarnation=self.incarnation)), seconds=5)

    def _print_once(self, text: str) -> None:
        if text != self._last_printed:
            self._last_printed = text
            self.console.print(text)
