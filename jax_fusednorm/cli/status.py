"""What the commands exit with."""

RIGHT = 0
WRONG = 1  # selftest: a comparison failed
USAGE = 2  # argparse's own
CANNOT = 3  # what was asked for by name is not to be had here: a kernel, a library that draws
UNTESTED = 4  # selftest: no kernel can run here, so that none was compared
INTERRUPTED = 130
PIPE_CLOSED = 141

HELP = """exit status: 0 all is right; 1 a comparison failed; 2 a wrong argument; 3 what was asked for by name cannot run here;
4 no kernel can run here, so that selftest compared none; 130 interrupted; 141 the reader of the output has gone"""
