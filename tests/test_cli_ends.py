"""However a run ends, it ends with a documented exit code, a message, no traceback and no half-written file."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvzip.cli.failures import EXIT_CODES
from kvzip.kinds import Kind, foreign
from tests.cli import KVZIP, cache_file, kvzip, process

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return cache_file(tmp_path / "kv.safetensors")


@pytest.fixture
def packed(cache: Path) -> Path:
    assert kvzip("compress", cache, "-q") == 0
    return Path(f"{cache}.kvz")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------------------------------------------------- bad input

HOSTILE = {
    "empty": b"",
    "text": b"this is a text and not a cache at all\n" * 10,
    "huge header": (10**12).to_bytes(8, "little") + b'{"a":',
    "no json": (16).to_bytes(8, "little") + b"{" * 16,
    "overlap": (lambda h: len(h).to_bytes(8, "little") + h + bytes(8))(
        b'{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"F16","shape":[4],"data_offsets":[0,8]}}'
    ),
    "magic alone": b"\x8bKVZ\r\n\x1a\n",
    "text mode": b"\x8bKVZ\n\x1a\n" + bytes(100),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("verb", ["compress", "decompress", "verify", "inspect", "bench"])
def test_hostile_input_gets_a_message_and_leaves_no_output(
    tmp_path: Path, capsys: Capture, verb: str, kind: str
) -> None:
    source = tmp_path / ("bad.kvz" if verb == "decompress" else "bad")
    source.write_bytes(HOSTILE[kind])
    taken: Kind = "safetensors" if verb in ("compress", "bench") else "kvz"
    other = verb != "inspect" and foreign(HOSTILE[kind], taken)
    assert kvzip(verb, source) in ((2,) if other else (3, 4))
    assert str(source) in capsys.readouterr().err
    assert names(tmp_path) == [source.name]


def test_a_file_cut_anywhere_is_damaged_by_every_verb(packed: Path, cache: Path, capsys: Capture) -> None:
    whole, source = packed.read_bytes(), cache.read_bytes()
    for part in range(1, 12):
        packed.write_bytes(whole[: len(whole) * part // 12])
        cache.write_bytes(source[: len(source) * part // 12])
        for verb in ("inspect", "verify", "decompress"):
            assert kvzip(verb, packed, *(["-o", "x"] if verb == "decompress" else [])) == 3
        assert kvzip("compress", cache, "-f") == 3
        assert process("decompress", "-", input=packed.read_bytes()).returncode == 3 if part in (1, 6, 11) else True
    assert names(packed.parent) == ["kv.safetensors", "kv.safetensors.kvz"]


def test_what_is_not_there_or_no_file_is_an_error_with_its_name(tmp_path: Path, capsys: Capture) -> None:
    for verb in ("compress", "verify", "inspect", "bench"):
        assert kvzip(verb, tmp_path / "nowhere") == 1
        assert "nowhere: No such file" in capsys.readouterr().err
    assert kvzip("decompress", tmp_path / "nowhere.kvz") == 1
    assert kvzip("verify", tmp_path) == 2


def test_control_characters_of_a_hostile_name_do_not_reach_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "evil\x1b[2J.kvz"
    path.write_bytes(b"nothing")
    assert kvzip("inspect", path) == 3
    assert "\x1b" not in capsys.readouterr().err


def test_a_missing_codec_is_unsupported(cache: Path, packed: Path, capsys: Capture) -> None:
    from tests.containers import frames, reseal

    data = packed.read_bytes()
    packed.write_bytes(reseal(data.replace(b'"name":"cachegen"', b'"name":"cachegem"'), frames(data)))
    assert kvzip("decompress", packed, "-f") == 4
    assert "cachegem" in capsys.readouterr().err
    assert kvzip("inspect", packed) == 0


# ------------------------------------------------------------------------------------------------------ pipes, devices


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("--version >&-", 1, b"kvzip: Bad file descriptor\n"),
        ("decompress -c {packed} >&-", 1, b"kvzip: Bad file descriptor\n"),
        ("inspect nothing >&-", 1, b"kvzip: nothing: No such file or directory\n"),
        ("decompress -qf {packed} >&- <&-", 0, b""),
        ("compress <&-", 3, b"kvzip: standard input: "),
    ],
)
def test_a_shell_may_close_standard_streams(arguments: str, code: int, said: bytes, packed: Path) -> None:
    command = " ".join([*KVZIP, arguments.format(packed=packed)])
    done = subprocess.run(["sh", "-c", command], capture_output=True, cwd=packed.parent)
    assert done.returncode == code and done.stderr.startswith(said) and done.stderr.count(b"\n") <= 1


def test_messages_do_not_get_into_data_where_standard_error_is_closed(packed: Path) -> None:
    command = " ".join([*KVZIP, f"decompress -c {packed}"])
    expected, done = (subprocess.run(["sh", "-c", command + end], capture_output=True) for end in ("", " 2>&-"))
    assert done.returncode == 0 and done.stdout == expected.stdout


def test_a_closed_pipe_ends_quietly(packed: Path) -> None:
    for arguments in (
        ["inspect", "-v", packed],
        ["decompress", "-c", packed],
        ["compress", "-c", packed.with_suffix("")],
    ):
        command = subprocess.Popen(
            [*KVZIP, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        assert command.stdout is not None and command.stderr is not None
        command.stdout.close()
        assert command.stderr.read() == b""
        assert command.wait(30) == 141
        command.stderr.close()


def test_a_full_disk_is_an_error(packed: Path, cache: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        for arguments in (["inspect", packed], ["decompress", "-c", packed], ["compress", "-c", cache]):
            done = subprocess.run([*KVZIP, *map(str, arguments)], stdout=full, stderr=subprocess.PIPE, timeout=60)
            assert done.returncode == 1
            assert done.stderr == b"kvzip: standard output: cannot be written: No space left on device\n"
    done = process("compress", cache, "-o", "/dev/full")
    assert (done.returncode, done.stderr) == (1, b"kvzip: /dev/full: cannot be written: No space left on device\n")


def test_lack_of_space_names_what_could_not_be_written(cache: Path, packed: Path) -> None:
    """Files may have 1000 bytes here."""
    import resource

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    other = cache_file(cache.with_name("other.safetensors"))
    back, before = cache.with_name("back"), names(cache.parent)
    packed.rename(packed.with_suffix(".moved"))
    done = process("compress", cache, other, "--progress", "json", preexec_fn=limit)
    events = [json.loads(line) for line in done.stderr.splitlines()]
    errors = [event for event in events if event["event"] == "error"]
    assert [(error.get("input"), error["code"]) for error in errors] == [
        (str(cache), "write-failed"), (str(other), "write-failed"), (None, "partial"),
    ]  # fmt: skip
    assert [error["message"] for error in errors[:2]] == [
        f"{name}.kvz: cannot be written: File too large" for name in (cache, other)
    ]
    packed.with_suffix(".moved").rename(packed)
    done = process("decompress", packed, "-o", back, preexec_fn=limit)
    assert (done.returncode, done.stderr.decode()) == (1, f"kvzip: {back}: cannot be written: File too large\n")
    done = process("compress", "--codec", "kvtc", "-o", back, input=cache.read_bytes(), preexec_fn=limit)
    assert done.returncode == 7 and b"the temporary folder" in done.stderr
    assert names(cache.parent) == before


def test_binary_data_is_kept_from_a_terminal_unless_forced(cache: Path) -> None:
    leader, terminal = pty.openpty()
    try:
        for arguments in (["compress", "-c", cache], ["compress", "-"]):
            done = subprocess.run(
                [*KVZIP, *map(str, arguments)],
                stdin=subprocess.DEVNULL, stdout=terminal, stderr=subprocess.PIPE, timeout=60,
            )  # fmt: skip
            assert done.returncode == 5 and b"terminal" in done.stderr
    finally:
        os.close(leader)
        os.close(terminal)


def test_nothing_is_read_from_a_terminal(tmp_path: Path) -> None:
    leader, terminal = pty.openpty()
    try:
        done = process("compress", stdin=terminal)
        assert done.returncode == 2 and b"nothing to read" in done.stderr
    finally:
        os.close(leader)
        os.close(terminal)


# -------------------------------------------------------------------------------------------------------------- signals


def heeding() -> None:
    """In the child: nothing is ignored, though whoever runs the tests may do so, as nohup and background jobs do."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_run_and_leaves_nothing_behind(cache: Path, number: signal.Signals, code: int) -> None:
    start = cache.read_bytes()[:-1000]
    command = subprocess.Popen(
        [*KVZIP, "compress", "-", "-o", str(cache.parent / "out.kvz")],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heeding,
    )  # fmt: skip
    assert command.stdin is not None and command.stderr is not None
    command.stdin.write(start)
    command.stdin.flush()
    for _ in range(3000):
        if any(name.startswith(".out.kvz") for name in names(cache.parent)):
            break
        time.sleep(0.02)
    else:
        pytest.fail("no temporary file appeared")
    command.send_signal(number)
    assert command.wait(30) == code
    message = command.stderr.read()
    command.stdin.close()
    command.stderr.close()
    assert number.name.encode() in message and b"Traceback" not in message
    assert names(cache.parent) == ["kv.safetensors"]


