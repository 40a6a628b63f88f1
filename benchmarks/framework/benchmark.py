"""A benchmark: its command line, its cases, and their results."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import reprlib
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import benchmarks
from benchmarks import durations, summary
from benchmarks.framework import parallel, reports
from benchmarks.framework.processes import BenchmarkError, Message
from benchmarks.framework.results import VERSIONS, Machine, ResultsFile, Row, lock, machine, unreadable

NO_TABLE = (
    "no table is made of rows that contradict each other; measure them again with --only followed by their names "
    "(in quotes), when nothing else runs on the machine"
)

QUICK = (
    "**Made with `--quick`**, which only shows that everything runs: neither its scores nor its times can be compared "
    "with others."
)

FINAL = ("ok", "out of memory", "timed out")
"""Outcomes that count as results. Cases that were wrong or failed are errors, and are tried again."""


@dataclass(frozen=True)
class Case:
    """One run, which gives one row of results: a frozen dataclass whose fields are the row's first columns.

    A case is not run again if a row has the same fields, from the same versions and machine.
    """

    result: ClassVar[type]
    """A `TypedDict` of the columns that a run adds; rows that lack them, or have other types, are not read."""
    noun: ClassVar[str] = "runs"
    """What several of these cases are called."""
    versions: ClassVar[Sequence[str]] = VERSIONS
    """The columns about versions and machine that must be the same for a row to count."""

    def key(self) -> str:
        """What identifies the case's row."""
        return self.key_of({**self.machine(), **asdict(self)})

    def checkpoint(self, folder: Path) -> Path:
        """The file of this case's checkpoint, if it is trained."""
        return folder / f"{hashlib.sha256(self.key().encode()).hexdigest()[:16]}.pt"

    @property
    def place(self) -> str:
        """The device on which the case computes: its field `device`, if it has one."""
        return getattr(self, "device", "cpu")

    @property
    def environment(self) -> Mapping[str, str]:
        """Additional environment variables of its process, set before the process starts."""
        return {}

    def machine(self) -> dict[str, str]:
        """The columns about versions, machine and allocator."""
        return machine(self.place, self.environment)

    @classmethod
    def contradictions(cls, rows: Mapping[Any, Row]) -> list[str]:
        """What cannot be true of these rows at the same time; then no table is made of them."""
        return []

    @classmethod
    def key_of(cls, row: Row) -> str:
        """The key of a row's case; keyword-only fields count only if they differ from their defaults."""
        names = [field.name for field in fields(cls) if not field.kw_only]
        others = [field for field in fields(cls) if field.kw_only]  # older rows lack them
        changed = {x.name: row[x.name] for x in others if row.get(x.name, x.default) != x.default}
        return repr([row.get(name) for name in (*names, *cls.versions)]) + (repr(changed) if changed else "")

    @classmethod
    def result_of(cls, row: Row) -> type:
        """The columns that a row must have besides those of the case."""
        return cls.result

    @classmethod
    def recorded(cls, results: ResultsFile) -> dict[str, Row]:
        """The newest row of each case of this type, by key."""
        return {cls.key_of(row): row for row in results.rows(cls, cls.result_of, Machine)}


C = TypeVar("C", bound=Case)


