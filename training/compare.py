"""Many runs of one model: every recipe with every seed, each a process of its own.

A run that is finished is never run again and one that was interrupted is resumed, so the same
command may be given as often as needed. Each process computes with one thread: as many runs as
CPUs side by side beat one run on all of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .compare_report import summarize, write_report
from .comparison import CompareArgs, Job
from .rundir import UsageError
from .signals import on_signals

__all__ = ["compare"]

POLL_S = 0.25
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def compare(args: CompareArgs, console: Console) -> int:
    """Run what is not finished, then write the report. Returns the exit code.

    Raises:
        UsageError: if a folder holds another run, or --plot-only finds nothing finished.
    """
    jobs = [Job(config, args.folder, args.metric) for config in args.runs()]
    todo = [job for job in jobs if job.finished() is None]
    failed: dict[str, int] = {}
    if not args.plot_only and todo:
        if len(todo) < len(jobs):
            console.print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already")
        try:
            failed = _run_all(todo, args, console)
        except KeyboardInterrupt:
            console.print("interrupted; the same command goes on where it stopped", style="yellow")
            return EXIT_INTERRUPTED
    finished = [done for job in jobs if (done := job.finished()) is not None]
    for job in jobs:
        if job.name in failed:
            console.print(
                f"run {job.name} failed (exit code {failed[job.name]}): {job.last_line()}\n"
                f"  all of it: {job.log}",
                style="red",
            )
    if not finished and not failed:
        raise UsageError(f"--plot-only: no run in {args.folder} is finished; run without it first")
    if finished:
        losses = [name.rpartition("-s")[0] for name in failed]
        rows = summarize(args.metric, finished, args.names, failed=losses)
        write_report(args, rows, finished, console)
    return EXIT_FAILED if failed else 0


def _run_all(todo: list[Job], args: CompareArgs, console: Console) -> dict[str, int]:
    """Run jobs side by side; returns the exit codes of those that failed, by name.

    SIGTERM interrupts as Ctrl-C does: the runs, in sessions of their own, would outlive this
    process. So does Ctrl-C where a shell that starts jobs in the background has it ignored.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = args.jobs or (cpus if args.device == "cpu" else 1)
    waiting = list(todo)
    running: dict[Job, subprocess.Popen[bytes]] = {}
    failed: dict[str, int] = {}
    bar = Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    shown = bar.add_task("", total=len(todo))
    with bar, on_signals(signal.default_int_handler):
        try:
            while waiting or running:
                while waiting and len(running) < limit:
                    job = waiting.pop(0)
                    running[job] = job.start()
                for job in [job for job, process in running.items() if process.poll() is not None]:
                    code = running.pop(job).returncode
                    if code or job.finished() is None:
                        failed[job.name] = code
                    done = len(todo) - len(waiting) - len(running)
                    console.print(f"[{done}/{len(todo)}] {job.name}: {_outcome(job, code, args)}")
                    bar.advance(shown)
                bar.update(shown, description="  ".join(map(_progress, running)))
                time.sleep(POLL_S)
        except BaseException:
            for process in running.values():
                process.send_signal(signal.SIGINT)
            for process in running.values():
                process.wait()
            raise
    return failed


def _outcome(job: Job, code: int, args: CompareArgs) -> str:
    curve = job.curve()
    return args.metric.show(curve[-1]) if curve and not code else f"exit code {code}"


def _progress(job: Job) -> str:
    """Describe how far a run is."""
    curve = job.curve()
    last = f" {job.metric.show(curve[-1])}" if curve else ""
    return f"{job.name} {len(curve)}/{job.config.epochs}{last}"
