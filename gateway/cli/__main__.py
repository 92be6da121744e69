"""`python -m gateway.cli`: how the supervisor starts its children, whatever is on PATH."""

from gateway.cli import main

main(prog_name="wavegate")
