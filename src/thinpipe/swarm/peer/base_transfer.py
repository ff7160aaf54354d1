"""How a peer comes to the base of a run on a Hugging Face model: the tensors that its segments read, each once.

In this order: what it has received before; a folder that this machine's user names (`thinpipe join --base`); the model
of the Hugging Face hub that the run names, at one commit; the run's own hub. What a tensor must be, the hub states, and
the hash in the run's checkpoints vouches for the statement.
"""

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from thinpipe.checkpoint import Manifest
from thinpipe.checkpoint.storage import received_manifest
from thinpipe.core.errors import UserError
from thinpipe.core.extras import require_extra
from thinpipe.core.foreign import ProtocolError, decode_foreign, sanitize
from thinpipe.core.units import format_bytes
from thinpipe.models.hf.base_files import open_source
from thinpipe.models.hf.base_statement import BaseStatement, StatedTensor
from thinpipe.models.hf.base_tensors import PeerBase
from thinpipe.models.hf.model_hub import HubModel
from thinpipe.swarm.peer.download_report import DownloadReport
from thinpipe.swarm.peer.file_transfer import OnProgress, fetch, stat_message
from thinpipe.swarm.peer.hub_settings import model_on_a_hub
from thinpipe.swarm.peer.request_pipeline import FileTransferError, RateLimiter
from thinpipe.swarm.protocol.base_files import STATEMENT_FILE, tensor_file
from thinpipe.swarm.protocol.file_messages import MAX_CHUNK_NBYTES
from thinpipe.swarm.protocol.messages import Assignment
from thinpipe.transport.nats.broadcasts import GENERATION_OVER, GenerationOver
from thinpipe.transport.nats.connection import HubConnection

PrintLine = Callable[[str], None]
_FREE_NBYTES = 1 << 30
"""Bytes of disk space that a base leaves free."""
_POLL_SECONDS = 0.5
_MAX_SHARE, _HEADER_NBYTES = 2, 100_000_000
"""Files of a model hub may be as large as this many times the stated base, and some bytes for their headers: they may
have tensors that nobody reads."""


