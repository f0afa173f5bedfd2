"""Entry point of `python -m meshpoint.cli`."""

from meshpoint.cli import main

if __name__ == "__main__":
    main()
