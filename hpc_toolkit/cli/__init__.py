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
    from collections.abc import Sequence
    from typing import Any

    from hpc_toolkit.cli.help import Commands
    from hpc_toolkit.system.options import Option, Panels

# Imports and short commands make hardly any garbage; looking for it adds 7 % to 'hpctk status'.
gc.disable()

from hpc_toolkit.errors import PASSING, HpcToolkitError, exit_code_of  # noqa: E402 - as above
from hpc_toolkit.system.installation import listed_imports, open_streams  # noqa: E402 - as above

COMMANDS = {
    "mapping": ("new", "map"),
    "runs": ("init", "items", "try", "trust"),
    "working": ("work",),
    "statusview": ("status",),
    "gathering": ("gather", "export", "report"),
    "reading": ("explain", "logs", "add", "seal", "retry", "drain"),
    "campaigns": ("study", "campaign"),
    "training": ("launch", "scaling"),
    "submit": ("submit", "keep", "cancel"),
    "render": ("render",),
    "clusters": ("cluster", "lab"),
    "checking": ("plan", "doctor"),
    "batch": ("batch", "preflight", "stage"),
}
"""The module of each command, in the order of the help."""
_LONG = {"campaign", "batch"}
"""Commands that collect their garbage from the start."""

_PLAIN = {"work": ("working", "prepare_work"), "status": ("statusview", "status")}
"""Commands whose usual words are read without a command line framework: module and function.

A job may start ``hpctk work`` on thousands of ranks at once. Each module that a rank imports costs
about six operations on the shared filesystem, and click imports sixty. A function may return what
is still to be done.
"""

EXIT_BUG = 70
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


def load_commands(first_word: str = "") -> Commands:
    """The application with the module of one command, or with all of them for any other word."""
    from hpc_toolkit.cli.help import application

    app = application()
    known = [module for module, commands in COMMANDS.items() if first_word in commands]
    if not known or first_word in _LONG:
        gc.enable()
    for module in known or (COMMANDS if first_word != "--version" else ()):
        # Importing what another command needs would cost every 'status' a tenth of its time.
        importlib.import_module(f"hpc_toolkit.cli.{module}").register(app)
    return app


def main() -> None:
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
    except Exception as error:  # noqa: BLE001 - the last resort, which says that it is our bug
        code = _surroundings(error)
        if code is not None:  # also of a mount whose server is gone: ESHUTDOWN, a BrokenPipeError
            sys.exit(code)
        if isinstance(error, BrokenPipeError):
            # The reader of our output left, such as 'head'. Python would complain again at exit.
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(1)
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


def plain_arguments(panels: Panels, words: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of a command with these options; None if only click can read the words.

    Everything unusual is left to the full command line: repeated options, abbreviations, options
    that are set by a variable or are converted, and every mistake.
    """
    options = [one for group in panels.values() for one in group]
    if any(one.variable in os.environ for one in options if one.variable):
        return None
    found = _given(options, words)
    defaults = {one.name.partition("/")[0]: () if one.repeated else one.default for one in options}
    return None if found is None else {"run": None, **defaults, **found}


def _given(options: Sequence[Option], words: Sequence[str]) -> dict[str, Any] | None:
    flags = {word: meaning for one in options for word, meaning in _flags(one).items()}
    values = {one.spelling: one for one in options if one.metavar in ("N", "DURATION")}
    found: dict[str, Any] = {}
    waiting = iter(words)
    for word in waiting:
        option, equals, text = word.partition("=")
        given: str | int | None
        if word in flags:
            name, given = flags[word]
        elif option in values:
            name, number = values[option].name, values[option].metavar == "N"
            given = _value(text if equals else next(waiting, ""), number=number)
        else:
            name, given = "run", _value(word, number=False)
        if given is None or (name in found and word not in flags):
            return None
        found[name] = given
    return found


def _flags(option: Option) -> dict[str, tuple[str, bool]]:
    """The spellings of an option without a value: its parameter, and what it is set to."""
    if option.metavar:
        return {}
    name, _, negation = option.name.partition("/")
    on = dict.fromkeys(filter(None, (option.spelling, option.short)), (name, True))
    return on | ({f"--{negation}": (name, False)} if negation else {})


def _value(text: str, *, number: bool) -> str | int | None:
    """The value of an option; None if it is missing or may be an option or a mistake."""
    if not text or text.startswith("-"):
        return None
    if not number:
        return text
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def run_plainly(command: str, words: Sequence[str]) -> None:
    """Run a command and exit; return if only the full command line can read the words."""
    if command not in _PLAIN:
        return
    module, function = _PLAIN[command]
    try:
        with listed_imports():
            found = importlib.import_module(f"hpc_toolkit.cli.{module}")
            arguments = plain_arguments(found.PANELS, words)
            if arguments is None:
                return
            rest = getattr(found, function)(**arguments)
        sys.exit(rest() if rest is not None else 0)
    except KeyboardInterrupt:
        sys.exit(130)
