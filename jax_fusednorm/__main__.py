"""jax-fusednorm info | selftest | bench, or python -m jax_fusednorm ..."""

import argparse
import os
import pathlib
import sys

from . import __version__
from .cli import bench, calls, info, selftest, status
from .core import checks, lowering


def some_of(known):
    """An argument of names with commas between."""
    def names(text):
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
        return list(dict.fromkeys(found))
    return names


def count(text):
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return number


def counts(text):
    return list(map(count, text.split(",")))


def file(text):
    """A path that can be written, which is better known before hours of measuring than after."""
    path = pathlib.Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: it names no file in a folder that there is")
    return path


def main(arguments=None):
    try:
        chosen = parsed(arguments)
        found = chosen.run(chosen)
        sys.stdout.flush()  # a pipe that is closed is found here, and not at exit
        return found
    except NotImplementedError as error:  # a kernel that was asked for by name and cannot run
        print(f"jax_fusednorm: {error}", file=sys.stderr)
        return status.CANNOT
    except KeyboardInterrupt:
        print("jax_fusednorm: interrupted", file=sys.stderr)
        return status.INTERRUPTED
    except BrokenPipeError:  # as of `| head`; what is left goes nowhere, or Python would try again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status.PIPE_CLOSED


def parsed(arguments):
    parser = argparse.ArgumentParser(prog="jax-fusednorm", description="Fused normalization ops for JAX.", epilog=status.HELP)
    parser.add_argument("--version", action="version", version=f"jax_fusednorm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="info | selftest | bench")
    for name, module in (("info", info), ("selftest", selftest), ("bench", bench)):
        command = commands.add_parser(name, help=module.__doc__.splitlines()[0], description=module.__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
        command.set_defaults(run=module.main)
        if module is not info:
            command.add_argument("--ops", type=some_of([call.name for call in calls.CALLS]), metavar="OP,OP", help="some ops; all by default")
            command.add_argument("--implementations", type=some_of(lowering.IMPLEMENTATIONS), metavar="A,B",
                                 help="some of jnp, host, metal, cuda; by default all that can run here")
        if module is selftest:
            command.add_argument("--dtypes", type=some_of(checks.STORAGE), default=list(checks.STORAGE), metavar="A,B",
                                 help="some of float32, bfloat16, float16; all by default")
            command.add_argument("--report", type=file, metavar="FILE", default="jax_fusednorm-selftest.txt", help="where the report goes (%(default)s)")
        if module is bench:
            command.add_argument("--dtype", choices=checks.STORAGE, default="bfloat16")
            command.add_argument("--tokens", type=counts, default="1,16,2048", metavar="A,B", help="how many tokens a call has (%(default)s)")
            command.add_argument("--rounds", type=count, default=15, help="how often each figure is taken (%(default)s)")
            command.add_argument("--json", type=file, metavar="FILE", help="write every figure there")
            command.add_argument("--plot", type=file, metavar="FILE",
                                 help="draw a roofline there, a PNG: operations a second over operations a byte; needs matplotlib")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
