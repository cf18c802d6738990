"""Every error has a status; details and sizes are what clients can read."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from runnerd_service.errors import (
    DuplicateRequest,
    FieldViolation,
    InvalidRequest,
    NotReady,
    Overloaded,
    RunnerdError,
)
from runnerd_service.rpc.status import TABLE, UNKNOWN_ERROR_TEXT, to_status


def tree(root: type[RunnerdError]) -> Iterator[type[RunnerdError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


def details(status: grpc.Status, kind: type) -> list:
    packed = status_pb2.Status.FromString(dict(status.trailing_metadata)["grpc-status-details-bin"])
    assert packed.message == status.details
    assert packed.code == status.code.value[0]
    found = []
    for one in packed.details:
        message = kind()
        if one.Unpack(message):
            found.append(message)
    return found


def reason(status: grpc.Status) -> str:
    (info,) = details(status, error_details_pb2.ErrorInfo)
    assert info.domain == "runnerd"
    return info.reason


@pytest.mark.parametrize("kind", list(tree(RunnerdError)), ids=lambda kind: kind.__name__)
def test_each_error_class_is_in_the_table(kind: type[RunnerdError]) -> None:
    assert kind in TABLE


def test_reasons_are_distinct() -> None:
    reasons = [mapping.reason for mapping in TABLE.values()]
    assert len(set(reasons)) == len(reasons)


def test_violations_become_a_bad_request() -> None:
    status = to_status(InvalidRequest(FieldViolation("sampling.top_p", "got 2"), FieldViolation("output.n", "got 0")))
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling.top_p: got 2" in status.details
    (bad_request,) = details(status, error_details_pb2.BadRequest)
    assert [(one.field, one.description) for one in bad_request.field_violations] == [
        ("sampling.top_p", "got 2"),
        ("output.n", "got 0"),
    ]


def test_an_overload_names_the_limit_and_when_to_retry() -> None:
    status = to_status(Overloaded("full", subject="max_waiting", retry_after_seconds=1.5))
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    (quota,) = details(status, error_details_pb2.QuotaFailure)
    assert quota.violations[0].subject == "max_waiting"
    (retry,) = details(status, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 1500


def test_retry_info_is_left_out_when_nothing_is_known() -> None:
    assert details(to_status(NotReady("no")), error_details_pb2.RetryInfo) == []
    assert len(details(to_status(NotReady("no", retry_after_seconds=0.0)), error_details_pb2.RetryInfo)) == 1


def test_a_subclass_made_elsewhere_has_the_status_of_its_parent() -> None:
    class Narrower(DuplicateRequest):
        pass

    try:
        assert reason(to_status(Narrower("x"))) == "DUPLICATE_REQUEST"
    finally:
        del Narrower


def test_the_text_of_an_unknown_error_stays_in_the_server() -> None:
    status = to_status(ValueError("the password is 1234"), "ab12")
    assert status.code is grpc.StatusCode.INTERNAL
    assert status.details == UNKNOWN_ERROR_TEXT.format(error_id="ab12")
    (info,) = details(status, error_details_pb2.ErrorInfo)
    assert dict(info.metadata) == {"error_id": "ab12"}
    assert b"1234" not in dict(status.trailing_metadata)["grpc-status-details-bin"]


violations = st.builds(
    FieldViolation, st.text(max_size=2000), st.text(st.characters(exclude_categories=()), max_size=5000)
)


@given(st.lists(violations, max_size=60))
def test_trailers_stay_below_what_clients_accept(found: list[FieldViolation]) -> None:
    status = to_status(InvalidRequest(*found))
    percent_encoded = 3 * len(status.details.encode())
    base64 = 4 * len(dict(status.trailing_metadata)["grpc-status-details-bin"]) / 3
    assert percent_encoded + base64 < 8000
    (bad_request,) = details(status, error_details_pb2.BadRequest)
    assert len(bad_request.field_violations) >= min(1, len(found))
