"""Options that are spelled otherwise here: those of other programs, and of earlier versions.

One table, read when click finds an unknown option. Nothing in it is accepted.
"""

from __future__ import annotations

from typing import Final

#: Options of GNU parallel, xargs, sbatch, hq and earlier versions, with ours.
_ANYWHERE: Final = {
    "--halt": "use --max-failures N",
    "--halt-on-error": "use --max-failures 1",
    "--bar": "use --progress",
    "--eta": "use --progress",
    "--delay": "use a service with `rate` in the settings (see docs/settings.md)",
    "--joblog": "use --output DIR, which has joblog.tsv",
    "--results": "use --output DIR",
    "--resume": "run the same command again: it resumes",
    "--resume-failed": "run the same command again: failed tasks are retried",
    "--retry-failed": "failed tasks are retried (--no-retry-failed leaves them)",
    "--keep-going": "all tasks run unless --max-failures is given",
    "--load": "use --cpus N for each task",
    "--memfree": "use --memory SIZE for each task",
    "--timelimit": "use --time-limit D",
    "--time": "use --time-limit D",
    "--crash-limit": "use --retries N",
    "--ntasks": "use -j N for the tasks at once",
    "--cpus-per-task": "use --cpus N",
    "--mem": "use --memory SIZE",
    "--mem-per-cpu": "use --memory SIZE",
    "--gres": "use --gpus N or --resource NAME=N",
    "--dependency": "use --after NAME",
    "--job-name": "use --name NAME or --campaign NAME",
    "--chdir": "use --cwd DIR",
    "--workdir": "use --cwd DIR",
    "--wd": "use --cwd DIR",
    "--export": "use --env NAME",
    "--begin": "use --due TIME",
    "--deadline": "use --expiry TIME",
    "--nice": "use --priority N, where higher runs first",
    "--partition": "use --service NAME",
    "--each-line": "use --lines FILE",
    "--from-json": "use --jsonl FILE",
    "--arg-file": "use --lines FILE, or :::: FILE after the command",
    "--max-procs": "use -j N",
    "--max-lines": "use -n N",
    "--delimiter": "lines end with a newline, or with -0 with NUL",
    "--sshlogin": "start `taskyard worker` on that machine (see docs/machines.md)",
    "--sshloginfile": "start `taskyard worker` on those machines (see docs/machines.md)",
    "--transfer": "name the files with --inputs on a shared file system",
    "--stream": "use --line-buffer",
    "--ungroup": "use --line-buffer",
    "--group": "the output of each task is printed together",
    "--xapply": "use :::+ before the list",
    "--link": "use :::+ before the list",
    "--bell": "use --notify 'printf \"\\a\" > /dev/tty'",
    "-S": "start `taskyard worker` on that machine (see docs/machines.md)",
    "-I": "write {} where the line goes",
    "-L": "use -n N",
    "-a": "use --lines FILE",
    "-d": "lines end with a newline, or with -0 with NUL",
    "-k": "results are in the order of the input already",
    "-u": "use --line-buffer",
    "-X": "use -n N",
    "-t": "use --dry-run to see the commands",
    "-r": "no task is made for empty input",
}

#: Spellings that mean something in one command only.
_IN_COMMAND: Final = {
    ("broker", "--memory"): "use --in-memory",
    ("down", "--timeout"): "use --grace D",
    ("drain", "--all"): "use --every-worker",
    ("lanes", "--all"): "use --every-lane",
    ("clean", "--all"): "use --every-file",
    ("submit", "--array"): "use `taskyard map --array` or `taskyard run --array`",
    ("submit", "-j"): "use `taskyard run -j N -- COMMAND`",
    ("submit", "--jobs"): "use `taskyard run -j N -- COMMAND`",
    ("up", "--slots"): "use -j N: slots of all workers",
    ("up", "--cpus"): "use --worker-cpus N",
    ("up", "--memory"): "use --worker-memory SIZE",
    ("up", "--gpus"): "use --worker-gpus N",
    ("up", "--resource"): "use --worker-resource NAME=N",
    ("up", "--no-page"): "use --page none",
    ("worker", "-j"): "use --slots N",
    ("worker", "--jobs"): "use --slots N",
}


def other_spelling(command: str, option: str) -> str | None:
    """Return what to use in place of an option that is unknown. None: no idea."""
    return _IN_COMMAND.get((command, option)) or _ANYWHERE.get(option)
