"""``python -m joestar``: the command line."""

from joestar.cli.entry import main

if __name__ == "__main__":
    main()
