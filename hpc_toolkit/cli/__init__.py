"""The command line: parse, one call, print. Whatever it can do, the Python interface can do as
well.

Exit codes: 0 fine; 1 an error that the user can act on; 2 usage; 70 a bug of ours; 75 try again
later.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpc_toolkit.cli.help import Commands

# Imports and short commands make hardly any garbage; looking for it adds 7 % to 'hpctk status'.
gc.disable()

from hpc_toolkit.cli.plain import run_plainly  # noqa: E402 - as above
from hpc_toolkit.errors import PASSING, HpcToolkitError, exit_code_of  # noqa: E402 - as above
from hpc_toolkit.system.imports import open_streams  # noqa: E402 - as above

COMMANDS = {
    "examples": ("new",),
    "mapping": ("map",),
    "runs": ("init", "items", "try", "trust"),
    "working": ("work",),
    "statusview": ("status",),
    "gathering": ("gather", "snapshot"),
    "reading": ("explain", "logs", "add", "seal", "retry", "drain"),
    "events": ("events",),
    "report": ("report",),
    "campaigns": ("campaign",),
    "bandit": ("bandit",),
    "launch": ("launch",),
    "scaling": ("scaling",),
    "submit": ("submit", "cancel"),
    "render": ("render",),
    "clusters": ("cluster",),
    "lab": ("lab",),
    "plan": ("plan",),
    "doctor": ("doctor",),
    "batch": ("batch", "preflight", "stage"),
}
"""The module of each command, in the order of the help."""
_LONG = {"campaign", "batch"}
"""Commands that collect their garbage from the start."""

EXIT_BUG = 70
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


def load_commands(first_word: str = "") -> Commands:
    """The application with the module of one command, or with all of them for any other word."""
    from hpc_toolkit.cli.help import application

    app = application()
    known = [module for module, commands in COMMANDS.items() if first_word in commands]
    if not known or first_word in _LONG:
        gc.enable()
    for module in known or COMMANDS:
        # Importing what another command needs would cost every 'status' a tenth of its time.
        importlib.import_module(f"hpc_toolkit.cli.{module}").register(app)
    return app


def main() -> None:
    """Run the command line and exit."""
    first_word = sys.argv[1] if len(sys.argv) > 1 else ""
    open_streams()
    for stream in (sys.stdout, sys.stderr):
        # An encoding that lacks a character of an item, such as ASCII, must not end the command.
        exact = (stream.encoding, stream.errors) == ("utf-8", "surrogateescape")
        if isinstance(stream, io.TextIOWrapper) and not exact:
            stream.reconfigure(errors="backslashreplace")
    try:
        _run(first_word)
    except SystemExit as end:
        # A command that only read or wrote files holds nothing that must be taken down, and doing
        # so adds 18 % to 'hpctk status'.
        if isinstance(end.code, int | None) and not gc.isenabled() and _flushed():
            os._exit(end.code or 0)
        raise


def _flushed() -> bool:
    """Write out what was printed; False where that fails: the interpreter then reports it."""
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except OSError:
        return False
    return True


def _run(first_word: str) -> None:
    """Run one command; always ends by SystemExit."""
    try:
        run_plainly(first_word, sys.argv[2:])
        load_commands(first_word)()
    except HpcToolkitError as error:
        from hpc_toolkit.system.terminal import show_error

        show_error(error)
        sys.exit(error.exit_code)
    except BrokenPipeError as error:
        # So Python calls ESHUTDOWN as well, which a mount says whose server is gone.
        code = _surroundings(error)
        if code is not None:
            sys.exit(code)
        # The reader of our output left, such as 'head'. Python would complain once more at exit.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - the last resort, which says that it is our bug
        code = _surroundings(error)
        if code is not None:
            sys.exit(code)
        import traceback

        traceback.print_exc()
        print("this is a bug in hpctk; please report it with the lines above", file=sys.stderr)
        sys.exit(EXIT_BUG)


def _surroundings(error: Exception) -> int | None:
    """Say what the machine refused and give the exit code; None for all other errors."""
    if not isinstance(error, OSError):
        return None
    where = f"{error.filename}: " if error.filename else ""
    hint = "check the owner, the permissions and the mount"
    if error.errno == errno.ENOENT and not where:  # only getcwd(2) names no file
        where, hint = "the current directory: ", "change to a directory that exists"
    elif error.errno not in _DENIED | PASSING:
        return None
    if error.errno == errno.ENOTDIR:
        hint = "a file exists where a directory is expected; 'hpctk doctor RUN' checks a run"
    elif error.errno in PASSING:
        hint = "fix that and try again; nothing that was recorded is lost"
    from hpc_toolkit.system.terminal import show_error

    show_error(HpcToolkitError(f"{where}{error.strerror}", hint=hint))
    return exit_code_of(error)
