"""The command ``cosmos-lab``.

Flags are the fields of dataclasses, parsed by tyro. A mistake ends in one clear line and exit code 2.
"""

from __future__ import annotations

import difflib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO, cast

from cosmos_lab import __version__

_format_warning = warnings.formatwarning

USAGE = """usage: cosmos-lab COMMAND ...

  demo                  compare four optimizers in a few minutes, without a GPU or data
  recipes               list the recipes, and say where to begin
  data prepare SOURCE   turn your text into tokens              cosmos-lab data prepare notes/
  train RECIPE          train one model                         cosmos-lab train tiny --lr 2e-3
  compare RECIPE        train a grid of optimizers and rates    cosmos-lab compare tiny --optimizers adam,cosmos
  report RUNS -o DIR    write an HTML page about runs           cosmos-lab report runs -o report
  evaluate RUN...       compute the loss by position            cosmos-lab evaluate runs/my-run
  export RUN -o DIR     write a checkpoint for transformers     cosmos-lab export runs/my-run -o my-model
  profile MODEL         measure time, memory, largest batch     cosmos-lab profile llama-1b
  --version             print the version

Each command explains its flags with --help. Every recipe takes --scale S to shrink model, batch and tokens together."""


def run_and_leave() -> NoReturn:
    """Run the command of the process's arguments, and end the process with its exit code.

    A process of a distributed run leaves without Python's shutdown: torch's caches keep the threads of gloo alive, and
    a thread that releases a tensor during the shutdown aborts the process, although the run is done.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a table has ±, and a path any byte, which not every locale can show
    sys.stdout = cast(TextIO, PipeSafeStream(sys.stdout))  # to the end: Python flushes it once more when it leaves
    try:
        code = main()
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        code = 1
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    # Before torch loads OpenMP: threads that spin while they wait make a busy machine six times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if given else 2
    if given[0] in ("-V", "--version", "version"):
        print(f"cosmos-lab {__version__}")
        return 0
    before = sys.stdout
    warnings.formatwarning = _one_line
    sys.stdout = cast(TextIO, PipeSafeStream(before))
    try:
        return _exit_code(*given)
    finally:
        sys.stdout, warnings.formatwarning = before, _format_warning


def _exit_code(command: str, *arguments: str) -> int:
    """Do the work of a command; print an error that a user can cause, or a stop, as one line, and return the code."""
    from cosmos_lab.run.stopping import Stopped

    try:
        _find(command)(list(arguments))  # finding it takes seconds, in which Ctrl-C may come
    except ModuleNotFoundError as error:
        more = "; the lab's packages come with pip install '.[lab]' in the source folder"
        hint = "" if "pip install" in str(error) else more
        return _fail(f"{error}{hint}")
    except (ValueError, OSError, ImportError, FloatingPointError) as error:  # nonfinite=raise
        return 2 if _told_by_another(error) else _fail(_in_words(error))
    except Stopped as stop:
        if os.environ.get("RANK", "0") != "0":  # only the first process prints
            return stop.code
        flag = " with --no-fresh" if command == "demo" else ""
        return _fail(f"{stop}; the same command continues{flag}", stop.code)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's: not every command imports torch
            raise
        from cosmos_lab.io import first_line

        return _fail(f"{first_line(error)} Try a smaller --micro-batch; docs/troubleshooting.md has more ways")
    except KeyboardInterrupt:
        return _fail("interrupted; run the same command again to continue", code=130)
    return 0


def _find(command: str) -> Callable[[list[str]], None]:
    """Return the function of a command; all but `recipes` import torch, which takes seconds."""
    if command == "recipes":
        from cosmos_lab.cli.recipe_list import recipes_command

        return recipes_command
    from cosmos_lab.cli.commands import COMMANDS

    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else ";"
        raise ValueError(f"there is no command {command!r}{hint} `cosmos-lab --help` lists the commands")
    return COMMANDS[command]


def _told_by_another(error: Exception) -> bool:
    """Tell whether the first process of a distributed run prints this error."""
    if os.environ.get("RANK", "0") == "0":
        return False
    from cosmos_lab.run.distributed import Shared

    return isinstance(error, Shared)


class PipeSafeStream:
    """A stream that discards its output once the reader is gone: a run of days must not end because its `tee` did."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._silence()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._silence()

    def _silence(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _one_line(message: Warning | str, category: type[Warning], filename: str, *place: Any, **more: Any) -> str:
    """Format a warning of the lab as one line, without its place in the code."""
    if "cosmos_lab" in filename:
        return f"cosmos-lab: {message}\n"
    return _format_warning(message, category, filename, *place, **more)


def _in_words(error: Exception) -> str:
    """Return the message of an error, without the number that the system's own errors begin with."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)


def _fail(message: str, code: int = 2) -> int:
    print(f"cosmos-lab: {message}", file=sys.stderr)
    return code
