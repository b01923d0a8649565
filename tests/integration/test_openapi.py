"""The OpenAPI document is what the daemon does: the committed one is up to date, and no request finds it wrong."""

from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from server.api.openapi import document, text_of
from server.app import routed
from server.errors import ServiceError

ROOT = Path(__file__).parents[2]

api = schemathesis.openapi.from_dict(document(routed()))

BEYOND_SCHEMAS = (
    "POST /jobs",
    "POST /pipelines",
    "GET /jobs",
    "GET /pipelines",
    "GET /jobs/{job_id}",
    "GET /jobs/{job_id}/log/stream",
)
"""What no schema can say: that paths are there, how a duration is written, that a cursor or id is one of ours."""


def tries():
    """Each operation with right requests, and those that take anything with wrong ones."""
    for one in (found.ok() for found in api.get_all_operations()):
        yield f"{one.method.upper()} {one.path}", GenerationMode.POSITIVE
        if list(one.iter_parameters()) or list(one.body):
            yield f"{one.method.upper()} {one.path}", GenerationMode.NEGATIVE


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, daemon_class):
    """One that lets nobody wait for long."""
    place = tmp_path_factory.mktemp("openapi")
    (place / "root").mkdir()
    daemon = daemon_class(place / "state", place / "root", {"EYAS_MAX_WAIT_S": "0.05"}).start()
    yield daemon
    daemon.close()


@pytest.mark.parametrize(("operation", "mode"), list(tries()))
def test_no_request_finds_the_document_wrong(daemon, operation, mode):
    token = (daemon.state / "token").read_text().strip()
    method, path = operation.split()

    # Wrong tokens without end are answered 429, which it does not expect; test_tokens.py tries them.
    excluded = [ignored_auth]
    if operation in BEYOND_SCHEMAS:
        excluded.append(positive_data_acceptance)

    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def ask(case):
        headers = {"Authorization": f"Bearer {token}"}
        case.call_and_validate(base_url=daemon.client.url, headers=headers, excluded_checks=excluded)

    ask()


def test_the_committed_document_is_that_of_the_routes():
    committed = (ROOT / "docs/openapi.json").read_text()
    assert committed == text_of(routed()), "the API has changed; look at the difference and run `make openapi`"


def test_each_operation_has_a_short_name_and_every_problem():
    made = document(routed())
    operations = [one for methods in made["paths"].values() for one in methods.values()]
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names)
    assert all(name.isalpha() and len(name) <= 24 for name in names)
    for one in operations:
        assert {"500", "503"} <= set(one["responses"])
        assert one["description"]
    shown = {kind for response in made["components"]["responses"].values() for kind in _kinds_shown(response)}
    assert shown == {kind.kind for kind in _tree(ServiceError)}


def _kinds_shown(response):
    return response["content"]["application/problem+json"]["examples"]


def _tree(kind):
    return {kind}.union(*(_tree(one) for one in kind.__subclasses__()))