class BaseTransfer:
    """Brings tensors of a run's base to this machine. `folder`: of what this peer has of it; `own`: folder of this
    machine with the model's files, if its user has named one."""

    def __init__(self, folder: Path, own: Path | None, print_line: PrintLine) -> None:
        self._base, self._own, self._print = PeerBase(folder), own, print_line
        self._on_a_hub = ""

    def learn(self, connection: HubConnection, manifest: Manifest) -> BaseStatement:
        """What the hub states of the base, checked against the hash in the manifest. Raises ProtocolError if it is
        another base, UserError if this machine cannot compute such a model."""
        require_extra("transformers", extra="tune", feature="model.hf")
        from thinpipe.models.hf.pretrained_config import transformers_config  # it takes seconds to import

        described = manifest.model.get("stored")
        if not isinstance(described, dict):
            raise ProtocolError("the hub's checkpoint says nothing of its model")
        transformers_config(described)  # refuses what would run code that comes with a model
        found = stat_message(connection, STATEMENT_FILE)
        fetch(connection, STATEMENT_FILE, self._base.statement_path, nbytes=found.nbytes, sha256=found.sha256)
        statement = decode_foreign(self._base.statement_path.read_bytes(), BaseStatement, form="json")
        if statement.base_sha256 != manifest.model.get("base_sha256"):
            raise ProtocolError(
                f"the hub states a base with the sha256 {statement.base_sha256}, and its checkpoint was trained on one "
                f"with {sanitize(manifest.model.get('base_sha256'), 80)}"
            )
        self._on_a_hub = "" if self._own is not None else model_on_a_hub(manifest.run)
        self._base.describe(described, "" if self._own is None else str(self._own.absolute()))
        return statement

    def bring(
        self,
        connection: HubConnection,
        tensors: Sequence[StatedTensor],
        *,
        rate_limiter: RateLimiter | None = None,
        chunk_nbytes: int = MAX_CHUNK_NBYTES,
        progress: OnProgress | None = None,
    ) -> None:
        """Downloads these tensors from the run's hub. Raises FileTransferError, ConnectionError or TimeoutError."""
        what = f"{len(tensors)} tensors of the base from the hub"
        report = DownloadReport(what, sum(tensor.nbytes for tensor in tensors), self._print)
        for tensor in tensors:
            fetch(
                connection,
                tensor_file(tensor.sha256),
                self._base.received(tensor),
                nbytes=tensor.nbytes,
                sha256=tensor.sha256,
                rate_limiter=rate_limiter,
                chunk_nbytes=chunk_nbytes,
                progress=report.file(tensor.nbytes, then=progress),
            )

    @property
    def names_a_model_hub(self) -> bool:
        """Whether tensors that are not here may come from the Hugging Face hub."""
        return bool(self._on_a_hub)

    def missing(self, tensors: Sequence[StatedTensor]) -> list[StatedTensor]:
        """Those that are neither received nor in a file of this machine's own folder; each content once. Raises
        UserError if the disk is too small for them."""
        own = set[str]()
        if self._own is not None:
            stored = open_source(str(self._own))
            own = {name for name in stored.names if stored.has_file(name)}
        lacking = {
            tensor.sha256: tensor
            for tensor in tensors
            if tensor.name not in own and not self._base.received(tensor).is_file()
        }
        wanted, free = sum(tensor.nbytes for tensor in lacking.values()), shutil.disk_usage(self._base.folder).free
        if lacking and wanted + _FREE_NBYTES > free:
            raise UserError(
                f"{self._base.folder} needs {format_bytes(wanted)} for this machine's part of the base, and "
                f"{format_bytes(free)} are free: free disk space, or join with --base and a folder that has the model"
            )
        return list(lacking.values())

    def from_a_model_hub(self, tensors: Sequence[StatedTensor]) -> bool:
        """Downloads the files with these tensors from the Hugging Face hub that this machine's environment names into
        its cache there, if the run's base comes from one. False if not, or if that fails; the reason is printed."""
        hub = HubModel.of(self._on_a_hub)
        if hub is None:
            return False
        try:
            files = {name: hub.size(name) for name in hub.files_of([tensor.name for tensor in tensors])}
            size = sum(nbytes or 0 for nbytes in files.values())
            limit = _MAX_SHARE * sum(tensor.nbytes for tensor in self._base.statement().tensors) + _HEADER_NBYTES
            if size > limit:
                raise UserError(f"the files of {hub} have {format_bytes(size)}, more than twice what the hub states")
            if absent := [name for name in files if not hub.has(name)]:
                self._print(f"downloading {', '.join(absent)} of {hub} from {hub.endpoint}, {format_bytes(size)}")
            for name in files:
                hub.fetch(name)
        except UserError as error:
            self._print(f"{sanitize(error, 500)}; the base comes from the run's own hub")
            return False
        self._base.use_own(self._on_a_hub)
        return True


def bring_own_base(transfer: BaseTransfer, connection: HubConnection, assignment: Assignment) -> None:
    """Brings what this peer's segments read of the base, before the `Trainer` of a generation is made; called in the
    training thread. Raises ConnectionError if the hub is lost or the generation over: what has arrived stays."""
    mine, over = assignment.names.index(connection.address.name), threading.Event()
    first = sum(assignment.shares[:mine])

    def on_over(data: bytes) -> None:
        if decode_foreign(data, GenerationOver).generation == assignment.generation:
            over.set()

    def refuse_over(*_progress: int) -> None:
        if over.is_set():
            raise ConnectionError("the hub has ended the generation")

    cancel = connection.subscribe_broadcast(GENERATION_OVER, on_over)
    try:
        statement = transfer.learn(connection, received_manifest(assignment.manifest))
        missing = transfer.missing(statement.of_segments(range(first, first + assignment.shares[mine])))
        if missing and transfer.names_a_model_hub and _from_a_model_hub(transfer, missing, connection, refuse_over):
            return
        transfer.bring(connection, missing, progress=refuse_over)
    except FileTransferError as error:
        if isinstance(error.__cause__, OSError):  # the local disk
            raise
        raise ConnectionError(str(error)) from error
    finally:
        cancel()


def _from_a_model_hub(
    transfer: BaseTransfer,
    tensors: Sequence[StatedTensor],
    connection: HubConnection,
    refuse_over: Callable[[], None],
) -> bool:
    """`BaseTransfer.from_a_model_hub` in a thread, while the hub of the run sees that this peer is at work. A download
    whose generation ends goes on by itself."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(transfer.from_a_model_hub(tensors)), daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        connection.activity.record_action()
        refuse_over()
    return found == [True]
