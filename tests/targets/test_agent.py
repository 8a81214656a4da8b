"""The agent target: programs in workspaces, their output, endings, limits, environment and secrets."""

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest

from steelyard import CaseLimits, ConfigurationError, EvalSet, Runner, Workspace
from steelyard.reaper import start_time
from steelyard.targets import Agent

SECRET = "sk-very-secret-value-123"


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    monkeypatch.setenv("STEELYARD_WORK", str(tmp_path / "work"))
    return tmp_path / "work"


@pytest.fixture
def run(tmp_path):
    def go(script, *words, case=None, limits=None, workspace=None, scorers=(), retries=0, **arguments):
        path = tmp_path / "agent.py"
        path.write_text(textwrap.dedent(script))
        agent = Agent([sys.executable, "{{ suite }}/agent.py", *words], folder=tmp_path, **arguments)
        suite = EvalSet("s", [{"id": "c1", "prompt": "Fix it", **(case or {})}])
        runner = Runner(
            agent, suite, scorers, workspace=workspace, case_limits=limits, output_path=tmp_path / "run",
            progress="off", retries=retries,
        )  # fmt: skip
        (record,) = runner.run_sync().responses
        return record

    return go


def log_of(tmp_path, stream="out"):
    return (tmp_path / "run" / "logs" / "c1" / f"0.{stream}").read_text()


def test_an_agent_answers_from_its_workspace(run, tmp_path):
    record = run(
        "import os, sys; print(os.getcwd()); print('err', file=sys.stderr); open('new', 'w').write('x')",
        workspace=Workspace({"files": {"a": "1"}}),
    )
    assert record.status == "ok"
    assert record.response_text.endswith("/workspace")
    assert record.exit_code == 0
    assert record.cpu_seconds > 0
    assert record.peak_memory > 1_000_000
    assert record.disk_used == 2
    assert record.stderr == "err"
    assert log_of(tmp_path) == record.response_text + "\n"
    assert log_of(tmp_path, "err") == "err\n"
    assert "+++ b/new" in (tmp_path / "run" / "artifacts" / "c1" / "0" / "workspace.patch").read_text()


@pytest.mark.parametrize(
    "prompt", ["two words", "$(touch /tmp/x) `id` ; rm -rf", "--flag", "a\nb\t'\"\\", "{{ id }}", "*"]
)
def test_an_argument_stays_one_word_whatever_it_contains(run, prompt):
    script = "import sys, json; print(json.dumps(sys.argv[1:]))"
    record = run(script, "{{ prompt }}", "{{ metadata.x }}", case={"prompt": prompt, "metadata": {"x": 5}})
    assert json.loads(record.response_text) == [prompt, "5"]


def test_an_argument_that_is_too_long_is_refused_with_the_remedy(run):
    record = run("", "{{ prompt }}", case={"prompt": "x" * 131_072})
    assert "use `stdin: prompt`" in record.error


def test_the_longest_argument_that_is_taken_works(run):
    record = run("import sys; print(len(sys.argv[1]))", "{{ prompt }}", case={"prompt": "x" * 131_071})
    assert record.response_text == "131071"


@pytest.mark.parametrize(("stdin", "expected"), [("none", ""), ("prompt", "Fix it"), ("json", "c1")])
def test_stdin_is_nothing_the_prompt_or_the_case(run, stdin, expected):
    record = run("import sys; print(sys.stdin.read())", stdin=stdin)
    got = record.response_text.strip()
    assert (json.loads(got)["id"] if stdin == "json" else got) == expected


def test_the_case_on_stdin_lacks_what_the_answer_is_compared_with(run):
    case = {"prompt": "Fix it", "expected": {"patch": "secret"}, "expected_trajectory": ["look"], "metadata": {"n": 1}}
    got = json.loads(run("import sys; print(sys.stdin.read())", stdin="json", case=case).response_text)
    assert got["metadata"] == {"n": 1}
    assert "expected" not in got
    assert "expected_trajectory" not in got


def test_exit_codes_are_answers_retries_and_errors(run, tmp_path):
    record = run("import sys; print('no', file=sys.stderr); sys.exit(3)")
    assert record.error_type == "TargetError"
    assert "exited with code 3: no" in record.error
    assert record.exit_code == 3