AT_IMPORT = """
import os, signal, sys

class Sender:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{number})

sys.meta_path.insert(0, Sender())
sys.argv = ["kvzip", *{arguments!r}]
from kvzip.cli import main
main()
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "module",
    [
        "kvzip.cli.failures", "typer", "kvzip.cli.compress", "numpy", "numpy._core._multiarray_umath", "ml_dtypes",
        "ml_dtypes._ml_dtypes_ext", "kvzip.api", "kvzip.pipeline.encoding", "kvzip.codecs.cachegen",
    ],
)  # fmt: skip
def test_a_signal_in_the_midst_of_an_import_shows_no_traceback(cache: Path, module: str, number: str) -> None:
    """From the first import of the command on; some modules would print what their import is ended by."""
    code = AT_IMPORT.format(module=module, number=number, arguments=["compress", str(cache)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, stdin=subprocess.DEVNULL, timeout=60, preexec_fn=heeding
    )
    assert done.stderr.decode() == f"kvzip: stopped by {number}\n"
    assert done.returncode == 128 + getattr(signal, number)
    assert names(cache.parent) in (["kv.safetensors"], ["kv.safetensors", "kv.safetensors.kvz"])


def test_an_alarm_of_the_parent_ends_the_run_as_it_ends_any_other(cache: Path) -> None:
    code = AT_IMPORT.format(module="kvzip.api", number="SIGALRM", arguments=["compress", str(cache)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGALRM, b"")


def test_what_a_finalizer_is_ended_by_is_no_traceback(cache: Path) -> None:
    code = (
        "import os, signal, kvzip.api\n"
        "class Last:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGTERM); [None for _ in range(9)]\n"
        "kvzip.api.compress = lambda *_, **__: [Last() and None, signal.pause()]\n"
        f"import sys; sys.argv = ['kvzip', 'compress', {str(cache)!r}]\n"
        "from kvzip.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (143, b"kvzip: stopped by SIGTERM\n")


def test_a_signal_that_the_parent_ignores_stays_ignored(cache: Path) -> None:
    done = process("compress", cache, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert done.returncode == 0


# -------------------------------------------------------------------------------------------------- errors of all kinds


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), 7),
        (OSError(28, "No space left on device"), 1),
        (OSError(12, "Cannot allocate"), 7),
        (RuntimeError("can't start new thread"), 7),
        (ZeroDivisionError(), 1),
    ],
)
def test_any_error_gets_a_message_and_its_code(
    cache: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def failing(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("kvzip.api.compress", failing)
    assert kvzip("compress", cache) == code
    assert capsys.readouterr().err.startswith("kvzip: ")


def test_debugging_shows_the_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [*KVZIP, "inspect", str(tmp_path / "nowhere")], stderr=subprocess.PIPE, env={**os.environ, "KVZIP_DEBUG": "1"}
    )
    assert b"Traceback" in done.stderr


def test_out_of_memory_is_a_limit_and_not_a_crash(tmp_path: Path) -> None:
    """Under the largest limit of address space that is too small for it."""
    import resource

    path = cache_file(tmp_path / "kv.safetensors", tokens=200_000)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    for megabytes in range(700, 100, -100):
        limit = (megabytes << 20, megabytes << 20)
        done = process(
            "compress", path, "-f", "-T", "1", "--device", "cpu",
            preexec_fn=lambda limit=limit: resource.setrlimit(resource.RLIMIT_AS, limit), env=environment,
        )  # fmt: skip
        if done.returncode:
            break
        Path(f"{path}.kvz").unlink()
    assert done.returncode == 7 and b"out of memory" in done.stderr
    assert names(tmp_path) == ["kv.safetensors"]


# ------------------------------------------------------------------------------------------------------- help, start-up


def test_help_shows_examples_and_every_exit_code(capsys: Capture) -> None:
    for arguments in ([], ["compress"], ["decompress"], ["inspect"], ["verify"], ["bench"]):
        assert kvzip(*arguments, "--help") == 0
        shown = capsys.readouterr().out
        assert "Examples:" in shown
        for line in EXIT_CODES.splitlines()[2:]:
            assert line in shown
    assert kvzip() == 2
    assert kvzip("compres") == 2
    assert "compress" in capsys.readouterr().err


def test_verbs_load_only_what_they_use(packed: Path) -> None:
    for arguments, banned in (
        (["--version"], {"numpy", "rich", "torch", "xxhash"}),
        (["compress", "--help"], {"numpy", "rich", "torch", "xxhash"}),
        (
            ["inspect", str(packed)],
            {
                *("rich", "torch", "cupy", "kvzip.cli.compress"),
                *("kvzip.codecs.raw", "kvzip.devices.cpu", "kvzip.layouts", "kvzip.pipeline"),
            },
        ),
    ):
        code = f"import sys; from kvzip.cli import run; run({arguments!r}); print(*sys.modules, file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert not banned & set(done.stderr.decode().split())


def test_the_shell_can_ask_for_completions() -> None:
    environment = {**os.environ, "_KVZIP_COMPLETE": "complete_bash", "COMP_WORDS": "kvzip comp", "COMP_CWORD": "1"}
    assert process(env=environment).stdout.split() == [b"compress"]
