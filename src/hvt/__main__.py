"""`python -m hvt` is `hvt`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
