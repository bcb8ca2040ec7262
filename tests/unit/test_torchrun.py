"""Commands and environments of ranks, and what is read of their ends."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from eth_cli import torchrun


def test_the_argv_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    found = torchrun.argv(num_ranks=3, module="a.b", args=["x y"], log_dir="/r/logs")
    assert found == [
        "/usr/bin/python3",
        "-m",
        "eth_cli.torchrun",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=3",
        "--max-restarts=0",
        "--shutdown-timeout=5",
        "--log-dir=/r/logs/torchrun",
        "--module",
        "eth_cli.worker_entry",
        "--log-dir=/r/logs",
        "a.b",
        "x y",
    ]
    without = torchrun.argv(num_ranks=2, module="a.b", args=[])
    assert without[-3:] == ["--module", "eth_cli.worker_entry", "a.b"]
    assert not any(part.startswith("--log-dir") for part in without)


def test_gloo_uses_the_loopback_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    assert torchrun.worker_env()["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(2, "eth0")])
    assert "GLOO_SOCKET_IFNAME" not in torchrun.worker_env()
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in torchrun.worker_env()


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"rank": 1}]', "{}"])
def test_damaged_exit_files_say_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "exits.json").write_text(text)
    (tmp_path / "deaths.jsonl").write_text(text or "{")
    assert torchrun.read_exits(tmp_path) == ()
    assert torchrun.read_deaths(tmp_path) == ()
