"""`python -m offspec`: the same program as the `offspec` script."""

from offspec.cli.entry import main

main()
