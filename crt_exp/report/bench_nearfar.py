"""Speed and memory of near-far attention compared with exact attention and FAVOR++: `crt_exp.studies.bench_methods`."""

from pathlib import Path

from crt_exp.studies.bench_methods import LONG, NEAR_FAR_LENGTHS, near_far_command_line, print_memory, print_near_far


def main(size: str, folder: Path) -> None:
    print_near_far(NEAR_FAR_LENGTHS)
    print_memory([LONG], ["nearfar", "favorpp"])


if __name__ == "__main__":
    near_far_command_line()
