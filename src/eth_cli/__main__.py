"""``python -m eth_cli`` is ``eth``."""

from eth_cli.cli import main

if __name__ == "__main__":
    main()
