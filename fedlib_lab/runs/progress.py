"""What a user sees while waiting: bars, and lines in papermill's terminal where the bars go into the notebook."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from fedlib.core.experiment import Experiment
from fedlib.engine.rounds import Finished

from .costs import Pace, about

HEADLESS = ("papermill", "jupyter-nbconvert", "jupyter-execute")  # programs whose kernels have no screen of their own
SWITCH = "TQDM_DISABLE"  # tqdm's own: not empty and not "0" means no bars
LINE_SECONDS = 30.0  # between lines in papermill's terminal


def call_quietly(tell: Callable, *args: Any, **options: Any) -> Any:
    """Call ``tell`` and return what it returns; that it speaks to a closed stream or a broken pipe ends no run."""
    try:
        return tell(*args, **options)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and "closed file" not in str(error):
            raise


def bar(shown: bool, **options: Any) -> Any:
    """Make a tqdm bar, a silent one if nobody can see it."""
    from tqdm.auto import tqdm

    found = call_quietly(tqdm, disable=not shown, **options)
    return tqdm(disable=True) if found is None else found


def say(text: str) -> None:
    """Print one line for the user on the standard output."""
    call_quietly(print, text, flush=True)


def interrupted(text: str) -> KeyboardInterrupt:
    """Make a Ctrl-C of which terminals and notebooks show one sentence; a plain one, so that a shell sees a signal."""
    error, others = KeyboardInterrupt(text), sys.excepthook
    vars(error)["_render_traceback_"] = lambda: [text]  # IPython asks for it
    sys.excepthook = lambda kind, e, trace: print(text, file=sys.stderr) if e is error else others(kind, e, trace)
    return error


@contextmanager
def unheard() -> Iterator[None]:
    """Ignore a further Ctrl-C inside the ``with`` block."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


class Watch:
    """The progress of ``experiments``, ``abreast`` at once: runs, rounds and about how many minutes are left."""

    def __init__(self, experiments: Sequence[Experiment], shown: bool = True, pace: Pace | None = None):
        self.left, self.total, self.shown, self.pace = list(experiments), len(experiments), shown, pace or Pace()
        self.bars = shown and os.environ.get(SWITCH, "") in ("", "0")
        self.terminal = Terminal.of_this_kernel() if self.bars else None
        self.runs = bar(self.bars and self.total > 1, total=self.total, desc="runs")
        self.going: dict[Experiment, tuple[int, Any]] = {}  # of the runs that go on: the last round, the bar of rounds
        self.abreast = 1

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close_rounds()
        for shown in (self.runs, self.terminal):
            if shown is not None:
                call_quietly(shown.close)

    def close_rounds(self, *ended: Experiment) -> None:
        """Close the bars of rounds of the runs that have ``ended``, by default of all."""
        for e in self.going.keys() & ended if ended else [*self.going]:
            call_quietly(self.going.pop(e)[1].close)

    def begin(self, e: Experiment, t: int) -> None:
        """Show that ``e`` goes on after round ``t``."""
        self.close_rounds(e)
        self.going[e] = t, bar(self.bars, total=e.rounds, initial=t, desc=e.slug, leave=False, mininterval=0.5)
        self._tell()

    def round(self, e: Experiment, r: Finished) -> None:
        """Show that round ``r`` of ``e`` has ended, and count its seconds."""
        _, rounds = self.going[e]
        self.going[e] = r.t, rounds
        self.pace.add(e, r.seconds, 1)
        if r.metrics is not None:
            rounds.set_postfix(accuracy=f"{r.metrics['accuracy']:.1f}%", refresh=False)
        call_quietly(rounds.update)
        self._tell()

    def end(self, e: Experiment) -> None:
        """Show that ``e`` is done, here or elsewhere."""
        self.close_rounds(e)
        if ended := e in self.left:
            self.left.remove(e)
        self._tell(now=True)
        call_quietly(self.runs.update, ended)

    def say(self, text: str) -> None:
        """Show one line to the user."""
        if self.shown:
            call_quietly(self.runs.write, text)
            if self.terminal is not None:
                self.terminal.show(text, True)

    def _tell(self, now: bool = False) -> None:
        words = [f"{self.total - len(self.left)} of {self.total} runs done"] if self.total > 1 else []
        seconds = self.seconds_left() if self.left else None
        self.runs.set_postfix_str(f"{about(seconds)} left" if seconds else "", refresh=False)
        if seconds:
            words.append(f"{about(seconds)} left")
        if self.going:
            words.append(" and ".join(f"round {t} of {e.rounds} of {e.slug}" for e, (t, _) in self.going.items()))
        if self.terminal is not None:
            self.terminal.show(", ".join(words), now)

    def seconds_left(self) -> float | None:
        """Estimate the seconds left from rounds of like runs; None before there are any."""
        left = {e: e.rounds for e in self.left} | {e: e.rounds - t for e, (t, _) in self.going.items()}
        seconds = [s * n for e, n in left.items() if (s := self.pace.seconds_a_round(e)) is not None]
        return None if len(seconds) < len(left) else max(sum(seconds) / self.abreast, *seconds, 0.0)


class Terminal:
    """A line now and then, where the notebook's own streams do not go."""

    def __init__(self, file: TextIO):
        self.file, self.at = file, None

    @classmethod
    def of_this_kernel(cls) -> "Terminal | None":
        """Open the terminal of the program that runs this kernel; None outside a kernel or where somebody watches."""
        if type(sys.stderr).__module__.partition(".")[0] != "ipykernel":
            return None
        import psutil

        parent = psutil.Process().parent()
        if parent is None or not {Path(part).stem for part in parent.cmdline()[:3]} & set(HEADLESS):
            return None
        try:  # a kernel's stderr goes into the notebook; its descriptor is the one that it was started with
            descriptor = sys.stderr.fileno()
        except OSError:  # or it was left where it was
            descriptor = 2
        return cls(os.fdopen(os.dup(descriptor), "w"))

    def show(self, text: str, now: bool = False) -> None:
        """Show ``text``, ``now`` or if it is time for another line."""
        if text and (now or self.at is None or time.monotonic() - self.at >= LINE_SECONDS):
            # the first stands below papermill's own bar
            call_quietly(print, "\n" * (self.at is None) + text, file=self.file, flush=True)
            self.at = time.monotonic()

    def close(self) -> None:
        self.file.close()
