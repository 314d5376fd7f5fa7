"""The command line: what it says, what it exits with, and that it needs neither rich nor matplotlib nor a wide terminal."""

import importlib.metadata
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import cases
import jax_fusednorm
from jax_fusednorm import __main__
from jax_fusednorm.cli import calls, report, status

ROOT = pathlib.Path(__file__).parent.parent
OTHER = "cuda" if jax.default_backend() == "cpu" else "host"  # a kernel that does not run on JAX's platform


def run(*arguments, status=0, **environment):
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT.parent, capture_output=True, text=True, check=False,
                          env={**os.environ, "XLA_FLAGS": "", **environment})
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_every_op_has_a_call():
    ops = {name for name in jax_fusednorm.__all__
           if callable(f := getattr(jax_fusednorm, name)) and "implementation" in inspect.signature(f).parameters}
    assert {call.name for call in calls.CALLS} == ops


def check_selftest(implementation, ops, dtypes, path, capsys):
    arguments = ["selftest", "--implementations", implementation, "--ops", ",".join(ops), "--dtypes", ",".join(dtypes), "--report", str(path)]
    assert __main__.main(arguments) == 0
    out, text = capsys.readouterr().out, path.read_text()
    for name in ops:
        for dtype in dtypes:
            assert re.search(rf"^{name}, {dtype} +ok$", text, re.M)
    assert "everything is right" in text and "jaxlib" in text
    assert "everything is right" in out and str(path) in out


def test_selftest_is_right(jnp_or_one_kernel, tmp_path, capsys):
    check_selftest(jnp_or_one_kernel, ("matmul_partial_rms_norm", "add_rms_norm"), ("float16",), tmp_path / "report.txt", capsys)


@pytest.mark.slow
def test_selftest_of_everything_is_right(implementation, tmp_path, capsys):
    check_selftest(implementation, [call.name for call in calls.CALLS], cases.DTYPES, tmp_path / "report.txt", capsys)


def test_selftest_finds_what_is_wrong_and_says_so(tmp_path, capsys, monkeypatch):
    def wrong(x, scale, **options):
        return jax_fusednorm.rms_norm(x, scale, **options) * (1.0 if x.dtype == "float64" else 1.5)

    def failing(x, scale, **options):
        if x.dtype != "float64":
            raise RuntimeError("the GPU is away")
        return jax_fusednorm.rms_norm(x, scale, **options)

    operands = calls.CALLS[0].operands
    monkeypatch.setattr(calls, "CALLS", tuple(calls.Call(f, operands, 16, 16, "") for f in (wrong, failing)))
    path = tmp_path / "report.txt"
    assert __main__.main(["selftest", "--implementations", "jnp", "--dtypes", "float32", "--report", str(path)]) == 1
    text = path.read_text()
    assert re.search(r"wrong, float32, jnp: array 0 of 3: \d+ of 176 elements are off by more than 0.0001, the worst at \[\d+, \d+\]: \S+ w", text)
    assert "failing, float32, jnp: RuntimeError: the GPU is away" in text and "2 of 2 comparisons failed" in text
    assert "please send it with a bug report" in capsys.readouterr().out


def test_bench_times_every_contestant(tmp_path, host_kernel):
    pytest.importorskip("matplotlib")
    data, image = tmp_path / "bench.json", tmp_path / "bench.png"
    out = run("-m", "jax_fusednorm", "bench", "--ops", "rms_norm,head_rms_norm_rope", "--tokens", "1,8", "--rounds", "2",
              "--json", data, "--plot", image, COLUMNS="200")
    records = json.loads(data.read_text())["records"]
    assert {(r["op"], r["tokens"], r["contestant"]) for r in records} == {
        (op, tokens, name) for op in ("rms_norm", "head_rms_norm_rope") for tokens in (1, 8) for name in ("host", "jnp", "copy")}
    assert all(r["median_s"] > 0 for r in records)
    moved = next(r["bytes"] for r in records if (r["op"], r["tokens"]) == ("rms_norm", 8))
    assert moved == (2 * 8 + 1) * 4096 * 2
    assert image.read_bytes().startswith(b"\x89PNG") and len(image.read_bytes()) > 10_000
    assert "jnp / best" in out and "head_rms_norm_rope, 8" in out


# The modules named in the first argument are not to be found.
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
from jax_fusednorm.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


def test_rich_and_matplotlib_are_not_needed(tmp_path):
    out = run("-c", WITHOUT, "rich,rich.console,matplotlib,matplotlib.figure", "selftest", "--ops", "rms_norm", "--dtypes", "float32",
              "--implementations", "jnp", "--report", tmp_path / "report.txt")
    assert re.search(r"^rms_norm, float32 +ok$", out, re.M)
    out = run("-c", WITHOUT, "rich,rich.console,matplotlib,matplotlib.figure", "bench", "--ops", "rms_norm", "--tokens", "1", "--rounds", "1",
              "--implementations", "jnp", "--plot", tmp_path / "no.png", status=status.CANNOT)
    assert re.search(r"^rms_norm, 1 +0.0246 ", out, re.M) and "matplotlib is not installed" in out


