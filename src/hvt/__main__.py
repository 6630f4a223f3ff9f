"""`hvt` and `python -m hvt`: the command line, quiet when it is interrupted while it starts."""

import sys


def main() -> int:
    """Run one command; Ctrl-C is a word on stderr and exit code 130."""
    try:
        from .cli import main as run

        return run()
    except KeyboardInterrupt:
        print("hvt: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
