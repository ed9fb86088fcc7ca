"""`python -m kvledger` is `kvledger`."""

from kvledger.cli.main import main

main()
