from crt_exp.options import parse_arguments as read  # noqa: F401
