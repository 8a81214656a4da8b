"""The sandbox: what a hostile program inside cannot see, reach, outlive or use up; plugins; refusals."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, InvocationContext, Runner, Workspace
from steelyard.errors import ConfigurationError
from steelyard.plugins import make_sandbox
from steelyard.protocols import Sandbox, SandboxPlace
from steelyard.scoring import Tests
from steelyard.subprocesses import run_program
from steelyard.targets import Agent, CallableTarget
from steelyard.workspace.sandbox import Bubblewrap, Cgroup, _end, _own_places, reap_cgroups
from tests.support.gateway import REAL_KEY, gateway_to, session_of
from tests.support.mock import running_mock
from tests.support.plugin import note_package

PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _why_not() -> str | None:
    try:
        Bubblewrap().check()
    except ConfigurationError as error:
        return str(error)
    return None


def _cgroup_problem() -> str | None:
    try:
        with Cgroup("probe", memory=1 << 30, cpus=1.0):
            return None
    except ConfigurationError as error:
        return str(error)


needs_bwrap = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))
needs_cgroups = pytest.mark.skipif(_cgroup_problem() is not None, reason=str(_cgroup_problem()))


@pytest.fixture
def place(tmp_path: Path) -> SandboxPlace:
    workspace = tmp_path / "attempt" / "workspace"
    workspace.mkdir(parents=True)
    return SandboxPlace(label=f"test-{os.getpid()}", workspace=workspace, writable=(workspace,))


def in_sandbox(
    place: SandboxPlace, code: str, options: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run Python inside; its exit code and output."""

    async def main() -> tuple[int, str]:
        sandbox = await Bubblewrap(**(options or {})).start(place)
        try:
            words = [PYTHON, "-I", "-c", textwrap.dedent(code)]
            argv, given = sandbox.wrap(words, {"PATH": os.environ["PATH"], **(env or {})}, cwd=place.workspace)
            done = await run_program(argv, env=given, cwd=place.workspace, timeout=60)
            return done.returncode, (done.stdout + done.stderr).decode()
        finally:
            await sandbox.destroy()

    return asyncio.run(main())


@needs_bwrap
def test_the_workspace_is_writable_and_the_rest_is_read_only_or_not_there(place: SandboxPlace, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "outputs.jsonl").write_text("expected answers")
    (tmp_path / "attempt2").mkdir()
    (tmp_path / "attempt2" / "secret").write_text("another case")
    hidden = [tmp_path / "run" / "outputs.jsonl", tmp_path / "attempt2" / "secret", Path.home() / ".bashrc"]
    hidden += [Path("/etc/shadow"), Path("/var/log"), Path("/root/.ssh"), Path(__file__)]
    code = f"""
        import os
        open("made", "w").write("inside")
        for path in {[str(path) for path in hidden]!r}:
            assert not os.path.exists(path), path
        for path in ("/x", "/usr/x", "/etc/x", "/etc/passwd", {PYTHON!r}):
            try:
                open(path, "w")
            except OSError:
                continue
            raise SystemExit(f"could write {{path}}")
        print(sorted(os.listdir({str(tmp_path)!r})))
    """
    code_, output = in_sandbox(place, code)
    assert (code_, output) == (0, "['attempt']\n")
    assert (place.workspace / "made").read_text() == "inside"