def test_exit_code_75_is_tried_again_in_a_fresh_workspace(run, tmp_path):
    script = f"""
        import os, sys
        seen = {str(tmp_path / "seen")!r}
        assert not os.path.exists('left')
        open('left', 'w')
        if not os.path.exists(seen):
            open(seen, 'w')
            print('busy')
            sys.exit(75)
        print('done')
    """
    record = run(script, retries=1)
    assert record.response_text == "done"
    assert record.attempts == 2
    assert "(try again)" in record.retry_errors[0].error
    assert (tmp_path / "run" / "logs" / "c1" / "0.1.out").read_text() == "busy\n"


def test_only_what_is_named_of_the_environment_is_passed_on(run, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", SECRET)
    monkeypatch.setenv("OTHER_TOKEN", "other-secret-value")
    monkeypatch.setenv("HOME", "/home/of/the/user")
    script = "import os, json; print(json.dumps(dict(os.environ)))"
    env = json.loads(run(script, pass_env=["MY_TOKEN"], env={"CASE": "{{ id }}"}).response_text)
    assert "OTHER_TOKEN" not in env
    assert env["CASE"] == "c1"
    assert env["MY_TOKEN"] == "***"
    assert env["HOME"] != "/home/of/the/user"
    for name in ("TMPDIR", "XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME"):
        assert env[name].startswith(os.path.dirname(env["HOME"]))


def test_keys_never_reach_the_disk(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_VALUE", SECRET)
    script = """
        import os, sys
        for stream in (sys.stdout, sys.stderr):
            for piece in os.environ['MY_VALUE'] + ' and ' + os.environ['OTHER']:
                stream.write(piece); stream.flush()
        sys.exit(2)
    """
    run(script, pass_env=["MY_VALUE"], env={"OTHER": "another-secret-key"})
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
            assert b"another-secret-key" not in path.read_bytes(), path


def test_keys_in_recorded_turns_never_reach_the_disk(run, tmp_path):
    script = """
        import json, os
        message = {"id": "m", "role": "assistant", "content": [{"type": "text", "text": os.environ["OTHER"]}]}
        print(json.dumps({"type": "assistant", "message": message}))
        print(json.dumps({"type": "result", "subtype": "success", "result": "done"}))
    """
    record = run(script, output="claude-stream-json", env={"OTHER": "another-secret-key"})
    assert record.messages == [{"role": "assistant", "content": "***"}]
    turns = (tmp_path / "run" / "logs" / "c1" / "0.turns.jsonl").read_text()
    assert '"content":"***"' in turns
    assert "another-secret-key" not in turns


def test_output_is_on_disk_while_the_agent_runs(run, tmp_path):
    script = f"""
        import time
        print('first', flush=True)
        log = {str(tmp_path / "run" / "logs" / "c1" / "0.out")!r}
        for _ in range(500):
            try:
                if open(log).read() == 'first\\n':
                    print('seen')
                    break
            except FileNotFoundError:
                pass
            time.sleep(0.02)
    """
    assert run(script).response_text == "first\nseen"


def test_long_output_is_bounded_in_the_record_and_whole_on_disk(run, tmp_path):
    record = run("print('x' * 5_000_000); print('the end')")
    assert len(record.response_text) < 1_100_000
    assert record.response_text.endswith("the end")
    assert len(log_of(tmp_path)) == 5_000_009


HANGS = """
    import signal, sys, time
    open('fixed', 'w').write('yes')
    print('fixed it', flush=True)
    signal.signal(signal.SIGTERM, lambda *_: (print('polite end', flush=True), sys.exit(0)))
    time.sleep(600)
"""


def fixed(case, response, context):
    return (context.workspace / "fixed").read_text() == "yes"


def test_the_time_limit_is_an_outcome_and_scored(run):
    record = run(HANGS, limits=CaseLimits(time=1.0), scorers=[fixed], retries=3)
    assert record.status == "ok"
    assert record.stop_reason == "time_limit"
    assert record.response_text == "fixed it\npolite end"
    assert record.attempts == 1
    assert record.scores[0].passed is True


def test_an_agent_that_ignores_sigterm_is_killed_after_its_grace(run):
    script = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print('here', flush=True)
        time.sleep(600)
    """
    record = run(script, limits=CaseLimits(time=4.0), grace="200ms")  # time to start even on a busy machine
    assert record.stop_reason == "time_limit"
    assert record.exit_code == -9


def test_a_case_has_its_own_limit(run):
    record = run(HANGS, limits=CaseLimits(time=600.0), case={"limits": {"time": "1s"}})
    assert record.stop_reason == "time_limit"


def test_the_output_limit_is_an_outcome(run):
    script = "import time\nfor _ in range(1000): print('x' * 1000, flush=True)\ntime.sleep(600)"
    record = run(script, limits=CaseLimits(output=10_000))
    assert record.stop_reason == "output_limit"
    assert record.status == "ok"


def test_nothing_of_an_agent_is_left_when_it_is_graded(run, tmp_path):
    daemon = tmp_path / "daemon.pid"
    script = f"""
        import subprocess, sys
        left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
        open({str(daemon)!r}, 'w').write(str(left.pid))
    """

    def gone(case, response, context):
        return start_time(int(daemon.read_text())) is None

    assert run(script, scorers=[gone]).scores[0].passed is True


def test_the_version_is_part_of_the_identity(tmp_path):
    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\necho agent 1.2.3\n")
    program.chmod(0o755)
    agent = Agent(["{{ suite }}/agent"], version=["{{ suite }}/agent", "--version"], folder=tmp_path)
    assert agent.identity()["version"] == "agent 1.2.3"
    with pytest.raises(ConfigurationError, match=r"version: .*false exited with code 1"):
        Agent(["true"], version=["false"]).identity()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"stdin": "file"}, "stdin must be one of none, prompt, json"),
        ({"output": "xml"}, "output must be one of text, json"),
        ({"env": {"A": "{{ nope }}"}}, "unknown name 'nope'"),
        ({"pass_env": "KEY"}, "pass_env must be a list"),
        ({"parallelism": 0}, "parallelism must be >= 1"),
        ({"argv": ["no-such-program-here"]}, "program not found"),
        ({"argv": []}, "must name a program"),
    ],
)
def test_a_bad_argument_is_named(arguments, problem):
    with pytest.raises(ConfigurationError, match=problem):
        Agent(**{"argv": ["true"], **arguments})


def test_cwd_is_a_folder_of_the_workspace(run):
    workspace = Workspace({"files": {"sub/a": "1"}})
    assert run("import os; print(os.listdir())", cwd="sub", workspace=workspace).response_text == "['a']"


def test_cwd_cannot_leave_the_workspace(run):
    assert "cwd must be a folder in the workspace" in run("", cwd="../home").error


def test_a_function_reads_the_output(run):
    assert run("print('answer: 42')", output=lambda text: text.split()[-1]).response_text == "42"


def test_json_output_has_the_fields_of_a_response(run):
    record = run("import json; print(json.dumps({'response_text': 'hi', 'num_tokens_output': 3}))", output="json")
    assert (record.response_text, record.num_tokens_output) == ("hi", 3)


def test_a_killed_run_ends_its_agents_and_a_fresh_attempt_starts(tmp_path, work):
    suite = tmp_path / "suite.yaml"
    (tmp_path / "agent.py").write_text(
        "import os, sys, time\n"
        f"open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "print('started', flush=True)\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)\n"
        "print('done')\n"
    )
    suite.write_text(
        f"target: {{agent: {{argv: [{sys.executable}, '{{{{ suite }}}}/agent.py']}}}}\ncases: [{{id: c1, prompt: p}}]\n"
    )
    command = [sys.executable, "-m", "steelyard", "run", str(suite), "--out", str(tmp_path / "run"), "--no-progress"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "run" / "logs" / "c1" / "0.out"
    until = time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    first.kill()
    first.wait()
    pid = int((tmp_path / "pids").read_text())
    while start_time(pid) is not None and time.monotonic() < until:
        time.sleep(0.05)
    assert start_time(pid) is None
    assert len(os.listdir(work)) == 1
    (tmp_path / "go").touch()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert log.read_text() == "started\ndone\n"
    assert log.with_name("0.1.out").read_text() == "started\n"
    assert os.listdir(work) == []
