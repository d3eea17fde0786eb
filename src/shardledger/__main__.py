"""``python -m shardledger``: the command line."""

from __future__ import annotations

from shardledger.cli.main import run

if __name__ == "__main__":
    run()
