"""Details of OpenAI's response formats."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.send.client import Exchange
from loadgen.send.http.openai_answers import retry_after_s, shown, take_body, take_event

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "text",
                    "token_ids",
                    "delta",
                    "usage",
                    "error",
                    "message",
                    "code",
                    "status",
                    "content",
                    "finish_reason",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON, st.sampled_from([None, 200, 429, 500]))
def test_any_server_output_is_handled_without_raising(value: object, status: int | None) -> None:
    import json

    for take in (
        lambda e: take_event(e, 1.0, b"", json.dumps(value).encode()),
        lambda e: take_body(e, 1.0, json.dumps(value).encode()),
    ):
        ends: list[Exchange] = []
        exchange = Exchange(0, ends.append)
        exchange.status = status
        take(exchange)
        assert len(ends) <= 1
        assert isinstance(exchange.error, str)
        assert all(type(token) is int for token in exchange.token_ids)
        assert all(isinstance(text, str) for text in exchange.texts)
        assert exchange.status is None or isinstance(exchange.status, int)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3", 3.0), ("0.5", 0.5), ("-2", 0.0), ("soon", None), ("nan", None), ("inf", None), ("", None)],
)
def test_retry_after_in_seconds_is_parsed(value: str, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds


def test_retry_after_as_a_date_is_parsed() -> None:
    soon = retry_after_s(format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True))
    assert soon == pytest.approx(100, abs=20)
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


@given(st.binary(max_size=3000) | st.text(max_size=3000))
def test_shown_text_fits_in_a_line(value: bytes | str) -> None:
    text = shown(value)
    assert len(text) <= 300
    assert text == "" or text.isprintable()
