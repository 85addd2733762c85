"""``python -m kvzip``."""

from kvzip.cli import main

if __name__ == "__main__":
    main()
