"""`python -m gyre_cli` is the command `gyre`."""

from gyre_cli.main import main

if __name__ == "__main__":
    main()
