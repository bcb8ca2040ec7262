"""What each command does, as functions that a notebook could call; `eth_cli.cli` parses for them.

A function here reads its input files, makes one call into the package that does the work, writes
the result and hands it to `eth_cli.render`. It imports what it needs when it runs, so that no
command pays for another one's libraries.
"""
