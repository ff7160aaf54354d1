"""Children that Ctrl+C in the terminal does not reach, so that their parent can stop them in order."""

import subprocess
import sys

if sys.platform == "win32":
    NEW_PROCESS_GROUP = subprocess.CREATE_NEW_PROCESS_GROUP
else:
    NEW_PROCESS_GROUP = 0
"""`creationflags` of such a child, for Windows, which ignores `process_group=0` and `start_new_session=True`; 0 on
POSIX, which needs one of these instead."""
