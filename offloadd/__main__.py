"""`python -m offloadd`, and what the `offloadd` command calls: `offloadd.app`, with signals that end it quietly.

Nothing else may be imported at the top: what is imported here can be interrupted half-way by a Ctrl-C.
"""

import signal


def main() -> None:
    """Run the command line."""
    # Until the event loop listens to signals itself there is nothing to put in order, so Ctrl-C ends the process as
    # SIGTERM does, and not with a traceback out of some import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from offloadd import app

    app.main()


if __name__ == "__main__":
    main()