class Benchmark(Generic[C]):
    """One benchmark, started with options. A subclass defines its cases, how they run, and what is reported.

    `--help` shows the module's docstring up to its first colon.

    Args:
        options: What `parse` returned.
        results: The existing rows.
        console: Where to print.
    """

    name: ClassVar[str]
    """`python -m benchmarks.<name>` runs it."""
    is_parallel: ClassVar[bool] = False
    """Whether several processes of torchrun can train a run together."""
    quick: ClassVar[Mapping[str, object]]
    """The defaults of options with `--quick`, which runs as much of the benchmark's code in a few minutes."""

    def __init__(self, options: argparse.Namespace, results: ResultsFile, console: Console):
        self.options = options
        self.results = results
        self.console = console
        self.skipped: dict[str, str] = {}
        self.started = time.strftime("%Y-%m-%d %H:%M:%S")

    # What a benchmark defines ---------------------------------------------------------------------------------------

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options except `--quick`.

        One of them is `--out`, the folder of results. With `--report`, it is only read.
        """
        raise NotImplementedError

    @classmethod
    def check_options(cls, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Fills in defaults, and calls `parser.error` for options that exclude each other."""

    def cases(self) -> Sequence[C]:
        """The cases, in the order of the table, grouped by type."""
        raise NotImplementedError

    def phases(self) -> Iterable[Sequence[C]]:
        """The cases of one type, then those of the next. Yielded one by one, they may depend on earlier results."""
        return [list(group) for _, group in itertools.groupby(self.cases(), type)] or [[]]

    def run(self, cases: Sequence[C]) -> Generator[Message[C], None, None]:
        """Runs cases of one type; yields what `in_processes` does."""
        raise NotImplementedError

    def extra_columns(self) -> Row:
        """Additional columns that say how the cases were run."""
        return {}

    def report(self, rows: dict[C, Row]) -> None:
        """Publishes the rows of cases of one type."""
        raise NotImplementedError

    # What it gets ---------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Reads the command line; `--quick` changes defaults only."""
        documentation = sys.modules[cls.__module__].__doc__
        usual, quick = durations(documentation)
        about = f"{summary(documentation)} Duration on two idle cores: {usual}."
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{cls.name}", description=about)
        cls.add_options(parser)
        text = f"only see whether everything runs, by smaller defaults of other options ({quick})"
        parser.add_argument("--quick", action="store_true", help=text)
        options = parser.parse_args(arguments)
        if options.quick:
            parser.set_defaults(**{"out": Path(f"runs/{cls.name}-quick"), **cls.quick})
            options = parser.parse_args(arguments)
        cls.check_options(options, parser)
        return options

    @classmethod
    def main(cls, arguments: Sequence[str] | None = None) -> None:
        """Runs the cases that have no results yet, then reports.

        Raises:
            SystemExit: With the reasons, if cases failed or their results were wrong.
        """
        parallel.start()
        if parallel.rank() > 0:
            cls.follow()
            return
        if parallel.size() > 1 and not cls.is_parallel:
            sys.exit(f"error: benchmarks.{cls.name} runs on one process only: start it without torchrun")
        options, console = parallel.of_first(cls.parse(arguments)), Console(markup=False)
        with cls.session(options, console) as benchmark:
            failures = []
            for cases in benchmark.phases():
                failures += benchmark.execute(cases)
                if rows := benchmark.rows(cases):
                    if found := next(iter(rows)).contradictions(rows):
                        failures += [*found, NO_TABLE]
                        continue
                    try:
                        benchmark.report(rows)
                    except Exception as error:  # if no case succeeded, there may be nothing to report
                        if not failures:
                            raise
                        failures.append(f"the report could not be made: {type(error).__name__}: {error}")
        if failures:
            sys.exit("\n".join(f"error: {failure}" for failure in failures))
        parallel.of_first(None)

    @classmethod
    def follow(cls) -> None:
        """Takes part in the runs that torchrun's first process announces, until it announces no more.

        Raises:
            SystemExit: With the reason, if a run failed here; without one if the first process has ended.
        """
        nothing: Any = None
        try:
            options = parallel.of_first(nothing)
            benchmark = cls(options, ResultsFile(options.out / "runs.jsonl"), Console(quiet=True))
            while (cases := parallel.of_first(nothing)) is not None:
                for _ in benchmark.run(cases):
                    pass
        except BenchmarkError as error:
            sys.exit(f"error: {error}")
        except (KeyboardInterrupt, RuntimeError):  # gloo raises the latter
            sys.exit(1)

    @classmethod
    @contextlib.contextmanager
    def session(cls, options: argparse.Namespace, console: Console) -> Iterator[Self]:
        """The benchmark, whose folder is locked; Ctrl-C and unusable files end it with a one-line message."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks characters is no reason to stop
        out: Path = options.out
        is_reading = getattr(options, "report", False)
        results = ResultsFile(out / "runs.jsonl")
        kept = f"Finished runs are in {results.path}; the same command resumes from there."
        try:
            with contextlib.ExitStack() as stack, _interruptible():
                if not is_reading:
                    try:
                        out.mkdir(parents=True, exist_ok=True)
                        stack.enter_context(lock(out))
                        results.open()
                    except BlockingIOError as error:
                        sys.exit(f"error: {error}; wait until it has ended, or choose another --out")
                    except OSError as error:
                        sys.exit(f"error: results cannot be written to {out}: {error}")
                yield cls(options, results, console)
        except KeyboardInterrupt:
            console.print(f"Interrupted. {kept}", soft_wrap=True)
            sys.exit(130)
        except BenchmarkError as error:
            sys.exit(f"error: {error}")
        except OSError as error:
            sys.exit(f"error: {error}" if is_reading else f"error: {error}. {kept}")

    def execute(self, cases: Sequence[C]) -> list[str]:
        """Runs the cases that have no row yet; returns which of them failed or were wrong, and why."""
        if not cases:
            return []
        noun, recorded = cases[0].noun, cases[0].recorded(self.results)
        done = {key for key, row in recorded.items() if self.is_final(row)}
        pending = parallel.of_first([case for case in cases if case.key() not in done])
        if only := getattr(self.options, "only", None):
            pending = [case for case in cases if any(text in str(case) for text in only)]
            if not pending:
                raise BenchmarkError(f"--only {' '.join(only)}: no name contains that, such as {cases[0]}")
        if count := len(cases) - len(pending):
            self.say(f"{count} of {len(cases)} {noun} are in {self.results.path} already.")
        failures = []
        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=self.console) as bars, contextlib.closing(self.run(pending)) as messages:
            total = bars.add_task(noun, total=len(cases), completed=count)
            tasks: dict[C, TaskID] = {}
            for case, kind, content in messages:
                if kind == "progress":
                    completed, size, text = content
                    if case not in tasks:
                        tasks[case] = bars.add_task(str(case))
                    bars.update(tasks[case], completed=completed, total=size, description=f"{case}{text}")
                    continue
                outcome, reason = kind, content
                if kind == "ok" and (problem := self.add(case, content)):
                    kind, outcome, reason = "failed", "failed", f"its row could not be read back: {problem}"
                elif kind == "ok":
                    outcome, reason = content.get("outcome", "ok"), content.get("reason")
                if kind != "ok" or outcome not in FINAL:
                    failures.append(f"{case}: {reason}" if outcome == "failed" else f"{case}: {outcome}: {reason}")
                if case in tasks:
                    bars.remove_task(tasks.pop(case))
                bars.advance(total)
        return failures

    def is_final(self, row: Row) -> bool:
        """Whether a row counts as a result; one that timed out does not if there is more time now."""
        outcome = row.get("outcome", "ok")
        has_more_time = row.get("timeout", 0) < getattr(self.options, "timeout", 0)
        return outcome in FINAL and not (outcome == "timed out" and has_more_time)

    def add(self, case: C, columns: Row) -> str | None:
        """Appends a row and deletes the case's checkpoint.

        A row that could not be read back as a row of this case is not appended; then it returns the reason.
        """
        own = asdict(case)
        try:
            more = {**self.extra_columns(), **case.machine(), "started": self.started}
            row = json.loads(json.dumps({**own, **columns, **more}))
        except (TypeError, ValueError) as error:
            return str(error)
        for name, value in own.items():
            if repr(row[name]) != repr(value):  # the comparison of `key_of`
                return f"{name} is {reprlib.repr(value)} in the case and {reprlib.repr(row[name])} in its row"
        problem = unreadable(row, type(case), case.result_of, Machine)
        if problem is None:
            self.results.append(row)
            case.checkpoint(self.options.out).unlink(missing_ok=True)
        return problem

    def rows(self, cases: Sequence[C]) -> dict[C, Row]:
        """The rows to report: the existing rows of the cases, in their order."""
        recorded = cases[0].recorded(self.results) if cases else {}
        return {case: recorded[key] for case in cases if (key := case.key()) in recorded}

    def say(self, text: str, style: str = "") -> None:
        """Prints a line without wrapping it."""
        self.console.print(text, style=style, highlight=False, soft_wrap=True)

    def skip(self, name: str, reason: str) -> None:
        """Reports that something is left out, which was not asked for by name."""
        self.skipped[name] = reason
        self.say(f"Skipped: {reason}", style="yellow")

    def publish(
        self,
        title: str,
        lines: Sequence[reports.Line],
        remarks: Sequence[str],
        files: Mapping[str, Figure | str | Sequence[reports.Line]],
        name: str = "table.md",
        headings: dict[str, str] | None = None,
        shorten: Callable[[reports.Line], reports.Line] = lambda line: line,
    ) -> None:
        """Prints a table with remarks, and writes both to the folder of results, beside other files.

        Args:
            title: Above the table, in the terminal.
            lines: The table's lines, by column.
            remarks: Notes for readers of the table.
            files: Pictures, texts, and the lines of further tables with the same remarks, by name.
            name: The table's file. (default: `"table.md"`)
            headings: The columns that a terminal shows, and their headings there. (default: all, under their names)
            shorten: Makes the line that a terminal shows. (default: the line without text in brackets)
        """
        headings = headings or {column: column for column in lines[0]}
        tables = [lines, *(content for content in files.values() if not isinstance(content, str | Figure))]
        remarks = [*[QUICK] * self.options.quick, *reports.remarks_on(tables, remarks), *remarks]
        reports.print_table(title, [shorten(line) for line in lines], headings, self.console)
        for remark in remarks:
            self.say(remark)
        out: Path = self.options.out
        for file, content in {name: lines, **files}.items():
            if not isinstance(content, str | Figure):
                content = reports.markdown(content, remarks)
            reports.write_file(out / file, content)
        self.say(f"Written: {', '.join(str(out / file) for file in (name, *files))}")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises `KeyboardInterrupt` in the block, and not `benchmarks.interrupted`, as before and after it."""
    is_ours = signal.getsignal(signal.SIGINT) is benchmarks.interrupted
    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, benchmarks.interrupted)