@pytest.mark.parametrize("width", (20, 80, 300))
def test_tables_fit_any_width_and_need_no_colour(width, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "25")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    made = report.Report()
    made.table("a title", ["op, dtype", "jnp", "host"], [["gated_group_rms_norm, bfloat16", "ok", "FAIL"]])
    made.line("a line", style="bold red")
    out = capsys.readouterr().out
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= width
    cells = [line.strip("│┃").split("│" if "│" in line else "┃") for line in out.splitlines() if "│" in line or "┃" in line]
    assert ["".join(map(str.strip, column)).replace(" ", "") for column in zip(*cells)] == [
        "op,dtypegated_group_rms_norm,bfloat16", "jnpok", "hostFAIL"]
    assert "a title" in out and "a line" in out
    assert made.text == ("a title\nop, dtype                       jnp  host\ngated_group_rms_norm, bfloat16   ok  FAIL\n\na line\n")


@pytest.mark.parametrize("arguments, says", (
    ("selftest --ops layer_norm", "argument --ops: there is no 'layer_norm'; there are rms_norm, add_rms_norm"),
    ("bench --ops rms_norm,layer_norm,", "there is no 'layer_norm', ''; there are rms_norm"),
    ("selftest --dtypes float32,float8", "argument --dtypes: there is no 'float8'; there are float32, bfloat16, float16"),
    ("selftest --implementations jnp,gpu", "argument --implementations: there is no 'gpu'; there are auto, jnp"),
    ("selftest --report nowhere/report.txt", "argument --report: 'nowhere/report.txt' cannot be written"),
    ("selftest --report .", "argument --report: '.' cannot be written"),
    ("bench --json nowhere/figures.json", "argument --json: 'nowhere/figures.json' cannot be written"),
    ("bench --plot nowhere/figures.png", "argument --plot: 'nowhere/figures.png' cannot be written"),
    ("bench --dtype int8", "argument --dtype: invalid choice: 'int8'"),
    ("bench --tokens 1,many", "argument --tokens: 'many' is no number of at least 1"),
    ("bench --tokens 0", "argument --tokens: '0' is no number of at least 1"),
    ("bench --rounds -1", "argument --rounds: '-1' is no number of at least 1")))
def test_a_wrong_argument_is_refused_before_anything_runs(arguments, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        __main__.main(arguments.split())
    assert stopped.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("command", ("bench --tokens 1 --rounds 1", "selftest --dtypes float32"))
def test_a_kernel_that_cannot_run_is_no_fault_and_says_why(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert __main__.main([*command.split(), "--ops", "rms_norm", "--implementations", f"jnp,{OTHER}"]) == status.CANNOT
    said = capsys.readouterr()
    assert f"implementation='{OTHER}' was asked for, but there are no {OTHER} kernels" in said.err
    assert "bug report" not in said.out + said.err and not list(tmp_path.iterdir())


def test_a_selftest_without_kernels_does_not_say_that_they_are_right(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calls, "kernels", lambda: [])
    arguments = ["selftest", "--ops", "rms_norm", "--dtypes", "float32,float16", "--report", str(tmp_path / "report.txt")]
    assert __main__.main(arguments) == status.UNTESTED
    said = capsys.readouterr()
    assert "everything is right" not in said.out and "no kernel can run here" in said.out
    assert said.err.splitlines() == ["1/2 rms_norm, float32", "2/2 rms_norm, float16"]  # progress, where the output goes to a file
    assert __main__.main([*arguments, "--implementations", "jnp"]) == status.RIGHT  # it was asked for no more than that


def test_a_table_in_a_pipe_is_plain_and_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    made = report.Report()
    made.table("a title", ["op, dtype", "jnp"], [["gated_group_rms_norm, bfloat16", "ok"]])
    assert "gated_group_rms_norm, bfloat16   ok\n" in capsys.readouterr().out


def test_a_closed_pipe_makes_no_traceback():
    done = subprocess.run(f"{{ {sys.executable} -m jax_fusednorm info; echo $? >&2; }} | true", shell=True, cwd=ROOT, capture_output=True, text=True,
                          check=False, env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert done.stderr.splitlines()[-1] == str(status.PIPE_CLOSED) and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__.info, "main", interrupted)
    try:
        assert __main__.main(["info"]) == status.INTERRUPTED
    except KeyboardInterrupt:  # which would stop the tests
        pytest.fail("it is not caught")
    assert capsys.readouterr().err == "jax_fusednorm: interrupted\n"


def test_the_version_and_the_console_script(capsys):
    with pytest.raises(SystemExit) as stopped:
        __main__.main(["--version"])
    assert stopped.value.code == status.RIGHT and capsys.readouterr().out == f"jax_fusednorm {jax_fusednorm.__version__}\n"
    [script] = importlib.metadata.entry_points(group="console_scripts", name="jax-fusednorm")
    assert script.load() is __main__.main


def test_the_exit_codes_are_distinct_and_said():
    codes = [value for name, value in vars(status).items() if name.isupper() and isinstance(value, int)]
    assert len(set(codes)) == len(codes) and all(re.search(rf"\b{code} ", status.HELP) for code in codes)
