"""Speed and memory of near-far attention compared with exact attention and FAVOR++: `crt_exp.studies.bench_nearfar`."""

from crt_exp.studies.bench_nearfar import command_line

if __name__ == "__main__":
    command_line()
