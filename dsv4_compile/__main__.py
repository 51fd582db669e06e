"""`python -m dsv4_compile`: the command line tool."""

from dsv4_compile.cli.app import main

if __name__ == "__main__":
    main()
