"""`hvt` and `python -m hvt`: the command line, without a traceback when it is interrupted early."""

import sys


def main() -> int:
    """Run one command; Ctrl-C is one line on stderr and exit code 130."""
    try:
        from .cli import main as run

        return run()
    except KeyboardInterrupt:
        print("hvt: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
