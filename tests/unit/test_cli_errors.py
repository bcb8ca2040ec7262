"""How commands end: exit codes, one line, no traceback unless asked for."""

from __future__ import annotations

import pytest

from eth_cli import cli
from eth_cli.commands import report
from eth_cli.errors import ConfigError, EthError, InfeasibleError, LaunchError


def end_with(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Exit code and stderr of a command that ends with an error."""

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(report, "run_report", fail)
    with pytest.raises(SystemExit) as end:
        cli.main(["report", "RUN"])
    out, err = capsys.readouterr()
    assert out == ""
    assert isinstance(end.value.code, int)
    return end.value.code, err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError.single("f", "a.b", "is wrong"), 2, "f: a.b: is wrong"),
        (InfeasibleError("no plan", binding="x", suggestion="do y"), 3, "no plan; do y"),
        (InfeasibleError("no plan: do y", binding="x", suggestion="do y"), 3, "no plan: do y"),
        (LaunchError("rank 3 died", rank=3), 4, "rank 3 died"),
        (EthError("odd"), 1, "odd"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 1, "the system refused: [Errno 28] No space"),
        (ZeroDivisionError("x / 0"), 1, "defect in eth: ZeroDivisionError: x / 0; ETH_DEBUG=1"),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, err = end_with(monkeypatch, error, capsys)
    assert found == code
    assert err.startswith(f"error: {line}")
    assert err.count("\n") == 1


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise ConfigError.single("f", "", "is wrong")

    monkeypatch.setattr(report, "run_report", fail)
    monkeypatch.setenv("ETH_DEBUG", "1")
    with pytest.raises(ConfigError):
        cli.main(["report", "RUN"])


def test_what_an_import_makes_of_ctrl_c_is_still_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "CTRL_C", cli.CtrlC())
    with pytest.raises(KeyboardInterrupt):
        cli.CTRL_C(2, None)
    error = ImportError("cannot load module more than once per process")
    assert end_with(monkeypatch, error, capsys) == (130, "error: interrupted\n")
