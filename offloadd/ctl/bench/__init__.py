"""`offloadctl bench`: what the daemon moves through ring and disk, and beside fio on the same file.

`client` is one rank's load in a process of its own; `harness` starts daemon and clients; `fio` runs the reference;
`compare` alternates the two.
"""
