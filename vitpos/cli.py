"""The command line of train.py and eval.py: ``key=value`` words, sweeps, and errors of one line.

Hydra's grammar wants a second layer of quotes around values with parentheses or ``=``. Values that are plain strings
(`STRINGS`: encoding specs and paths) are quoted here, so that what the shell passes on is what is meant::

    python train.py 'pos=rope_axial(theta=50)'
    python train.py -m 'pos=none,rope_axial(theta=50),rope_axial + ape1d' seed=0,1
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from vitpos import config, preemption
from vitpos.spec import nearest, parse

STRINGS = {"pos", "out", "resume", "init", "checkpoint", "weights", "runs", "results", "data.root", "compare.baseline"}
USER_ERRORS = (ValueError, TypeError, OSError, ModuleNotFoundError, HydraException, OmegaConfBaseException)
PATHS = STRINGS - {"pos", "compare.baseline"}
SWEEP_FLAGS = ("-m", "--multirun")
FAILURES = "VITPOS_FAILURES"  # in the environment: the file that names the runs of a sweep which failed
OPEN = "model.kwargs"  # takes keys that the configuration does not hold yet
OPENING, CLOSING = "([{", ")]}"


def run(main: Callable[[], Any]) -> None:
    """Call a ``@hydra.main`` function on the command line's words; end with exit code 2 on a user's error.

    One of several processes ends without taking PyTorch's libraries down: threads that these leave behind abort about
    one in ten processes of a sharded run that is done, and with them the others.
    """
    code: Any = 0
    try:
        _run(main)
    except SystemExit as end:
        code = end.code
        if not _of_several():
            raise
    if _of_several():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def _of_several() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and torch.distributed.is_initialized()


def _run(main: Callable[[], Any]) -> None:
    words = sys.argv[1:]
    known_flags = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    for word in words:
        if word.startswith("-") and word.partition("=")[0] not in known_flags:
            fail(f"unknown flag {word!r}; {nearest(word, known_flags)} (settings are written key=value)")
    words = [_at_home(word) for word in words]
    sweeping = is_sweep(words)
    new_folders: list[Path] = []  # the sweep's own and the parents that are made with it
    if sweeping and "TORCHELASTIC_RUN_ID" in os.environ:
        fail("a sweep (-m) cannot run under torchrun; start one torchrun per run instead")
    if sweeping and not any(word.startswith("hydra.sweep.dir=") for word in words):
        given = [word.partition("=")[2] for word in words if word.startswith("out=")]
        now = datetime.now()
        sweep_folder = Path(given[-1] if given else f"runs/{now:%Y-%m-%d}/{now:%H-%M-%S}-sweep")
        new_folders = [path for path in (sweep_folder, *sweep_folder.parents) if not path.exists()]
        words.append(f"hydra.sweep.dir={quote(str(sweep_folder))}")
        try:
            config.check_writable(f"out={sweep_folder}", sweep_folder)
        except ValueError as error:
            fail(explain(error))
    resumes = [word.partition("=")[2] for word in words if word.startswith("resume=")]
    if resumes and config.AUTO not in resumes:  # the run's own data may have other keys than the default
        words = [f"++{word}" if word.startswith("data.") else word for word in words]
    traceback_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors over instead of printing them
    flags = [word for word in words if word in SWEEP_FLAGS]  # argparse wants them before the key=value words
    sys.argv[1:] = flags + [prepare(word, sweeping) for word in words if word not in SWEEP_FLAGS]
    _check_specs(words, sweeping)
    try:
        with _failures(sweeping), preemption.handling(preemption.stop, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            main()
    except USER_ERRORS as error:
        if traceback_wanted:
            raise
        fail(explain(error))
    except RuntimeError as error:
        lines = str(error).splitlines() or [""]
        if traceback_wanted or not (type(error).__module__.startswith("submitit") or "srun" in lines[0]):
            raise
        fail(" ... ".join(dict.fromkeys([lines[0], lines[-1]])))  # of a job: which one, and the end of its log
    except preemption.Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            print(stopped, file=sys.stderr)
        raise SystemExit(stopped.code) from None
    finally:
        _remove_unused(new_folders)


def _at_home(word: str) -> str:
    """``out=~/runs`` as a shell writes paths elsewhere. Ends here for an empty path, such as an unset ``$OUT``."""
    key, equals, value = word.partition("=")
    if key not in PATHS or not equals:
        return word
    if not value:
        fail(f"{key}= is empty; write a path, or leave it out")
    if "~" not in value:
        return word
    return f"{key}={','.join(os.path.expanduser(part) if part[:1] == '~' else part for part in split(value))}"


def _check_specs(words: list[str], sweeping: bool) -> None:
    """End here for a spec of a sweep that cannot be read, before its first run and not after the last good one."""
    for word in words:
        key, _, value = word.partition("=")
        if key == "pos" and value[:1] not in ("'", '"', ""):
            if len(split(value)) > 1 and not sweeping:
                fail(f"{word}: several encodings are a sweep, which takes -m")
            for text in split(value) if sweeping else []:
                try:
                    parse(text)
                except USER_ERRORS as error:
                    fail(explain(error))


@contextmanager
def _failures(sweeping: bool) -> Iterator[None]:
    """Within it runs of a sweep that fail are noted while the others go on; it ends with exit code 2 if any did."""
    if not sweeping:
        yield
        return
    with tempfile.NamedTemporaryFile("r") as log:
        os.environ[FAILURES] = log.name
        try:
            yield
        finally:
            del os.environ[FAILURES]
        failed = log.read().splitlines()
    if failed:
        fail(f"{len(failed)} of the sweep's runs failed: {', '.join(failed)}")


def task(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorator below ``@hydra.main``: a user's error ends the process here, before Hydra reports it at length.

    In a sweep in this process or its own workers it ends this run only.
    """

    @functools.wraps(function)
    def guarded(cfg: Any) -> Any:
        try:
            return function(cfg)
        except USER_ERRORS as error:
            if os.environ.get("VITPOS_TRACEBACK") == "1":
                raise
            if FAILURES not in os.environ or "SUBMITIT_EXECUTOR" in os.environ:
                fail(explain(error))
            run = f"{HydraConfig.get().job.num:02d}"  # as its folder's name begins
            print(f"error in run {run}: {explain(error)}", file=sys.stderr)
            with open(os.environ[FAILURES], "a") as log:
                log.write(f"{run}\n")
            return None

    return guarded


