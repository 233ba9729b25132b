"""`python -m offloadd`: the same as the `offloadd` command."""

from offloadd.app import main

main()
