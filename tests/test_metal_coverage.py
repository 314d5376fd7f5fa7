"""Which lines of the Metal launcher no test runs: those that docs/apple.md names, and no others."""

import gzip
import json
import os
import pathlib
import re
import subprocess

import cases
import pytest
from launcher_program import LAUNCHER, RIGHT, TESTS, WRONG, Built

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not cases.STAND_IN, reason="no stand-in for Metal's driver: `make test` brings one")]


def counted(folder, name):
    """{line: how often it ran} of one source, by gcov."""
    subprocess.run([os.environ.get("GCOV", "gcov"), "--json-format", f"{name}.gcno"], cwd=folder, check=True, capture_output=True)
    report = json.loads(gzip.decompress((folder / f"{name}.gcov.json.gz").read_bytes()))
    [lines] = [each["lines"] for each in report["files"] if pathlib.Path(each["file"]) == LAUNCHER / name]
    times = {}
    for line in lines:  # a template's are there once for each of its instances
        times[line["line_number"]] = times.get(line["line_number"], 0) + line["count"]
    return times


def test_every_line_of_the_launcher_runs(standin_driver, tmp_path):
    run = Built(tmp_path, standin_driver, "--coverage").program()
    for arguments, environment, *_ in (*RIGHT.values(), *WRONG.values(), (("status",), {})):
        run(*arguments, **environment)
    idle, lines = set(), 0
    for path in sorted(LAUNCHER.glob("*.c*")):
        times = counted(tmp_path, path.name)
        source = path.read_text().splitlines()
        lines += len(times)
        idle |= {f"{path.name}: {source[number - 1].strip()}" for number, count in times.items() if not count}
    print(f"{lines} lines, of which {len(idle)} did not run:", *sorted(idle), sep="\n")
    [row] = re.findall(r"^\| the launcher, line by line \|(.*)\|$", (TESTS.parent / "docs" / "apple.md").read_text(), re.M)
    assert lines > 250 and idle == set(re.findall(r"`(\w+\.cc?: [^`]*)`", row))
