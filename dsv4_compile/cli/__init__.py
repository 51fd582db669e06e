"""The command line tool `dsv4-compile`: one module for each command, `app` puts them together.

A command first works out plain data and then prints it, as tables or with `--json` as it is. Commands that read a dump
import no torch.
"""
