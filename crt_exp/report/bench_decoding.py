"""A cached token and a prompt of swapped causal models, and of the model itself: `crt_exp.studies.bench_decoding`."""

from crt_exp.studies.bench_decoding import command_line

if __name__ == "__main__":
    command_line()
