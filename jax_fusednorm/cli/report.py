"""What a command prints: with rich on a terminal where it is installed, else in plain text, as wide as it is; and the same text for a file."""

import contextlib
import itertools
import sys

try:
    import rich.console
    import rich.progress
    import rich.table
except ImportError:
    rich = None


class Report:
    """Prints lines and tables, and keeps their text."""

    def __init__(self):
        self.text = ""
        self._out = rich.console.Console(highlight=False, markup=False) if rich and sys.stdout.isatty() else None

    def line(self, text="", style=None):
        self.text += text + "\n"
        if self._out:
            self._out.print(text, style=style, soft_wrap=True)
        else:
            print(text)

    def table(self, title, columns, rows):
        """The first column is of names, the others of figures."""
        plain = plain_table(title, columns, rows)
        self.text += plain
        if not self._out:
            print(plain, end="")
            return
        self._out.print(title, style="bold")
        table = rich.table.Table()
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._out.print(table)


@contextlib.contextmanager
def progress(total):
    """step(what): says what is done next. On standard error, so that it is no part of what is printed."""
    if rich is None or not sys.stderr.isatty():
        done = itertools.count(1)
        yield lambda what: print(f"{next(done)}/{total} {what}", file=sys.stderr, flush=True)
        return
    columns = rich.progress.TextColumn("{task.description}"), rich.progress.BarColumn(), rich.progress.MofNCompleteColumn()
    with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, advance=1, description=what)


def plain_table(title, columns, rows):
    widths = [max(map(len, cells)) for cells in zip(columns, *rows)]
    lines = ["  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(zip(row, widths))).rstrip()
             for row in (columns, *rows)]
    return "\n".join([title, *lines, "", ""])