def is_sweep(words: list[str]) -> bool:
    return any(word in SWEEP_FLAGS or word.lower() == "hydra.mode=multirun" for word in words)


def prepare(word: str, sweeping: bool) -> str:
    """One ``key=value`` word in Hydra's grammar; of a sweep, each of the values parted by top-level commas.

    >>> prepare("pos=rope_axial(theta=50, resize='interpolate')", sweeping=False)
    "pos='rope_axial(theta=50, resize=\\\\'interpolate\\\\')'"
    >>> prepare("pos=none,rope_axial(theta=50, normalize=True) + ape1d", sweeping=True)
    "pos='none','rope_axial(theta=50, normalize=True) + ape1d'"
    """
    key, equals, value = word.partition("=")
    if f"{key}.".startswith(f"{OPEN}."):
        return f"++{word}"
    if not equals or key.lstrip("+") not in STRINGS or value in ("", "null") or value[0] in "'\"":
        return word
    values = split(value) if sweeping else [value]
    return f"{key}={','.join(map(quote, values))}"


def split(text: str) -> list[str]:
    """``text`` at its commas outside brackets and quotes, blanks around the parts removed."""
    parts, depth, inside = [""], 0, ""
    for char in text:
        if inside:
            inside = "" if char == inside else inside
        elif char in "'\"":
            inside = char
        else:
            depth += (char in OPENING) - (char in CLOSING)
        if char == "," and depth == 0 and not inside:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def quote(value: str) -> str:
    """``value`` as a single-quoted string of Hydra's grammar, where backslashes count only before a quote."""
    inside = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{inside}'"


def explain(error: BaseException) -> str:
    """One line that says what is wrong."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, OmegaConfBaseException) and cause.parent_node is not None and cause.full_key:
        if "is not in struct" in str(cause) or "not in '" in str(cause):
            root = cause.parent_node._get_root()
            return f"unknown config key {cause.full_key!r}; {config.suggest(cause.full_key, root)}"
        return f"{cause.full_key}: {str(cause).splitlines()[0]}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"unknown {group} {name!r}; {nearest(name, error.options)}"
    if isinstance(cause, ModuleNotFoundError):
        return f"{cause.name} is not installed; pip install 'vitpos[train,eval]' brings all that is needed"
    if str(error).startswith("Config group override must be"):
        return "data, model and train take the name of a choice each, such as data=digits, not null"
    text = str(error).split("See https")[0]
    return " ".join(text.split()) or type(error).__name__


def fail(message: str) -> None:
    """Print one line on standard error and end with exit code 2.

    Every process prints: an error may be one process's alone, and torchrun ends the others when the first has ended.
    """
    rank = os.environ.get("RANK", "0")
    print(f"error: {message}" if rank == "0" else f"error in process {rank}: {message}", file=sys.stderr)
    raise SystemExit(2)


def _remove_unused(folders: list[Path]) -> None:
    """Remove a sweep's folder when no run was started in it (Hydra has written its multirun.yaml by then)."""
    for folder in folders:
        if not folder.is_dir() or any(path.name != "multirun.yaml" for path in folder.iterdir()):
            return
        (folder / "multirun.yaml").unlink(missing_ok=True)
        folder.rmdir()