@needs_bwrap
def test_nothing_of_the_drivers_processes_and_environment_is_seen(
    place: SandboxPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", REAL_KEY)
    code = f"""
        import os
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        assert max(pids) < 20, pids
        for pid in pids:
            for name in ("environ", "cmdline"):
                try:
                    assert {REAL_KEY[::-1]!r}[::-1].encode() not in open(f"/proc/{{pid}}/{{name}}", "rb").read()
                except PermissionError:
                    pass
        print("clean")
    """
    assert in_sandbox(place, code) == (0, "clean\n")


@needs_bwrap
def test_no_address_is_reached_without_a_network(place: SandboxPlace) -> None:
    with running_mock() as mock:
        code = f"""
            import os, socket
            for address in ({mock.address!r}, ("127.0.0.1", 22), ("1.1.1.1", 53), ("169.254.169.254", 80)):
                try:
                    socket.create_connection(address, timeout=2)
                except OSError:
                    continue
                raise SystemExit(f"reached {{address}}")
            print(os.listdir("/sys/class/net") if os.path.exists("/sys/class/net") else "no /sys")
        """
        assert in_sandbox(place, code) == (0, "no /sys\n")
        assert mock.stats()["connections_opened"] <= 1  # that of the question itself


@needs_bwrap
def test_only_the_gateway_is_reached_with_the_gateways_network(tmp_path: Path, place: SandboxPlace) -> None:
    async def main(address: tuple[str, int], url: str) -> None:
        async with gateway_to(url) as gateway, session_of(gateway) as session:
            inside = SandboxPlace(
                label=place.label,
                workspace=place.workspace,
                writable=place.writable,
                gateway_socket=session.open_door(),
                gateway_port=session.port,
            )
            code = f"""
                import json, socket, urllib.request
                request = urllib.request.Request(
                    "{session.addresses.openai}/chat/completions",
                    json.dumps({{"model": "m", "messages": [{{"role": "user", "content": "hi"}}]}}).encode(),
                    {{"authorization": "Bearer {session.addresses.key}", "content-type": "application/json"}},
                )
                for _ in range(2):
                    print(json.load(urllib.request.urlopen(request))["object"])
                for address in ({address!r}, ("1.1.1.1", 53)):
                    try:
                        socket.create_connection(address, timeout=2)
                    except OSError:
                        continue
                    raise SystemExit(f"reached {{address}}")
            """
            for _ in range(2):  # each program of an attempt has a network of its own
                done = await asyncio.to_thread(in_sandbox, inside, code, {"network": "gateway"})
                assert done == (0, "chat.completion\nchat.completion\n")
            assert (await session.end()).turns == 4

    with running_mock() as mock:
        asyncio.run(asyncio.wait_for(main(mock.address, mock.base_url), 90))


@needs_bwrap
def test_a_door_takes_nothing_but_listening_sockets(place: SandboxPlace) -> None:
    async def main(url: str) -> None:
        async with gateway_to(url) as gateway, session_of(gateway) as session:
            path = session.open_door()

            def offer() -> bytes:
                import socket

                with socket.socket(socket.AF_UNIX) as door, socket.socket() as plain:
                    door.settimeout(20)
                    door.connect(str(path))
                    socket.send_fds(door, [b"x"], [plain.fileno()])
                    return door.recv(1)

            assert await asyncio.to_thread(offer) == b""
            folder = path.parent
        assert not folder.exists()

    asyncio.run(main("http://127.0.0.1:9/v1"))


@needs_bwrap
def test_a_daemon_dies_with_its_program_and_with_its_driver(place: SandboxPlace) -> None:
    code = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.environ.clear()
            while True:
                open("alive", "w").write(str(time.time()))
                time.sleep(0.02)
        while not os.path.exists("alive"):
            time.sleep(0.01)
        print("left a daemon")
    """
    assert in_sandbox(place, code) == (0, "left a daemon\n")
    alive = place.workspace / "alive"
    assert is_still(alive)
    # The driver is killed without a chance to clean up.
    staying = textwrap.dedent(code).replace('print("left a daemon")', "time.sleep(600)")
    driver = f"""
        import asyncio, os
        from pathlib import Path
        from steelyard.protocols import SandboxPlace
        from steelyard.workspace.sandbox import Bubblewrap

        work = Path({str(place.workspace)!r})

        async def main():
            sandbox = await Bubblewrap().start(SandboxPlace(label="x", workspace=work, writable=(work,)))
            argv, env = sandbox.wrap([{PYTHON!r}, "-I", "-c", {staying!r}], dict(os.environ), cwd=work)
            await (await asyncio.create_subprocess_exec(*argv, env=env)).wait()

        asyncio.run(main())
    """
    alive.unlink()
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(driver)]) as process:
        while not alive.exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert is_still(alive)


def is_still(path: Path) -> bool:
    """Whether a file that a living process writes to all the time has stopped changing; waits until it has."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        before = path.read_text()
        time.sleep(0.5)
        if path.read_text() == before:
            return True
    return False


@needs_bwrap
def test_a_program_gets_sigterm_and_its_grace(place: SandboxPlace) -> None:
    async def main() -> str:
        sandbox = await Bubblewrap().start(place)
        code = """
            import os, signal, sys, time
            def bye(*_):
                open("bye", "w").write("said")
                sys.exit(0)
            signal.signal(signal.SIGTERM, bye)
            open("ready", "w")
            time.sleep(600)
        """
        argv, env = sandbox.wrap([PYTHON, "-I", "-c", textwrap.dedent(code)], {}, cwd=place.workspace)
        running = asyncio.create_task(run_program(argv, env=env, cwd=place.workspace, timeout=None))
        while not (place.workspace / "ready").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
        await sandbox.destroy()
        return (place.workspace / "bye").read_text()

    assert asyncio.run(main()) == "said"


@needs_bwrap
@needs_cgroups
def test_memory_is_bounded_for_all_programs_together(place: SandboxPlace) -> None:
    code = """
        import os
        for _ in range(4):
            if os.fork() == 0:
                held = bytearray(60 << 20)
                import time; time.sleep(20)
                os._exit(0)
        codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(1)]
        print(codes)
    """
    code_, output = in_sandbox(place, code, {"memory": "100Mi", "cpus": 1})
    assert "-9" in output or code_ in (137, -9), (code_, output)
    assert not list(Path("/sys/fs/cgroup").glob(f"**/steelyard-*{place.label}*"))


@needs_cgroups
def test_cgroups_of_a_driver_that_is_gone_are_ended_by_their_label() -> None:
    code = (
        "from steelyard.workspace.sandbox import Cgroup; import os; Cgroup('lost-label-x', memory=1 << 30); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert list(Path("/sys/fs/cgroup").glob("**/steelyard-*-lost-label-x"))
    reap_cgroups("lost-label")
    assert not list(Path("/sys/fs/cgroup").glob("**/steelyard-*-lost-label-x"))


@pytest.fixture
def version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the delegated scope of this process in cgroup version 2; the kernel takes no part."""
    root = tmp_path / "cgroup"
    scope = root / "user.slice" / "run-1.scope"
    scope.mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpu memory pids\n")
    for name in ("cgroup.subtree_control", "cgroup.procs"):
        (scope / name).write_text("")
    monkeypatch.setattr("steelyard.workspace.sandbox._ROOT", root)
    monkeypatch.setattr("steelyard.workspace.sandbox._own_places", lambda: {"": scope})
    monkeypatch.setattr("steelyard.workspace.sandbox._END_SECONDS", 0.0)
    return scope


def test_version_2_bounds_memory_cpus_and_processes_in_one_group(version_2: Path) -> None:
    group = Cgroup("case/one", memory=1 << 30, cpus=1.5)
    (folder,) = version_2.glob("steelyard-*")
    assert folder.name == f"steelyard-{os.getpid()}-case-one"
    assert (version_2 / "cgroup.subtree_control").read_text() == "+memory +cpu"
    values = {path.name: path.read_text() for path in folder.iterdir()}
    assert values == {
        "memory.max": str(1 << 30), "memory.swap.max": "0", "cpu.max": "150000 100000", "pids.max": "4096",
    }  # fmt: skip
    assert group.joining == [str(folder / "cgroup.procs")]
    group.close()
    assert (folder / "cgroup.kill").read_text() == "1"


def test_a_delegated_scope_with_processes_is_left_for_a_group_below_it(
    version_2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses controllers below a group that has processes: they move first, and then it takes them."""
    (version_2 / "cgroup.procs").write_text("11\n12\n")
    moved: list[str] = []

    def write(path: Path, text: str) -> None:
        if path.name == "cgroup.subtree_control" and len(moved) < 2:
            raise OSError(errno.EBUSY, "Device or resource busy")
        if path == version_2 / "steelyard" / "cgroup.procs":
            moved.append(text)
        path.write_text(text)

    monkeypatch.setattr("steelyard.workspace.sandbox._write", write)
    Cgroup("one", memory=1 << 20).close()
    assert moved == ["11", "12"]
    assert (version_2 / "cgroup.subtree_control").read_text() == "+memory"


def test_a_process_that_has_moved_makes_groups_beside_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cgroup"
    (root / "run-1.scope" / "steelyard").mkdir(parents=True)
    monkeypatch.setattr("steelyard.workspace.sandbox._ROOT", root)
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text",
        lambda path, *more: "0::/run-1.scope/steelyard\n" if str(path) == "/proc/self/cgroup" else read(path, *more),
    )  # fmt: skip
    assert _own_places() == {"": root / "run-1.scope"}


def test_a_group_that_may_not_be_made_is_refused_with_the_remedy(
    version_2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(ConfigurationError, match=r"Permission denied; run in a delegated scope \(systemd-run"):
        Cgroup("one", memory=1 << 20)


@pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/unified/cgroup.procs", os.W_OK), reason="needs a cgroup of version 2 to write to"
)
def test_what_is_in_a_real_group_of_version_2_is_killed_with_it() -> None:
    folder = Path("/sys/fs/cgroup/unified") / f"steelyard-{os.getpid()}-test"
    folder.mkdir()
    code = (
        f"open({str(folder / 'cgroup.procs')!r}, 'w').write('0'); print('in', flush=True); import time; time.sleep(99)"
    )
    with subprocess.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        _end(folder)
        assert process.wait(20) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while folder.exists() and time.monotonic() < deadline:
        _end(folder)
    assert not folder.exists()


@needs_cgroups
def test_groups_of_a_long_name_are_found_by_the_beginning_of_their_label() -> None:
    label = f"lost{os.getpid()}-" + "x" * 150 + "-agent"
    code = f"from steelyard.workspace.sandbox import Cgroup; import os; Cgroup({label!r}, memory=1 << 30); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    reap_cgroups(f"lost{os.getpid()}")
    assert not list(Path("/sys/fs/cgroup").glob(f"**/steelyard-*-lost{os.getpid()}-*"))


@needs_bwrap
def test_one_file_and_the_temporary_folders_have_a_hard_bound(place: SandboxPlace) -> None:
    code = """
        import os, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sizes = []
        for path in ("big", "/tmp/big", "/dev/shm/big", "/run/big"):
            try:
                with open(path, "wb", buffering=0) as file:
                    for _ in range(64):
                        file.write(bytes(1 << 20))
            except OSError:
                pass
            sizes.append(os.path.getsize(path) <= 8 << 20)
        print(sizes)
    """
    assert in_sandbox(place, code, {"disk": "8Mi"}) == (0, "[True, True, True, True]\n")


def sandboxed(options: Mapping[str, Any], code: str, tmp_path: Path, **more: Any) -> Any:
    """The record of one case whose agent runs this code in its sandbox."""

    async def agent(case: EvalCase, context: InvocationContext) -> str:
        assert context.sandbox is not None
        assert context.workspace is not None
        words = [PYTHON, "-I", "-c", textwrap.dedent(code)]
        env = {"PATH": os.environ["PATH"], **(context.environment or {})}
        argv, env = context.sandbox.wrap(words, env, cwd=context.workspace)
        done = await run_program(argv, env=env, cwd=context.workspace, timeout=60, programs=context.programs)
        return done.stdout.decode() + done.stderr.decode()

    target = CallableTarget(agent)
    target.sandbox = options  # type: ignore[attr-defined]
    suite = EvalSet("s", [EvalCase(id="c", prompt="?")])
    workspace = Workspace({"files": {"a.txt": "x"}}, **more)
    runner = Runner(target, suite, progress="off", workspace=workspace, output_path=tmp_path / "run")
    (record,) = runner.run_sync().iter_responses()
    return record


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEELYARD_WORK", str(tmp_path / "work"))
    return tmp_path / "work"


@needs_bwrap
def test_an_agent_in_a_run_sees_its_workspace_and_home_and_not_the_run_directory(tmp_path: Path, work: Path) -> None:
    code = f"""
        import os
        assert os.listdir(".") == ["a.txt"]
        open(os.path.expanduser("~/note"), "w").write("mine")
        open(os.path.join(os.environ["TMPDIR"], "x"), "w")
        assert not os.path.exists({str(tmp_path / "run" / "run.json")!r})
        print(os.listdir({str(work)!r}), end="")
    """
    record = sandboxed({"bubblewrap": {}}, code, tmp_path)
    assert record.error is None
    (run,) = json.loads(record.response_text.replace("'", '"'))
    assert not run.startswith("Traceback")


@needs_bwrap
def test_a_hostile_agent_in_a_run_finds_no_key_no_answers_and_no_other_case(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cases at once, each searching all that it can read and reach for what is not its own."""
    monkeypatch.setenv("OPENAI_API_KEY", REAL_KEY)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary").write_text("private-diary")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    code = """
        import os, socket, sys
        mine, other, direct = sys.argv[1], sys.argv[2], int(sys.argv[3])
        open("marker", "w").write("workspace-of-" + mine)
        words = [word[::-1].encode() for word in sys.argv[4:]] + [("workspace-of-" + other).encode()]
        found = [word for word in words if any(word in value.encode() for value in os.environ.values())]
        for place, folders, files in os.walk("/"):
            folders[:] = [one for one in folders if os.path.join(place, one) not in ("/usr", "/proc", "/dev")]
            if "lib/python3" in place:
                continue
            for name in files:
                try:
                    if os.path.getsize(os.path.join(place, name)) < 1_000_000:
                        data = open(os.path.join(place, name), "rb").read()
                        found += [(word, place, name) for word in words if word in data]
                except OSError:
                    pass
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    data = open(f"/proc/{name}/environ", "rb").read() + open(f"/proc/{name}/maps", "rb").read()
                    found += [(word, "proc") for word in words if word in data]
                except OSError:
                    pass
        try:
            socket.create_connection(("127.0.0.1", direct), timeout=2)
            found.append("reached the models directly")
        except OSError:
            pass
        print(found, sorted(os.listdir(os.path.dirname(os.path.dirname(os.getcwd())))))
    """
    (tmp_path / "hostile.py").write_text(textwrap.dedent(code))
    secrets = [word[::-1] for word in (REAL_KEY, "expected-answer", "private-diary")]
    with running_mock(key=REAL_KEY) as mock:
        target = Agent(
            [PYTHON, "-I", "{{ suite }}/hostile.py", "{{ id }}", "{{ prompt }}", str(mock.address[1]), *secrets],
            gateway={"openai": {"base_url": mock.base_url}},
            sandbox={"bubblewrap": {"network": "gateway", "read_only": ["hostile.py"]}},
            folder=tmp_path,
        )
        cases = [EvalCase(id="a", prompt="b", expected="expected-answer"), EvalCase(id="b", prompt="a")]
        runner = Runner(
            target,
            EvalSet("s", cases),
            progress="off",
            parallelism=2,
            workspace=Workspace(),
            output_path=tmp_path / "run",
        )
        records = list(runner.run_sync().iter_responses())
        assert mock.stats()["requests"] == 0
    assert len(records) == 2
    for record in records:
        assert record.error is None, record.error
        assert record.response_text.startswith("[] ["), record.response_text
        assert record.response_text.count(f"'{record.id}.0.1-") == 1  # of the work folder its own attempt alone
        assert record.response_text.count("'") == 2


@needs_bwrap
def test_an_agent_that_fills_the_disk_is_ended_at_its_bound(tmp_path: Path, work: Path) -> None:
    code = """
        import os, time
        for number in range(100_000):
            with open(f"file-{number}", "wb") as file:
                file.write(os.urandom(1 << 20))
            time.sleep(0.005)
    """
    record = sandboxed({"bubblewrap": {"disk": "20M"}}, code, tmp_path, keep="none")
    assert record.stop_reason == "disk_limit"
    assert record.error is None


@needs_bwrap
def test_setup_may_have_a_sandbox_of_its_own(tmp_path: Path, work: Path) -> None:
    seen = f"import os; open('seen', 'w').write(str(os.path.exists({str(tmp_path / 'run' / 'run.json')!r})))"
    record = sandboxed(
        {"bubblewrap": {}}, "print(open('seen').read())", tmp_path,
        setup=[[PYTHON, "-I", "-c", seen]], sandbox={"bubblewrap": {"network": "none"}},
    )  # fmt: skip
    assert record.response_text.strip() == "False"


@needs_bwrap
def test_a_grader_may_have_a_sandbox_of_its_own(tmp_path: Path, work: Path) -> None:
    code = f"""
        import os, socket, sys
        assert os.path.exists("a.txt")
        assert not os.path.exists({str(tmp_path / "run" / "run.json")!r})
        try:
            socket.create_connection(("1.1.1.1", 53), timeout=2)
        except OSError:
            sys.exit(0)
        sys.exit("reached the network")
    """
    grader = Tests(argv=[PYTHON, "-I", "-c", textwrap.dedent(code)], sandbox="bubblewrap")
    suite = EvalSet("s", [EvalCase(id="c", prompt="?")])
    workspace = Workspace({"files": {"a.txt": "x"}})
    options: dict[str, Any] = {"progress": "off", "output_path": tmp_path / "run"}
    (record,) = Runner(lambda case: "done", suite, [grader], workspace=workspace, **options).run_sync().iter_responses()
    assert record.scores[0].passed, record.scores[0]


def test_a_grader_has_no_gateway() -> None:
    with pytest.raises(ConfigurationError, match="the agent's alone"):
        Tests(argv=["true"], sandbox={"bubblewrap": {"network": "gateway"}})
    with pytest.raises(ConfigurationError, match="the agent's alone"):
        Workspace(sandbox={"bubblewrap": {"network": "gateway"}})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"bubblewrap": {"network": "some"}}, "network must be one of none, gateway, host"),
        ({"bubblewrap": {"memory": "lots"}}, "memory must be"),
        ({"bubblewrap": {"cpus": 0}}, "cpus must be"),
        ({"bubblewrap": {"read_only": ["/nowhere/at/all"]}}, "does not exist"),
        ({"bubblewrap": {"read_only": "/usr"}}, "must be a list"),
        ({"bubblewrap": {"walls": 1}}, "sandbox.bubblewrap"),
        ({"dock": {}}, "dock"),
        ({"bubblewrap": {}, "other": {}}, "one name"),
        ({"bubblewrap": 3}, "takes a mapping"),
    ],
)
def test_a_sandbox_that_makes_no_sense_is_refused(raw: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_sandbox(raw)


@needs_bwrap
def test_folders_that_would_show_what_is_hidden_are_refused(tmp_path: Path) -> None:
    for path, message in (("/", "never has /"), (str(Path.home()), "would show"), (str(tmp_path), "would show")):
        with pytest.raises(ConfigurationError, match=message):
            Bubblewrap(read_only=[path]).check([tmp_path / "run"])
    (tmp_path / "tools").mkdir()
    Bubblewrap(read_only=[str(tmp_path / "tools")]).check([tmp_path / "run"])


def test_without_bwrap_a_run_is_refused_before_its_first_case(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="install the package bubblewrap"):
        sandboxed({"bubblewrap": {}}, "print(1)", tmp_path)
    assert not (tmp_path / "run" / "run.json").exists()


def test_without_the_rights_a_run_is_refused_before_its_first_case(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "bwrap"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    with pytest.raises(ConfigurationError, match="no right to make a sandbox here: bwrap: No permissions"):
        sandboxed({"bubblewrap": {}}, "print(1)", tmp_path)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@needs_bwrap
def test_the_walls_stand_for_a_user_without_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", "/usr")  # another user may not read this one's Python
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "bwrap", *Bubblewrap()._walls()]
    done = subprocess.run([*words, "--", "/usr/bin/id", "-u"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "65534"), done.stderr


class FolderSandbox:
    """A sandbox of a plugin, as small as can be: it only notes what it is asked to do."""

    wants_gateway = False

    def __init__(self, note: str) -> None:
        self.note = Path(note)

    def identity(self) -> dict[str, Any]:
        return {"kind": "folder"}

    def check(self, hidden: Sequence[Path] = ()) -> None:
        self.say("check")

    async def start(self, place: SandboxPlace) -> Sandbox:
        self.say("start")
        return FolderWalls(self, place)

    async def reap(self, label: str) -> None:
        self.say(f"reap {label}")

    def say(self, word: str) -> None:
        with open(self.note, "a") as file:
            file.write(f"{word}\n")


class FolderWalls:
    disk = None

    def __init__(self, maker: FolderSandbox, place: SandboxPlace) -> None:
        self._maker = maker
        self._place = place

    def wrap(self, argv: Sequence[str], env: Mapping[str, str], *, cwd: Path) -> tuple[list[str], dict[str, str]]:
        self._maker.say("run")
        return ["/usr/bin/env", *argv], dict(env)

    async def copy_in(self, source: Path, destination: Path) -> None:
        shutil.copy(source, self._place.workspace / destination)

    async def copy_out(self, source: Path, destination: Path) -> None:
        shutil.copy(self._place.workspace / source, destination)

    async def destroy(self) -> None:
        self._maker.say("destroy")


def test_a_plugin_adds_a_sandbox(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_package(tmp_path / "site", "folder-sandbox", {"steelyard.sandboxes": {"folder": f"{__name__}:FolderSandbox"}})
    monkeypatch.syspath_prepend(tmp_path / "site")
    record = sandboxed({"folder": {"note": str(tmp_path / "note")}}, "print('hello')", tmp_path)
    assert record.response_text == "hello\n"
    said = [line.split()[0] for line in (tmp_path / "note").read_text().splitlines()]
    assert said == ["check", "reap", "start", "run", "destroy"]


@needs_bwrap
def test_files_are_copied_in_and_out_of_the_workspace_alone(place: SandboxPlace, tmp_path: Path) -> None:
    async def main() -> None:
        sandbox = await Bubblewrap().start(place)
        (tmp_path / "source").write_text("x")
        await sandbox.copy_in(tmp_path / "source", Path("sub/file"))
        await sandbox.copy_out(Path("sub"), tmp_path / "out")
        assert (tmp_path / "out" / "file").read_text() == "x"
        with pytest.raises(ConfigurationError, match="not in the sandbox"):
            await sandbox.copy_out(Path("../../secret"), tmp_path / "out")

    asyncio.run(main())
