"""`python -m jax_fusednorm info`: what is installed, what runs where, and why."""

import argparse
import os
import platform

import jax
import jax.numpy as jnp

import jax_fusednorm
from jax_fusednorm.core import ffi, lowering


def info():
    print(f"jax_fusednorm {jax_fusednorm.__version__}, Python {platform.python_version()}, jax {jax.__version__}, "
          f"jaxlib {jax.lib.__version__}, {platform.system()} {platform.machine()}")
    print(f"devices: {', '.join(f'{d.platform}:{d.id} {d.device_kind}' for d in jax.devices())}")
    print(f"default implementation: {lowering.requested('info', None)}"
          f" ({lowering.VARIABLE}={os.environ.get(lowering.VARIABLE, '')!r} in the environment)")
    for launchers in lowering.LAUNCHERS.values():
        for launcher in launchers:
            library = ffi.library(launcher)
            print(f"{launcher}: {library.about}; kernels: {', '.join(sorted(library.targets)) or 'none'}")
    x, scale = jax.ShapeDtypeStruct((2, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096,), jnp.float32)
    for op, operands in ((jax_fusednorm.rms_norm, (x, scale)), (jax_fusednorm.add_rms_norm, (x, x, scale))):
        print(f"{op.__name__}, bfloat16 [2, 4096]:")
        for name, decision in jax_fusednorm.explain(op, *operands).items():
            print(f"  {name:5} {decision}")


def main():
    parser = argparse.ArgumentParser(prog="python -m jax_fusednorm", description=__doc__)
    parser.add_argument("command", choices=["info"], help="info: print what is installed and what runs where")
    parser.parse_args()
    info()


if __name__ == "__main__":
    main()
