"""A worker without torch that behaves as badly as ETH_TEST_BEHAVIOUR says: {rank: behaviour}.

Every rank says that it trains; then it does its own, or waits for the others until it is ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from eth_cli.launch.config import RunFolder
from eth_cli.launch.status import StatusWriter

folder = RunFolder(sys.argv[1])
rank = int(os.environ["RANK"])
behaviour = json.loads(os.environ["ETH_TEST_BEHAVIOUR"]).get(str(rank), "wait")
print(f"rank {rank} will {behaviour}")

if behaviour == "fail at import":
    raise ImportError("no such thing")
status = StatusWriter(folder.status_of(rank), rank=rank)
status.update(state="training", step=3, operation=f"{rank}F1", waits=False)
time.sleep(0.5)  # until all have come so far

match behaviour:
    case "raise":
        raise ValueError("a fault of its own")
    case "exit 3":
        os._exit(3)
    case "exit 0":
        os._exit(0)
    case "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    case "be deaf":
        # With a child in a session of its own, which nobody but the launcher would find.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(300)", str(folder.root)],
            start_new_session=True,
        )

status.update(state="training", step=3, operation="AGREE", waits=True)
if behaviour == "freeze torchrun":
    os.kill(os.getppid(), signal.SIGSTOP)
    folder.stop.touch()
while not folder.stop.exists():
    time.sleep(0.05)
    if behaviour == "lose":
        time.sleep(0.3)
        raise RuntimeError("Connection closed by peer [127.0.0.1]:5033")
if behaviour != "be deaf":
    status.update(state="stopped", step=3, operation="end", waits=False)
else:
    time.sleep(300)
