"""python -m jax_fusednorm info | selftest | bench"""

import argparse
import sys

from .cli import bench, info, selftest


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m jax_fusednorm", description="Fused normalization ops for JAX.")
    commands = parser.add_subparsers(required=True, metavar="info | selftest | bench")
    for name, module in (("info", info), ("selftest", selftest), ("bench", bench)):
        command = commands.add_parser(name, help=module.__doc__.splitlines()[0], description=module.__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
        command.set_defaults(run=module.main)
        if module is not info:
            command.add_argument("--ops", metavar="OP,OP", help="some ops; all by default")
            command.add_argument("--implementations", metavar="A,B", help="some of jnp, host, metal, cuda; by default all that can run here")
        if module is selftest:
            command.add_argument("--dtypes", metavar="A,B", help="some of float32, bfloat16, float16; all by default")
            command.add_argument("--report", metavar="FILE", default="jax_fusednorm-selftest.txt", help="where the report goes (%(default)s)")
        if module is bench:
            command.add_argument("--dtype", default="bfloat16")
            command.add_argument("--tokens", default="1,16,2048", metavar="A,B", help="how many tokens a call has (%(default)s)")
            command.add_argument("--rounds", type=int, default=15, help="how often each figure is taken (%(default)s)")
            command.add_argument("--json", metavar="FILE", help="write every figure there")
            command.add_argument("--plot", metavar="FILE", help="draw the rates over the bytes moved, as a PNG; needs matplotlib")
    chosen = parser.parse_args(arguments)
    return chosen.run(chosen)


if __name__ == "__main__":
    sys.exit(main())
