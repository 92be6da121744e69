"""What a person reads when a configuration is wrong: every problem with its line, its key and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.config_file import MAX_FILE_BYTES, ConfigError, load, parse

EXAMPLE = Path(__file__).parents[2] / "wavegate.example.yaml"


def problems(text: str) -> list[str]:
    """What is reported for this text, without the heading."""
    with pytest.raises(ConfigError) as refused:
        parse(text, "wavegate.yaml")
    heading, *lines = str(refused.value).splitlines()
    assert heading.startswith("wavegate.yaml: ")
    return [line.strip() for line in lines]


def test_the_example_is_fine() -> None:
    assert len(load(EXAMPLE).ranks()) == 4


def test_all_problems_are_reported_together_in_the_order_of_the_file() -> None:
    text = """
groups:
- engine: embedded
  name: G 0
  port: 99999
envoy:
  retries: -1
"""
    assert problems(text) == [
        'line 4: groups[0].name: is "G 0"; it must be 1 to 32 of a-z, 0-9 and -, '
        "beginning with a letter or digit",
        "line 5: groups[0].port: is 99999; it must be at most 65535",
        "line 7: envoy.retries: is -1; it must be at least 0",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "groups: is missing: The groups of ranks behind this gateway."),
        ("groups: []", "line 1: groups: is empty; it needs at least one item"),
        ("groups: 3", "line 1: groups: is 3; it must be a list (lines beginning with `- `, or [a, b])"),
        ("- a", "is a list; it must be a section (indented `key: value` lines)"),
        ("groups: [{name: a}]", "line 1: groups[0].engine: is missing; write embedded or vllm or adopted"),
        ("groups: [{engine: embeded}]", 'line 1: groups[0].engine: is "embeded"; did you mean embedded?'),
        (
            "groups: [{engine: cuda}]",
            'line 1: groups[0].engine: is "cuda"; write embedded or vllm or adopted',
        ),
        (
            "groups: [{engine: adopted, name: a, model: m}]",
            "line 1: groups[0]: needs endpoints or hosts to find the ranks, and has neither",
        ),
    ],
)
def test_one_mistake_is_one_problem(text: str, expected: str) -> None:
    assert problems(text) == [expected]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("envoy: {prot: 1}", "envoy.prot: is not a key here; did you mean port?"),
        ("envoy: {drain_timeout_s: 1}", "envoy.drain_timeout_s: is not a key here; it belongs to gateway"),
        ("admin_port: 1", "admin_port: is not a key here; it belongs to envoy or gateway"),
        ("gateway: {reports: {x: 1}}", "gateway.reports.x: is not a key here; known are interval_s, "),
        ("envoy: {port: '80a'}", 'envoy.port: is "80a"; it must be a plain whole number, without a unit'),
        ("envoy: {port: 1.5}", "envoy.port: is 1.5; it must be a whole number"),
        ("envoy: {connect_timeout_s: 2s}", 'is "2s"; it must be a plain number, without a unit'),
        ("envoy: {host: localhost}", "'localhost' is not an IP address to listen on, e.g. 127.0.0.1"),
        ("gateway: {reports: {interval_s: 2}}", "gateway.reports.stale_after_s: 2 s is not longer than"),
        ("envoy: {access_log: no}", "YAML reads false here, not text; it must be text: put it in quotes"),
        ("envoy: {binary: 3}", "envoy.binary: is 3; it must be a path in quotes"),
        ("envoy: {mode: one-message}", 'envoy.mode: is "one-message"; did you mean one_message?'),
        (
            "gateway: {ext_proc_listen: 9002}",
            "is 9002, without an address; write ip:port, such as 127.0.0.1:",
        ),
        ("gateway: {ext_proc_listen: '9002'}", "such as 127.0.0.1:9002, or unix:/path"),
        (
            "envoy: {standby_gateways: [9002]}",
            "is 9002, without an address; write ip:port, such as 10.0.0.2:",
        ),
        ("gateway: {policy: lockstpe}", 'gateway.policy: is "lockstpe"; did you mean lockstep?'),
        ("gateway: {policy: bogus}", 'gateway.policy: is "bogus"; write one of: lockstep, '),
        (
            "supervision: {hang_after_s: 60}",
            "supervision.restart_hung_after_s: 30 s is shorter than hang_after_s (60 s): ",
        ),
        (
            "supervision: {max_backoff_s: 0.5}",
            "supervision.max_backoff_s: 0.5 s is shorter than first_backoff_s (1 s): ",
        ),
        (
            "envoy: {max_heap_bytes: 67108864, max_body_bytes: 67108864}",
            "envoy.max_heap_bytes: 67108864 is less than twice max_body_bytes (67108864): ",
        ),
        ("envoy: {mode: 3}", "envoy.mode: is 3; write one of: one_message, header_only, partial_body, "),
        ("envoy: {health_check: 3}", "is 3; it must be a section (indented `key: value` lines)"),
        ("gateway: {reports: {stale_after_s: 0}}", "is 0; it must be more than 0"),
        ("gateway: {reports: {interval_s: 100000}}", "is 100000; it must be at most 86400"),
    ],
)
def test_wrong_values_are_explained_with_what_would_be_right(section: str, expected: str) -> None:
    (problem,) = problems("groups: [{engine: embedded, name: a}]\n" + section)
    assert problem.startswith("line 2: ")
    assert expected in problem


def test_a_key_of_another_kind_of_group_is_named_as_such() -> None:
    text = "groups: [{engine: adopted, name: a, model: m, endpoints: ['10.0.0.1:1'], rank_args: {}}]"
    assert problems(text) == [
        "line 1: groups[0].rank_args: is not a key here; it belongs to groups with engine: embedded"
    ]


def test_a_key_is_named_as_files_spell_it() -> None:
    text = "groups: [{engine: vllm, name: a, model: m, rank: local}]"
    assert problems(text) == ["line 1: groups[0].rank: is not a key here; did you mean ranks?"]


def test_places_of_ranks_are_local_or_a_list() -> None:
    (problem,) = problems("groups: [{engine: vllm, name: a, model: m, ranks: here}]")
    assert problem == (
        "line 1: groups[0].ranks: is 'here'; write local, or a list of the machines' addresses"
    )


def test_each_wrong_item_of_a_list_is_named() -> None:
    text = "groups: [{engine: adopted, name: a, model: m, endpoints: ['x:1', '10.0.0.1:1', '10.0.0.1']}]"
    assert [problem.split(": ")[1] for problem in problems(text)] == [
        "groups[0].endpoints[0]",
        "groups[0].endpoints[2]",
    ]


def test_rank_options_by_name_are_refused() -> None:
    text = "groups: [{engine: embedded, name: a, rank_args: {first: [--x]}}]"
    assert problems(text) == [
        'line 1: groups[0].rank_args.first: is not a rank\'s index; write a number such as 0, not "first"'
    ]


def test_a_contradiction_between_keys_is_placed_at_the_one_to_change() -> None:
    text = """
