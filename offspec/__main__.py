"""`python -m offspec`: the same program as the `offspec` script."""

from offspec.cli.main import main

main()
