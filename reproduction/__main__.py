"""`python -m reproduction`: train rows of the paper's tables, fill the tables."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