groups:
- {engine: vllm, name: a, model: m, args: [--port, 1]}
- {engine: adopted, name: a, model: m, endpoints: ['10.0.0.1:1']}
envoy: {message_timeout_s: 5}
"""
    group, *others = problems(text)
    assert group.startswith("line 3: groups[0].args: wavegate itself gives the ranks --port; ")
    assert others == []  # whole sections are compared only once each is fine
    group, timeout = problems(text.replace("args: [--port, 1]", "args: []"))
    assert group == "line 4: groups[1].name: 'a' is also that of groups[0]; choose another"
    assert timeout.startswith("line 5: envoy.message_timeout_s: 5 s is not longer than ")


def test_a_key_given_twice_is_an_error() -> None:
    assert problems("envoy: {port: 1}\nenvoy: {port: 2}") == [
        "line 2: envoy: is given twice, first in line 1; keep one"
    ]


def test_syntax_errors_name_the_line_and_tabs_the_remedy() -> None:
    (problem,) = problems("groups:\n\t- a")
    assert problem.startswith("line 2: is not YAML: ")
    assert problem.endswith("indent with spaces, not tabs")


def test_clashing_ports_are_all_reported() -> None:
    text = """
groups:
- {engine: embedded, name: a, port: 8080}
envoy: {admin_port: 9090}
"""
    assert len(problems(text)) == 2


@pytest.mark.parametrize("text", ["groups: &g [*g]", "[" * 5000, "a: !!python/object:os.system x", "\x00"])
def test_hostile_yaml_is_refused_like_any_other_mistake(text: str) -> None:
    assert problems(text)


def test_a_missing_file_is_answered_with_where_to_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; start from wavegate\.example\.yaml"):
        load(tmp_path / "wavegate.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wavegate.yaml"
    path.write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 3\)"):
        load(path)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "wavegate.yaml"
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="is larger than"):
        load(path)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
KEYS = ("groups", "envoy", "gateway", "engine", "name", "model", "port", "endpoints", "reports", "args")
DOCUMENTS = st.recursive(
    SCALARS | st.sampled_from(["embedded", "adopted"]),
    lambda children: (
        st.lists(children, max_size=2)
        | st.dictionaries(st.sampled_from(KEYS) | st.integers(), children, max_size=4)
    ),
    max_leaves=20,
)


def report(text: str) -> str:
    """What is reported for this text; nothing when it is fine."""
    try:
        parse(text, "wavegate.yaml")
    except ConfigError as error:
        return str(error)
    return ""


@given(DOCUMENTS | st.fixed_dictionaries({"groups": DOCUMENTS, "envoy": DOCUMENTS}))
def test_whatever_a_file_says_it_is_loaded_or_explained_in_our_own_words(document: object) -> None:
    text = report(yaml.safe_dump(document))
    assert "pydantic" not in text
    assert "Input should" not in text


def test_every_section_knows_its_keys() -> None:
    """However deep a section is, a typing error in it is answered with the right key."""
    sections = (
        "gateway: {reports: {interval: 1}}\n"
        "envoy: {health_check: {intervals: 1}, ext_proc_tls: {server_name: a}}"
    )
    text = f"groups: [{{engine: embedded, name: a}}]\n{sections}"
    assert [problem.rpartition("; ")[2] for problem in problems(text)] == [
        "did you mean interval_s?",
        "did you mean interval_s?",
        "did you mean server_names?",
    ]
