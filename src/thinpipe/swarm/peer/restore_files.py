"""Uploads files that the hub has lost, of a checkpoint of which this peer has a part."""

from collections.abc import Callable
from pathlib import Path

from thinpipe.core.errors import UserError
from thinpipe.core.files import file_sha256
from thinpipe.core.run_folder import step_folder
from thinpipe.swarm.peer.file_transfer import push
from thinpipe.swarm.protocol.messages import RestoreFiles
from thinpipe.transport.nats.connection import HubConnection


def restore_files(
    connection: HubConnection, checkpoints: Path, wanted: RestoreFiles, print_line: Callable[[str], None]
) -> bool:
    """Uploads those of the wanted files that are here and whole. False if the hub did not take one of them."""
    folder, uploaded = checkpoints / step_folder(wanted.step), True
    for name, sha256 in wanted.files.items():
        path = folder / name
        try:
            if path.is_file() and file_sha256(path) == sha256:
                push(connection, path, f"{folder.name}/{name}")
        except UserError as error:
            uploaded = False
            print_line(f"could not upload {name}: {error}")
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:  # an unreadable file counts as absent, so that the repair need not wait for it
            print_line(f"could not upload {name}, because it cannot be read ({error.strerror or error})")
    return uploaded
